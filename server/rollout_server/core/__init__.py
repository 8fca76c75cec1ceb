"""The pure core: the values that describe a rollout, and the rules that it follows.

Standard library only: no async code, clock, randomness, logging or I/O.
"""
