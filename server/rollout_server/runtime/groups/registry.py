"""The groups that this server knows, by caller and group id, and by request id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rollout_server.core.error import Conflict, NotFound, Violation
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.registry.interruption import check_resumable
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.start_request import AdmittedStart, Caller, StartRequest


class GroupRegistry:
    """All groups of a server. Lives on one event loop. A group is dropped with the first of its rollouts after its end."""

    def __init__(self, registry: RolloutRegistry) -> None:
        self._registry = registry
        self._groups: dict[tuple[str, str], RolloutGroup] = {}
        self._requests: dict[tuple[str, str, str], RolloutGroup] = {}

    def admit(self, request: StartRequest, plan: GroupPlan, also_wrong: Iterable[Violation] = ()) -> AdmittedStart:
        """Validate the request for a group once, for all its rollouts. Any thread may call it. See `RolloutRegistry.admit`."""
        largest = self._registry.capacity.largest_group
        admitted = self._registry.admit(request, [*also_wrong, *plan.violations(request.spec, largest)])
        durable = self._registry.journal.is_durable
        check_resumable(replace(admitted.request.spec, group_index=0), admitted.agent, durable=durable)
        return admitted

    def start(self, admitted: AdmittedStart, plan: GroupPlan) -> tuple[RolloutGroup, bool]:
        """Start the rollouts of a group, all or none, or find the group that was started under the same request id.

        Returns the group and whether it was found. Raises `RolloutError` if there is no room, if the request id belongs to another
        payload, or if the caller has another group with this group id.
        """
        request, key = admitted.request, admitted.key
        found = self._requests.get(key) if key is not None else None
        if found is not None:
            if (found.admitted.fingerprint, found.plan) != (admitted.fingerprint, plan):
                text = f"request id {request.request_id!r} is known with another payload (group {found.id!r}); use another id"
                raise Conflict(text)
            found.update_credentials(admitted)
            return found, True
        group_id = request.spec.group_id or self._registry.new_id()
        if (request.caller, group_id) in self._groups:
            raise Conflict(f"you have another group {group_id!r}; use another group id, or none", reason="GROUP_EXISTS")
        group = RolloutGroup(group_id, admitted, plan, self._registry, self._drop)
        group.start()
        self._groups[request.caller, group_id] = group
        if key is not None:
            self._requests[key] = group
        return group, False

    def get(self, group_id: str, caller: Caller) -> RolloutGroup:
        """Return a group that the caller may see: its own, or, for an admin, the newest with this id. Raise `NotFound`."""
        group = self._groups.get((caller.name, group_id))
        if group is None and caller.admin:
            group = next((each for each in reversed(self._groups.values()) if each.id == group_id), None)
        if group is None:
            text = f"there is no group {group_id!r} that StartGroup started; a group is forgotten with its rollouts"
            raise NotFound(text, reason="GROUP_NOT_FOUND")
        return group

    def _drop(self, group: RolloutGroup) -> None:
        # Both ids may belong to a newer group by now: its rollouts are dropped one by one.
        if self._groups.get((group.caller, group.id)) is group:
            del self._groups[group.caller, group.id]
        key = group.admitted.key
        if key is not None and self._requests.get(key) is group:
            del self._requests[key]
