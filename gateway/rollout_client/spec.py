"""What a rollout is asked for with: keywords, or a ready RolloutSpec."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, TypedDict

from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest

from rollout_client.proto_fields import fill

Dialect: TypeAlias = Literal["grpc", "http_masked", "http_plain", "openai", "vllm", "sglang", "stream"]
MessageLike: TypeAlias = Mapping[str, Any] | str | message_pb2.Message | message_pb2.ChatMessage
JsonLike: TypeAlias = Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that the server calls.

    Args:
        url: http:, https:, grpc: or grpcs:, without user name or password: those go into `Credentials`.
        dialect: the protocol spoken there; None: taken from the URL.
        replays_turn_keys: a repeated turn gets the same answer there and generates nothing anew.
        model: the model's name at an engine ("openai", "vllm" or "sglang"), which needs one; None for trainers.
    """

    url: str
    dialect: Dialect | None = None
    replays_turn_keys: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The tokenizer and chat template of the trainer's model.

    Args:
        name: such as "Qwen/Qwen3-8B".
        revision: a branch, tag or commit; empty: the default one.
        template_kwargs: switches of the chat template.
    """

    name: str
    revision: str = ""
    template_kwargs: JsonLike | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Bearer tokens for the endpoints of a rollout, which travel beside its spec and are shown by nobody."""

    completions_bearer: str | None = None
    outcome_bearer: str | None = None
    tools_bearer: str | None = None

    def __repr__(self) -> str:
        return "Credentials(...)"


class Sampling(TypedDict, total=False):
    """How the model samples. What is left out is the trainer's to decide; 0 is a value."""

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    extra: JsonLike | None


class Limits(TypedDict, total=False):
    """What a rollout may use up; `time` is in seconds. What is left out is the agent's own limit, if it has one."""

    turns: int | None
    generated_tokens: int | None
    time: float | timedelta | None
    calls_per_turn: int | None
    tool_turns: int | None
    bytes: int | None


class SpecFields(TypedDict, total=False):
    """A rollout's spec as keywords: the fields of RolloutSpec by their names, None for unset.

    `messages` are mappings, texts of JSON objects (sent as they are) or messages of the contract, all in one form. `metadata` is a
    mapping or the text of a JSON object. `cancel_after_detach` is in seconds. An endpoint is its URL or a `Target`.
    """

    rollout_id: str
    group_id: str | None
    agent: str | None
    messages: Sequence[MessageLike]
    completions: str | Target | spec_pb2.Target
    outcome: str | Target | spec_pb2.Target | None
    tools: str | Target | spec_pb2.Target | None
    sampling: Sampling | spec_pb2.Sampling | None
    limits: Limits | spec_pb2.Limits | None
    tokenizer: str | Tokenizer | spec_pb2.Tokenizer | None
    token_mode: Literal["messages", "tokens"] | None
    on_drift: Literal["warn", "fail"] | None
    on_interrupt: Literal["resume", "fail"] | None
    cancel_after_detach: float | timedelta | None
    priority: int | None
    metadata: JsonLike | None
    labels: Mapping[str, str] | None


class StartFields(SpecFields, total=False):
    """A spec, and what travels beside it.

    The same `request_id` and spec attach to the same rollout; one is made up where none is given. `request_memory` says how long
    the server remembers it: "until_received" is until the outcome was acknowledged.
    """

    request_id: str
    credentials: Credentials | spec_pb2.Credentials | None
    request_memory: Literal["until_received"] | None


_BESIDE: Final = frozenset({"request_id", "credentials", "request_memory"})
_NEEDED: Final = ("messages", "completions")


def rollout_spec(fields: Mapping[str, object]) -> spec_pb2.RolloutSpec:
    """A spec from keywords. Raises TypeError and ValueError, which name the keyword."""
    spec = spec_pb2.RolloutSpec()
    fill(spec, fields)
    return spec


def start_request(spec: spec_pb2.RolloutSpec | None, fields: Mapping[str, object]) -> StartRolloutRequest:
    """A request that may be sent as often as it takes: it has a request id.

    Raises TypeError and ValueError, which name the keyword.
    """
    beside = {key: value for key, value in fields.items() if key in _BESIDE}
    of_spec = {key: value for key, value in fields.items() if key not in _BESIDE}
    if spec is None:
        spec = _complete(of_spec)
    elif not isinstance(spec, spec_pb2.RolloutSpec):
        raise TypeError(f"the spec must be a RolloutSpec, not {type(spec).__name__}; fields go by keyword")
    elif of_spec:
        raise TypeError(f"{sorted(of_spec)[0]!r} is given beside a ready RolloutSpec; set it there")
    request = StartRolloutRequest(spec=spec)
    fill(request, beside)
    if request.request_id == "":
        if beside.get("request_id") is not None:
            raise ValueError(
                "request_id is empty, so the request could not be repeated; leave it out to have one made up"
            )
        request.request_id = uuid.uuid4().hex
    if not request.spec.rollout_id:
        request.spec.rollout_id = request.request_id
    return request


def _complete(fields: Mapping[str, object]) -> spec_pb2.RolloutSpec:
    spec = rollout_spec(fields)
    missing = [name for name in _NEEDED if fields.get(name) is None]
    if missing:
        raise TypeError(f"{' and '.join(missing)} must be given")
    return spec
