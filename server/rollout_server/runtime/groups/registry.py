"""The groups that this server knows, by caller and group id, and by request id."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rollout_server.core.error import Conflict, NotFound, RolloutError, Violation
from rollout_server.core.fingerprint import is_same_payload
from rollout_server.core.outcome import Category, Failure
from rollout_server.runtime.groups.group import RolloutGroup
from rollout_server.runtime.groups.restored import GroupDamaged, restored_group
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.journal import GroupDropped, StoredGroup
from rollout_server.runtime.registry.interruption import interrupted_text
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart, Caller, StartRequest

_log = logging.getLogger(__name__)


class GroupRegistry:
    """All groups of a server. Lives on one event loop. A group is dropped with the first of its rollouts after its end."""

    def __init__(self, registry: RolloutRegistry) -> None:
        self._registry = registry
        self._groups: dict[tuple[str, str], RolloutGroup] = {}
        self._requests: dict[tuple[str, str, str], RolloutGroup] = {}
        self._restored: list[RolloutGroup] = []
        self._rewardless: list[Rollout] = []

    async def load(self, restore_streams: Callable[[Iterable[Rollout]], None] = lambda rollouts: None) -> None:
        """Take over the rollouts and groups of earlier processes. See `RolloutRegistry.load`.

        `restore_streams` is called with all rollouts, at the same time as groups are rebuilt.
        """

        def restore(groups: Sequence[StoredGroup], rollouts: Mapping[str, Rollout]) -> None:
            self._restore(groups, rollouts)
            restore_streams(rollouts.values())

        await self._registry.load(restore)

    async def resume(self) -> None:
        """Continue what `load` took over. See `RolloutRegistry.resume`."""
        restored, self._restored = self._restored, []
        for group in restored:
            group.resume()
        rewardless, self._rewardless = self._rewardless, []
        text = interrupted_text("the journal has lost rollouts of its group, so the group cannot get its reward")
        for rollout in rewardless:
            rollout.ending.request(Failure(Category.INTERRUPTED, text))
        await asyncio.sleep(0)  # a queued rollout whose end was requested ends in the next iteration of the event loop
        self._registry.resume()

    def admit(self, request: StartRequest, plan: GroupPlan, also_wrong: Iterable[Violation] = ()) -> AdmittedStart:
        """Validate the request for a group once, for all its rollouts. Any thread may call it. See `StartAdmission.admit`."""
        largest = self._registry.capacity.largest_group
        return self._registry.admission.admit(request, [*also_wrong, *plan.violations(request.spec, largest)])

    def start(self, admitted: AdmittedStart, plan: GroupPlan) -> tuple[RolloutGroup, bool]:
        """Start the rollouts of a group, all or none, or find the group that was started under the same request id.

        Returns the group and whether it was found. Raises `RolloutError` if there is no room, if the request id belongs to another
        payload, or if the caller has another group with this group id.
        """
        request, key = admitted.request, admitted.key
        found = self._requests.get(key) if key is not None else None
        if found is not None:
            if found.plan != plan or not is_same_payload(found.admitted.fingerprint, admitted.fingerprint):
                text = f"request id {request.request_id!r} is known with another payload (group {found.id!r}); use another id"
                raise Conflict(text)
            found.update_credentials(admitted)
            return found, True
        group = RolloutGroup(self._registry.new_id(), admitted, plan, self._registry, self._drop)
        if (group.caller, group.id) in self._groups:
            raise Conflict(f"you have another group {group.id!r}; use another group id, or none", reason="GROUP_EXISTS")
        group.start()
        self._list(group)
        return group, False

    async def accept(self, group: RolloutGroup) -> None:
        """Wait until a group that was started or found is stored. Its start must not be acknowledged before that.

        Raises `Unavailable` if the journal cannot be written. Then a group that is not stored yet is forgotten, and its rollouts.
        """

        def refused() -> Iterator[Rollout]:  # evaluated once the journal has failed
            if not group.is_stored:
                yield from group.rollouts

        try:
            await self._registry.accept(refused())
        except RolloutError as error:
            if not group.is_stored:
                self._drop(group)
                group.abandon(error)
            raise

    def get(self, group_id: str, caller: Caller) -> RolloutGroup:
        """Return a group that the caller may see: its own, or, for an admin, the newest with this id. Raise `NotFound`."""
        group = self._groups.get((caller.name, group_id))
        if group is None and caller.admin:
            group = next((each for each in reversed(self._groups.values()) if each.id == group_id), None)
        if group is None:
            text = f"there is no group {group_id!r} that StartGroup started; a group is forgotten with its rollouts"
            raise NotFound(text, reason="GROUP_NOT_FOUND")
        return group

    def _restore(self, groups: Sequence[StoredGroup], rollouts: Mapping[str, Rollout]) -> None:
        """Rebuild the groups of earlier processes. The rollouts of a group that cannot be rebuilt go on one by one.

        Not those whose agent has a `reward_group`: they would end without that reward.
        """
        for stored in groups:
            try:
                group = restored_group(stored, rollouts, self._registry, self._drop)
            except GroupDamaged as error:
                _log.error("group %s is not restored: %s; its rollouts go on one by one", stored.group.group_id, error)
                self._registry.journal.write(GroupDropped(stored.group.uid))
                members = *stored.group.members, *(uid for _, uid in stored.refills)
                left = [rollouts[uid] for uid in members if uid in rollouts and rollouts[uid].outcome is None]
                self._rewardless += [rollout for rollout in left if rollout.agent.overrides("reward_group")]
                continue
            self._restored.append(group)
            if stored.group.is_listed:
                self._list(group)

    def _list(self, group: RolloutGroup) -> None:
        self._groups[group.caller, group.id] = group
        if group.admitted.key is not None:
            self._requests[group.admitted.key] = group

    def _drop(self, group: RolloutGroup) -> None:
        # Both ids may belong to a newer group by now: its rollouts are dropped one by one.
        if self._groups.get((group.caller, group.id)) is group:
            del self._groups[group.caller, group.id]
        key = group.admitted.key
        if key is not None and self._requests.get(key) is group:
            del self._requests[key]
