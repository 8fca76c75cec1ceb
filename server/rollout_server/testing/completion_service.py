"""CompletionService in message mode (completion_service.proto), on the same judge as the HTTP face.

There is no mask on this wire: the trainer derives it. What is judged is the history, and that base and turn key are what
they should be. An answered turn key gets the same answer again and generates nothing; a turn that failed, or a key that
was never answered, is judged as if for the first time.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import grpc
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import completion_service_pb2_grpc, message_pb2

from rollout_server.testing import completion_wire
from rollout_server.testing.call import Call
from rollout_server.testing.completion_segments import Segments, messages_of
from rollout_server.testing.completion_status import StatusError, abort, invalid, status_of_fault
from rollout_server.testing.desk import Desk, ToolsUnavailableError
from rollout_server.testing.engine import Answered, Failed
from rollout_server.testing.judge import ROLLOUTS_KEPT
from rollout_server.testing.script import FaultKind
from rollout_server.testing.verdict import RefusedError

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_ANSWERS_KEPT: Final = 16 * ROLLOUTS_KEPT
