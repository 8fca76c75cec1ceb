"""Resources that the tool calls of all rollouts share: slots, threads, processes and cached results; and programs."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from rollout_server.runtime.programs import NoPrograms, Programs
from rollout_server.runtime.tools.cache import ResultCache
from rollout_server.runtime.tools.protocols import ServerRunTool, TokenCounter, ToolProcesses
from rollout_server.runtime.tools.slots import Slots
from rollout_server.runtime.tools.toolsets import NoToolsets, Toolsets

_log = logging.getLogger(__name__)
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Server-wide limits for tools, whatever their policies say.

    Args:
        threads: concurrent calls of synchronous functions, including abandoned calls that have not returned. Further calls
            wait; they fail once abandoned calls hold all threads.
        output_bytes: size of a result's text; longer texts are truncated.
        image_bytes: total size of a result's images; a larger result is an error.
        cache_entries, cache_bytes: size of the result cache.
    """

    threads: int = 64
    output_bytes: int = 1024 * 1024
    image_bytes: int = 16 * 1024 * 1024
    cache_entries: int = 10_000
    cache_bytes: int = 64 * 1024 * 1024


class ToolResources:
    """Resources of one server. Lives on its event loop. Without `processes`, tools that need a process fail with an error."""

    def __init__(
        self,
        limits: ToolLimits | None = None,
        processes: ToolProcesses | None = None,
        measure: TokenCounter | None = None,
        programs: Programs | None = None,
        toolsets: Toolsets | None = None,
    ) -> None:
        self.limits = limits or ToolLimits()
        self.processes = processes
        self.measure = measure
        self.programs = programs or NoPrograms()
        self.toolsets = toolsets or Toolsets(NoToolsets())
        self.threads = Slots(self.limits.threads)
        self.cleanup_threads = Slots(self.limits.threads)
        self.results = ResultCache(self.limits.cache_entries, self.limits.cache_bytes)
        self._slots: dict[Hashable, Slots] = {}
        self._warned: set[Hashable] = set()

    def slots(self, tool: ServerRunTool) -> Slots | None:
        """Return the tool's server-wide slots; None: no limit. Tools created from the same definition share them."""
        limit = tool.policy.server_concurrency
        if limit is None:
            return None
        return self._slots.setdefault((tool.definition, tool.name, limit), Slots(limit))

    def warn_author(self, tool: str, what: str) -> None:
        """Log a mistake of a tool's author as "tool NAME (LOCATION) ...": once as a warning, then at debug level."""
        again = (tool, what) in self._warned or len(self._warned) >= _REMEMBERED
        if not again:
            self._warned.add((tool, what))
        _log.log(logging.DEBUG if again else logging.WARNING, "%s %s", tool, what)

    async def close(self) -> None:
        """End the processes and programs, and close the sessions with toolsets."""
        await self.toolsets.close()
        await self.programs.close()
        if self.processes is not None:
            await self.processes.close()
