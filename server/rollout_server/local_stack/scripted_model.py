"""The model of a test: it says what the test's author writes down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from rollout_server.testing.script import Line, Script, ScriptedReply, tool_call


class ScriptedModel:
    """What the model says, answer by answer: `model.calls("add", a=5, b=3).says("It is 8.")`.

    Every rollout that is played with it hears all of it from the start. A rollout that asks for more answers than there are
    fails, and its failure says so.
    """

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._calls = 0

    @property
    def script(self) -> Script:
        """As the strict trainer takes it. Raises ValueError for a model without answers."""
        return Script(tuple(self._lines))

    def says(self, content: str, *, reasoning: str | None = None) -> Self:
        """Answers with a text, which ends the default loop."""
        return self.answers(ScriptedReply(content=content, reasoning=reasoning))

    def calls(self, tool: str, /, **arguments: object) -> Self:
        """Answers with one call."""
        return self.calls_together((tool, arguments))

    def calls_together(self, *calls: tuple[str, Mapping[str, object] | str]) -> Self:
        """Answers with several calls at once, each a tool's name and its arguments; a text is sent as it is, broken or not."""
        return self.answers(
            ScriptedReply(tool_calls=tuple(tool_call(self._id(), name, given) for name, given in calls))
        )

    def answers(self, line: Line) -> Self:
        """Answers with anything that `rollout_server.testing.script` knows: an answer that is cut, a fault, a lie."""
        self._lines.append(line)
        return self

    def _id(self) -> str:
        self._calls += 1
        return f"call_{self._calls}"
