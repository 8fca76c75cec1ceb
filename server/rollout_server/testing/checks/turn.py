"""The values of one turn on the trainer's side: the request, the checked prompt, the completion."""

from collections.abc import Sequence
from dataclasses import dataclass

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
