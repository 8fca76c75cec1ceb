"""Uses tokenizers for what no turn of a rollout requests: RenderPrompt, CountTokens and DecodeTokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar

from rollout_server.core.capture.call import OfferedTool
from rollout_server.core.error import Busy, InvalidRequest, NotPossible, Violation
from rollout_server.core.ledger import Tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.tokens.cache import Tokenizers, open_renderer
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool

_T = TypeVar("_T")
MOST_PROMPTS: Final = 64
"""Prompts, and texts of tokens, of one service that are made or wait for it."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Total size of their requests. A single larger one is accepted."""


class PromptRenderer:
    """Renders first prompts as token mode does, and calls other work on tokenizers.

    Running rollouts need the renderer's threads as well, so one prompt is rendered at a time.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers
        self._tasks: dict[asyncio.Task[Any], int] = {}
        self._lock = asyncio.Lock()

    async def run_bounded(self, work: Coroutine[Any, Any, _T], size: int) -> _T:
        """Run the work of a request of `size` bytes. Raises `Busy` if too much is running.

        The work counts until it ends, also if its caller leaves: a thread cannot be cancelled.
        """
        if len(self._tasks) >= MOST_PROMPTS or (self._tasks and sum(self._tasks.values()) + size > MOST_BYTES):
            work.close()
            raise Busy("too many prompts and texts of tokens are being made", retry_after=1.0, reason="TOO_MANY_CALLS")
        task = asyncio.create_task(work, name="render a prompt")
        self._tasks[task] = size
        task.add_done_callback(self._on_done)
        return await asyncio.shield(task)

    async def run(self, name: TokenizerName | None, work: Callable[[LoadedTokenizer], _T]) -> _T:
        """Call `work` on a tokenizer in a thread and return its result. Raises `NotPossible` (NO_TOKENIZER) as `token_ids` does."""
        if name is None:
            raise NotPossible("the rollout names no tokenizer, so its tokens have no texts", reason="NO_TOKENIZER")
        try:
            tokenizer = await self._tokenizers.load(name)
        except RolloutFailed as error:
            raise NotPossible(str(error), reason="NO_TOKENIZER") from None
        async with self._lock:
            return await tokenizer.run(work, tokenizer)

    async def token_ids(
        self,
        name: TokenizerName | None,
        tools: Sequence[Tool | OfferedTool],
        messages: Sequence[Message],
        where: str = "messages",
    ) -> Tokens:
        """Return the token ids of the first prompt with these tools and messages. `where` is the messages' field in the request.

        Raises `NotPossible` (NO_TOKENIZER) if there is no tokenizer or it cannot be loaded, and `InvalidRequest` if a template
        argument or the messages are refused.
        """
        try:
            if name is not None:
                await self._tokenizers.load(name)  # before the lock is taken, because it may download the tokenizer
            async with self._lock:
                renderer = await open_renderer(self._tokenizers, name, tools)
        except RolloutFailed as error:
            if error.failure.category is Category.VALIDATION:
                raise InvalidRequest(Violation("spec.tokenizer.template_kwargs_json", str(error))) from None
            raise NotPossible(str(error), reason="NO_TOKENIZER") from None
        try:
            async with self._lock:
                rendered = await renderer.append(messages, None, 0)
        except RolloutFailed as error:
            raise InvalidRequest(Violation(where, str(error))) from None
        return rendered.predicted.environment

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        del self._tasks[task]
        if not task.cancelled():
            task.exception()  # marks it as read: its caller may have left
