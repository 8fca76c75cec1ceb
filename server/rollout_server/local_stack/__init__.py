"""A local stack for agents: a real server, a scripted model, and a strict trainer that checks every token. For authors' tests.

The pytest plugin `pytest_rollout` offers it as fixtures. Without pytest, `with LocalStack(LoopThread(), agent) as stack` does
the same.
"""

from __future__ import annotations

from rollout_server.local_stack.loop_thread import LoopThread
from rollout_server.local_stack.result import FinishedRollout
from rollout_server.local_stack.stack import LocalStack, ScriptedModel

__all__ = ["FinishedRollout", "LocalStack", "LoopThread", "ScriptedModel"]
