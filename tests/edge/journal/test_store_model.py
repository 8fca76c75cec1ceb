"""Random changes, commits and restarts: the journal has the same as a model that applies one change after the other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_server.edge.journal import SqliteJournal
from rollout_server.runtime.journal import (
    Change,
    CredentialsChanged,
    DeliveryChanged,
    EntriesAppended,
    OutcomeReceived,
    RolloutAccepted,
    RolloutDropped,
    StoredDelivery,
    StoredRollout,
)
from rollout_server.runtime.outcome_delivery import Delivery, DeliveryState
from rollout_server.runtime.ports import Credentials

from tests.edge.journal.store import accepted, appended

MODEL = dict[str, StoredRollout]


def apply(model: MODEL, change: Change) -> None:
    if isinstance(change, RolloutAccepted):
        model[change.start.uid] = StoredRollout(change.start, [])
        return
    uid = change.uid
    rollout = model[uid]
    match change:
        case EntriesAppended():
            model[uid] = replace(rollout, entries=[*rollout.entries, *change.entries])
        case CredentialsChanged():
            request = replace(rollout.start.request, credentials=change.credentials)
            model[uid] = replace(rollout, start=replace(rollout.start, request=request))
        case DeliveryChanged():
            model[uid] = replace(rollout, stored_delivery=change.stored)
        case OutcomeReceived():
            model[uid] = replace(rollout, received=True)
        case RolloutDropped():
            del model[uid]


def a_change(rng: random.Random, model: MODEL, number: int) -> Change:
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
        RolloutDropped(uid),
    ]
    return rng.choices(changes, [10, 2, 2, 1, 1])[0]


def credentials(rng: random.Random) -> Credentials:
    return rng.choice([Credentials(), Credentials("sk-1", models={"judge": "sk-2"}), Credentials(tools="sk-3")])


@pytest.mark.parametrize("seed", range(12))
async def test_random_changes(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    model: MODEL = {}
    number = 0
    heard: list[int] = []
    for _ in range(4):
        async with SqliteJournal(directory) as journal:
            assert [*await journal.load()] == [*model.values()]
            for _ in range(100):
                number += 1
                change = a_change(rng, model, number)
                apply(model, change)
                journal.write(change, lambda number=number: heard.append(number))
                if rng.random() < 0.1:
                    await journal.flush(patient=rng.random() < 0.5)
                    assert heard == [*range(1, number + 1)]
    assert heard == [*range(1, 401)]
