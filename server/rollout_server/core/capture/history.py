"""The canonical form of the messages that an agent sends: equal for every spelling of the same conversation.

Clients send one conversation in many spellings: a text as a string or as parts, no text as null or "", tool arguments with other
spaces or key order, other ids, cache markers, an answer as several messages in a row. None of that is rendered, so none of it
parts two histories. All else is compared, and rendered as it was first sent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Final, TypeVar

from rollout_server.core.capture.call import HistoryMessage, OfferedTool
from rollout_server.core.capture.rules import SEARCHED
from rollout_server.core.message import JSON, MalformedMessage, parse_json, parse_object

ASSISTANT = "assistant"
TOOL = "tool"
_ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {"system": "system", "developer": "system", "user": "user", ASSISTANT: ASSISTANT, TOOL: TOOL}
)
_TEXT_PARTS = ("text", "input_text", "output_text")
_EXACT_INTEGER = 2**53
_MOST_SYSTEM_TEXTS = 64
_ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"))
_THINK, _END_OF_THINK = "<think>", "</think>"


class InvalidHistory(ValueError):
    """A field of a call is invalid. `field` is its path, such as `messages[3].content[0].type`; `text` says what to do."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}")
        self.field = path
        self.text = text


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image within a message: the SHA-256 of its data, and the data: URL as it was sent."""

    sha256: str
    url: str = field(repr=False, compare=False)


_Part = TypeVar("_Part", bound="str | ImagePart")


@dataclass(frozen=True, slots=True)
class CanonicalCall:
    """A tool call within an assistant message.

    Args:
        name: the name of the tool.
        arguments: canonical JSON text, or the text as it came if it is not JSON.
        sent: the arguments as they came.
        id: the id as it came; may be empty.
    """

    name: str
    arguments: str
    sent: str | Mapping[str, JSON] = field(compare=False)
    id: str = field(compare=False)


@dataclass(frozen=True)
class CanonicalMessage:
    """One message in canonical form. It keeps its keys: each call of the agent repeats the messages before it.

    Args:
        role: "system", "user", "assistant" or "tool".
        parts: texts and images; texts are joined, and none is empty.
        calls: the tool calls.
        reasoning: the reasoning, if the message has it in a field of its own.
        result_of: for a tool result, the number of the call that it answers, counted over the whole history from 0.
        completion_ids: ids of the completions that the client says it repeats.
        name: for a tool result, the name of its tool if the client sent one. It does not part two histories, as the call that the
            result answers has it too.
    """

    role: str
    parts: tuple[str | ImagePart, ...] = ()
    calls: tuple[CanonicalCall, ...] = ()
    reasoning: str = ""
    result_of: int = -1
    completion_ids: frozenset[str] = field(default=frozenset(), compare=False)
    name: str = field(default="", compare=False)

    @cached_property
    def text(self) -> str:
        """The texts, with images named by their digest."""
        return "".join(part if isinstance(part, str) else f"[image {part.sha256}]" for part in self.parts)

    @cached_property
    def key(self) -> bytes:
        """Equal for two messages that render alike. 32 bytes."""
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return digest(("sent", self.role, self.parts, calls, self.reasoning, self.result_of))

    @cached_property
    def completion_key(self) -> bytes:
        """Equal for two spellings of one answer of the model: its reasoning and outer white space do not count. 32 bytes."""
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return digest(("completion", self.spoken, calls))

    @cached_property
    def calls_key(self) -> bytes:
        """Equal for two messages with the same tool calls and ids, whatever their texts. 32 bytes; empty without calls or ids."""
        calls = tuple((call.id, call.name, call.arguments) for call in self.calls)
        return digest(("calls", calls)) if calls and all(call.id for call in self.calls) else b""

    @property
    def spoken(self) -> str:
        """The text without outer white space and without leading `<think>` reasoning."""
        return self._split[1].strip()

    @property
    def thought(self) -> str:
        """The reasoning, also where it leads the text in `<think>` tags, without outer white space; empty if there is none."""
        return self._split[0].strip()

    @cached_property
    def _split(self) -> tuple[str, str]:
        text = self.text
        if self.reasoning:
            return self.reasoning, text
        start = text.lstrip()
        if not start.startswith(_THINK):
            return "", text
        reasoning, closed, rest = start[len(_THINK) :].partition(_END_OF_THINK)
        return (reasoning, rest) if closed else ("", text)

    def is_written_as(self, sampled: CanonicalMessage) -> bool:
        """Return whether the message has the text, reasoning and arguments of a completion, letter by letter.

        Agents get reasoning apart from the text, also where the trainer sent it in `<think>` tags. That is no change of theirs.
        """
        was_split = bool(sampled.thought) and not sampled.reasoning and self.reasoning.strip() == sampled.thought
        return (
            (self.parts == sampled.parts and self.reasoning == sampled.reasoning)
            or (was_split and self.spoken == sampled.spoken)
        ) and all(_same_arguments(mine, its) for mine, its in zip(self.calls, sampled.calls, strict=True))


def digest(value: object) -> bytes:
    """Return the SHA-256 of a value made of tuples, texts and numbers."""
    return hashlib.sha256(repr(value).encode("utf-8", "surrogatepass")).digest()


def join_messages(messages: Sequence[CanonicalMessage]) -> CanonicalMessage:
    """Join assistant messages in a row: they are one answer."""
    if len(messages) == 1:
        return messages[0]
    return CanonicalMessage(
        ASSISTANT,
        _joined_parts(part for each in messages for part in each.parts),
        tuple(call for each in messages for call in each.calls),
        "".join(each.reasoning for each in messages),
        completion_ids=frozenset().union(*(each.completion_ids for each in messages)),
    )


class HistoryReader:
    """Reads the messages of one call, in order, and finds the call that each tool result answers.

    A result is found by its id: among the calls of the last assistant message that have no result yet, then among all earlier
    calls. A result without a known id answers the next call of the last assistant message.

    Args:
        earlier: messages that precede the ones to be read.
        drops: whether a text of the system prompt is left out.

    Attributes:
        calls: the number of tool calls so far.
        dropped: the number of texts that were left out.
        system_texts: the first texts of system messages, as they came, without those that were left out.
    """

    def __init__(
        self, earlier: Iterable[CanonicalMessage] = (), drops: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.calls = 0
        self.dropped = 0
        self.system_texts: list[str] = []
        self._drops = drops
        self._numbers: dict[str, int] = {}
        # The calls of the last assistant message without a result: their numbers, and the numbers of each id.
        self._waiting: dict[int, None] = {}
        self._waiting_ids: dict[str, list[int]] = {}
        self._in_answer = False
        for message in earlier:
            self.add(message)

    def read_instructions(self, texts: Sequence[str]) -> CanonicalMessage | None:
        """Return the texts of a system prompt as one message; None if nothing is left of them."""
        remaining = self._without_dropped(tuple(text for text in texts if text))
        return CanonicalMessage("system", ("\n\n".join(remaining),)) if remaining else None

    def read(self, message: HistoryMessage, path: str) -> CanonicalMessage | None:
        """Return the canonical form of a message; None if all its texts are left out.

        `path` names it in errors. Raises `InvalidHistory`.
        """
        fields = message.fields
        role = _ROLES.get(role_field) if isinstance(role_field := fields.get("role"), str) else None
        if role is None:
            raise InvalidHistory(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
        if fields.get("function_call") is not None:
            raise InvalidHistory(f"{path}.function_call", "is not supported; send tool_calls")
        found = _parts(fields.get("content"), f"{path}.content")
        parts = _joined_parts(self._without_dropped(found) if role == "system" else found)
        if found and not parts and role == "system":
            return None
        ids = frozenset([message.completion_id]) if message.completion_id else frozenset[str]()
        if role == ASSISTANT:
            if not parts and isinstance(refusal := fields.get("refusal"), str) and refusal:
                parts = (refusal,)
            calls = _calls(fields.get("tool_calls"), f"{path}.tool_calls")
            read = CanonicalMessage(role, parts, calls, _reasoning(fields, path), completion_ids=ids)
        elif role == TOOL:
            name = sent if isinstance(sent := fields.get("name"), str) else ""
            read = CanonicalMessage(role, parts, result_of=self._number(fields, f"{path}.tool_call_id"), name=name)
        else:
            read = CanonicalMessage(role, parts)
        self.add(read)
        return read

    def _without_dropped(self, parts: tuple[_Part, ...]) -> tuple[_Part, ...]:
        remaining = tuple(part for part in parts if not (isinstance(part, str) and self._drops(part)))
        self.dropped += len(parts) - len(remaining)
        self.system_texts += [part[:SEARCHED] for part in remaining if isinstance(part, str)][:_MOST_SYSTEM_TEXTS]
        return remaining

    def add(self, message: CanonicalMessage) -> None:
        """Take a message that is read already. Only `read` counts the texts of a system message."""
        if message.role == ASSISTANT:
            if not self._in_answer:
                self._waiting, self._waiting_ids = {}, {}
            for call in message.calls:
                self._waiting[self.calls] = None
                if call.id:
                    self._numbers[call.id] = self.calls
                    self._waiting_ids.setdefault(call.id, []).append(self.calls)
                self.calls += 1
        elif message.role == TOOL:
            self._waiting.pop(message.result_of, None)
        self._in_answer = message.role == ASSISTANT

    def _number(self, fields: Mapping[str, JSON], path: str) -> int:
        sent = fields.get("tool_call_id")
        if sent is not None and not isinstance(sent, str):
            raise InvalidHistory(path, "must be a string")
        same_id = self._waiting_ids.get(sent or "", [])
        while same_id:
            if (number := same_id.pop(0)) in self._waiting:
                return number
        if sent and sent in self._numbers:
            return self._numbers[sent]
        if not self._waiting:
            raise InvalidHistory(path, "no earlier assistant message has a tool call that this result could answer")
        return next(iter(self._waiting))


def tools_key(tools: Sequence[OfferedTool]) -> bytes:
    """Return a digest of the offered tools: of their order and contents, not of spaces and key order in their schemas.

    Raises `InvalidHistory` for a schema that is not a JSON object.
    """
    return digest(
        tuple(
            (tool.name, tool.description, canonical_schema(tool.parameters_json_schema, f"tools[{index}]"), tool.strict)
            for index, tool in enumerate(tools)
        )
    )


def canonical_json(value: JSON) -> str:
    """Return JSON text that is equal for values that are equal to clients, which read numbers as 64-bit floats."""
    return _ENCODER.encode(_canonical_numbers(value))


def _canonical_numbers(value: JSON) -> JSON:
    if isinstance(value, Mapping):
        return {key: _canonical_numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical_numbers(each) for each in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        number = float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    return int(number) if number.is_integer() and abs(number) <= _EXACT_INTEGER else number


def canonical_schema(text: str, tool: str) -> str:
    """Return a tool's schema without regard to spaces and key order. Raise `InvalidHistory` if it is no JSON object."""
    try:
        return json.dumps(parse_object(text), sort_keys=True)
    except MalformedMessage as error:
        raise InvalidHistory(f"{tool}.parameters_json_schema", f"must be one JSON object: {error}") from None


def _parts(content: JSON, path: str) -> tuple[str | ImagePart, ...]:
    if content is None:
        return ()
    if isinstance(content, str):
        return (content,) if content else ()
    if not isinstance(content, list):
        raise InvalidHistory(path, "must be a string, a list of parts, or null")
    return tuple(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: JSON, path: str) -> str | ImagePart:
    if not isinstance(part, dict):
        raise InvalidHistory(path, "must be an object")
    kind = part.get("type")
    if kind in _TEXT_PARTS:
        return _string(part.get("text"), f"{path}.text")
    if kind == "refusal":
        return _string(part.get("refusal"), f"{path}.refusal")
    if kind == "image_url":
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        return _image(_string(url, f"{path}.image_url.url"), f"{path}.image_url.url")
    raise InvalidHistory(f"{path}.type", 'must be "text", "refusal" or "image_url"')


def _image(url: str, path: str) -> ImagePart:
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not comma:
        raise InvalidHistory(path, "must be a data: URL with the image in it; other addresses are not fetched")
    return ImagePart(hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest(), url)


def _joined_parts(parts: Iterable[str | ImagePart]) -> tuple[str | ImagePart, ...]:
    joined: list[str | ImagePart] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        joined += ["".join(texts), part]
        texts = []
    joined.append("".join(texts))
    return tuple(part for part in joined if part)


def _reasoning(fields: Mapping[str, JSON], path: str) -> str:
    for name in ("reasoning_content", "reasoning"):
        if (value := fields.get(name)) is not None:
            return _string(value, f"{path}.{name}")
    # A trainer's name for it, which clients get as `reasoning_content`.
    value = fields.get("thinking")
    return value if isinstance(value, str) else ""


def _calls(calls: JSON, path: str) -> tuple[CanonicalCall, ...]:
    if calls is None:
        return ()
    if not isinstance(calls, list):
        raise InvalidHistory(path, "must be a list")
    return tuple(_call(call, f"{path}[{index}]") for index, call in enumerate(calls))


def _call(call: JSON, path: str) -> CanonicalCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidHistory(f"{path}.function", "must be an object with a name and arguments")
    name = _string(function.get("name"), f"{path}.function.name")
    call_id = _string(call.get("id") or "", f"{path}.id")
    arguments = function.get("arguments")
    if arguments is None:
        arguments = ""
    if not isinstance(arguments, str | dict):
        raise InvalidHistory(f"{path}.function.arguments", "must be a string or an object")
    return CanonicalCall(name, _canonical_arguments(arguments), arguments, call_id)


def _canonical_arguments(arguments: str | Mapping[str, JSON]) -> str:
    if not isinstance(arguments, str):
        return canonical_json(arguments)
    try:
        return canonical_json(parse_json(arguments) if arguments.strip() else {})
    except (MalformedMessage, RecursionError):
        return arguments


def _same_arguments(mine: CanonicalCall, its: CanonicalCall) -> bool:
    """Arguments that a trainer sent as an object have no spelling of their own."""
    both_texts = isinstance(mine.sent, str) and isinstance(its.sent, str)
    return mine.sent == its.sent if both_texts else mine.arguments == its.arguments


def _string(value: JSON, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidHistory(path, "must be a string")
    return value
