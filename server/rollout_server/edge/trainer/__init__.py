"""Clients and samplers for trainers: request the completions of a rollout and check what comes back."""
