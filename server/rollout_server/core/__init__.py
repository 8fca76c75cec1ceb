"""The pure core: what a rollout is and which rules it obeys.

Standard library only; no async, clock, randomness, logging or I/O.
"""
