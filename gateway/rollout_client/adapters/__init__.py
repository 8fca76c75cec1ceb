"""Adapters for trainers. Each module imports its framework; this package imports none.

* `openenv`: a `TrainingTrace` of any rollout, and sessions for TRL's asynchronous GRPO trainer.
"""
