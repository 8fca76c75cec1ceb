"""Adapters that connect trainers of frameworks to a rollout server.

`trl`, `openenv` and `verl`, with the modules whose names begin so, are the adapters, and nothing else of this package imports their
frameworks. The extras of the distribution name the versions on which the adapters are tested: `rollout-server[trl]`,
`rollout-server[openenv]`, `rollout-server[verl]`.

The other modules are what adapters have in common: `bridge` for threads, `shared_trainer` for asyncio, `dataset_rows`, and
`sampling`, which imports torch.
"""
