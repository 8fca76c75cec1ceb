"""Base class, context and result of agent loops."""

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
    """Return value of `run`.

    Args:
        status: "COMPLETED" or "ERROR".
        final_messages: the whole conversation: `request.messages` and everything appended since.
        finish_reason: why the rollout ended: "stop", "max_turns", "error" or your own word.
        error_message: what failed, for an ERROR.
        metrics: usage as the loop counted it.
        reward: reward of the rollout, or None.
    """

    status: str
    final_messages: list[MessageDict]
    finish_reason: str
    error_message: str | None = None
    metrics: RolloutMetrics | None = None
    reward: float | None = None


@dataclass
class RolloutContext:
    """Context of one rollout, passed to `run`.

    Args:
        request: the rollout's request.
        tools: what `get_tools` returned for the request.
        llm: generates completions. In your tests it may be any object with `chat_completions` and `get_metrics`.
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
        """Request a completion of the whole conversation.

        Args:
            messages: the previous list, plus the last completion and everything after it.
            kwargs: sampling parameters of this call: `temperature`, `top_p`, `max_tokens`, `stop` and `logprobs`. Parameters that
                are not given are the request's.

        Raises an `OsmosisRolloutError` if the trainer fails. The rollout has then ended, even if you catch the error.
        """
        return await self.llm.chat_completions(messages, **kwargs)

    def complete(
        self, final_messages: list[MessageDict], finish_reason: str = "stop", reward: float | None = None
    ) -> RolloutResult:
        """Return the result of a completed rollout, for `run` to return."""
        return RolloutResult(
            status=RolloutStatus.COMPLETED.value,
            final_messages=final_messages,
            finish_reason=finish_reason,
            metrics=self._build_metrics(),
            reward=reward,
        )

    def error(self, error_message: str, final_messages: list[MessageDict] | None = None) -> RolloutResult:
        """Return the result of a failed rollout, for `run` to return."""
        return RolloutResult(
            status=RolloutStatus.ERROR.value,
            final_messages=final_messages or [],
            finish_reason="error",
            error_message=error_message,
            metrics=self._build_metrics(),
        )

    def record_tool_call(self, latency_ms: float = 0.0) -> None:
        """Count a tool call that the loop ran, with its latency in milliseconds."""
        self._num_tool_calls += 1
        self._tool_latency_ms += latency_ms
        if self._took is not None:
            self._took(latency_ms)

    @property
    def debug_enabled(self) -> bool:
        """Return whether `log_event` writes to a file."""
        return bool(self._debug_dir)

    def log_event(self, event_type: str, **data: Any) -> None:
        """Add a note to the rollout's events and, with a debug directory, a line to the rollout's debug file.

        Values that are not JSON are converted with `str`. Errors are logged and not raised.
        """
        entry = {"event": event_type, "rollout_id": self.request.rollout_id, **data}
        try:
            line = json.dumps(entry, default=str, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            _log.warning("event %r of the agent loop is not serializable: %s", event_type, error)
            return
        if self._note is not None and self._noted < _NOTES:
            self._noted += 1
            self._note(str(event_type)[:_CODE_LENGTH], line[:_NOTE_LENGTH])
        if self._debug_dir:
            write_line(debug_file(self._debug_dir, self.request.rollout_id), line)

    def _build_metrics(self) -> RolloutMetrics:
        """Return the client's metrics with the tool calls and times counted here."""
        return self.llm.get_metrics().model_copy(
            update={
                "total_latency_ms": 1000 * (time.monotonic() - self._start_time),
                "tool_latency_ms": self._tool_latency_ms,
                "num_tool_calls": self._num_tool_calls,
            }
        )


class RolloutAgentLoop(ABC):
    """Base class of agents of the earlier SDK: a name, tools per request, and a loop.

    One object runs many rollouts at the same time. Keep the state of a rollout in local variables of `run`, not in `self`.

    Attributes:
        name: unique within a server, at most 256 characters. Defining a concrete class without a name raises TypeError.
    """

    name: str

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # `__abstractmethods__` is not set yet: ABCMeta computes it after `__init_subclass__`.
        if any(getattr(getattr(cls, each, None), "__isabstractmethod__", False) for each in dir(cls)):
            return
        name = getattr(cls, "name", None)
        if not isinstance(name, property) and not (isinstance(name, str) and name.strip()):
            problem = "has no name" if name is None else f"has the name {name!r}"
            raise TypeError(f'agent loop class {cls.__name__} {problem}; give it one: name = "my_agent"')

    @abstractmethod
    def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
        """Return the tools that the model is offered in this rollout; an empty list for none."""

    def get_default_tools(self) -> list[OpenAIFunctionToolSchema]:
        """Return the tools of `GET /tools`, which has no rollout request.

        Override it if `get_tools` depends on more of a request than the sample request contains.
        """
        from rollout_server.sdk.request_view import sample_request

        return self.get_tools(sample_request())

    @abstractmethod
    async def run(self, ctx: RolloutContext) -> RolloutResult:
        """Run one rollout and return `ctx.complete(...)` or `ctx.error(...)`."""


def debug_file(directory: str, rollout_id: str) -> Path:
    """Return `DIRECTORY/ROLLOUT_ID.jsonl`.

    An id cannot lead out of the directory: characters that are unsafe in a file name are escaped, and a long id ends with its hash.
    """
    name = quote(rollout_id, safe=" ", errors="surrogatepass")
    if name.startswith("."):
        name = f"%2E{name[1:]}"
    if len(name) > _NAME_LENGTH:
        name = f"{name[:100]}-{hashlib.sha256(rollout_id.encode('utf-8', 'surrogatepass')).hexdigest()}"
    return Path(directory) / f"{name}.jsonl"


def write_line(path: Path, line: str) -> None:
    """Append a line and close the file, so that the line survives a crash. Errors are logged and not raised."""
    if len(line) > _LINE_LENGTH:
        _log.warning("event of %d characters not written to %s: too long", len(line), path.name)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{line}\n")
    except OSError as error:
        _log.warning("%s cannot be written: %s", path.name, error)
