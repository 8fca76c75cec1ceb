"""Results at a turn boundary: the place where a completion ends and the next prompt continues."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout_server.edge.tokens.rendering_form import Arguments
from rollout_server.tokencheck.model_output import Writing


class Cause(Enum):
    """Why the full rendering of a later prompt does not begin with the tokens that the rollout holds."""

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
    """The result of a trainer that computes mask lengths from the growth of its rendering."""

    RIGHT = "right"
    TOKENS = "right length, wrong tokens"
    LENGTH = "wrong length"
    NEGATIVE = "negative length"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token at which reference and rendering differ, with the surrounding text of both."""

    cause: Cause
    index: int
    reference: str
    rendered: str


@dataclass(frozen=True, slots=True)
class TurnBoundary:
    """One boundary.

    Args:
        kind: the kind of conversation.
        message_index: index of the message that ends there.
        added: number of tokens in the reference, including a stop token that the completion lacked.
        counted: number of tokens counted by a trainer that renders the whole conversation in each turn.
        divergence: None if the rendering equals the reference.
        short_form: True if the environment is the same after a short history; None if the short history gives no result.
    """

    kind: str
    message_index: int
    added: int
    counted: int
    divergence: Divergence | None
    short_form: bool | None = None

    @property
    def mask(self) -> Mask:
        """The result of counting by lengths."""
        if self.counted < 0:
            return Mask.NEGATIVE
        if self.counted != self.added:
            return Mask.LENGTH
        return Mask.RIGHT if self.divergence is None else Mask.TOKENS


@dataclass(frozen=True, slots=True)
class SimulatedConversation:
    """A simulated conversation.

    Args:
        kind: the kind of conversation.
        form: the form of tool call arguments in the trainer's rendering.
        writing: how the completions were written.
        boundaries: in order, as far as the simulation got.
        refused: the template's error if it refuses the conversation or its rest; otherwise empty.
        uncut: indices of completions after which no turn boundary was found.
        left_out: the kinds of content that the template does not render.
        unprompted: for a completion that is not rendered after its generation prompt: (end of the prompt, text in its place).
    """

    kind: str
    form: Arguments
    writing: Writing
    boundaries: tuple[TurnBoundary, ...] = ()
    refused: str = ""
    uncut: tuple[int, ...] = ()
    left_out: frozenset[str] = field(default_factory=frozenset)
    unprompted: tuple[str, str] | None = None
