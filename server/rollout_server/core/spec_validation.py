"""Validation of a spec, and the defaults that the server fills in.

Pure functions. Whether an agent, a tokenizer or an endpoint exists is checked elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rollout_server.core.error import Violation
from rollout_server.core.limits import CALLS_PER_TURN, MOST_CALLS_PER_TURN, Limits
from rollout_server.core.message import MAX_VALUES, MalformedMessage, first_too_many, parse_object
from rollout_server.core.segment import MAX_STEP
from rollout_server.core.spec import ENGINES, Dialect, DriftPolicy, Sampling, Spec, Target

ID_LENGTH = 256
MOST_MASKED_TOKENS = 32_768
"""Largest `max_tokens` in the synchronous HTTP API."""
MAX_SECONDS = 10**9
MOST_MODELS = 16
MODEL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
HTTP_ROLES = ("system", "user", "assistant", "tool", "function")
_SCHEMES = MappingProxyType(
    {
        Dialect.GRPC: ("grpc", "grpcs"),
        Dialect.HTTP_MASKED: ("http", "https"),
        Dialect.HTTP_PLAIN: ("http", "https"),
        **dict.fromkeys((*ENGINES, Dialect.MCP), ("http", "https")),
    }
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The server's limits and defaults for specs.

    Args:
        seconds: the longest time of any rollout.
        default_seconds: the time of a rollout whose request sets none, by the trainer's protocol; `seconds` for all others.
        on_drift: the policy of a rollout whose request names none.
        metadata_bytes: the maximum size of the metadata.
        default_turns: the turn limit if neither the request nor the agent sets one.
    """

    seconds: float = 86_400.0
    default_seconds: Mapping[Dialect, float] = field(default_factory=lambda: {Dialect.HTTP_MASKED: 600.0})
    on_drift: DriftPolicy = DriftPolicy.WARN
    metadata_bytes: int = 1024 * 1024
    default_turns: int = 256


def settle(spec: Spec, agent: str, limits: Limits, bounds: Bounds) -> Spec:
    """Fill in what the request left open: agent, limits and drift policy. Of the request's and the agent's limit the lower applies.

    Every rollout gets a turn limit. Without one, its loop could hold a slot for as long as the model calls tools. Every rollout
    also gets a limit of calls per turn, at most `MOST_CALLS_PER_TURN`.
    """
    seconds = spec.limits.seconds
    if seconds is None:
        seconds = bounds.default_seconds.get(spec.completions.dialect, bounds.seconds)
    settled = replace(spec.limits, seconds=min(seconds, bounds.seconds)).lower(limits)
    turns = bounds.default_turns if settled.turns is None else settled.turns
    calls = CALLS_PER_TURN if settled.calls_per_turn is None else min(settled.calls_per_turn, MOST_CALLS_PER_TURN)
    settled = replace(settled, turns=turns, calls_per_turn=calls)
    return replace(spec, agent=agent, limits=settled, on_drift=spec.on_drift or bounds.on_drift)


def violations(spec: Spec, bounds: Bounds) -> Iterator[Violation]:
    """Yield what is wrong with a spec, field by field, with the field names of the proto file."""
    yield from _identity(spec)
    yield from _conversation(spec)
    yield from target_violations(spec.completions, "spec.completions")
    for name, target in (("outcome", spec.outcome), ("tools", spec.tools)):
        if target is not None:
            yield from target_violations(target, f"spec.{name}")
    if spec.outcome is not None and spec.outcome.dialect is Dialect.HTTP_MASKED:
        yield Violation(
            "spec.outcome.dialect", "the synchronous HTTP API has no callback for outcomes; use HTTP_PLAIN or GRPC"
        )
    yield from _engines(spec)
    yield from _toolset(spec)
    yield from _models(spec)
    yield from sampling_violations(spec.sampling, spec.completions.dialect)
    yield from _limits(spec.limits, least=0 if spec.completions.dialect is Dialect.HTTP_PLAIN else 1)
    yield from _tokenizer(spec)
    yield from _metadata(spec, bounds)
    if spec.staleness is not None and not 0 <= spec.staleness.max_lag <= MAX_STEP:
        yield Violation("spec.staleness.max_lag", f"must be from 0 to {MAX_STEP}")


def target_violations(target: Target, where: str) -> Iterator[Violation]:
    """Check that an endpoint's URL has a scheme of its protocol. `edge.targets` checks the rest of the URL before it is called."""
    if target.dialect is Dialect.STREAM:  # the trainer connected to the server, so there is no URL
        return
    schemes = _SCHEMES[target.dialect]
    if target.url.partition("://")[0].lower() not in schemes:
        yield Violation(f"{where}.url", f"needs the scheme {' or '.join(schemes)}")


def _engines(spec: Spec) -> Iterator[Violation]:
    """Check that only a completion target is an inference engine, and that an engine, and only an engine, has a model name."""
    for name, target in (("completions", spec.completions), ("outcome", spec.outcome), ("tools", spec.tools)):
        if target is None:
            continue
        if target.dialect not in ENGINES:
            if target.model:
                known = ", ".join(sorted(engine.name for engine in ENGINES))
                yield Violation(f"spec.{name}.model", f"is for the dialects {known} only; leave it unset")
        elif name != "completions":
            yield Violation(f"spec.{name}.dialect", "is that of an inference engine, which only generates completions")
        elif not target.model.strip():
            yield Violation(f"spec.{name}.model", "is needed: the name under which the engine serves the model")
        else:
            yield from length_violations(target.model, f"spec.{name}.model")


def _toolset(spec: Spec) -> Iterator[Violation]:
    """Check that `tools`, and only it, may be an MCP server, and that the trainer's protocol can transmit its tools."""
    for name, target in (("completions", spec.completions), ("outcome", spec.outcome)):
        if target is not None and target.dialect is Dialect.MCP:
            yield Violation(
                f"spec.{name}.dialect", "is MCP, which only runs tools; name the MCP server in `spec.tools`"
            )
    if spec.tools is None:
        return
    if spec.tools.dialect not in (Dialect.GRPC, Dialect.MCP, *ENGINES):
        yield Violation("spec.tools.dialect", "must be GRPC, for a ToolService, or MCP, for an MCP server")
    if spec.completions.dialect is Dialect.HTTP_MASKED:
        text = (
            "cannot be used with an HTTP_MASKED trainer, which learns the tools before a rollout begins; use another protocol for "
            "`spec.completions`, or give the tools to the agent"
        )
        yield Violation("spec.tools", text)


def _models(spec: Spec) -> Iterator[Violation]:
    if len(spec.models) > MOST_MODELS:
        yield Violation("spec.models", f"has {len(spec.models)} entries, at most {MOST_MODELS} are allowed")
        return
    for name, target in spec.models.items():
        if not MODEL_NAME.fullmatch(name):
            yield Violation("spec.models", f'{name!r:.100} is not a name of 1 to 64 letters, digits, "_" and "-"')
        else:
            yield from model_violations(target, f"spec.models[{name}]")


def model_violations(target: Target, where: str) -> Iterator[Violation]:
    """Yield what is wrong with the endpoint of a further model."""
    if target.dialect not in ENGINES:
        known = ", ".join(sorted(engine.name for engine in ENGINES))
        yield Violation(f"{where}.dialect", f"must be one of {known}: a further model is called as an inference engine")
    else:
        yield from target_violations(target, where)
    if not target.model.strip() or len(target.model) > ID_LENGTH:
        text = f"has {len(target.model)} characters; 1 to {ID_LENGTH} are needed: the name at the endpoint"
        yield Violation(f"{where}.model", text)


def _identity(spec: Spec) -> Iterator[Violation]:
    if not spec.rollout_id.strip():
        yield Violation("spec.rollout_id", "must not be blank")
    for name, value in (("rollout_id", spec.rollout_id), ("group_id", spec.group_id), ("agent", spec.agent)):
        yield from length_violations(value, f"spec.{name}")
    if len(spec.labels) > 64:
        yield Violation("spec.labels", f"has {len(spec.labels)} entries, at most 64 are allowed")
    if any(len(text) > ID_LENGTH for item in spec.labels.items() for text in item):
        yield Violation("spec.labels", f"keys and values must have at most {ID_LENGTH} characters")


def _conversation(spec: Spec) -> Iterator[Violation]:
    if not spec.messages and spec.completions.dialect is not Dialect.HTTP_PLAIN:
        yield Violation("spec.messages", "needs at least one message")
    if spec.completions.dialect is not Dialect.HTTP_MASKED:
        return
    for index, message in enumerate(spec.messages):
        if message.role not in HTTP_ROLES:
            yield Violation(f"spec.messages[{index}].role", f"must be one of {', '.join(HTTP_ROLES)}")


def sampling_violations(sampling: Sampling, dialect: Dialect) -> Iterator[Violation]:
    """Yield what is wrong with sampling parameters; some bounds depend on the trainer's protocol."""
    if sampling.temperature is not None and not 0 <= sampling.temperature <= 2:
        yield Violation("spec.sampling.temperature", "must be from 0 to 2")
    if sampling.top_p is not None and not 0 <= sampling.top_p <= 1:
        yield Violation("spec.sampling.top_p", "must be from 0 to 1")
    most = MOST_MASKED_TOKENS if dialect is Dialect.HTTP_MASKED else 2**31 - 1
    if sampling.max_tokens is not None and not 1 <= sampling.max_tokens <= most:
        yield Violation("spec.sampling.max_tokens", f"must be from 1 to {most}")
    if len(sampling.stop) > 64:
        yield Violation("spec.sampling.stop", f"has {len(sampling.stop)} entries, at most 64 are allowed")
    yield from json_object_violations(sampling.extra_json, "spec.sampling.extra_json")


def _limits(limits: Limits, *, least: int) -> Iterator[Violation]:
    for name, lowest in (("turns", least), ("generated_tokens", least), ("calls_per_turn", 1), ("bytes", 1)):
        value = getattr(limits, name)
        if value is not None and value < lowest:
            yield Violation(f"spec.limits.{name}", f"must be at least {lowest}")
    if limits.seconds is not None and not 0 < limits.seconds <= MAX_SECONDS:
        yield Violation("spec.limits.time", f"must be positive and at most {MAX_SECONDS} s")


def _tokenizer(spec: Spec) -> Iterator[Violation]:
    if spec.tokenizer is None:
        if spec.completions.dialect is Dialect.HTTP_MASKED:
            yield Violation("spec.tokenizer", "is needed: masks are counted with the trainer's tokenizer")
        return
    if not spec.tokenizer.name.strip():
        yield Violation("spec.tokenizer.name", "must not be blank")
    for name, value in (("name", spec.tokenizer.name), ("revision", spec.tokenizer.revision)):
        yield from length_violations(value, f"spec.tokenizer.{name}")
    yield from json_object_violations(spec.tokenizer.template_kwargs_json, "spec.tokenizer.template_kwargs_json")


def _metadata(spec: Spec, bounds: Bounds) -> Iterator[Violation]:
    size = len(spec.metadata_json.encode("utf-8", "surrogatepass"))
    if size > bounds.metadata_bytes:
        yield Violation("spec.metadata_json", f"has {size} bytes, at most {bounds.metadata_bytes} are allowed")
    else:
        yield from json_object_violations(spec.metadata_json, "spec.metadata_json")
    yield from json_object_violations(spec.source_json, "spec.source_json")
    if spec.cancel_after_detach is not None and not 0 <= spec.cancel_after_detach <= MAX_SECONDS:
        yield Violation("spec.cancel_after_detach", f"must be from 0 to {MAX_SECONDS} s; unset is never")


def length_violations(text: str, where: str, most: int = ID_LENGTH) -> Iterator[Violation]:
    """Check that a text has at most `most` characters."""
    if len(text) > most:
        yield Violation(where, f"has {len(text):,} characters, at most {most:,} are allowed")


def json_object_violations(text: str, where: str) -> Iterator[Violation]:
    """Check that a text is empty or one JSON object."""
    if not text:
        return
    if first_too_many((text,)) is not None:
        yield Violation(where, f"holds more than {MAX_VALUES} JSON values")
        return
    try:
        parse_object(text)
    except MalformedMessage as error:
        yield Violation(where, f"must be one JSON object: {error}")
