"""The values of one turn on the trainer's side: its HTTP dialect, the request, the checked prompt, the completion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rollout_server.testing.checks.renderer import Message, Tools
from rollout_server.testing.checks.token_mode_check import TokenPrompt


@dataclass(frozen=True, slots=True)
class Keyed:
    """What a call of the asynchronous dialect brings along: its ``Idempotency-Key``, and what is wrong with its body."""

    turn_key: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One call for a completion, as received.

    `mask` is the `response_mask` of the body, None where there was none. A dialect without masks says `masked=False`:
    then only the messages are judged. The asynchronous dialect is `keyed` as well, and its history verbatim. `tools` are
    those that the prompt is rendered with. `verdict_key` is the name under which the conversation is judged, where that is
    not the rollout's id: a rollout may hold several conversations. In token mode `token_prompt` are the ids to answer from, and
    `max_tokens` the most that the answer may have. `again`: the last turn is asked for anew, to be answered anew.
    """

    rollout_id: str
    messages: Sequence[Message]
    mask: object = None
    tools: Tools | None = None
    masked: bool = True
    keyed: Keyed | None = None
    verdict_key: str = ""
    token_prompt: TokenPrompt | None = None
    max_tokens: int | None = None
    again: bool = False

    @property
    def key(self) -> str:
        """The name of the verdict that the call counts for."""
        return self.verdict_key or self.rollout_id


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A call that was found right: the ids that the model sees, and how many of them are new since the last answer.

    `turn` counts from 1. `begins` says that it is the first of a rollout; its `new_tokens` is 0. `repeats` says that the
    turn was answered already: whatever is generated now is a sibling of that answer, and replaces it.
    """

    call: CompletionCall
    ids: list[int]
    new_tokens: int
    turn: int
    begins: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedCompletion:
    """What is sent back, before anything is left out of it: one negative logprob, exact as float32, for each token id.

    `raw_text` is what the ids decode to.
    """

    message: Message
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int]
    raw_text: str = ""


class TrainerDialect(StrEnum):
    """What a trainer expects of the calls for completions.

    They look alike but for `response_mask`. A trainer that expects a mask refuses a call without one, so one that speaks
    both has to know which is meant: the first call of a rollout says so, by having the key (null there) or not.
    """

    MASKED = "masked"
    """The synchronous dialect. Every call is judged by its mask, and outcomes are not received."""
    PLAIN = "plain"
    """The asynchronous dialect. No call has a mask, every one has an ``Idempotency-Key``, and outcomes are received."""
    EITHER = "either"
    """Each rollout in the dialect that its first call is in."""

    def has_mask(self, body: Mapping[str, Any], known: bool | None) -> bool:
        """Whether a call is one with a mask; `known` says it of the calls before, None where there were none."""
        if self is not TrainerDialect.EITHER:
            return self is TrainerDialect.MASKED
        return known if known is not None else "response_mask" in body
