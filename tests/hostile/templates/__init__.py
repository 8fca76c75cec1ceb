"""A fuzzer for the renderer: random chat templates and conversations.

Renderings that mark the end of each completion judge the result. `python -m tests.hostile.templates --boundaries 20000
--seed 1 --jobs 2` runs rollouts and prints a table by trait.
"""
