"""Validation of what an agent passes to its `Run`: sampling options, forks, reasons, notes, and the rollout's size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from types import MappingProxyType
from typing import Any, Literal, TypedDict

from rollout_server.core.conversation import Conversation
from rollout_server.core.ledger import AGENT, Role, SegmentKind
from rollout_server.core.machine import Machine
from rollout_server.core.message import JSON, parse_object
from rollout_server.core.record import LARGEST_TURN_REWARD, MOST_REWARDS_OF_A_TURN
from rollout_server.core.spec import Dialect, Sampling
from rollout_server.core.spec_validation import ID_LENGTH, sampling_violations
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.reward import real_number, score_number

_KINDS = {kind.value: kind for kind in (SegmentKind.BRANCH, SegmentKind.SUBAGENT, SegmentKind.COMPACTION)}
LONGEST_REASON = 1000
LONGEST_NOTE = 65_536
"""Maximum length of a note's text, in characters."""
MOST_MESSAGES = 100_000
"""Messages of one conversation beyond which an agent cannot append."""
MOST_CONVERSATIONS = 10_000
MOST_BYTES = 256 * 1024 * 1024
"""Size of a rollout, as counted by `Machine.size`, beyond which an agent cannot append or fork."""


class SamplingOptions(TypedDict, total=False):
    """Sampling options of `Run.sample`. An option that is missing or None keeps the request's value.

    temperature: from 0 to 2.
    top_p: from 0 to 1.
    max_tokens: maximum length of the completion in tokens, 1 or more.
    stop: texts that end the completion; an empty list for none.
    logprobs: request the logprobs of the sampled tokens.
    extra: further parameters by name, merged into the request's; of two values for one name, this one is used.
    """

    temperature: float | None
    top_p: float | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    logprobs: bool | None
    extra: Mapping[str, JSON] | None


class ForkOptions(TypedDict, total=False):
    """Options of `Run.fork`. An option that is missing or None has its default.

    kind: "branch": a second continuation of this conversation; the tokens so far are not trained again. "subagent": an independent
        conversation, such as a delegated subtask. "compaction": a shorter context that replaces this conversation, which is closed.
        Default: a branch without messages, a subagent with messages.
    tools: the tools offered to the model in the conversation. Default: the same as here. A branch always has the same tools.
    role: the part that the conversation plays, such as "critic": a non-blank text of at most 256 characters. Its samples carry it,
        and `RewardResult.roles` gives rewards by it. Default: "agent" for a subagent, otherwise the role of this conversation,
        which a compaction always keeps.
    trainable: False: its samples do not train. Default: True for a subagent, otherwise as this conversation.
    model: name of a further model that generates the completions, for a subagent only. The trainer does not see the conversation.
        Role and trainable then default to the model's name and False. Default: the same as here.
    after: a completion of this conversation, for a branch only: the branch begins right after it, without what came later. It can
        be opened at any time, also during a turn and after the conversation was closed. Default: the present.
    """

    kind: Literal["branch", "subagent", "compaction"] | None
    tools: Sequence[Tool] | None
    role: str | None
    trainable: bool | None
    model: str | None
    after: Reply | None


def turn_sampling(sampling: Sampling, options: Mapping[str, object], dialect: Dialect) -> Sampling:
    """Return the request's sampling parameters overridden by an agent's options. Raise `AgentMistake` naming the option."""
    given = {name: value for name, value in options.items() if value is not None}
    read = {name: _read(name, value) for name, value in given.items()}
    extra = read.pop("extra", None)
    found = replace(sampling, **read)
    if extra:
        found = replace(found, extra_json=_merge(sampling.extra_json, extra))
    for violation in sampling_violations(found, dialect):
        name = violation.field.rpartition(".")[2].removesuffix("_json")  # `extra` is `extra_json` in a request
        if name in given:
            raise AgentMistake(f"sample: {name}={given[name]!r:.100}: {violation.description}")
    return found


def _read(name: str, value: object) -> Any:
    if name not in _READERS:
        raise AgentMistake(
            f"sample: {name} is not an option; the options are {', '.join(_READERS)}. Pass other parameters of a trainer as "
            f"extra={{{name!r}: ...}}"
        )
    read, expected = _READERS[name]
    try:
        return read(value)
    except (TypeError, ValueError, OverflowError):
        raise AgentMistake(f"sample: {name}={value!r:.100} is invalid; pass {expected}") from None


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError
    return int(value)


def _texts(value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError
    for text in texts:
        text.encode()  # UnicodeEncodeError, a ValueError, for lone surrogates: they could not be sent
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
        raise AgentMistake(f"sample: extra contains {doubled[0]}, which is an option: use sample({doubled[0]}=...)")
    return parse_object(json.dumps(dict(value), allow_nan=False))


def _merge(request_json: str, extra: Mapping[str, JSON]) -> str:
    """Return the request's extra parameters merged with these, as JSON.

    The request's text is kept verbatim unless `extra` replaces one of its values: parsing it would change large numbers (D13).
    """
    request_extra = parse_object(request_json) if request_json else {}
    if request_extra and request_extra.keys().isdisjoint(extra):
        return f"{request_json.rstrip()[:-1]}, {json.dumps(extra)[1:]}"
    try:
        return json.dumps({**request_extra, **extra}, allow_nan=False)
    except ValueError:
        text = "sample: extra: cannot merge, because the request's extra parameters contain a number that JSON cannot represent"
        raise AgentMistake(text) from None


_READERS: Mapping[str, tuple[Callable[[object], Any], str]] = MappingProxyType(
    {
        "temperature": (real_number, "a number"),
        "top_p": (real_number, "a number"),
        "max_tokens": (_whole, "an integer"),
        "stop": (_texts, "a string or a list of strings"),
        "logprobs": (_flag, "True or False"),
        "extra": (_object, "a dict that can be serialized as JSON"),
    }
)


def fork_kind(options: ForkOptions, messages: int | None) -> SegmentKind:
    """Return the kind of the new conversation. `messages` is their number, None if none were passed. Raise `AgentMistake`."""
    if unknown := options.keys() - ForkOptions.__annotations__.keys():
        known = ", ".join(ForkOptions.__annotations__)
        raise AgentMistake(f"fork: {min(unknown)} is not an option; the options are {known}")
    word, model = options.get("kind"), options.get("model")
    if word is not None and word not in _KINDS:
        raise AgentMistake(f"fork: kind is {word!r}; it must be one of {', '.join(_KINDS)}")
    kind = _KINDS[word] if word else SegmentKind.BRANCH if messages is None else SegmentKind.SUBAGENT
    branches = kind is SegmentKind.BRANCH
    if branches and messages is not None:
        raise AgentMistake(
            "fork: a branch continues this conversation and takes no messages; append them to the Run that fork returns"
        )
    if branches and options.get("tools") is not None:
        raise AgentMistake(
            "fork: a branch shares this conversation's tokens, which contain its tools; to change tools, pass messages"
        )
    if options.get("after") is not None and not branches:
        raise AgentMistake(f"fork: after is for a branch; a {kind.value} has its own messages, so leave it out")
    if model is not None and kind is not SegmentKind.SUBAGENT:
        raise AgentMistake(
            f"fork: a {kind.value} keeps the model of its conversation; leave out model={model!r:.100}, or open a subagent: pass "
            "messages, and no other kind"
        )
    if model is not None and not isinstance(model, str):
        raise AgentMistake(f"fork: model is {model!r:.100}; it must be the name of a further model")
    if not branches and not messages:
        raise AgentMistake(f"fork: a {kind.value} needs its initial messages")
    return kind


def fork_role(kind: SegmentKind, parent: Role, name: object, trainable: object, model: str | None) -> Role:
    """Return the role of the new conversation; None for `name`, `trainable` or `model` keeps the default. Raise `AgentMistake`.

    A subagent of a further model has its name as role and does not train, unless declared otherwise.
    """
    default, model = parent, parent.model if model is None else model
    if kind is SegmentKind.SUBAGENT:
        default = Role(model, trainable=False, model=model) if model else AGENT
    if name is None and trainable is None:
        return default
    if kind is SegmentKind.COMPACTION:
        raise AgentMistake(
            "fork: a compaction continues this conversation and keeps its role; leave out role and trainable"
        )
    if trainable is not None and not isinstance(trainable, bool):
        raise AgentMistake(f"fork: trainable is {trainable!r:.100}; it must be True or False")
    if name is not None and not (isinstance(name, str) and name.strip() and len(name) <= ID_LENGTH and _is_utf8(name)):
        raise AgentMistake(f"fork: role is {name!r:.100}; it must be a non-blank text of 1 to {ID_LENGTH} characters")
    trains = default.trainable if trainable is None else trainable
    return Role(default.name if name is None else str(name), trains, default.model)


def _is_utf8(text: str) -> bool:
    return text.encode("utf-8", "ignore").decode() == text


def checked_turn_reward(value: object, machine: Machine, conversation: Conversation) -> tuple[int, float]:
    """Return the turn that gets the reward, the latest with a completion, and the reward. Raise `AgentMistake`."""
    last = conversation.last_completion
    if last is None:
        raise AgentMistake("give_reward: the conversation has no completion yet; call it after `await run.sample()`")
    try:
        number = score_number(value)
    except TypeError:
        number = math.nan
    if not abs(number) <= LARGEST_TURN_REWARD:
        most = f"{LARGEST_TURN_REWARD:,.0f}"
        raise AgentMistake(f"give_reward: the reward is {value!r:.100}; it must be a number from -{most} to {most}")
    if len(machine.rewards.get(last.turn, ())) >= MOST_REWARDS_OF_A_TURN:
        raise AgentMistake(
            f"give_reward: turn {last.turn} has {MOST_REWARDS_OF_A_TURN:,} rewards already; add them up first"
        )
    return last.turn, number


def forkable_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return the tools as a tuple. Raise `AgentMistake` for a value that is not a tool, and for duplicate names."""
    for tool in tools:
        texts = [getattr(tool, name, None) for name in ("name", "description", "parameters_json_schema")]
        if not all(isinstance(text, str) for text in texts) or not callable(getattr(tool, "run", None)):
            raise AgentMistake(f"fork: {tool!r} is not a tool; `tool` turns a function into one")
    names = [tool.name for tool in tools]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise AgentMistake(f"fork: more than one tool is named {', '.join(map(repr, doubled))}")
    return tuple(tools)


def checked_reason(value: object, of: str) -> str:
    """Return a reason that is a non-blank text. Raise `AgentMistake`, whose text begins with the method's name `of`."""
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_REASON:
        raise AgentMistake(
            f"{of}: the reason is {value!r:.100}; it must be a non-blank text of 1 to {LONGEST_REASON} characters"
        )
    return value


def checked_note(code: object, text: object) -> tuple[str, str]:
    """Return code and text of a note, truncated to their maximum lengths. Raise `AgentMistake`."""
    if not isinstance(code, str) or not isinstance(text, str):
        raise AgentMistake(f"note: code and text must be strings, not {code!r:.100} and {text!r:.100}")
    return code[:LONGEST_REASON], text[:LONGEST_NOTE]


def check_room(machine: Machine, conversation: Conversation, of: str) -> None:
    """Raise `AgentMistake` if the rollout is too large. Otherwise a loop that never samples would fill the memory."""
    messages, opened = len(conversation.messages), len(machine.ledger.segments)
    if messages < MOST_MESSAGES and opened < MOST_CONVERSATIONS and machine.size < MOST_BYTES:
        return
    size = f"{messages:,} messages in {opened:,} conversations, {machine.size // 2**20:,} MiB"
    most = f"{MOST_MESSAGES:,} in {MOST_CONVERSATIONS:,}, {MOST_BYTES // 2**20:,} MiB"
    text = f"{of}: in turn {conversation.turn} the rollout holds {size}, at most {most} are allowed"
    raise AgentMistake(f"{text}. Is this a loop that never samples?")
