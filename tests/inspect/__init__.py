"""`rollout inspect`."""
