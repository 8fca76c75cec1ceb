"""Rebuilds the groups of earlier processes from what the journal has of them, and their rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rollout_server.core.error import RolloutError
from rollout_server.core.record import Accepted
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.journal import FormedGroup, StoredGroup
from rollout_server.runtime.ports import Credentials, Tool
from rollout_server.runtime.registry.interruption import MissingAgent
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart, StartRequest


class GroupDamaged(Exception):
    """A group cannot be rebuilt. The text says why, as part of a sentence."""


def restored_group(
    stored: StoredGroup,
    rollouts: Mapping[str, Rollout],
    registry: RolloutRegistry,
    dropped: Callable[[RolloutGroup], None],
) -> RolloutGroup:
    """Return a group of an earlier process. `dropped`: see `RolloutGroup`. Raises `GroupDamaged`."""
    formed = stored.group
    members, refills = _rollouts(stored, rollouts)
    admitted = _admitted(formed, [*members, *(refill for _, refill in refills)])
    plan = GroupPlan(len(members), formed.min_usable, formed.refill, admitted.request.spec.train_on)
    group = RolloutGroup(formed.uid, admitted, plan, registry, dropped if formed.is_listed else None)
    group.restore(members, refills, _refill_tools(admitted, members[0]))
    return group


def _rollouts(
    stored: StoredGroup, rollouts: Mapping[str, Rollout]
) -> tuple[Sequence[Rollout], Sequence[tuple[int, Rollout]]]:
    """Return the rollouts that a group was formed of, and its refills with their indices. Raise `GroupDamaged`."""
    members = stored.group.members
    missing = {*members, *(uid for _, uid in stored.refills)} - rollouts.keys()
    if missing or not members:
        raise GroupDamaged(f"the journal does not have all of its rollouts ({', '.join(sorted(missing)) or 'none'})")
    current = list(members)
    for index, uid in stored.refills:
        if index >= len(current) or rollouts[current[index]].outcome is None:
            raise GroupDamaged(f"rollout {uid} was started in place of one that has not ended")
        current[index] = uid
    return [rollouts[uid] for uid in members], [(index, rollouts[uid]) for index, uid in stored.refills]


def _admitted(formed: FormedGroup, rollouts: Sequence[Rollout]) -> AdmittedStart:
    """Return the request of a group: that of its first rollout, with the group's ids and the credentials of an unfinished one."""
    first = rollouts[0]
    group_id = "" if formed.group_id == formed.uid else formed.group_id
    spec = replace(first.spec, rollout_id=formed.rollout_id, group_id=group_id, group_index=None)
    found = (
        rollout.credentials for rollout in rollouts if rollout.outcome is None and rollout.credentials != Credentials()
    )
    credentials, trace = next(found, Credentials()), first.trace
    request = StartRequest(spec, first.caller, formed.request_id, credentials=credentials, trace=trace)
    return AdmittedStart(request, first.agent, first.fingerprint)  # each member has that of the group's request


def _refill_tools(admitted: AdmittedStart, first: Rollout) -> Sequence[Tool] | None:
    """Return the tools of further refills; None if this server does not have the agent of the group, in its version."""
    accepted, agent = first.log.entries[0].record, admitted.agent
    version = accepted.agent_version if isinstance(accepted, Accepted) else ""
    if isinstance(agent, MissingAgent) or agent.version != version:
        return None
    try:
        return admitted.tools()
    except RolloutError:
        return None
