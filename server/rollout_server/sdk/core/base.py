"""What authors of agent loops write against: the loop, its context and its result."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from rollout_server.sdk.core.llm_client import LLMClientProtocol
from rollout_server.sdk.core.schemas import (
    MessageDict,
    OpenAIFunctionToolSchema,
    RolloutMetrics,
    RolloutRequest,
    RolloutStatus,
)

if TYPE_CHECKING:
    from rollout_server.sdk.client import CompletionsResult

_log = logging.getLogger(__name__)
_CODE_LENGTH = 64
_NOTE_LENGTH = 2000
_NOTES = 1000
_NAME_LENGTH = 200
_LINE_LENGTH = 1024 * 1024


@dataclass
class RolloutResult:
    """What `run` returns.

    Args:
        status: "COMPLETED" or "ERROR".
        final_messages: the conversation; only grown since `request.messages`.
        finish_reason: why it ended: "stop", "max_turns", "error" or a word of your own.
        error_message: what went wrong, for an ERROR.
        metrics: what was used, as the loop counted it.
        reward: the loop's own judgement of the rollout; None: none.
    """

    status: str
    final_messages: list[MessageDict]
    finish_reason: str
    error_message: str | None = None
    metrics: RolloutMetrics | None = None
    reward: float | None = None


@dataclass
class RolloutContext:
    """One rollout, as its loop sees it.

    Args:
        request: what was asked for.
        tools: what `get_tools` gave for it.
        llm: what completes. In tests of your own it may be anything with `chat_completions` and `get_metrics`.
    """

    request: RolloutRequest
    tools: list[OpenAIFunctionToolSchema]
    llm: LLMClientProtocol
    _start_time: float = field(default_factory=time.monotonic, repr=False)
    _tool_latency_ms: float = field(default=0.0, repr=False)
    _num_tool_calls: int = field(default=0, repr=False)
    _debug_dir: str | None = field(default=None, repr=False)
    _note: Callable[[str, str], None] | None = field(default=None, repr=False)
    _took: Callable[[float], None] | None = field(default=None, repr=False)
    _noted: int = field(default=0, repr=False)

    async def chat(self, messages: list[MessageDict], **kwargs: Any) -> CompletionsResult:
        """Asks the model for its answer to the whole conversation.

        Give it the list that you gave before, with the last answer and what came after it appended. `kwargs` are sampling
        parameters of this call, `temperature`, `top_p`, `max_tokens`, `stop` and `logprobs`; the request's stand in for those
        that are not given. Raises an `OsmosisRolloutError` when the trainer fails; the rollout is over then, whatever you do
        about it.
        """
        return await self.llm.chat_completions(messages, **kwargs)

    def complete(
        self, final_messages: list[MessageDict], finish_reason: str = "stop", reward: float | None = None
    ) -> RolloutResult:
        """The result of a rollout that came to its end; return it from `run`."""
        return RolloutResult(
            status=RolloutStatus.COMPLETED.value,
            final_messages=final_messages,
            finish_reason=finish_reason,
            metrics=self._build_metrics(),
            reward=reward,
        )

    def error(self, error_message: str, final_messages: list[MessageDict] | None = None) -> RolloutResult:
        """The result of a rollout that went wrong; return it from `run`."""
        return RolloutResult(
            status=RolloutStatus.ERROR.value,
            final_messages=final_messages or [],
            finish_reason="error",
            error_message=error_message,
            metrics=self._build_metrics(),
        )

    def record_tool_call(self, latency_ms: float = 0.0) -> None:
        """Counts a tool call that you ran, and the milliseconds that it took."""
        self._num_tool_calls += 1
        self._tool_latency_ms += latency_ms
        if self._took is not None:
            self._took(latency_ms)

    @property
    def debug_enabled(self) -> bool:
        """Whether `log_event` writes to a file."""
        return bool(self._debug_dir)

    def log_event(self, event_type: str, **data: Any) -> None:
        """Remarks something: a note among the rollout's events, and a line of its debug file where there is one.

        What is not JSON is written as `str` writes it. Nothing that goes wrong here reaches the loop.
        """
        entry = {"event": event_type, "rollout_id": self.request.rollout_id, **data}
        try:
            line = json.dumps(entry, default=str, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            _log.warning("event %r of the agent loop cannot be written: %s", event_type, error)
            return
        if self._note is not None and self._noted < _NOTES:
            self._noted += 1
            self._note(str(event_type)[:_CODE_LENGTH], line[:_NOTE_LENGTH])
        if self._debug_dir:
            write_line(debug_file(self._debug_dir, self.request.rollout_id), line)

    def _build_metrics(self) -> RolloutMetrics:
        """What the client counted, with the tool calls and times counted here."""
        return self.llm.get_metrics().model_copy(
            update={
                "total_latency_ms": 1000 * (time.monotonic() - self._start_time),
                "tool_latency_ms": self._tool_latency_ms,
                "num_tool_calls": self._num_tool_calls,
            }
        )


class RolloutAgentLoop(ABC):
    """An agent of the earlier SDK: a name, tools for each request, and a loop.

    One object plays many rollouts at the same time: what belongs to one of them lives in `run`, not in `self`.

    Attributes:
        name: unique within a server, at most 256 characters. A class that can be used without one is a TypeError.
    """

    name: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # ABCMeta looks for abstract methods only after this.
        if any(getattr(getattr(cls, each, None), "__isabstractmethod__", False) for each in dir(cls)):
            return
        name = getattr(cls, "name", None)
        if not isinstance(name, property) and not (isinstance(name, str) and name.strip()):
            problem = "has no name" if name is None else f"has the name {name!r}"
            raise TypeError(f'agent loop class {cls.__name__} {problem}; give it one: name = "my_agent"')

    @abstractmethod
    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        """The tools that the model is told in this rollout; an empty list for none."""

    def get_default_tools(self) -> list[OpenAIFunctionToolSchema]:
        """Those for nobody's request: `GET /tools` tells them. Write it where `get_tools` needs more of a request to choose."""
        from rollout_server.sdk.request_view import sample_request

        return self.get_tools(sample_request())

    @abstractmethod
    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Plays one rollout and returns `ctx.complete(...)` or `ctx.error(...)`."""


def debug_file(directory: str, rollout_id: str) -> Path:
    """`DIRECTORY/ROLLOUT_ID.jsonl`. An id cannot lead out of the directory: what is no part of a file's name is escaped."""
    name = quote(rollout_id, safe=" ", errors="surrogatepass")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _NAME_LENGTH:
        name = f"{name[:100]}-{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return Path(directory) / f"{name}.jsonl"


def write_line(path: Path, line: str) -> None:
    """Appends a line at once: what came before a crash is what such a file is for. What goes wrong is logged."""
    if len(line) > _LINE_LENGTH:
        _log.warning("an event of %d characters is not written to %s", len(line), path.name)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{line}\n")
    except OSError as error:
        _log.warning("%s cannot be written: %s", path.name, error)
