"""Trainers that are only clients: streams on which they start rollouts and complete them (trainer_service.proto, D16).

A `TrainerStream` outlives its connections. It holds a `StreamRollout` for each rollout that was started on it and whose outcome
was not acknowledged yet. A `StreamRollout` holds the pending completions of its rollout, which the sampler waits for, and knows
how much of the rollout's log was sent. Nothing is buffered for a trainer that reads slowly: what goes out next is decided when
there is room for it, from the completions that are pending and the logs of the rollouts.
"""
