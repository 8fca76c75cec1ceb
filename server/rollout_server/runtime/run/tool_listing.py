"""The tools of toolsets that a rollout offers: those that its request names are listed, and what was listed is recorded.

The record has each toolset's name and the SHA-256 of its list, and for the request's toolset the list itself. A later process that
continues the rollout offers the same list without asking again: other tools would be another prompt. The lists of an agent's own
toolsets are the server's, so a later process only compares their digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rollout_server.core.message import JSON
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import SESSION, TOOLS, Observed, Record
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import Tool
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.context import RunContext
from rollout_server.runtime.tools.listing import check_names, listing_digest
from rollout_server.runtime.tools.protocols import ToolFailed
from rollout_server.runtime.tools.remote_tool import RemoteTool, ToolsetLimits, remote_tool
from rollout_server.runtime.tools.toolset import ListedTool, RequestedToolset, ToolsetSource
from rollout_server.runtime.tools.toolsets import RolloutToolsets

_TOOLSETS: Final = "toolsets"
_TOOLSET: Final = "toolset"
_SHA256: Final = "sha256"
_TOOLS: Final = "tools"


def has_toolsets(rollout: Rollout) -> bool:
    """Return whether the rollout has tools of toolsets."""
    return rollout.spec.tools is not None or any(isinstance(tool, RemoteTool) for tool in rollout.tools)


async def list_requested(context: RunContext, toolsets: RolloutToolsets, limits: ToolsetLimits) -> Sequence[Tool]:
    """Return all tools of the rollout, and record what its toolsets list. Called before anything else of the rollout runs.

    Raises `RolloutFailed` if the request's toolset cannot be listed, if two tools have the same name, or if the rollout is
    continued and a list is not what it was.
    """
    rollout = context.rollout
    target, own = rollout.spec.tools, rollout.tools
    recorded = _recorded(rollout.log.records)
    if recorded is not None:  # by an earlier process
        entries = json.loads(recorded.value_json)[_TOOLSETS]
        _check_unchanged(own, entries)
        if rollout.replay is not None:
            context.record(recorded)
        return own if target is None else (*own, *_remote_tools(RequestedToolset(target), entries, limits))
    tools = own
    if target is not None:
        try:
            tools = (*own, *await toolsets.list_tools(RequestedToolset(target)))
            check_names(tools, f"agent {rollout.agent.name!r} and spec.tools")
        except (ToolFailed, ValueError) as error:
            text = f"tools: the rollout cannot offer the tools of spec.tools: {error}"
            raise RolloutFailed(Failure(Category.TOOL, text)) from error
    entries = [_entry(source, listed) for source, listed in _by_source(tools).items()]
    if entries:
        context.record(Observed(TOOLS, json.dumps({_TOOLSETS: entries}, ensure_ascii=False)))
    return tools


async def note_use(context: RunContext, source: ToolsetSource) -> None:
    """Record that a toolset is called whose session has state, and wait until that is stored: see `lost_state`."""
    context.record(Observed(SESSION, json.dumps(str(source))))
    await context.rollout.stored()


def lost_state(records: Iterable[Record]) -> str:
    """Return why a later process cannot continue a rollout: it used a session that had state. Empty if it used none."""
    for record in records:
        if isinstance(record, Observed) and record.what == SESSION:
            return f"its session with {json.loads(record.value_json)} ended with the server, and the state of its tools with it"
    return ""


def _recorded(records: Sequence[Record]) -> Observed | None:
    return next((each for each in records if isinstance(each, Observed) and each.what == TOOLS), None)


def _by_source(tools: Sequence[Tool]) -> Mapping[ToolsetSource, Sequence[ListedTool]]:
    found: dict[ToolsetSource, list[ListedTool]] = {}
    for tool in tools:
        if isinstance(tool, RemoteTool):
            found.setdefault(tool.source, []).append(tool.listed)
    return found


def _entry(source: ToolsetSource, listed: Sequence[ListedTool]) -> Mapping[str, JSON]:
    entry: dict[str, JSON] = {_TOOLSET: str(source), _SHA256: listing_digest(listed)}
    return entry | {_TOOLS: [asdict(each) for each in listed]} if isinstance(source, RequestedToolset) else entry


def _check_unchanged(own: Sequence[Tool], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raise `RolloutFailed` if a toolset of the agent lists other tools than when the rollout began."""
    then = [(entry[_TOOLSET], entry[_SHA256]) for entry in entries if _TOOLS not in entry]
    now = [(str(source), listing_digest(listed)) for source, listed in _by_source(own).items()]
    if then != now:
        changed = next(
            (name for name, digest in (*now, *then) if (name, digest) not in then or (name, digest) not in now), ""
        )
        text = f"the server was restarted, and {changed or 'its agent'} lists other tools now; start the rollout again"
        raise RolloutFailed(Failure(Category.INTERRUPTED, text))


def _remote_tools(
    source: RequestedToolset, entries: Sequence[Mapping[str, Any]], limits: ToolsetLimits
) -> Sequence[RemoteTool]:
    listed = (ListedTool(**tool) for entry in entries for tool in entry.get(_TOOLS, ()))
    return [remote_tool(each, source, limits) for each in listed]
