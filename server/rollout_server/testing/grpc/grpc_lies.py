"""Answers over gRPC that say what is not so, made from honest ones. See `script.Lie`."""

import hashlib
from typing import Final

from osmosis.rollout.v1 import completion_service_pb2 as pb

from rollout_server.testing.script import Lie

TOO_LARGE: Final = 1 << 31
BORROWED: Final = frozenset({Lie.OTHER_TURN, Lie.REPLAYED_TURN})
"""The lies that need an earlier answer."""


def twisted(lie: Lie, honest: pb.CompleteResponse, earlier: pb.CompleteResponse, turn: int) -> pb.CompleteResponse:
    """The honest answer of a turn with the lie in it. `earlier` is another turn's answer, for those that need one.

    Lies about ids say nothing of an answer that has none.
    """
    told = pb.CompleteResponse()
    told.CopyFrom(earlier if lie in BORROWED else honest)
    middle = len(told.token_ids) // 2
    match lie:
        case Lie.CHANGED_ID if told.token_ids:
            told.token_ids[middle] ^= 1
        case Lie.DROPPED_ID if told.token_ids:
            del told.token_ids[middle]
            del told.logprobs.values[middle : middle + 1]
        case Lie.OVERSIZED_ID if told.token_ids:
            told.token_ids[middle] += TOO_LARGE
        case Lie.SHORT_LOGPROBS:
            del told.logprobs.values[-1:]
        case Lie.OTHER_TURN:
            _keep_checkpoints(told, honest)
        case Lie.STALE_POLICY:
            told.policy_version = f"policy-{max(0, turn - 2)}"
        case Lie.PROMPT_DIGEST if honest.HasField("prompt_checkpoint"):
            told.prompt_checkpoint.digest = _other(told.prompt_checkpoint.digest)
        case Lie.AFTER_DIGEST:
            told.after.digest = _other(told.after.digest)
        case Lie.NO_CHECKPOINTS:
            told.ClearField("after")
            told.ClearField("prompt_checkpoint")
    return told


def _keep_checkpoints(told: pb.CompleteResponse, honest: pb.CompleteResponse) -> None:
    told.after.CopyFrom(honest.after)
    told.policy_version = honest.policy_version
    if honest.HasField("prompt_checkpoint"):
        told.prompt_checkpoint.CopyFrom(honest.prompt_checkpoint)
    else:
        told.prompt_ids.CopyFrom(honest.prompt_ids)


def _other(digest: bytes) -> bytes:
    return hashlib.sha256(digest).digest()
