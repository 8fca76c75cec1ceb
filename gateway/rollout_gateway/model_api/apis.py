"""The three APIs, each with its requests, responses, streams and errors."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from rollout_gateway.model_api import chat, messages, responses
from rollout_gateway.model_api.call import ApiCall, Frame, Reply
from rollout_gateway.model_api.errors import OVER, ModelError
from rollout_gateway.model_api.fields import Object
from rollout_gateway.rest.event_routes import one_line

#: A frame without an event, which clients skip.
COMMENT: Final[Frame] = (":", "heartbeat")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The shape of one API.

    Args:
        path: of its requests, behind the endpoint's base.
        title: its name for people.
        frames: the stream of a reply, from its first event to its last.
        waiting: the frame with this index of a stream that has no reply yet. The id of the reply is empty if unknown.
        late: the frames of a reply after `waiting` frames; None: they are the same.
        error: the body of an error.
        failure: the frames that end a stream that fails; the connection is cut behind them. The id is as in `waiting`.
        paths: paths in the body of the call's fields that have other names there.
    """

    path: str
    title: str
    parse: Callable[[Object], ApiCall]
    response: Callable[[ApiCall, Reply], Object]
    frames: Callable[[ApiCall, Reply], Sequence[Frame]]
    waiting: Callable[[ApiCall, int, str], Frame]
    error: Callable[[ModelError], Object]
    failure: Callable[[ApiCall, ModelError, str], Sequence[Frame]]
    paths: Mapping[str, str] = field(default_factory=dict)
    #: Status of a request to a rollout that has ended: clients repeat the request after others.
    over: int = 410
    #: The frames have their type and a number in their data.
    numbered: bool = False
    late: Callable[[ApiCall, Reply], Sequence[Frame]] | None = None

    def status(self, error: ModelError) -> int:
        """Return the HTTP status of an error."""
        return self.over if error.reason == OVER else error.status


def _responses_frames(call: ApiCall, reply: Reply) -> Sequence[Frame]:
    begun = {"response": responses.head(call, reply.id)}
    return [("response.created", begun), ("response.in_progress", begun), *responses.frames(call, reply)]


def _responses_waiting(call: ApiCall, index: int, reply_id: str) -> Frame:
    # Clients refuse a response whose id changes.
    if not reply_id:
        return COMMENT
    return f"response.{'in_progress' if index else 'created'}", {"response": responses.head(call, reply_id)}


def _responses_failure(call: ApiCall, error: ModelError, reply_id: str) -> Sequence[Frame]:
    shown = error.openai()["error"]
    failed = responses.head(call, reply_id or "failed", "failed") | {
        "error": {k: shown[k] for k in ("code", "message")}
    }
    return [("response.failed", {"response": failed}), ("error", {k: shown[k] for k in ("code", "message", "param")})]


CHAT: Final = ModelShape(
    path="chat/completions",
    title="OpenAI's chat completions",
    parse=chat.parse,
    response=chat.response,
    frames=chat.frames,
    waiting=lambda call, index, reply_id: COMMENT,
    error=ModelError.openai,
    failure=lambda call, error, reply_id: [("", error.openai())],
)
RESPONSES: Final = ModelShape(
    path="responses",
    title="OpenAI's responses",
    parse=responses.parse,
    response=responses.response,
    frames=_responses_frames,
    waiting=_responses_waiting,
    late=responses.frames,
    error=ModelError.openai,
    failure=_responses_failure,
    paths={"previous": "previous_response_id", "response_format": "text.format", "max_tokens": "max_output_tokens"},
    # Codex repeats 410.
    over=400,
    numbered=True,
)
MESSAGES: Final = ModelShape(
    path="messages",
    title="Anthropic's messages",
    parse=messages.parse,
    response=messages.response,
    frames=messages.frames,
    waiting=lambda call, index, reply_id: ("ping", {"type": "ping"}),
    error=ModelError.anthropic,
    failure=lambda call, error, reply_id: [("error", error.anthropic())],
    paths={
        "response_format": "output_config.format",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
        "stop": "stop_sequences",
    },
)


class FrameEncoder:
    """Encodes the frames of one stream, and numbers them if the API does."""

    def __init__(self, *, numbered: bool) -> None:
        self._numbered = numbered
        self._sequence = 0

    def encode(self, frames: Iterable[Frame]) -> bytes:
        """Return the bytes of some frames. No frame has an SSE id: some clients would read an empty event after it."""
        return b"".join(self._frame(*frame) for frame in frames)

    def _frame(self, name: str, data: Any) -> bytes:
        if name == ":":
            return f": {data}\n\n".encode()
        if self._numbered:
            data = {"type": name, "sequence_number": self._sequence, **data}
            self._sequence += 1
        text = data if isinstance(data, str) else one_line(msgspec.json.encode(data).decode())
        event = f"event: {name}\n" if name else ""
        return f"{event}data: {text}\n\n".encode()
