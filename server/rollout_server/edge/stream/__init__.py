"""Trainers that are only clients: streams on which they start rollouts and complete them (trainer_service.proto, D16).

A `Stream` outlives its connections. It holds a `Seat` for each rollout that was started on it and whose outcome was not
acknowledged yet. A seat holds the asks of its rollout, which the sampler waits for, and knows how much of the rollout's log was
told. Nothing is buffered for a trainer that reads slowly: what goes out next is decided when there is room for it, from the asks
that wait and the logs of the rollouts.
"""
