"""The tree of the histories that an agent has sent, and the walk of a call's history down that tree.

A node is a message after the messages of its parents. A completion of the model has a node of its own kind, which every spelling
of it reaches. So the last such node on a history's way is the completion that it continues, and finding it takes one step for each
message that was sent, however many conversations there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.capture.history import ASSISTANT, CanonicalMessage, join_messages

_MOST_PIECES = 8


class Node:
    """A message of a history.

    Attributes:
        message: the message, as it was first sent or sampled; None at a root.
        parent: the message before it; None at a root.
        depth: the number of messages up to here.
        children: the messages that followed it, the newest last.
        turns: the turns whose completion it is.
        by_calls: the completions that followed it, by the key of their tool calls.
        attempts: the calls that ended with this message, by digest of what else they said.
    """

    __slots__ = ("attempts", "by_calls", "children", "depth", "message", "parent", "turns")

    def __init__(self, message: CanonicalMessage | None = None, parent: Node | None = None) -> None:
        self.message = message
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Node] = {}
        self.turns: list[CapturedTurn] = []
        self.by_calls: dict[bytes, Node] = {}
        self.attempts: dict[bytes, list[Pending]] = {}

    def child(self, key: bytes, message: CanonicalMessage) -> Node:
        """Return the child with this key; a new one if there is none."""
        child = self.children.get(key)
        if child is None:
            child = self.children[key] = Node(message, self)
        return child

    def extend(self, messages: Sequence[CanonicalMessage]) -> Node:
        """Return the node of messages that follow this one."""
        node = self
        for message in messages:
            node = node.child(message.key, message)
        return node

    @property
    def root(self) -> Node:
        """The root above it."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def newest_child(self) -> Node | None:
        """The child that was added last."""
        return next(reversed(self.children.values()), None)


class Lineage:
    """Conversations that belong together: they offer the same tools, and share the system prompt or the first message.

    Attributes:
        main: it began with the main conversation.
        latest: its conversation that got the last completion.
    """

    __slots__ = ("latest", "main")

    def __init__(self, main: bool) -> None:
        self.main = main
        self.latest: CapturedConversation | None = None


class CapturedConversation:
    """A conversation of the rollout.

    Attributes:
        id: unique in the tree, from 0.
        lineage: None if it is beside the task.
        tools: the names of the tools that its calls offer.
        tip: its last turn; None before the first one.
        turns: the number of its turns.
        pending: the call that it waits for.
        closed: a call failed: it cannot be continued.
    """

    __slots__ = ("closed", "id", "lineage", "pending", "tip", "tools", "turns")

    def __init__(self, number: int, lineage: Lineage | None, tools: tuple[str, ...]) -> None:
        self.id = number
        self.lineage = lineage
        self.tools = tools
        self.tip: CapturedTurn | None = None
        self.turns = 0
        self.pending: Pending | None = None
        self.closed = False

    @property
    def auxiliary(self) -> bool:
        """Whether it is beside the task."""
        return self.lineage is None

    @property
    def is_free(self) -> bool:
        """Whether its last turn can be continued."""
        return self.pending is None and not self.closed


class CapturedTurn:
    """A completion of the model.

    Attributes:
        id: of the completion.
        number: of the turn in the rollout.
        order: the position of the completion among those of the rollout.
        pending: the call that it was sampled for.
        conversation: the conversation it belongs to.
        parent: the turn before it.
        node: its node in the tree.
        message: the message as sampled.
        first_call: the number of its first tool call within its history.
        continued: the number of calls of the task that continued it.
        delivered: it reached the agent to its last byte.
        completed_at: seconds, on the caller's clock.
    """

    def __init__(
        self,
        pending: Pending,
        completion_id: str,
        number: int,
        message: CanonicalMessage,
        *,
        order: int,
        completed_at: float,
    ) -> None:
        self.id = completion_id
        self.number = number
        self.order = order
        self.pending = pending
        self.conversation = pending.conversation
        self.parent = pending.plan.parent
        self.node = pending.node.child(message.completion_key, message)
        if message.calls_key:
            pending.node.by_calls[message.calls_key] = self.node
        self.message = message
        self.first_call = pending.plan.calls
        self.continued = 0
        self.delivered = False
        self.completed_at = completed_at

    def field(self, name: str) -> CanonicalMessage | None:
        """Return a message with only "content", "reasoning_content" or "tool_calls[INDEX]" of the completion; None: it has none."""
        whole = replace(self.message, completion_ids=frozenset([self.id]))
        if name == "content":
            return replace(whole, reasoning="", calls=())
        if name == "reasoning_content":
            return replace(whole, parts=(), calls=()) if whole.reasoning else None
        named = {f"tool_calls[{index}]": call for index, call in enumerate(whole.calls)}.get(name)
        return None if named is None else replace(whole, parts=(), reasoning="", calls=(named,))

    def lineage(self) -> Iterator[CapturedTurn]:
        """Yield the turn and those before it, the latest first."""
        turn: CapturedTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Where the tree grows if a decision is carried out.

    Args:
        node: the last message that the tree has.
        messages: the messages after it.
        parent: the turn that the call continues, if any.
        calls: the number of tool calls in the whole history.
        digest: of what the call says beside its history.
        repeat_key: the client's idempotency key.
        tools_key: digest of the tools.
        tools: their names.
        lineage_keys: what its conversation shares with others of its lineage: all but the messages after the system prompt, and all
            but the system prompt and the messages after the first.
        has_instructions: its system prompt came apart from the messages.
        restored: the answer that it continues came back in another form than it was sampled in.
        dropped: the number of system texts and tools that were left out.
    """

    node: Node
    messages: tuple[CanonicalMessage, ...]
    parent: CapturedTurn | None
    calls: int
    digest: bytes
    repeat_key: str
    tools_key: bytes
    tools: tuple[str, ...]
    lineage_keys: tuple[bytes, bytes]
    has_instructions: bool
    restored: bool
    dropped: int


class Pending:
    """A call whose completion is being sampled.

    Attributes:
        conversation: its conversation.
        plan: how it was decided.
        node: the last message of its history.
        listeners: the number of callers that wait for it.
        repeats: the number of calls that got its completion besides the first.
        turn: its completion; None while it is sampled.
    """

    def __init__(self, conversation: CapturedConversation, plan: CallPlan) -> None:
        self.conversation = conversation
        self.plan = plan
        self.node = plan.node.extend(plan.messages)
        self.listeners = 1
        self.repeats = 0
        self.turn: CapturedTurn | None = None


@dataclass(slots=True)
class Walk:
    """How far the tree knows a history.

    Args:
        node: the last message that the tree has.
        index: the number of sent messages up to it.
        end_index: the number of sent messages up to the last completion on the way.
        ends: the turns whose completion that is, with the number of ids of completions on the way that the client repeated.
        sent_end: the last completion, as it was sent.
    """

    node: Node
    index: int = 0
    end_index: int = 0
    ends: dict[CapturedTurn, int] = field(default_factory=dict)
    sent_end: CanonicalMessage | None = None


def walk(root: Node, sent: Sequence[CanonicalMessage], as_template: bool) -> Walk:
    """Follow a history down the tree, as far as the tree has it.

    Args:
        root: the root of the call's tools.
        sent: the messages; parts of one answer may be several assistant messages.
        as_template: a completion with reasoning is found only if the reasoning was sent back, and no user message follows; one with
            tool calls, only with its text.
    """
    stops = _ends_of_runs(sent)
    last_user = max((index for index, message in enumerate(sent) if message.role == "user"), default=-1)
    found, scores = Walk(root), dict[CapturedTurn, int]()
    while found.index < len(sent):
        start, stop = found.index, stops[found.index]
        child = None
        for joined, pieces in _spellings(sent, start, stop):
            known = found.node.children.get(joined.completion_key)
            if known is None and not (joined.spoken or as_template):
                known = found.node.by_calls.get(joined.calls_key)
            strict = as_template, start < last_user
            ends = {} if known is None else _matching(known.turns, joined, scores, strict)
            if known is not None and ends:
                child, stop = known, start + pieces
                scores |= ends
                found.end_index, found.ends, found.sent_end = stop, ends, joined
                break
        child = child or found.node.children.get(join_messages(sent[start:stop]).key)
        if child is None:
            break
        found.node, found.index = child, stop
    return found


def joined_runs(sent: Sequence[CanonicalMessage]) -> tuple[CanonicalMessage, ...]:
    """Return messages with assistant messages in a row joined."""
    stops, joined, start = _ends_of_runs(sent), [], 0
    while start < len(sent):
        joined.append(join_messages(sent[start : stops[start]]))
        start = stops[start]
    return tuple(joined)


def _ends_of_runs(sent: Sequence[CanonicalMessage]) -> list[int]:
    """Return for each message the index after the assistant messages in a row that it belongs to, or after itself."""
    stops = list(range(1, len(sent) + 1))
    for index in range(len(sent) - 2, -1, -1):
        if sent[index].role == sent[index + 1].role == ASSISTANT:
            stops[index] = stops[index + 1]
    return stops


def _spellings(sent: Sequence[CanonicalMessage], start: int, stop: int) -> Iterator[tuple[CanonicalMessage, int]]:
    """Yield the completions that assistant messages in a row can begin with, and of how many messages each consists.

    Nearly always all of them are one completion. Several completions in a row, without a message between them, are found if each
    came as at most 8 messages.
    """
    if sent[start].role != ASSISTANT:
        return
    whole = stop - start
    if whole <= _MOST_PIECES or start == 0 or sent[start - 1].role != ASSISTANT:
        yield join_messages(sent[start:stop]), whole
    for pieces in range(min(whole - 1, _MOST_PIECES), 0, -1):
        joined = join_messages(sent[start : start + pieces])
        if joined.spoken or joined.calls:  # an empty piece is no completion: clients split answers so
            yield joined, pieces


def _matching(
    turns: Sequence[CapturedTurn],
    sent: CanonicalMessage,
    scores: dict[CapturedTurn, int],
    strict: tuple[bool, bool],
) -> dict[CapturedTurn, int]:
    """Return the turns that a sent answer may be, each with the number of ids that were repeated up to it."""
    return {
        turn: (scores[turn.parent] if turn.parent else 0) + _repeats_id(turn, sent)
        for turn in turns
        if (turn.parent is None or turn.parent in scores) and _has_reasoning_of(turn.message, sent, *strict)
    }


def _has_reasoning_of(sampled: CanonicalMessage, sent: CanonicalMessage, as_template: bool, before_user: bool) -> bool:
    """Return whether the reasoning that was sent back, if any, is the one that was sampled."""
    if as_template and sampled.thought:
        return sent.thought == sampled.thought and not before_user
    return sent.thought in ("", sampled.thought)


def _repeats_id(turn: CapturedTurn, sent: CanonicalMessage) -> bool:
    if turn.id in sent.completion_ids:
        return True
    return any(mine.id and mine.id == its.id for mine, its in zip(turn.message.calls, sent.calls, strict=True))
