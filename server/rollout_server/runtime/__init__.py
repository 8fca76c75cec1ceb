"""The asyncio runtime: performs the intents of each rollout's state machine, and keeps the server's rollouts.

It contains no gRPC, protobuf, HTTP or tokenizer code: these are behind `ports`, `agent_protocol` and `registry.dependencies`.
Imports go one way: `registry` imports `run`, `run` imports `tools`, all three import the modules of this folder, and `aio`
imports none of them.
"""
