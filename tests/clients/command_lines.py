"""The command-line agents: what the model says in their sessions, and the texts that are this repository's own."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.service import TurnModel

CLIS = Path(os.environ.get("ROLLOUT_CLIS", "build/clis")).resolve()
TASK, MORE = "Count the doors and the windows.", "Is that all?"
DOORS, WINDOWS = "Find the doors.", "Find the windows."
ANSWER = "There are 3 doors and 4 windows."
SUMMARY = "<summary>\nDoors and windows were counted: 3 and 4.\n</summary>"
_TOOLS = "You may call these functions"


def calling(thought: str, *calls: tuple[str, Mapping[str, object]]) -> str:
    """A completion with calls whose arguments have a spacing that no library writes."""
    texts = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given, separators=(" , ", ":"))}}}\n</tool_call>'
        for name, given in calls
    ]
    return "\n".join([f"<think>\n{thought}\n</think>\n\nI do that.", *texts])


@dataclass
class SessionModel(TurnModel):
    """Say the texts of the script whose key comes first in the prompt, by the number of completions; `untooled` without tools."""

    scripts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    untooled: str = ""

    def next_text(self, prompt: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(prompt))
        if self.untooled and _TOOLS not in text:
            return self.untooled
        places = {text.find(key): key for key in self.scripts if key in text}
        self.says = self.scripts[places[min(places)]]
        return super().next_text(prompt)


def _found(tool: str, argument: str) -> dict[str, list[str]]:
    return {
        DOORS: [calling("I look at the doors.", (tool, {argument: "echo 3"})), "3 doors."],
        WINDOWS: [calling("I look at the windows.", (tool, {argument: "echo 4"})), "4 windows."],
        MORE: ["That is all."],
    }


def _sub(tool: str, prompt: str, **more: object) -> tuple[str, Mapping[str, object]]:
    return tool, {"prompt": prompt, "description": "Look", **more}


def model(name: str) -> SessionModel:
    """The model of a session of one of the agents."""
    if name == "codex":
        two = calling("I look at both.", ("exec_command", {"cmd": "echo 3"}), ("exec_command", {"cmd": "echo 4"}))
        return SessionModel((), odd=True, scripts={TASK: [two, ANSWER, "That is all."]})
    if name == "opencode":
        first = calling("I look.", ("bash", {"command": "echo hi"}))
        sub = calling("One looks at the doors.", _sub("task", DOORS, subagent_type="general"))
        main = [first, sub, ANSWER, "That is all."]
        return SessionModel((), odd=True, scripts={TASK: main, **_found("bash", "command")}, untooled="Doors")
    first = calling("I look.", ("Bash", {"command": "echo hi"}))
    subs = calling("Two look.", *(_sub("Agent", each, run_in_background=False) for each in (DOORS, WINDOWS)))
    return SessionModel(
        (), odd=True, scripts={TASK: [first, subs, ANSWER, SUMMARY], **_found("Bash", "command")}, untooled=SUMMARY
    )
