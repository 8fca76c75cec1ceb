"""Text that real templates write around messages, and tokens that end completions there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tests.hostile.templates.vocabulary import EOS, Words


@dataclass(frozen=True, slots=True)
class Framing:
    """Text around messages.

    Args:
        heads: before the content, by role.
        tails: after the content, by role; `tail` for the others.
        before: white space between the content and the stop of completions.
        stop: ends completions; `calls_stop` ends those with calls. Empty: no token ends them.
        after: after the stop.
        next_begins: completions are ended by the token with which the next message begins.
        part: opens and closes a part of a completion, as "channels" do.
    """

    heads: Mapping[str, str]
    tail: str = ""
    tails: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    stop: str = ""
    calls_stop: str = ""
    after: str = ""
    next_begins: bool = False
    part: tuple[str, str] = ("", "")
    words: Words = field(default_factory=lambda: Words(()))

    def ending(self, role: str) -> str:
        """The text after the content of a message that is not a completion."""
        return self.tails.get(role, self.tail)


def _named(pattern: str, **other: str) -> dict[str, str]:
    roles = ("system", "user", "assistant", "tool")
    return {role: pattern.format(other.get(role, role)) for role in roles}


def _lines(heads: Mapping[str, str], stop: str, words: Words) -> Framing:
    """A framing in which all messages end with the same token and a line break."""
    return Framing(heads, f"{stop}\n", stop=stop, calls_stop=stop, after="\n", words=words)


_ROLES: Final = tuple(f"<|{role}|>" for role in ("system", "user", "assistant", "observation", "tool"))

FRAMINGS: Final[Mapping[str, Framing]] = {
    "chatml": _lines(_named("<|im_start|>{}\n"), "<|im_end|>", Words(("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")),
    "headers": Framing(
        heads=_named("<|start_header|>{}<|end_header|>\n\n", tool="ipython"),
        tail="<|eot|>",
        stop="<|eot|>",
        calls_stop="<|eom|>",
        words=Words(("<|start_header|>", "<|end_header|>", "<|eot|>", "<|eom|>")),
    ),
    "stripping": _lines(_named("<|{}|>\n"), "<|end|>", Words((*_ROLES, "<|end|>"), frozenset({*_ROLES, "<|end|>"}))),
    "channels": Framing(
        heads={**_named("<|start|>{}<|message|>"), "assistant": "<|start|>assistant"},
        tail="<|end|>",
        stop="<|end|>",
        calls_stop="<|call|>",
        part=("<|channel|>{}<|message|>", "<|end|><|start|>assistant"),
        words=Words(("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"), eos="<|return|>"),
    ),
    "next_begins": Framing(
        heads=_named("<|{}|>\n", tool="observation"),
        stop="<|user|>",
        calls_stop="<|observation|>",
        next_begins=True,
        words=Words(_ROLES),
    ),
    "lines": Framing(
        heads=_named("<|{}|>\n", tool="observation"),
        before="\n",
        stop="<|user|>",
        calls_stop="<|observation|>",
        next_begins=True,
        words=Words(_ROLES),
    ),
    "spaced": Framing(
        heads=_named("<|{}|>\n"),
        tail="\n\n<|end|>\n",
        before="\n\n",
        stop="<|end|>",
        calls_stop="<|end|>",
        after="\n",
        words=Words((*_ROLES, "<|end|>")),
    ),
    "inst": Framing(
        heads={"system": "<<SYS>>\n", "user": "[INST] ", "assistant": " ", "tool": "[RESULT] "},
        tails={"system": "\n<</SYS>>\n\n", "user": " [/INST]", "tool": " [/RESULT]"},
        stop="</s>",
        calls_stop="</s>",
        words=Words(("[INST]", "[/INST]", "[RESULT]", "[/RESULT]", "</s>"), eos="</s>"),
    ),
    "one_sided": Framing(
        heads={"system": "", "user": "<|User|>", "assistant": "<|Assistant|>", "tool": "<|Result|>"},
        tails={"system": "\n\n", "tool": "<|/Result|>"},
        stop="<|eos|>",
        calls_stop="<|eos|>",
        words=Words(("<|User|>", "<|Assistant|>", "<|Result|>", "<|/Result|>", "<|eos|>"), eos="<|eos|>"),
    ),
    "no_stop": Framing(
        heads={"system": "System: ", "user": "User: ", "assistant": "Assistant: ", "tool": "Result: "},
        tail="\n\n",
        after="\n\n",
    ),
    "only_eos": Framing(
        heads={"system": "System: ", "user": "User: ", "assistant": "Assistant: ", "tool": "Result: "},
        tail="\n",
        stop=EOS,
        calls_stop=EOS,
        after="\n",
    ),
}
