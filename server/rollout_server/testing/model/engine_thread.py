"""What the wires of a strict trainer share: one engine in one thread, and the tools that prompts are rendered with."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from rollout_server.testing.checks.judge import Judge
from rollout_server.testing.checks.renderer import Tools
from rollout_server.testing.checks.turn import CompletionCall
from rollout_server.testing.model.engine import Engine, Result, Scripts
from rollout_server.testing.script import Script

_T = TypeVar("_T")


class ToolsUnavailableError(Exception):
    """The tools could not be fetched from where they were to come from."""


class ToolList:
    """The tools that the trainer was told of: given, or fetched from a gateway once, on first use.

    An empty list is no list: templates differ in what they make of one.
    """

    def __init__(self, tools: Tools | None, tools_from: str | None, key: str | None = None, *, rendered: bool) -> None:
        self.rendered = rendered
        self._tools = tools
        self._tools_from = tools_from
        self._key = key
        self._fetching = asyncio.Lock()

    async def get(self) -> Tools | None:
        """The tools to render, None if there are none. ToolsUnavailableError if the gateway does not hand them out."""
        if not self.rendered:
            return None
        async with self._fetching:
            if self._tools is None and self._tools_from is not None:
                self._tools = await _fetch(f"{self._tools_from.rstrip('/')}/tools", self._key)
        return self._tools or None


class EngineThread:
    """Takes calls from the event loop to the engine's own thread, where everything that counts tokens happens."""

    def __init__(
        self, judge: Judge, engine: Engine, scripts: Scripts, tools: ToolList, thread: ThreadPoolExecutor
    ) -> None:
        self.judge = judge
        self.scripts = scripts
        self.tools = tools
        self._engine = engine
        self._thread = thread

    async def complete(self, call: CompletionCall) -> Result:
        """Judges one call and answers it; RefusedError for a wrong one. Calls are taken in the order of arrival."""
        return await self._in_thread(lambda: self._engine.complete(call))

    async def put_script(self, rollout_id: str, script: Script) -> None:
        """Gives a rollout its script; its next call is then a first one."""
        await self._in_thread(lambda: self._engine.put_script(rollout_id, script))

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)


async def _fetch(url: str, key: str | None) -> Tools:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:  # a gateway nearby is behind no proxy
            response = await client.get(url, headers=headers)
            response.raise_for_status()
            tools = response.json()["tools"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ToolsUnavailableError(
            f"no tools from {url}: {type(error).__name__}: {error}; `rollout trainer --tools-from URL` names where they are, "
            "and --tools-key the API key for them"
        ) from error
    if not isinstance(tools, list):
        raise ToolsUnavailableError(f"no tools from {url}: 'tools' is not a list")
    return tools
