"""Random changes, commits and restarts: the journal has the same as a model that applies one change after the other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.journal import (
    CancelRequested,
    Change,
    CredentialsChanged,
    DeliveryChanged,
    FormedGroup,
    GroupChange,
    GroupDropped,
    GroupFormed,
    GroupGrew,
    KeyMinted,
    OutcomeReceived,
    RolloutDropped,
    StoredDelivery,
    StoredGroup,
    StoredRollout,
)
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.ports import Credentials

from tests.edge.journal.store import accepted, appended
from tests.support.journal import apply, apply_to_groups


@dataclass
class Model:
    """What the journal should have, by uid in the order of acceptance."""

    rollouts: dict[str, StoredRollout] = field(default_factory=dict)
    groups: dict[str, StoredGroup] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        if isinstance(change, GroupChange):
            apply_to_groups(self.groups, change)
        else:
            apply(self.rollouts, change)


def a_change(rng: random.Random, model: dict[str, StoredRollout], number: int) -> Change:
    if not model or rng.random() < 0.15:
        return accepted(f"{rng.choice('xyz')}{number}", credentials(rng))
    uid = rng.choice([*model])
    entries = len(model[uid].entries)
    delivery = Delivery(
        rng.choice([*DeliveryState]), number, f"error {number}", rng.choice([None, 1.5]), rng.choice([None, 2.5])
    )
    changes: list[Change] = [
        appended(uid, entries + 1, entries + rng.randint(1, 4)),
        CredentialsChanged(uid, credentials(rng)),
        DeliveryChanged(uid, StoredDelivery(delivery, f"key {uid}", 3.5, uid.encode() * 100)),
        OutcomeReceived(uid),
        CancelRequested(uid, f"reason {number} \ud800"),
        KeyMinted(uid, rng.choice([b"", bytes([number % 256]) * 32])),
        RolloutDropped(uid),
    ]
    return rng.choices(changes, [10, 2, 2, 1, 1, 1, 1])[0]


def a_group_change(rng: random.Random, model: dict[str, StoredGroup], number: int) -> Change:
    if not model or rng.random() < 0.4:
        members = tuple(f"member-{number}-{index}" for index in range(rng.randint(1, 4)))
        flags = rng.randint(0, 3), rng.randint(0, 3), rng.random() < 0.5
        return GroupFormed(
            FormedGroup(f"group-{number}", "ü", f"request-{number}", f"rollout-{number}", *flags, members)
        )
    stored = model[rng.choice([*model])]
    grew = GroupGrew(stored.group.uid, len(stored.refills) + 1, rng.randint(0, 3), f"refill-{number}")
    return rng.choices([grew, GroupDropped(stored.group.uid)], [3, 1])[0]


def credentials(rng: random.Random) -> Credentials:
    return rng.choice([Credentials(), Credentials("sk-1", models={"judge": "sk-2"}), Credentials(tools="sk-3")])


@pytest.mark.parametrize("seed", range(12))
async def test_random_changes(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    model = Model()
    number = 0
    heard: list[int] = []
    for _ in range(4):
        async with SqliteJournal(directory) as journal:
            loaded = [replace(each, entries=tuple(each.entries)) for each in await journal.load()]
            assert loaded == [*model.rollouts.values()]
            groups = [replace(each, refills=tuple(each.refills)) for each in await journal.load_groups()]
            assert groups == [*model.groups.values()]
            for _ in range(100):
                number += 1
                is_of_group = rng.random() < 0.2
                change = (
                    a_group_change(rng, model.groups, number) if is_of_group else a_change(rng, model.rollouts, number)
                )
                model.apply(change)
                journal.write(change, lambda number=number: heard.append(number))
                if rng.random() < 0.1:
                    await journal.flush(patient=rng.random() < 0.5)
                    assert heard == [*range(1, number + 1)]
    assert heard == [*range(1, 401)]
