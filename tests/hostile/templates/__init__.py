"""A fuzzer for the renderer: random chat templates and conversations, judged by renderings that mark where each answer ends.

`python -m tests.hostile.templates --boundaries 20000 --seed 1 --jobs 2` plays rollouts and prints a table by trait.
"""
