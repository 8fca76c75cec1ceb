"""What the tool calls of all rollouts on a server share: slots, threads, processes, results that are kept."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass

from rollout_server.runtime.tools.cache import ResultCache
from rollout_server.runtime.tools.protocols import ServerRunTool, TokenCounter, ToolProcesses
from rollout_server.runtime.tools.slots import Slots

_log = logging.getLogger(__name__)
_REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """What tools may take of a server, whatever their authors say.

    Args:
        threads: plain functions that run at the same time, those among them that were given up and never returned. Calls
            wait for a slot; when all are lost they fail.
        output_bytes: of a result's text; the rest is cut.
        image_bytes: of a result's images together; a larger result is an error.
        cache_entries, cache_bytes: results that are kept.
    """

    threads: int = 64
    output_bytes: int = 1024 * 1024
    image_bytes: int = 16 * 1024 * 1024
    cache_entries: int = 10_000
    cache_bytes: int = 64 * 1024 * 1024


class ToolResources:
    """Belongs to one server and lives on its event loop. Without `processes` tools that want one fail, and say so."""

    def __init__(
        self,
        limits: ToolLimits | None = None,
        processes: ToolProcesses | None = None,
        measure: TokenCounter | None = None,
    ) -> None:
        self.limits = limits or ToolLimits()
        self.processes = processes
        self.measure = measure
        self.threads = Slots(self.limits.threads)
        self.results = ResultCache(self.limits.cache_entries, self.limits.cache_bytes)
        self._slots: dict[Hashable, Slots] = {}
        self._warned: set[Hashable] = set()

    def slots(self, tool: ServerRunTool) -> Slots | None:
        """The slots that the tool has on the server; None: no limit. Tools made by one definition share them."""
        limit = tool.policy.server_concurrency
        if limit is None:
            return None
        return self._slots.setdefault((tool.definition, tool.name, limit), Slots(limit))

    def warn_author(self, tool: str, what: str) -> None:
        """Tells the author of a fault of "tool NAME (PLACE)": as a warning once, after that for those who look closely."""
        again = (tool, what) in self._warned or len(self._warned) >= _REMEMBERED
        if not again:
            self._warned.add((tool, what))
        _log.log(logging.DEBUG if again else logging.WARNING, "%s %s", tool, what)

    async def close(self) -> None:
        """Ends the processes."""
        if self.processes is not None:
            await self.processes.close()
