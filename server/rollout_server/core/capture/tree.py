"""Decides which conversation of a rollout each model call of its agent continues.

The agent owns its loop and sends whole histories. `CallTree.decide` compares a history with those that the rollout has, and says
what is to be done; `begin` notes that it is done. The tree has no clock and no tasks: its owner passes times in seconds, decides
one call at a time, and samples.

* A call that repeats all of a conversation and adds messages continues it. The completions in it are put back as sampled.
* A call that leaves a conversation after an earlier completion, or while it waits for another one, is a branch.
* A call that continues nothing opens a conversation.
* A call that is equal to another one joins it, or gets its completion, where the agent cannot have that completion yet.
  Otherwise it is a sibling with a completion of its own.

No decision can make a sample incorrect. What a branch shares with its parent is prompt in it, a new conversation is prompt from its
first message on, and a completion is put back as it was sampled or not at all. A history that is not recognized only cuts the
rollout into more samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from rollout_server.core.capture.call import HistoryMessage, ModelCall, OfferedTool
from rollout_server.core.capture.decision import (
    HOSTED_TOOL,
    INVALID_CALL,
    UNKNOWN_COMPLETION,
    Branch,
    Continue,
    Decision,
    Delivering,
    FixedReply,
    Join,
    Open,
    Refuse,
    Replay,
    Settlement,
)
from rollout_server.core.capture.difference import find_difference
from rollout_server.core.capture.earlier import EarlierMain
from rollout_server.core.capture.history import (
    ASSISTANT,
    CanonicalMessage,
    HistoryReader,
    InvalidHistory,
    digest,
    tools_key,
)
from rollout_server.core.capture.history_tree import (
    CallPlan,
    CapturedConversation,
    CapturedTurn,
    Lineage,
    Node,
    Pending,
    Walk,
    joined_runs,
    walk,
)
from rollout_server.core.capture.rendering import LaterSystem, render
from rollout_server.core.capture.rules import AuxiliaryRule, CaptureOptions, matches, matches_name
from rollout_server.core.capture.settlement import settle
from rollout_server.core.message import JSON, Message
from rollout_server.core.segment import SegmentKind

REPLAY_SECONDS = 600.0
"""For how long the completion of a call answers equal calls."""
DELIVERY_SECONDS = 0.5
"""For how long a completion that was not confirmed counts as on its way: most confirmations take milliseconds."""


class _Refused(Exception):
    def __init__(self, refusal: Refuse) -> None:
        super().__init__(refusal.text)
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class _History:
    """A call's history in canonical form.

    Args:
        tools: digest of the tools.
        sent: the messages.
        has_instructions: the first one was sent apart from the others.
        reader: what read them.
    """

    tools: bytes
    sent: tuple[CanonicalMessage, ...]
    has_instructions: bool
    reader: HistoryReader


class CallTree:
    """The conversations of one rollout, as its agent's calls built them.

    With `history="as_template"` a completion that was sampled with reasoning is continued only if the call sends that reasoning
    back and no user message follows the completion, because chat templates drop the reasoning before the last user message. Where
    that does not hold, or the text beside its tool calls is missing, the call branches after an earlier completion or opens a
    conversation, with the messages as they were sent. All else is as with "restored".

    Args:
        options: the rules of the agent's author.
        later_system: the role that a system message behind another message is rendered with: "user" if the chat template allows
            only one system message, at the start. System messages at the start are then joined.
        earlier: the main conversation before a restart of the server, which the tree does not have. The first call that belongs
            to it opens a conversation of the kind DRIFT, and none is of the kind MAIN.
    """

    def __init__(
        self,
        options: CaptureOptions | None = None,
        later_system: LaterSystem = "system",
        earlier: EarlierMain | None = None,
    ) -> None:
        self._options = options or CaptureOptions()
        self._later_system: LaterSystem = later_system
        self._earlier = earlier
        self._roots: dict[bytes, Node] = {}
        self._conversations: list[CapturedConversation] = []
        self._turns: dict[str, CapturedTurn] = {}
        self._lineages: dict[bytes, Lineage] = {}
        self._latest: CapturedConversation | None = None
        self._has_main = False
        self._counts = Counter[str]()
        # The latest whole history and the latest tools, with what they were read as. Saves work and does not affect decisions.
        self._known: Sequence[tuple[HistoryMessage, CanonicalMessage | None]] = ()
        self._known_tools: tuple[Sequence[OfferedTool], bytes] | None = None

    def decide(self, call: ModelCall, now: float) -> Decision:
        """Decide what is to be done for a call. `now` is in seconds and never decreases.

        Joined, replayed and refused calls, and those with a fixed reply, are complete with it. All others change nothing until
        `begin`.
        """
        try:
            return self._decide(call, now)
        except InvalidHistory as error:
            return Refuse(INVALID_CALL, error.field, error.text)
        except _Refused as error:
            return error.refusal

    def begin(self, decision: Continue | Branch | Open) -> Pending:
        """Note that a decision, the latest one, is carried out: its completion is being sampled."""
        plan = decision.plan
        if isinstance(decision, Continue):
            conversation = self._conversations[decision.conversation]
            self._counts["continued"] += 1
        else:
            conversation = self._new_conversation(decision)
        if plan.parent is not None and not conversation.auxiliary:
            plan.parent.continued += 1
        self._roots.setdefault(plan.tools_key, plan.node.root)
        conversation.pending = pending = Pending(conversation, plan)
        pending.node.attempts.setdefault(plan.digest, []).append(pending)
        self._counts["restored"] += plan.restored
        self._counts["dropped"] += plan.dropped
        return pending

    def completed(
        self, pending: Pending, completion_id: str, fields: Mapping[str, JSON], turn: int, now: float
    ) -> None:
        """Note the completion of a call.

        Args:
            pending: the call.
            completion_id: unique in the rollout.
            fields: the assistant message as sampled, in the shape of OpenAI chat completions.
            turn: the number of the turn in the rollout.
            now: seconds.

        Raises:
            InvalidHistory: for a malformed message; then `failed` is due.
        """
        message = _as_sampled(fields)
        made = CapturedTurn(pending, completion_id, turn, message, order=len(self._turns), completed_at=now)
        made.node.turns.append(made)
        pending.turn = self._turns[completion_id] = made
        conversation = pending.conversation
        conversation.pending, conversation.tip = None, made
        conversation.turns += 1
        if conversation.lineage is not None:
            conversation.lineage.latest = self._latest = conversation

    def failed(self, pending: Pending) -> None:
        """Note that a call got no completion. Its conversation can no longer be continued, only branched from."""
        pending.conversation.pending = None
        pending.conversation.closed = True
        attempts = pending.node.attempts[pending.plan.digest]
        attempts.remove(pending)
        if not attempts:
            del pending.node.attempts[pending.plan.digest]

    def disconnected(self, pending: Pending) -> None:
        """Note that a caller that waited for the completion is gone. The next equal call joins."""
        pending.listeners = max(0, pending.listeners - 1)

    def confirmed(self, completion_id: str) -> bool:
        """Note that a completion reached the agent. Return whether the tree has the completion."""
        turn = self._turns.get(completion_id)
        if turn is not None:
            turn.delivered = True
        return turn is not None

    def settle(self) -> Settlement:
        """Return what the end of the capture decides: the main conversation, the turns that do not train, and the counts."""
        resumed = self._earlier is not None
        return settle(self._conversations, self._turns.values(), self._options, self._counts, resumed=resumed)

    def _decide(self, call: ModelCall, now: float) -> Decision:
        if call.hosted_tools and self._options.hosted_tools == "refuse":
            text = f"{call.hosted_tools[0][:100]!r} is a tool that only the API's provider can run; remove it"
            raise _Refused(Refuse(HOSTED_TOOL, "hosted_tools[0]", text))
        history = self._read(call)
        root = self._roots.get(history.tools) or Node()
        found = walk(root, history.sent, self._options.history == "as_template")
        auxiliary = self._is_auxiliary(call, history.reader.system_texts)
        if auxiliary and self._options.auxiliary_reply:
            self._counts["fixed_replies"] += 1
            return FixedReply(self._options.auxiliary_reply, self._counts["fixed_replies"])
        body = _body_digest(call, auxiliary)
        best = max(found.ends.values(), default=0)
        if found.index == len(history.sent):
            parents = {turn for turn, score in found.ends.items() if score == best}
            again = self._repeated(call, found.node.attempts.get(body, ()), parents, now)
            if again is not None:
                return again
        parent = max(found.ends, key=lambda turn: (found.ends[turn], _is_free_tip(turn), turn.order), default=None)
        plan = self._plan(call, history, found, parent, body)
        return self._sample(call, plan, found, history, auxiliary)

    def _read(self, call: ModelCall) -> _History:
        previous = self._previous(call)
        earlier = [] if previous is None else _messages_up_to(previous)
        reader = HistoryReader(earlier, self._drops)
        instructions = reader.read_instructions(call.instructions)
        read = self._read_messages(reader, call)
        sent = tuple(message for message in (instructions, *earlier, *read) if message is not None)
        if not sent:
            raise InvalidHistory("messages", "at least one message is needed")
        if self._known_tools is None or self._known_tools[0] != call.tools:
            self._known_tools = call.tools, tools_key(call.tools)
        return _History(self._known_tools[1], sent, instructions is not None, reader)

    def _read_messages(self, reader: HistoryReader, call: ModelCall) -> Sequence[CanonicalMessage | None]:
        """Read the messages of a call. Those with which the whole history before it began, too, are not read again."""
        known = () if call.previous else self._known
        messages: list[CanonicalMessage | None] = []
        same = True
        for index, message in enumerate(call.messages):
            same = same and index < len(known) and message.repeats(known[index][0])
            read = known[index][1] if same else self._repeated_field(message, f"messages[{index}]")
            if read is None or read.role == "system":
                read = reader.read(message, f"messages[{index}]")
            else:
                reader.add(read)
            messages.append(read)
        if not call.previous:
            self._known = tuple(zip(call.messages, messages, strict=True))
        return messages

    def _repeated_field(self, message: HistoryMessage, path: str) -> CanonicalMessage | None:
        """Return the field of a completion that a message names; None if it names none."""
        name = message.fields.get("repeated_field")
        if name is None:
            return None
        turn = self._turns.get(message.completion_id)
        found = turn.field(str(name)) if turn else None
        if found is None:
            text = "this rollout has no completion with this id and field; send the message itself instead"
            raise _Refused(Refuse(UNKNOWN_COMPLETION, path, text))
        return found

    def _previous(self, call: ModelCall) -> CapturedTurn | None:
        if not call.previous:
            return None
        turn = self._turns.get(call.previous)
        if turn is None:
            text = "this rollout has no completion with this id; send the whole conversation instead"
            raise _Refused(Refuse(UNKNOWN_COMPLETION, "previous", text))
        return turn

    def _drops(self, text: str) -> bool:
        return any(matches(pattern, text) for pattern in self._options.dropped_instructions)

    def _is_auxiliary(self, call: ModelCall, system_texts: Iterable[str]) -> bool:
        return call.auxiliary or any(_applies(rule, call, system_texts) for rule in self._options.auxiliary)

    def _repeated(
        self, call: ModelCall, attempts: Iterable[Pending], parents: set[CapturedTurn], now: float
    ) -> Join | Replay | Delivering | None:
        """Return how an equal call's completion serves this call; None if it gets one of its own.

        Unless it is marked, a call that can continue another completion comes from the agent that has that one, as two processes
        of one agent send equal calls. While a completion may be on its way to a caller that is there, it is not known yet whether
        this call repeats that caller's.
        """
        has_other = any(_is_free_tip(turn) and turn.delivered for turn in parents)
        for earlier in reversed(list(attempts)):
            key = earlier.plan.repeat_key
            if (earlier.plan.parent is not None and earlier.plan.parent not in parents) or (
                call.repeat_key and key and call.repeat_key != key
            ):
                continue
            marked = call.repeated or bool(call.repeat_key and call.repeat_key == key)
            turn = earlier.turn
            if has_other and not marked:
                continue
            if turn is None:
                if marked or not earlier.listeners:
                    earlier.listeners += 1
                    earlier.repeats += 1
                    self._counts["joined"] += 1
                    return Join(earlier)
            elif not turn.continued and now - turn.completed_at <= REPLAY_SECONDS and (marked or not turn.delivered):
                left = turn.completed_at + DELIVERY_SECONDS - now
                if earlier.listeners and not marked and left > 0:
                    return Delivering(turn.id, left)
                earlier.repeats += 1
                self._counts["replayed"] += 1
                return Replay(turn.id)
        return None

    def _plan(
        self,
        call: ModelCall,
        history: _History,
        found: Walk,
        parent: CapturedTurn | None,
        body: bytes,
    ) -> CallPlan:
        came_back = None if call.previous else found.sent_end
        return CallPlan(
            node=found.node,
            messages=joined_runs(history.sent[found.index :]),
            parent=parent,
            calls=history.reader.calls,
            digest=body,
            repeat_key=call.repeat_key,
            tools_key=history.tools,
            tools=tuple(tool.name for tool in call.tools),
            lineage_keys=_lineage_keys(call, history),
            has_instructions=history.has_instructions,
            restored=parent is not None
            and came_back is not None
            and not parent.continued
            and not came_back.is_written_as(parent.message),
            dropped=history.reader.dropped + len(call.hosted_tools),
        )

    def _sample(
        self, call: ModelCall, plan: CallPlan, found: Walk, history: _History, auxiliary: bool
    ) -> Continue | Branch | Open:
        parent = plan.parent
        messages = render(joined_runs(history.sent[found.end_index :]), parent, self._later_system)
        if parent is not None and _is_free_tip(parent) and parent.conversation.auxiliary == auxiliary:
            return Continue(parent.conversation.id, messages, plan)
        parting = find_difference(call, plan, self._latest)
        if parent is not None:
            return Branch(parent.conversation.id, parent.number, messages, parting, plan, auxiliary)
        kind = self._kind(call, plan, auxiliary, messages)
        first = kind is SegmentKind.MAIN or not (self._conversations or self._earlier)
        return Open(kind, messages, None if first else parting, auxiliary, plan)

    def _kind(
        self, call: ModelCall, plan: CallPlan, auxiliary: bool, messages: Sequence[Mapping[str, JSON]]
    ) -> SegmentKind:
        """Return the label of a new conversation, which changes no mask."""
        if auxiliary:
            return SegmentKind.SUBAGENT
        if not self._has_main:
            if self._earlier is None:
                return SegmentKind.MAIN
            rendered = [Message.write(message) for message in messages]
            goes_on = self._earlier.goes_on_in(plan.tools, rendered, call.client_agent)
            return SegmentKind.DRIFT if goes_on else SegmentKind.SUBAGENT
        by_first, lineage = self._lineage(plan)
        if lineage is None or (not lineage.main and not by_first):
            return SegmentKind.SUBAGENT
        latest = lineage.latest
        idle = None if latest is None or latest.pending is not None else latest.tip
        length = plan.node.depth + len(plan.messages)
        shorter = idle is not None and bool(plan.messages) and length < idle.node.depth
        return SegmentKind.COMPACTION if shorter else SegmentKind.DRIFT

    def _lineage(self, plan: CallPlan) -> tuple[bool, Lineage | None]:
        """Return whether a lineage has the same first message, and the lineage of a new conversation."""
        by_system, by_first = (self._lineages.get(key) for key in plan.lineage_keys)
        return by_first is not None, by_first or by_system

    def _new_conversation(self, decision: Branch | Open) -> CapturedConversation:
        lineage = None
        if not decision.auxiliary:
            if isinstance(decision, Branch) and decision.plan.parent is not None:
                lineage = decision.plan.parent.conversation.lineage
            lineage = lineage or self._lineage(decision.plan)[1] or Lineage(main=self._begins_main(decision))
            for key in decision.plan.lineage_keys:
                self._lineages.setdefault(key, lineage)
            self._has_main = self._has_main or lineage.main
        self._counts["parted"] += bool(self._conversations)
        conversation = CapturedConversation(len(self._conversations), lineage, decision.plan.tools)
        self._conversations.append(conversation)
        return conversation

    def _begins_main(self, decision: Branch | Open) -> bool:
        if self._earlier is None:
            return not self._has_main
        return not self._has_main and isinstance(decision, Open) and decision.kind is SegmentKind.DRIFT


def _applies(rule: AuxiliaryRule, call: ModelCall, system_texts: Iterable[str]) -> bool:
    if (rule.without_tools and call.tools) or (rule.model and not matches_name(rule.model, call.model)):
        return False
    return not rule.system or any(matches(rule.system, text) for text in system_texts)


def _is_free_tip(turn: CapturedTurn) -> bool:
    return turn.conversation.tip is turn and turn.conversation.is_free


def _as_sampled(fields: Mapping[str, JSON]) -> CanonicalMessage:
    message = HistoryReader().read(HistoryMessage({**fields, "role": ASSISTANT}), "completion")
    assert message is not None, "only system messages are left out"  # noqa: S101 - for the type checker
    return message


def _messages_up_to(turn: CapturedTurn) -> list[CanonicalMessage]:
    """Return the history of a turn with its completion, without instructions that were sent apart from the messages."""
    turns = {each.node: each for each in turn.lineage()}
    messages, node = [], turn.node
    while node.message is not None and node.parent is not None:
        own = turns.get(node)
        message = node.message if own is None else replace(own.message, completion_ids=frozenset([own.id]))
        messages.append(message)
        node = node.parent
    messages.reverse()
    return messages[1:] if turn.pending.plan.has_instructions else messages


def _lineage_keys(call: ModelCall, history: _History) -> tuple[bytes, bytes]:
    """Return what the conversations of a lineage share: tools and agent, with the system prompt, and with the first message."""
    start = tuple(message.key for message in takewhile(lambda message: message.role == "system", history.sent))
    first = tuple(message.key for message in history.sent[len(start) : len(start) + 1])
    shared = history.tools, call.client_agent
    return digest((*shared, "system", start)), digest((*shared, "first", first))


def _body_digest(call: ModelCall, auxiliary: bool) -> bytes:
    """Return a digest of what a call says beside its history."""
    return digest((call.sampling, call.model, call.client_agent, call.api.value, auxiliary))
