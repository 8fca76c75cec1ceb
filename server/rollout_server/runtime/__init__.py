"""The asyncio runtime: performs what the machine wants, and knows which rollouts there are.

No gRPC, protobuf, HTTP or tokenizers: those are behind the ports.
"""
