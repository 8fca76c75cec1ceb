"""What was found where a completion ends and the next prompt begins."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.tokencheck.model_output import Writing


class Cause(Enum):
    """Why a conversation that is rendered anew does not begin with the tokens that were there."""

    RETOKENISED = "retokenised"
    THINKING = "thinking dropped"
    SPACE = "white space changed"
    ARGUMENTS = "arguments spelled anew"
    TWICE = "arguments encoded twice"
    SEPARATOR = "stop or separator replaced"
    PROMPT = "generation prompt not kept"
    TOOLS = "tools moved"
    HISTORY = "history rewritten"


class Mask(Enum):
    """What a trainer that counts by the growth of its rendering makes of a boundary."""

    RIGHT = "right"
    TOKENS = "right length, wrong tokens"
    LENGTH = "wrong length"
    NEGATIVE = "negative length"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where reference and rendering diverge: the first token that differs, and the text around it on both sides."""

    cause: Cause
    index: int
    reference: str
    rendered: str


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """One boundary.

    Args:
        kind: of the conversation.
        message_index: the index of the message that ends there.
        added: how many tokens the reference has there, a stop that the completion lacked included.
        counted: how many a trainer counts that renders everything anew.
        divergence: None where the rendering equals the reference.
        short_form: rendering what follows the answer behind a short history gives the same; None where it gives nothing.
    """

    kind: str
    message_index: int
    added: int
    counted: int
    divergence: Divergence | None
    short_form: bool | None = None

    @property
    def mask(self) -> Mask:
        """What counting by lengths comes to."""
        if self.counted < 0:
            return Mask.NEGATIVE
        if self.counted != self.added:
            return Mask.LENGTH
        return Mask.RIGHT if self.divergence is None else Mask.TOKENS


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """A conversation that was simulated.

    Args:
        kind: of the conversation.
        form: in which a trainer's rendering had the arguments of calls.
        writing: how the answers were written.
        boundaries: in order, as far as it could be simulated.
        refused: the template's error, where it refuses the conversation or the rest of it.
        uncut: indices of answers behind which no place was found at which the environment begins.
        left_out: what the template does not render, in words.
        unprompted: an answer that is not rendered with the generation prompt before it: the prompt's end, and what stands there.
    """

    kind: str
    form: Arguments
    writing: Writing
    boundaries: tuple[TurnBoundary, ...] = ()
    refused: str = ""
    uncut: tuple[int, ...] = ()
    left_out: frozenset[str] = field(default_factory=frozenset)
    unprompted: tuple[str, str] | None = None
