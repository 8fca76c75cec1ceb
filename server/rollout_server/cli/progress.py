"""Live output of one rollout: a line per event and, on a terminal, a status line below them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollout_server.cli.demo_output import agent_action, plural
from rollout_server.core.limits import Limits
from rollout_server.core.message import MalformedMessage, parse_object
from rollout_server.core.record import FIRST
from rollout_server.inspection.escape import EMPTY, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from rollout_client import Message, RolloutEvent

    from rollout_server.authoring.rollout_result import Result

_MAX_CHARACTERS = 20_000
_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold green", "tool": "yellow"}
_AUTHORS = (("M", "model"), ("A", "author"), ("P", "prompt"), ("E", "environment"), ("C", "closing"))
_ACTION_STYLES = {
    "fork": "blue",
    "given up": "magenta",
    "masked": "red",
    "observed": "dim",
    "reward": "green",
    "model": "cyan",
    "calls": "cyan",
}
_SEGMENT_EVENTS = frozenset({"answered", "tool_returned", "appended", "drift_found"})
_END_TEXTS = {"stop": "completed", "failure": "failed", "cancellation": "cancelled"}
_AUTHOR_TEXTS = {"author": "model (masked by the agent)"}


class Progress:
    """Prints a rollout's events and keeps the counts for the status line."""

    def __init__(self, console: Console, limits: Limits) -> None:
        self._console = console
        self._limits = limits
        self._began = time.monotonic()
        self._turn = self._calls = self._tokens = 0
        self._segment = FIRST
        self._doing = "starting"

    @contextmanager
    def live(self, age: float = 0) -> Iterator[None]:
        """Show the status line on a terminal within the block. Its clock starts at `age`, in seconds."""
        self._began = time.monotonic() - age
        if not self._console.is_terminal:
            yield
            return
        from rich.live import Live

        with Live(get_renderable=self._state, console=self._console, transient=True, refresh_per_second=8):
            yield

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Print messages, such as those that a rollout begins with."""
        for message in messages:
            self._message(message)

    def show(self, event: RolloutEvent) -> None:
        """Print an event and update the status line."""
        self._turn = max(event.turn, self._turn)
        self._show_segment(event)
        match event.WhichOneof("event"):
            case "asked":
                self._doing = "waiting for the model"
            case "answered":
                self._show_completion(event)
            case "tool_started":
                self._doing = f"running {visible(event.tool_started.name)}"
            case "tool_returned":
                self._show_tool_result(event)
            case "appended":
                self.messages([parse_message(message) for message in event.appended.messages])
            case "drift_found":
                self._line(
                    "drift",
                    f"the reported prompt differs from the prediction at token {event.drift_found.index}",
                    "red",
                )
            case "note":
                self._line("note", f"{event.note.code}: {event.note.text}", "magenta")
            case "forked" | "given_up" | "masked" | "observed" | "rewarded" | "model_called" | "capture_settled":
                self._show_action(event)

    def _show_segment(self, event: RolloutEvent) -> None:
        """Print the segment if it differs from the previous event's, because segments can run at the same time."""
        belongs = event.WhichOneof("event") in _SEGMENT_EVENTS
        if belongs and event.segment_id and event.segment_id != self._segment:
            self._segment = event.segment_id
            self._line("", f"in segment {event.segment_id}:", "dim")

    def _show_action(self, event: RolloutEvent) -> None:
        """Print a fork, an abandoned completion, a mask, an observation or a call of a further model."""
        action, text = agent_action(event)
        self._line(action, text, _ACTION_STYLES[action])
        if event.HasField("forked"):
            self._segment = event.segment_id
            self.messages([parse_message(message) for message in event.forked.messages])

    def _show_completion(self, event: RolloutEvent) -> None:
        completion = event.answered
        self._tokens += completion.generated_tokens
        self._doing = "thinking"
        self._message(parse_message(completion.message))
        self._line("", f"{plural(completion.generated_tokens, 'token')}, {completion.elapsed_ms:.0f} ms", "dim")

    def _show_tool_result(self, event: RolloutEvent) -> None:
        returned = event.tool_returned
        self._calls += 1
        style = "red" if returned.failed else _STYLES["tool"]
        text = _text(parse_message(returned.message).get("content")) or EMPTY
        self._line("tool", f"{returned.name}, {returned.elapsed_ms:.0f} ms: {text}", style)

    def _message(self, message: Mapping[str, Any]) -> None:
        role = str(message.get("role", ""))
        style = _STYLES.get(role, "")
        texts = {key: _text(message.get(key)) for key in ("reasoning_content", "content")}
        calls = message.get("tool_calls") or ()
        if not calls and not any(texts.values()):
            texts["content"] = EMPTY
        for key, text in texts.items():
            if text:
                self._line(role, text, "dim italic" if key == "reasoning_content" else style)
        for call in calls:
            function = call.get("function", {}) if isinstance(call, Mapping) else {}
            arguments = function.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            self._line(role, f"calls {function.get('name')} {text}", style)

    def _line(self, label: str, text: str, style: str) -> None:
        """Print a text with the label in front of each of its lines, so that no text can imitate another label."""
        from rich.text import Text

        cut = (
            text
            if len(text) <= _MAX_CHARACTERS
            else f"{text[:_MAX_CHARACTERS]} … ({len(text) - _MAX_CHARACTERS} more characters)"
        )
        for part in cut.split("\n"):
            line = Text()
            line.append(f"{visible(label)[:9]:9} │ ", "dim")
            line.append(visible(part), style)
            self._console.print(line, soft_wrap=True)

    def _state(self) -> Text:
        from rich.text import Text

        limits = self._limits
        seconds = time.monotonic() - self._began
        parts = [
            f"turn {self._turn}{_of(limits.turns)}",
            plural(self._calls, "tool call"),
            f"tokens generated: {self._tokens}{_of(limits.generated_tokens)}",
            f"{seconds:.1f}{_of(limits.seconds)} s",
            self._doing,
        ]
        return Text(" · ".join(parts), "reverse")


def show_result(console: Console, result: Result, authors: Mapping[str, int] | None) -> None:
    """Print how a rollout ended and what it used.

    Args:
        authors: number of tokens by author, as `authors_of` returns them; None if the endpoint returned no token ids; empty
            to print nothing about them.
    """
    from rich.text import Text

    failed = f" ({sum(result.tool_errors.values())} failed)" if result.tool_calls else ""
    used = f"{plural(result.turns, 'turn')}, {plural(result.tool_calls, 'tool call')}{failed}"
    lines = [
        (
            f"{_END_TEXTS.get(result.end, result.end)}: {result.reason}{f': {result.message}' if result.message else ''}",
            "bold",
        )
    ]
    lines.append((f"{used}; {plural(result.tokens.generated, 'token')} generated, {result.ms.total:.0f} ms", ""))
    if authors is None and result.tokens.generated:
        lines.append(("tokens: authors unknown, because the endpoint returned no token ids", "dim"))
    elif authors:
        named = ", ".join(
            f"{authors[name]} {_AUTHOR_TEXTS.get(name, name)}" for _, name in _AUTHORS if authors.get(name)
        )
        lines.append((f"tokens: {named}", ""))
    reward = "the agent returned no reward" if result.reward is None else f"reward {result.reward:g}"
    scores = "".join(f", {name} {value:g}" for name, value in sorted(result.scores.items()))
    lines.append((reward + scores, "bold"))
    lines += [(f"warning: {text}", "yellow") for text in result.warnings]
    for text, style in lines:
        colour = style if result.finished or style != "bold" else "bold red"
        console.print(Text(visible(text), colour), soft_wrap=True)


def authors_of(letters: Mapping[str, int]) -> dict[str, int]:
    """Return token counts by author or mask reason, from token counts by the letters of a transcript."""
    return {name: letters[letter] for letter, name in _AUTHORS if letter in letters}


def parse_message(message: Message) -> Mapping[str, Any]:
    """Return a message of the contract as a mapping; one that is not JSON becomes the text of a message."""
    from rollout_client import messages

    try:
        return parse_object(message.json) if message.HasField("json") else messages([message])[0]
    except (MalformedMessage, ValueError):
        return {"role": "assistant", "content": message.json}


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    return "" if content is None else json.dumps(content, ensure_ascii=False)


def _of(bound: float | None) -> str:
    return "" if bound is None else f"/{bound:g}"
