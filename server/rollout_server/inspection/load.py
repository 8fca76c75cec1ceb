"""Read rollouts from files: JSON of the REST API, or protobuf messages in JSON or binary."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError, Message
from osmosis.rollout.v1 import outcome_pb2, outcome_service_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_server.inspection.rest_json import is_rest_json, rollout_of, strict_json

UID = re.compile(r"[A-Za-z0-9_-]{1,64}")

_FORMS = "the JSON of GET /v1/rollouts/UID?view=full, or a protobuf Rollout or Outcome in JSON or binary"
# Messages that contain a rollout or an outcome, in the order in which they are tried.
_MESSAGES: tuple[type[Message], ...] = (
    pb.Rollout,
    pb.GetRolloutResponse,
    outcome_service_pb2.DeliverOutcomeRequest,
    outcome_pb2.Outcome,
)


def read_file(path: Path) -> pb.Rollout:
    """Return the rollout in a file. Raises OSError if the file cannot be read, ValueError if it holds no rollout."""
    return parse_rollout(path.read_bytes())


def parse_rollout(content: bytes) -> pb.Rollout:
    """Return the rollout in the bytes of a file. Raises ValueError if there is none."""
    content = content.removeprefix(BOM_UTF8)
    if not content.strip():
        raise ValueError(f"the file is empty; it must hold {_FORMS}")
    found = _from_json(content) if content.lstrip()[:1] == b"{" else None
    found = found or _from_binary(content)
    if found is None:
        raise ValueError(f"the file holds no rollout; it must hold {_FORMS}")
    return found


def _from_json(content: bytes) -> pb.Rollout | None:
    try:
        value = strict_json(content.decode())
    except UnicodeDecodeError:
        return None
    except RecursionError:
        raise ValueError("the file's JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"the file is not JSON: {error}") from None
    if not is_rest_json(value):
        return next((found for kind in _MESSAGES if (found := _from_contract(value, kind)) is not None), None)
    try:
        return rollout_of(value)
    except ValueError as error:
        raise ValueError(f"the file's JSON is not a rollout of the REST API: {error}") from None


def _from_contract(value: Any, kind: type[Message]) -> pb.Rollout | None:
    try:
        return _rollout_in(json_format.ParseDict(value, kind(), ignore_unknown_fields=True))
    except (json_format.ParseError, RecursionError, TypeError, ValueError):
        return None


def _from_binary(content: bytes) -> pb.Rollout | None:
    """Return the first message that has the required fields: most bytes parse as some protobuf message."""
    for kind in _MESSAGES:
        try:
            found = _rollout_in(kind.FromString(content))
        except DecodeError:
            continue
        if found is not None:
            return found
    return None


def _rollout_in(message: Message) -> pb.Rollout | None:
    if isinstance(message, outcome_pb2.Outcome):
        return pb.Rollout(outcome=message) if message.WhichOneof("end") else None
    rollout = message if isinstance(message, pb.Rollout) else getattr(message, "rollout", None)
    if not isinstance(rollout, pb.Rollout) or not rollout.state or UID.fullmatch(rollout.uid) is None:
        return None
    return rollout
