"""What an agent passes to the methods of its `Run`, checked: sampling options, forks, reasons, notes, and the size of it all."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, TypedDict

from rollout_server.core.conversation import Conversation
from rollout_server.core.ledger import SegmentKind
from rollout_server.core.machine import Machine
from rollout_server.core.message import JSON, parse_object
from rollout_server.core.spec import Dialect, Sampling
from rollout_server.core.spec_validation import sampling_violations
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.ports import Tool

_KINDS = {kind.value: kind for kind in (SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION)}
LONGEST_REASON = 1000
LONGEST_NOTE = 65_536
"""Characters."""
MOST_MESSAGES = 100_000
"""Of one conversation, where its agent adds to it."""
MOST_CONVERSATIONS = 10_000
MOST_BYTES = 256 * 1024 * 1024
"""Of a rollout, as `Machine.size` counts them."""


class SamplingOptions(TypedDict, total=False):
    """What `Run.sample` takes; what is not given, or None, is as in the request.

    temperature: from 0 to 2.
    top_p: from 0 to 1.
    max_tokens: the most tokens of the answer, 1 or more.
    stop: texts that end the answer; an empty list for none.
    logprobs: ask for the logprobs of sampled tokens.
    extra: further parameters by name, added to the request's; a name that both have is this one's.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    extra: Mapping[str, JSON] | None


def turn_sampling(sampling: Sampling, options: Mapping[str, object], dialect: Dialect) -> Sampling:
    """The request's sampling with an agent's own options. Raises `AgentMistake` naming the option."""
    given = {name: value for name, value in options.items() if value is not None}
    read = {name: _read(name, value) for name, value in given.items()}
    extra = read.pop("extra", None)
    found = replace(sampling, **read)
    if extra:
        found = replace(found, extra_json=_merge(sampling.extra_json, extra))
    for violation in sampling_violations(found, dialect):
        name = violation.field.rpartition(".")[2]
        if name in given:
            raise AgentMistake(f"sample: {name}={given[name]!r:.100}: {violation.description}")
    return found


def _read(name: str, value: object) -> Any:
    if name not in _READERS:
        raise AgentMistake(
            f"sample: {name}: there is no such option, there are {', '.join(_READERS)}; what a trainer understands beside them "
            f"goes into extra={{{name!r}: ...}}"
        )
    read, wanted = _READERS[name]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise AgentMistake(f"sample: {name}={value!r:.100}: {wanted} is needed") from None


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    for text in texts:
        text.encode()  # halves of surrogate pairs could not be sent
    return tuple(texts)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _object(value: object) -> Mapping[str, JSON]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise TypeError
    doubled = sorted(value.keys() & _READERS.keys())
    if doubled:
        raise AgentMistake(f"sample: extra: {doubled[0]} is an option of its own, sample({doubled[0]}=...)")
    return parse_object(json.dumps(dict(value), allow_nan=False))


def _merge(request_json: str, extra: Mapping[str, JSON]) -> str:
    """The request's extra parameters with these; verbatim, unless some are replaced."""
    request_extra = parse_object(request_json) if request_json else {}
    if request_extra and request_extra.keys().isdisjoint(extra):
        return f"{request_json.rstrip()[:-1]}, {json.dumps(extra)[1:]}"
    try:
        return json.dumps({**request_extra, **extra}, allow_nan=False)
    except ValueError:
        text = "sample: extra: the request's own extra parameters hold a number that is too large to be written again"
        raise AgentMistake(text) from None


_READERS: Mapping[str, tuple[Callable[[object], Any], str]] = MappingProxyType(
    {
        "temperature": (_number, "a number"),
        "top_p": (_number, "a number"),
        "max_tokens": (_whole, "a whole number"),
        "stop": (_texts, "a text or a list of texts"),
        "logprobs": (_flag, "True or False"),
        "extra": (_object, "a dict that JSON can hold"),
    }
)


def fork_kind(word: str | None, messages: int | None, *, has_tools: bool) -> SegmentKind:
    """The kind of conversation that is wanted; with so many messages, None for none given. Raises `AgentMistake`."""
    if word is not None and word not in _KINDS:
        raise AgentMistake(f"fork: kind is {word!r}, it must be one of {', '.join(_KINDS)}")
    kind = _KINDS[word] if word else SegmentKind.BRANCH if messages is None else SegmentKind.SUBAGENT
    branches = kind is SegmentKind.BRANCH
    if branches and messages is not None:
        raise AgentMistake("fork: a branch goes on from this conversation as it is; append to the Run that it returns")
    if branches and has_tools:
        raise AgentMistake(
            "fork: a branch has the tokens of this conversation, which tell its tools; others need messages"
        )
    if not branches and not messages:
        raise AgentMistake(f"fork: a {kind.value} needs the messages that it begins with")
    return kind


def forkable_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Tools by which a conversation may go. Raises `AgentMistake` for what is none, and for two of one name."""
    for tool in tools:
        texts = [getattr(tool, name, None) for name in ("name", "description", "parameters_json_schema")]
        if not all(isinstance(text, str) for text in texts) or not callable(getattr(tool, "run", None)):
            raise AgentMistake(f"fork: {tool!r} is not a tool; `tool` makes one of a function")
    names = [tool.name for tool in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise AgentMistake(f"fork: more than one tool has the name {', '.join(map(repr, doubled))}")
    return tuple(tools)


def checked_reason(value: object, of: str) -> str:
    """A text that says something. Raises `AgentMistake`, which begins with `of`, the name of the method."""
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_REASON:
        raise AgentMistake(
            f"{of}: a reason is a text of 1 to {LONGEST_REASON} characters, not blank; this is {value!r:.100}"
        )
    return value


def checked_note(code: object, text: object) -> tuple[str, str]:
    """The code and the text of a note, cut where they are too long. Raises `AgentMistake`."""
    if not isinstance(code, str) or not isinstance(text, str):
        raise AgentMistake(f"note: code and text are texts, not {code!r:.100} and {text!r:.100}")
    return code[:LONGEST_REASON], text[:LONGEST_NOTE]


def check_room(machine: Machine, conversation: Conversation, of: str) -> None:
    """Raises `AgentMistake` where the rollout holds as much as any may: a loop that never samples would fill the memory."""
    messages, opened = len(conversation.messages), len(machine.ledger.segments)
    if messages < MOST_MESSAGES and opened < MOST_CONVERSATIONS and machine.size < MOST_BYTES:
        return
    held = f"{messages:,} messages in {opened:,} conversations, {machine.size // 2**20:,} MiB"
    most = f"{MOST_MESSAGES:,} in {MOST_CONVERSATIONS:,}, {MOST_BYTES // 2**20:,} MiB"
    raise AgentMistake(
        f"{of}: turn {conversation.turn} holds {held}; at most {most} may be. Is this a loop that never samples?"
    )
