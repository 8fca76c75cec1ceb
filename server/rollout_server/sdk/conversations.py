"""The conversations of one agent loop.

A loop passes the whole message list with each chat and may run several chats at the same time. Each pending chat needs a
conversation for itself. Chats that start together and continue from the same message get branches of one conversation: they share
the tokens up to there, which are trained once. A chat whose conversation is already waiting for a completion gets a new
conversation, whose first prompt is the whole list.
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
from rollout_server.sdk.history_diff import ConversationHistory, SerializedMessages
from rollout_server.sdk.run_access import append_results


@dataclass(slots=True, eq=False)
class LoopConversation:
    """One conversation of a loop.

    Args:
        run: generates the completions of this conversation.
        history: the messages so far, as the loop passed them.
        calls: tool calls of the last completion that have no result yet.
        is_taken: a chat is waiting for a completion.
        is_closed: no message can be appended.
    """

    run: Run
    history: ConversationHistory
    calls: Sequence[ToolCall] = ()
    is_taken: bool = False
    is_closed: bool = False

    async def append(self, messages: SerializedMessages, stop: int, tool_ms: float) -> None:
        """Append the new messages of a list that continues this conversation.

        Args:
            messages: the whole list.
            stop: index after the last message to append.
            tool_ms: milliseconds that the tools took together since the last completion.
        """
        added = messages[self.history.known : stop]
        # All tool calls of a turn count as returned when their messages arrive, so their latency is the sum that the loop recorded.
        left, calls = await append_results(self.run, self.calls, added, tool_ms)
        # Before the await below, because the chat may be cancelled there, and recorded results must not be appended twice.
        self.history.extend(messages, stop - len(left))
        self.calls = () if left else calls
        await self.run.append(*left)
        self.history.extend(messages, stop)

    async def branch(self) -> LoopConversation:
        """Return a new conversation that continues from the current end of this one."""
        return LoopConversation(await self.run.fork(), copy(self.history), self.calls)

    def append_completion(self, messages: SerializedMessages, reply: Reply) -> None:
        """Add the completion of this list."""
        self.history.append_completion(messages, reply.message)
        self.calls = reply.tool_calls


@dataclass(slots=True, eq=False)
class _Chat:
    messages: SerializedMessages
    conversation: LoopConversation | None = None


class Conversations:
    """All conversations of one rollout.

    Args:
        run: the rollout's first run.
        messages: messages of the request.

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
        """Add the latency of a tool that the loop ran. Its result arrives with a later list."""
        self._tool_ms += max(0.0, milliseconds)

    async def take(self, messages: SerializedMessages) -> LoopConversation:
        """Return a conversation that holds this list, reserved for one chat. The caller resets `is_taken`.

        Raises `RolloutEnded` if the list needs another conversation and the trainer supports only one. Raises
        `OsmosisValidationError` for an empty list that continues no conversation.
        """
        chat = _Chat(messages)
        self._waiting.append(chat)
        try:
            await asyncio.sleep(0)  # lets chats that start together register before the first of them is served
            async with self._lock:
                # While this chat waited for the lock, another one may have assigned a branch to it.
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

    async def conclude(self, messages: SerializedMessages) -> bool:
        """Make the loop's final list the main conversation. Return False if the list continues no known conversation."""
        usable = [each for each in self._all if each is self.main or each.history.has_completion]
        found = self._find(messages, (each for each in usable if not each.is_taken))
        if found is None or self.main.is_taken:
            return False
        if not found.is_closed:
            await found.append(messages, len(messages), self._time())
        if found is not self.main:
            # Nothing is sampled in the new conversation. It only supplies the outcome's messages.
            await self._replace(self.main, messages)
        return True

    async def _share(self, chat: _Chat) -> LoopConversation:
        """Assign a conversation to a chat, and branches of it to all waiting chats that continue the same conversation."""
        free = [each for each in self._all if not each.is_closed and not each.is_taken]
        shared = self._find(chat.messages, free) or await self._open(chat.messages)
        others = [each for each in self._waiting if each is not chat and shared.history.follows(each.messages)]
        # Append only the messages that all lists share. Each branch then gets the rest of its list in `take`.
        texts = zip(chat.messages.texts, *(each.messages.texts for each in others), strict=False)
        common = sum(1 for _ in takewhile(lambda same: len({*same}) == 1, texts))
        await shared.append(chat.messages, max(common, shared.history.known), self._time())
        for other in others:
            branch = await shared.branch()
            self._all.append(branch)
            if other in self._waiting:  # its chat may have been cancelled during the await
                self._waiting.remove(other)
                other.conversation, branch.is_taken = branch, True
        shared.is_taken = True
        chat.conversation = shared
        return shared

    async def _open(self, messages: SerializedMessages) -> LoopConversation:
        """Open a conversation for a list that continues none. It replaces the latest one unless a chat still needs that."""
        if not messages:
            raise OsmosisValidationError("messages is empty; pass at least one message", 400)
        latest = self.main if self._latest.is_closed else self._latest
        needed = any(each.is_taken for each in self._all)
        if not needed and not any(latest.history.follows(each.messages) for each in self._waiting):
            return await self._replace(latest, messages)
        opened = LoopConversation(await self.main.run.fork(messages, kind="subagent"), ConversationHistory(messages))
        self._all.append(opened)
        return opened

    async def _replace(self, closed: LoopConversation, messages: SerializedMessages) -> LoopConversation:
        opened = LoopConversation(await closed.run.fork(messages, kind="compaction"), ConversationHistory(messages))
        closed.is_closed = True
        self._all.append(opened)
        self._latest = opened
        self.main = opened if closed is self.main else self.main
        return opened

    def _find(self, messages: SerializedMessages, candidates: Iterable[LoopConversation]) -> LoopConversation | None:
        """Return the conversation that this list continues: the longest one, and of several the main one."""
        found = [each for each in candidates if each.history.follows(messages)]
        return max(found, key=lambda each: (each.history.known, each is self.main), default=None)

    def _time(self) -> float:
        """Return the tool latency since the last call, in milliseconds, and reset it."""
        elapsed, self._tool_ms = self._tool_ms, 0.0
        return elapsed
