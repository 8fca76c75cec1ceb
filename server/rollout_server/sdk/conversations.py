"""The conversations of one agent loop.

A loop hands over a whole list of messages with each chat, and may have several chats under way. Each needs a conversation of its
own meanwhile. Chats that begin together and go on from the same point get branches of one conversation: the tokens until there
are shared, and train once. A chat whose conversation waits for an answer gets a new one, whose first prompt is the whole list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import takewhile

from rollout_server.core.message import ToolCall
from rollout_server.runtime.run.messages import Reply
from rollout_server.runtime.run.run import Run
from rollout_server.sdk.core.exceptions import OsmosisValidationError
from rollout_server.sdk.core.schemas import MessageDict
from rollout_server.sdk.history_diff import ConversationHistory, MessageList
from rollout_server.sdk.run_access import append_results


@dataclass(slots=True, eq=False)
class LoopConversation:
    """One conversation, as its loop has shown it.

    Args:
        run: what completes it.
        history: the messages so far.
        calls: the tool calls of the last answer, whose results are still to come.
        is_taken: a chat waits for its answer.
        is_closed: nothing can be added to it any more.
    """

    run: Run
    history: ConversationHistory
    calls: Sequence[ToolCall] = ()
    is_taken: bool = False
    is_closed: bool = False

    async def append(self, messages: MessageList, stop: int, tool_ms: float) -> None:
        """Adds the messages of a list that follows, those before `stop`; results of tool calls took `tool_ms` together."""
        added = messages[self.history.known : stop]
        # The calls of a turn count as returned together, when their messages come: so their time is the sum of what was recorded.
        left, calls = await append_results(self.run, self.calls, added, tool_ms)
        # At once: whoever asked may stop waiting below, and what is recorded must not be appended again.
        self.history.extend(messages, stop - len(left))
        self.calls = () if left else calls
        await self.run.append(*left)
        self.history.extend(messages, stop)

    async def branch(self) -> LoopConversation:
        """One that goes on from where this one is."""
        return LoopConversation(await self.run.fork(), copy(self.history), self.calls)

    def append_completion(self, messages: MessageList, reply: Reply) -> None:
        """The model has answered this list."""
        self.history.append_completion(messages, reply.message)
        self.calls = reply.tool_calls


@dataclass(slots=True, eq=False)
class _Chat:
    messages: MessageList
    conversation: LoopConversation | None = None


class Conversations:
    """All conversations of one rollout.

    Args:
        run: the one that the rollout begins with.
        messages: those of the request.

    Attributes:
        main: the conversation whose messages the outcome holds.
    """

    def __init__(self, run: Run, messages: Sequence[MessageDict]) -> None:
        self.main = self._latest = LoopConversation(run, ConversationHistory(messages))
        self._all = [self.main]
        self._waiting: list[_Chat] = []
        self._lock = asyncio.Lock()
        self._tool_ms = 0.0

    def tool_call_took(self, milliseconds: float) -> None:
        """The loop ran a tool; its result is still to come."""
        self._tool_ms += max(0.0, milliseconds)

    async def take(self, messages: MessageList) -> LoopConversation:
        """A conversation that holds this list, for one chat. Whoever asked for it sets `is_taken` back.

        Raises `RolloutEnded` where the trainer knows one conversation only, and `OsmosisValidationError` for an empty list that
        goes on from none.
        """
        chat = _Chat(messages)
        self._waiting.append(chat)
        try:
            await asyncio.sleep(0)  # chats that begin together are all known before the first of them is asked
            async with self._lock:
                found = self._latest = chat.conversation or await self._share(chat)
                await found.append(messages, len(messages), self._time())
        except BaseException:
            if chat.conversation is not None:
                chat.conversation.is_taken = False
            raise
        finally:
            if chat in self._waiting:
                self._waiting.remove(chat)
        return found

    async def conclude(self, messages: MessageList) -> bool:
        """Makes the loop's last list the main conversation; False where none is known that the list goes on from."""
        usable = [each for each in self._all if each is self.main or each.history.has_completion]
        found = self._find(messages, (each for each in usable if not each.is_taken))
        if found is None or self.main.is_taken:
            return False
        if not found.is_closed:
            await found.append(messages, len(messages), self._time())
        if found is not self.main:
            # Nothing is sampled in it: it only is the conversation that the outcome holds.
            await self._replace(self.main, messages)
        return True

    async def _share(self, chat: _Chat) -> LoopConversation:
        """Gives a conversation to a chat, and branches of it to all that wait and go on from the same point."""
        free = [each for each in self._all if not each.is_closed and not each.is_taken]
        shared = self._find(chat.messages, free) or await self._open(chat.messages)
        others = [each for each in self._waiting if each is not chat and shared.history.follows(each.messages)]
        texts = zip(chat.messages.texts, *(each.messages.texts for each in others), strict=False)
        common = sum(1 for _ in takewhile(lambda same: len({*same}) == 1, texts))
        await shared.append(chat.messages, max(common, shared.history.known), self._time())
        for other in others:
            branch = await shared.branch()
            self._all.append(branch)
            if other in self._waiting:  # it has not been given up meanwhile
                self._waiting.remove(other)
                other.conversation, branch.is_taken = branch, True
        shared.is_taken = True
        chat.conversation = shared
        return shared

    async def _open(self, messages: MessageList) -> LoopConversation:
        """A conversation for a list that follows none: in place of the latest one, unless that is still needed."""
        if not messages:
            raise OsmosisValidationError("messages is empty: there is nothing to answer", 400)
        latest = self.main if self._latest.is_closed else self._latest
        needed = any(each.is_taken for each in self._all)
        if not needed and not any(latest.history.follows(each.messages) for each in self._waiting):
            return await self._replace(latest, messages)
        opened = LoopConversation(await self.main.run.fork(messages, kind="subagent"), ConversationHistory(messages))
        self._all.append(opened)
        return opened

    async def _replace(self, closed: LoopConversation, messages: MessageList) -> LoopConversation:
        opened = LoopConversation(await closed.run.fork(messages, kind="compaction"), ConversationHistory(messages))
        closed.is_closed = True
        self._all.append(opened)
        self._latest = opened
        self.main = opened if closed is self.main else self.main
        return opened

    def _find(self, messages: MessageList, candidates: Iterable[LoopConversation]) -> LoopConversation | None:
        """The conversation that this list goes on from: that which has most of it, and the main one of several."""
        found = [each for each in candidates if each.history.follows(messages)]
        return max(found, key=lambda each: (each.history.known, each is self.main), default=None)

    def _time(self) -> float:
        """The milliseconds of tools since somebody asked."""
        taken, self._tool_ms = self._tool_ms, 0.0
        return taken
