"""Parts that all protocols of a strict trainer share: one engine in one thread, and the tools for rendering prompts."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import httpx

from rollout_server.testing.checks.judge import RequestJudge
from rollout_server.testing.checks.renderer import Tools
from rollout_server.testing.checks.turn import CompletionCall
from rollout_server.testing.model.engine import Engine, Result, Scripts
from rollout_server.testing.script import Script

_T = TypeVar("_T")


class ToolsUnavailableError(Exception):
    """The tools could not be fetched from the gateway."""


class ToolList:
    """The tools for rendering prompts: given, or fetched from a gateway once, on first use.

    An empty list is treated as no list, because templates render the two differently.
    """

    def __init__(self, tools: Tools | None, tools_from: str | None, key: str | None = None, *, rendered: bool) -> None:
        self.rendered = rendered
        self._tools = tools
        self._tools_from = tools_from
        self._key = key
        self._fetching = asyncio.Lock()

    async def get(self) -> Tools | None:
        """Return the tools to render; None if there are none. Raises ToolsUnavailableError if they cannot be fetched."""
        if not self.rendered:
            return None
        async with self._fetching:
            if self._tools is None and self._tools_from is not None:
                self._tools = await _fetch(f"{self._tools_from.rstrip('/')}/tools", self._key)
        return self._tools or None


class EngineThread:
    """Runs the engine's work in its own thread, because rendering and counting tokens would block the event loop."""

    def __init__(
        self, judge: RequestJudge, engine: Engine, scripts: Scripts, tools: ToolList, thread: ThreadPoolExecutor
    ) -> None:
        self.judge = judge
        self.scripts = scripts
        self.tools = tools
        self._engine = engine
        self._thread = thread

    async def complete(self, call: CompletionCall) -> Result:
        """Call `Engine.complete`. Raises RefusedError for a wrong request. Requests are processed in the order of arrival."""
        return await self._in_thread(lambda: self._engine.complete(call))

    async def put_script(self, rollout_id: str, script: Script) -> None:
        """Call `Engine.put_script`."""
        await self._in_thread(lambda: self._engine.put_script(rollout_id, script))

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)


async def _fetch(url: str, key: str | None) -> Tools:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:  # no proxy: the gateway is usually local
            response = await client.get(url, headers=headers)
            response.raise_for_status()
            tools = response.json()["tools"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ToolsUnavailableError(
            f"no tools from {url}: {type(error).__name__}: {error}; set their URL with `rollout trainer --tools-from URL`, and "
            "its API key with --tools-key"
        ) from error
    if not isinstance(tools, list):
        raise ToolsUnavailableError(f"no tools from {url}: 'tools' is not a list")
    return tools
