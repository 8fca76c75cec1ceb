"""A local stack for agent tests: a real server, a scripted model, and a strict trainer that verifies every token.

The pytest plugin `pytest_rollout` provides it as fixtures. Without pytest, use
`with LoopThread() as loop, LocalStack(loop, agent) as stack`.
"""

from __future__ import annotations

from rollout_server.local_stack.loop_thread import LoopThread
from rollout_server.local_stack.result import FinishedRollout
from rollout_server.local_stack.stack import LocalStack, ScriptedModel

__all__ = ["FinishedRollout", "LocalStack", "LoopThread", "ScriptedModel"]
