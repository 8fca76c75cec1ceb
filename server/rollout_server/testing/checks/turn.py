"""The values of one turn in the trainer: the request, the checked prompt and the completion."""

from collections.abc import Sequence
from dataclasses import dataclass

from rollout_server.testing.checks.renderer import Message, Tools
from rollout_server.testing.checks.token_mode_check import TokenPrompt


@dataclass(frozen=True, slots=True)
class Keyed:
    """Data of a request through the asynchronous HTTP API: its ``Idempotency-Key``, and what is wrong with its body."""

    turn_key: str
    fault: str = ""


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """One completion request as received.

    Args:
        mask: the `response_mask` of the body; None if there was none.
        tools: the tools to render the prompt with.
        masked: False for a protocol without masks; then only the messages are verified.
        keyed: set for the asynchronous HTTP API, whose history must be verbatim.
        verdict_key: key of the conversation's verdict if it is not the rollout id: a rollout can have several conversations.
        token_prompt: in token mode the ids to generate from.
        max_tokens: in token mode the maximum length of the completion.
        again: the request repeats the last turn, which is generated again.
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
        """The key of the verdict that this request belongs to."""
        return self.verdict_key or self.rollout_id


@dataclass(frozen=True, slots=True)
class CheckedPrompt:
    """A request that passed all checks.

    Args:
        ids: the token ids of the prompt.
        new_tokens: number of prompt tokens after the last completion; 0 in the first turn.
        turn: the turn, from 1.
        begins: the request is the first of a rollout.
        repeats: the turn was already answered; the new completion is a sibling of the earlier one and replaces it.
    """

    call: CompletionCall
    ids: list[int]
    new_tokens: int
    turn: int
    begins: bool = False
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class ScriptedCompletion:
    """A complete response, before any field is omitted.

    Args:
        logprobs: one negative float per token id, exactly representable as float32.
        raw_text: the text that the ids decode to.
    """

    message: Message
    finish_reason: str
    token_ids: list[int]
    logprobs: list[float]
    prompt_ids: list[int]
    raw_text: str = ""
