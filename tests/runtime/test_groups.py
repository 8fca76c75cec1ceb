"""Groups of rollouts are accepted as a whole or not at all, and rollouts that are held are not forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rollout_server import Agent, tool
from rollout_server.core import fingerprint
from rollout_server.core.error import (
    Busy,
    Conflict,
    Draining,
    InvalidRequest,
    NotFound,
    NotPossible,
    RolloutError,
    Violation,
)
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.ports import Credentials, Tool
from rollout_server.runtime.registry.registry import Check
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import Capacity, StartRequest

from tests.support.runtime_harness import FOREVER, ME, Looping, RuntimeHarness, Say, Script, a_spec, outcome_of

ALL = Selection(ME)


def accepting(found: Sequence[Rollout | None]) -> None:
    """Accept every group."""


class Groups(RuntimeHarness):
    """A harness whose uids also count up within a group."""

    taken = 0

    def _new_uid(self) -> str:
        self.taken += 1
        return f"u{self.taken}"

    async def begin(self, wishes: Sequence[StartRequest], check: Check = accepting) -> list[bool]:
        """Start a group; return for each rollout whether it already existed."""
        self.scripts |= {wish.spec.rollout_id: Script(Say(seconds=FOREVER)) for wish in wishes}
        taken = await self.roster.start_all([self.roster.admission.admit(wish) for wish in wishes], check)
        self.rollouts += [rollout for rollout, found in taken if not found]
        return [found for _, found in taken]

    @property
    def names(self) -> list[str]:
        """The ids of all rollouts, the oldest first."""
        return [rollout.spec.rollout_id for _, rollout in self.roster.select(ALL)][::-1]


def group(count: int, *, keyed: bool = True, name: str = "g", **fields: object) -> list[StartRequest]:
    return [
        StartRequest(a_spec(rollout_id=f"{name}/{k}", **fields), "me", f"{name}/{k}" if keyed else "")
        for k in range(count)
    ]


@tool
async def ping() -> str:
    """Answers."""
    return "pong"


class Choosing(Agent):
    """Choose tools by request, and fail for one of them."""

    name = "choosing"

    def tools_for(self, request: Request) -> Sequence[Tool]:
        if request.rollout_id == "g/3":
            raise LookupError
        return (ping,)


async def test_a_group_is_taken_whole_and_found_again() -> None:
    world = Groups()
    assert await world.begin(group(4)) == [False] * 4
    assert await world.begin(group(4)) == [True] * 4
    assert await world.begin(group(6)) == [True] * 4 + [False] * 2
    assert world.names == [f"g/{k}" for k in range(6)]
    await world.close()


def refusing(found: Sequence[Rollout | None]) -> None:
    raise NotPossible("no")


@pytest.mark.parametrize(
    ("wishes", "error"),
    [
        (group(9), Busy),
        ([*group(3), StartRequest(a_spec(rollout_id=" "), "me")], InvalidRequest),
        ([*group(3), StartRequest(a_spec(rollout_id="other"), "me", "known")], Conflict),
        ([*group(3), StartRequest(a_spec(rollout_id="other"), "me", "g/0")], Conflict),
        ([*group(3), StartRequest(a_spec(rollout_id="x"), "me", "k" * 257)], InvalidRequest),
        (group(4, agent="choosing"), RolloutError),
    ],
    ids=["no room", "invalid", "known otherwise", "twice in itself", "too long", "its agent fails"],
)
async def test_of_a_group_that_cannot_be_taken_whole_nothing_is_taken(
    wishes: list[StartRequest], error: type[RolloutError]
) -> None:
    world = Groups(Looping(), Choosing(), capacity=Capacity(running=2, queued=7))
    await world.begin([StartRequest(a_spec(rollout_id="there"), "me", "known")])
    with pytest.raises(error):
        await world.begin(wishes)
    assert (world.names, world.taken) == (["there"], 1)
    await world.begin(group(3))
    await world.close()


async def test_a_large_group_is_admitted_with_the_work_of_one_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    world, parsed = Groups(), list[str]()
    parse = fingerprint._json
    monkeypatch.setattr(fingerprint, "_json", lambda text: parsed.append(text) or parse(text))
    (one,) = group(1, metadata_json='{"a": 1}')
    wishes = [replace(one, spec=replace(one.spec, group_index=k), request_id=f"g/{k}") for k in range(50)]
    one_by_one = [world.roster.admission.admit(wish) for wish in wishes]
    parsed.clear()
    assert world.roster.admission.admit_alike(wishes) == one_by_one
    assert len(parsed) < 10
    await world.close()


async def test_a_group_for_which_there_is_never_room_takes_no_work() -> None:
    world = Groups(capacity=Capacity(active_bytes=1000))
    with pytest.raises(
        Busy, match=r"50 rollouts need .* bytes, at most 1,000 are allowed .*; start fewer at once"
    ) as busy:
        world.roster.admission.admit_alike(group(50))
    assert busy.value.reason == "TOO_MANY_BYTES"
    assert len(world.roster.admission.admit_alike(group(1))) == 1
    await world.close()


async def test_what_the_caller_finds_wrong_forbids_it_too() -> None:
    world = Groups()
    with pytest.raises(NotPossible):
        await world.begin(group(3), refusing)
    with pytest.raises(InvalidRequest, match=r"spec\.tools"):
        world.roster.admission.admit(group(3)[0], (Violation("spec.tools", "are not served"),))
    assert world.names == []
    await world.close()


async def test_rollouts_that_are_found_need_no_room_and_no_open_door() -> None:
    world = Groups(capacity=Capacity(running=2, queued=2))
    await world.begin(group(4))
    assert await world.begin(group(4)) == [True] * 4
    stopping = asyncio.create_task(world.roster.drain(1))
    await asyncio.sleep(0)
    assert await world.begin(group(4)) == [True] * 4
    with pytest.raises(Draining):
        await world.begin(group(5))
    await stopping
    await world.close()


async def test_what_happens_while_a_group_is_looked_at_counts() -> None:
    world = Groups(capacity=Capacity(running=2, queued=2))
    late = asyncio.create_task(world.begin(group(4, name="late")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert world.names == []
    world.start(Say(seconds=FOREVER), spec=a_spec(rollout_id="first"))
    with pytest.raises(Busy):
        await late
    assert world.names == ["first"]
    await world.close()


async def test_two_groups_of_the_same_ids_at_the_same_time_are_one() -> None:
    world = Groups()
    found = await asyncio.gather(world.begin(group(5)), world.begin(group(5)))
    assert sorted(found) == [[False] * 5, [True] * 5]
    assert len(world.names) == 5
    await world.close()


async def test_what_is_held_is_not_forgotten_before_it_is_released() -> None:
    world = Groups(capacity=Capacity(finished=0))
    rollout = world.start(Say("8"))
    rollout.update_credentials(Credentials("s3cr3t"))
    rollout.hold("a consumer")
    await outcome_of(rollout)
    await asyncio.sleep(1)
    world.roster.forget()
    assert world.roster.get(rollout.uid, ME) is rollout
    assert rollout.credentials == Credentials()
    rollout.release("a consumer")
    with pytest.raises(NotFound):
        world.roster.get(rollout.uid, ME)
    await world.close()


async def test_what_is_released_before_its_end_is_forgotten_as_any_other() -> None:
    world = Groups(capacity=Capacity(finished=0))
    rollout = world.start(Say("8", seconds=5))
    rollout.hold("a consumer")
    rollout.release("a consumer")
    await outcome_of(rollout)
    await asyncio.sleep(1)
    with pytest.raises(NotFound):
        world.roster.get(rollout.uid, ME)
    await world.close()
