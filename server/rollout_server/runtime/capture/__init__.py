"""The model endpoint of one rollout, for an agent that owns its loop: runs what `core.capture` decides about each of its calls."""
