"""Streams of trainers that connect as clients: on a stream a trainer starts rollouts and completes their turns (D16).

The protocol is in trainer_service.proto. A `TrainerStream` outlives its connections. It contains a `StreamRollout` for each
rollout that was started on it and whose outcome is not acknowledged. A `StreamRollout` contains the pending completions, on
which the sampler waits, and the position up to which the rollout's log was sent. There are no send buffers: when the connection
can take an item, the next one is chosen from the pending completions and the logs. A trainer that reads slowly therefore costs
no memory.
"""
