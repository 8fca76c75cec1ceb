"""Arguments of `start` and `run`: keywords that become a RolloutSpec, and the request around it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, TypedDict, cast

from osmosis.rollout.v1 import message_pb2, spec_pb2
from osmosis.rollout.v1.rollout_service_pb2 import StartRolloutRequest

from rollout_client.enums import Dialect, DriftPolicy, FailureClass, InterruptPolicy, StaleAction, TokenMode
from rollout_client.proto_fields import enum_number, fill

MessageLike: TypeAlias = Mapping[str, Any] | str | message_pb2.Message | message_pb2.ChatMessage
JsonLike: TypeAlias = Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint that the server calls: a trainer, an inference engine, a receiver of outcomes or a tool server.

    Args:
        url: http:, https:, grpc: or grpcs:, without user name and password; use `Credentials` for secrets.
        dialect: protocol of the endpoint. "grpc": the services of osmosis.rollout.v1. "http_masked": chat completions with
            response_mask, as in the synchronous HTTP API. "http_plain": without masks, as in the asynchronous HTTP API.
            "openai", "vllm", "sglang": inference engines. "mcp": an MCP server, for `tools`. None: derived from the URL: "grpc"
            for grpc: and grpcs:, otherwise "http_masked", "http_plain" for `outcome`, "mcp" for `tools`, "openai" in `models`.
        replays_turn_keys: the endpoint returns the same completion for a repeated turn key instead of generating again.
        model: model name, required by inference engines ("openai", "vllm", "sglang"). None for trainers.
    """

    url: str
    dialect: Dialect | None = None
    replays_turn_keys: bool = False
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """Tokenizer and chat template of the model.

    Args:
        name: model name, such as "Qwen/Qwen3-8B".
        revision: branch, tag or commit; empty: the default revision.
        template_kwargs: extra arguments of the chat template, such as {"enable_thinking": False}.
    """

    name: str
    revision: str = ""
    template_kwargs: JsonLike | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Credentials:
    """Bearer tokens for the endpoints of a rollout. They are sent beside the spec, never stored in clear and never shown.

    Args:
        completions_bearer: sent to the target `completions`.
        outcome_bearer: sent to the target `outcome`.
        tools_bearer: sent to the target `tools`.
        model_bearers: sent to the targets `models`, by name.
    """

    completions_bearer: str | None = None
    outcome_bearer: str | None = None
    tools_bearer: str | None = None
    model_bearers: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        return "Credentials(...)"


class Sampling(TypedDict, total=False):
    """Sampling parameters. The trainer chooses a value that is omitted or None; 0 is a value.

    `temperature` is 0 to 2, `top_p` 0 to 1. `max_tokens` bounds one completion. `stop` are texts that end a completion.
    `logprobs` requests the logprob of each generated token. `extra` holds further parameters for the trainer or engine.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    extra: JsonLike | None


class Limits(TypedDict, total=False):
    """Limits of one rollout. The agent's own limit also applies, and the lower one holds. No turn starts once a limit is met.

    `turns` counts completions (256 if neither side sets it), `generated_tokens` the generated tokens of all turns. `time` is in
    seconds from the first turn; a rollout that exceeds it fails. `calls_per_turn` bounds the tool calls run per completion (128
    if neither side sets it), `tool_turns` the turns with tool calls, `bytes` the size of all messages.
    """

    turns: int | None
    generated_tokens: int | None
    time: float | timedelta | None
    calls_per_turn: int | None
    tool_turns: int | None
    bytes: int | None


class CommonFields(TypedDict, total=False):
    """Keyword arguments that `Trainer.rollouts` takes, too. `SpecFields` describes them."""

    agent: str | None
    tools: str | Target | spec_pb2.Target | None
    sampling: Sampling | spec_pb2.Sampling | None
    limits: Limits | spec_pb2.Limits | None
    tokenizer: str | Tokenizer | spec_pb2.Tokenizer | None
    token_mode: TokenMode | None
    on_drift: DriftPolicy | None
    on_interrupt: InterruptPolicy | None
    priority: int | None
    labels: Mapping[str, str] | None
    train_on: Collection[FailureClass] | spec_pb2.TrainOn | None
    max_lag: int | None
    on_stale: StaleAction | None


class SpecFields(CommonFields, total=False):
    """Keyword arguments for a RolloutSpec: its fields by name; None leaves a field unset.

    Keys:
        rollout_id: the caller's name for the rollout, sent to trainers. Default: the request id.
        group_id: id of the rollouts of one prompt.
        group_index: position of the rollout in its group, from 0; `start_group` does not take it.
        agent: name of the agent; None: the server's default agent.
        messages: the conversation so far, required: mappings, str with a JSON object (sent unchanged) or protobuf messages, all
            in one form.
        completions: endpoint that generates completions, required: a URL or a `Target`.
        outcome: endpoint that receives the outcome. None: the caller reads it.
        tools: endpoint with additional tools: a ToolService (grpc:, grpcs:) or an MCP server (http:, https:). Not for
            "http_masked" targets.
        sampling: sampling parameters.
        limits: limits of the rollout.
        tokenizer: model name or `Tokenizer`. Required for "http_masked" targets and for token mode "tokens".
        token_mode: "tokens": the server applies the chat template and sends token ids. "messages": the trainer applies it. None:
            "tokens" for gRPC targets if a tokenizer is given, otherwise "messages".
        on_drift: if the trainer's prompt differs from the ledger, "warn" and continue, or "fail". None: the server's setting.
        on_interrupt: when a stop of the server interrupts the rollout, "resume" it after the restart, or "fail". None: the server's
            setting. "resume" is refused if the server has no journal or the agent cannot be replayed.
        cancel_after_detach: seconds without an attached client until the rollout is cancelled; 0: at once. None: never.
        priority: queued rollouts with a higher value start first.
        metadata: mapping or str with a JSON object, for agents and tools.
        labels: str to str, for selecting rollouts.
        train_on: failure classes whose samples are trainable; an empty list: only completed rollouts train. None: "policy" and
            "deadline".
        max_lag: how many policy steps a sampled token may be older than the newest one, 0 or more; `on_stale` says what happens to
            older ones. None: any age.
        on_stale: "cancel": cancel the rollout. "mask": mask out its stale tokens at its end. "split": put them into samples of
            their own, which are not trainable. "keep": train on them. Goes with `max_lag`.
        models: further models by name that the agent may call, such as a judge: a `Target` with a model name; "openai" unless it
            has a dialect. Their keys are `Credentials.model_bearers`.
    """

    rollout_id: str
    group_id: str | None
    group_index: int | None
    messages: Sequence[MessageLike]
    completions: str | Target | spec_pb2.Target
    outcome: str | Target | spec_pb2.Target | None
    cancel_after_detach: float | timedelta | None
    metadata: JsonLike | None
    models: Mapping[str, Target | spec_pb2.Target] | None


class StartFields(SpecFields, total=False):
    """Keyword arguments of `start` and `run`: those of `SpecFields`, and what is sent beside the spec.

    Keys:
        request_id: idempotency key. A call with the same id and spec attaches to the same rollout. Default: a random id.
        credentials: bearer tokens for the endpoints.
        request_memory: "until_received": the server remembers the request id until you acknowledge the outcome. None: until it
            forgets the rollout (an hour after its end by default).
    """

    request_id: str
    credentials: Credentials | spec_pb2.Credentials | None
    request_memory: Literal["until_received"] | None


_BESIDE: Final = frozenset({"request_id", "credentials", "request_memory"})
_NEEDED: Final = ("messages", "completions")


def rollout_spec(fields: Mapping[str, object]) -> spec_pb2.RolloutSpec:
    """Build a RolloutSpec from keywords (`SpecFields`). Raises TypeError and ValueError that name the keyword."""
    spec = spec_pb2.RolloutSpec()
    max_lag, action = fields.get("max_lag"), fields.get("on_stale")
    if (max_lag is None) != (action is None):
        raise TypeError("max_lag and on_stale go together; give both, such as max_lag=2 and on_stale='cancel'")
    fill(spec, {name: value for name, value in fields.items() if name not in ("max_lag", "on_stale")})
    if max_lag is not None:
        number = enum_number(spec_pb2.StaleAction.DESCRIPTOR, action, "on_stale")
        spec.staleness.action = cast(spec_pb2.StaleAction.ValueType, number)
        fill(spec.staleness, {"max_lag": max_lag})
    return spec


def start_request(
    spec: spec_pb2.RolloutSpec | None, fields: Mapping[str, object], needed: Sequence[str] = _NEEDED
) -> StartRolloutRequest:
    """Build the request that starts a rollout. It always has a request id, so it is safe to retry.

    `needed` are the keywords without which there is no spec. Raises TypeError and ValueError that name the keyword.
    """
    beside = {key: value for key, value in fields.items() if key in _BESIDE}
    of_spec = {key: value for key, value in fields.items() if key not in _BESIDE}
    if spec is None:
        spec = _complete(of_spec, needed)
    elif not isinstance(spec, spec_pb2.RolloutSpec):
        raise TypeError(f"the spec must be a RolloutSpec, not {type(spec).__name__}; pass its fields as keywords")
    elif of_spec:
        raise TypeError(f"{sorted(of_spec)[0]!r} is given beside a RolloutSpec; set it in the spec")
    request = StartRolloutRequest(spec=spec)
    fill(request, beside)
    if request.request_id == "":
        if beside.get("request_id") is not None:
            raise ValueError(
                "request_id is empty, so the request could not be retried safely; omit it to use a random id"
            )
        request.request_id = uuid.uuid4().hex
    if not request.spec.rollout_id:
        request.spec.rollout_id = request.request_id
    return request


def _complete(fields: Mapping[str, object], needed: Sequence[str]) -> spec_pb2.RolloutSpec:
    spec = rollout_spec(fields)
    missing = [name for name in needed if fields.get(name) is None]
    if missing:
        raise TypeError(f"{' and '.join(missing)} must be given")
    return spec
