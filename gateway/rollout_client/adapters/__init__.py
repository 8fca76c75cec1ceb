"""Adapters that connect trainers of frameworks to a rollout server.

Each module imports its framework, and nothing else of this package does. The extras of the distribution name the versions on which
the adapters are tested: `rollout-server[trl]`, `rollout-server[openenv]`, `rollout-server[verl]`.
"""
