"""Each known problem of chat templates in isolation.

A synthetic template has the problem, and its twin determines the tokens of conversations exactly. `tests/hostile` generates
templates with several problems at once, and more of them.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.hostile.templates import conversations
from tests.hostile.templates.conversations import Conversation, Turn
from tests.hostile.templates.grammar import OPTIONS, Traits, build
from tests.hostile.templates.run import Case, Verdict, play

SYSTEM = {"role": "system", "content": "Be brief. é"}
USER = {"role": "user", "content": "What is 5 + 3?"}
AGAIN = {"role": "user", "content": "<|im_end|> is not the end 😀"}
ANSWER = {"role": "assistant", "content": "Eight.", "reasoning_content": "Five and three."}
RESULT = {"role": "tool", "content": "8<|im_end|>\n", "tool_call_id": "call00001"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": '{"value": 8.0, "x":[1,2]}'}}
    ],
}
RANDOM = 1
"""Random conversations per template, besides the written one."""


def written(ending: str) -> Conversation:
    """Completions and calls alternately, each with the same ending."""
    turns = (Turn(CALLING, (RESULT,), ending), Turn(ANSWER, (AGAIN,), ending))
    return Conversation((SYSTEM, USER), turns * 3, tools=True)


def trapped(name: str, word: str) -> Traits:
    """Plain traits except for one. For a switch, something to switch is added."""
    return Traits(**{name: word}, **({"switch": "any_user"} if name == "switch_effect" else {}))


TRAPS = [(name, word) for name, words in OPTIONS.items() for word in words[1:]]


@pytest.mark.parametrize(("name", "word"), [("framing", "chatml"), *TRAPS])
def test_no_token_is_wrong(name: str, word: str) -> None:
    template, rng = build(trapped(name, word)), random.Random(f"{name}:{word}")
    talks = [written("stop"), written("cut"), *(conversations.generate(rng) for _ in range(RANDOM))]
    played = play([Case(template, conversation) for conversation in talks])
    assert [(each.path, each.turn, each.verdict, each.expected, each.got) for each in played.differences] == []
    verdicts = Counter(verdict for boundary in played.boundaries for _, verdict in boundary.verdicts)
    assert verdicts[Verdict.RIGHT] > 0, verdicts
