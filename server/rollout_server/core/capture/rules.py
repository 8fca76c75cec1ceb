"""The options of a capture: what an agent's author decides about the model calls of an agent that owns its loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

History = Literal["restored", "as_template"]
SamplingSource = Literal["rollout", "client"]
AbandonedAnswers = Literal["mask", "train"]
HostedTools = Literal["drop", "refuse"]

SEARCHED: Final = 500
"""Characters at the start of a text in which a pattern is searched: agents choose the texts, so the time of a search is bounded."""

_LONGEST_MODEL = 256


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern of `CaptureOptions` is found in the first 500 characters of a text."""
    return re.search(pattern, text[:SEARCHED]) is not None


def matches_name(pattern: str, name: str) -> bool:
    """Return whether a pattern of `CaptureOptions` matches a whole name."""
    return re.fullmatch(pattern, name[:SEARCHED]) is not None


def _check_pattern(where: str, pattern: str) -> None:
    if not isinstance(pattern, str):
        raise ValueError(f"{where}: a text is needed, this is {type(pattern).__name__}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{where}: {pattern[:100]!r} is not a regular expression: {error}") from None


@dataclass(frozen=True, slots=True)
class AuxiliaryRule:
    """Which calls are beside the task, such as a title for a user interface: those for which all that the rule names holds.

    Args:
        system: a regular expression, searched in the first 500 characters of each text of the system prompt; empty: any.
        model: a regular expression for the whole name by which the client calls the model; empty: any.
        without_tools: only calls that offer no tools.

    Raises:
        ValueError: for a rule that names neither `system` nor `model`, and for an invalid regular expression.
    """

    system: str = ""
    model: str = ""
    without_tools: bool = False

    def __post_init__(self) -> None:
        if not self.system and not self.model:
            raise ValueError("AuxiliaryRule: system or model must be given, or every call would match")
        for name in ("system", "model"):
            _check_pattern(f"AuxiliaryRule.{name}", getattr(self, name))


KNOWN_AUXILIARY: Final = (
    AuxiliaryRule(system=r"^You are a title generator\b", without_tools=True),
    AuxiliaryRule(system=r"^(?:Analyze|Determine) if this message indicates a new conversation topic\b"),
    AuxiliaryRule(system=r"^Summarize this coding conversation in under \d+ characters\b", without_tools=True),
    AuxiliaryRule(
        system=r"^(?:Generate|You are coming up with) a (?:concise|succinct|short)\b[^\n.]{0,40}\btitle\b",
        without_tools=True,
    ),
)
"""The title calls of coding agents' user interfaces."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """What an agent's author decides about its captured model calls.

    Args:
        history: "restored": an answer that the agent sends back without its reasoning, or without the text beside its tool calls,
            continues its conversation, and the model sees it as it was sampled. "as_template": the conversation is cut wherever an
            ordinary server would show the model another prompt (`CallTree` says where).
        sampling: whose sampling parameters hold where both give one: those of the rollout, or the client's.
        model: the name of the model that clients are shown. At most 256 characters.
        dropped_instructions: regular expressions, searched in the first 500 characters of each text of the system prompt; a text
            that matches is left out. For texts that clients add for their provider, which change from call to call.
        auxiliary: which calls are beside the task. They do not train.
        auxiliary_reply: the text that calls beside the task get without being sampled, so that they cost nothing and need no
            conversation of the trainer; empty: the model answers them.
        guess_auxiliary: a conversation of a single call without tools is also beside the task if others have tools.
        abandoned: "mask": an answer that led nowhere, while another answer to the same messages was continued, does not train.
        hosted_tools: tools that the API's provider would run are left out, or the call is refused.

    Raises:
        ValueError: for an unknown word and an invalid regular expression.
    """

    history: History = "restored"
    sampling: SamplingSource = "rollout"
    model: str = "rollout"
    dropped_instructions: tuple[str, ...] = (r"^x-anthropic-billing-header:",)
    auxiliary: tuple[AuxiliaryRule, ...] = KNOWN_AUXILIARY
    auxiliary_reply: str = ""
    guess_auxiliary: bool = False
    abandoned: AbandonedAnswers = "mask"
    hosted_tools: HostedTools = "drop"

    def __post_init__(self) -> None:
        words = {
            "history": History,
            "sampling": SamplingSource,
            "abandoned": AbandonedAnswers,
            "hosted_tools": HostedTools,
        }
        for name, possible in words.items():
            if (value := getattr(self, name)) not in get_args(possible):
                choices = " or ".join(f'"{word}"' for word in get_args(possible))
                raise ValueError(f"CaptureOptions.{name}: {value!r} is not possible; choose {choices}")
        if not self.model.strip() or len(self.model) > _LONGEST_MODEL:
            raise ValueError(
                f"CaptureOptions.model: needs 1 to {_LONGEST_MODEL} characters, this is {self.model[:50]!r}"
            )
        if not isinstance(self.auxiliary_reply, str):
            found = type(self.auxiliary_reply).__name__
            raise ValueError(f"CaptureOptions.auxiliary_reply: a text is needed, this is {found}")
        self._check_patterns()

    def _check_patterns(self) -> None:
        for name in ("dropped_instructions", "auxiliary"):
            given = getattr(self, name)
            if not isinstance(given, tuple):
                raise ValueError(f"CaptureOptions.{name}: a tuple is needed, this is {type(given).__name__}")
        for index, rule in enumerate(self.auxiliary):
            if not isinstance(rule, AuxiliaryRule):
                found = type(rule).__name__
                raise ValueError(f"CaptureOptions.auxiliary[{index}]: an AuxiliaryRule is needed, this is {found}")
        for index, pattern in enumerate(self.dropped_instructions):
            _check_pattern(f"CaptureOptions.dropped_instructions[{index}]", pattern)
            if not pattern:
                raise ValueError(f"CaptureOptions.dropped_instructions[{index}] is empty, which matches every text")
