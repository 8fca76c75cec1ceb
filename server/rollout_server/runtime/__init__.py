"""The asyncio runtime: performs what the machine of a rollout wants, and keeps the rollouts that there are.

No gRPC, protobuf, HTTP or tokenizers: those are behind `ports`, `agent_protocol` and `registry.dependencies`. Imports go one way:
`registry` imports `run`, `run` imports `tools`, all of them the modules here, and `aio` imports none of them.
"""
