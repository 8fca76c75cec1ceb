"""Selections by failure class and by text, and pages of them that are found bit by bit."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import outcome_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.runtime.registry import pages

from tests.support.agents import Gated
from tests.support.server_client import Caller, refusal
from tests.support.start_requests import json_message, start

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NEEDLE = 'Straße "x"\n\\日本 </b>'


def say(content: str, *, ascii_only: bool = True) -> Any:
    """A user's message, as various JSON libraries write it."""
    return json_message(
        json.dumps({"role": "user", "content": [{"type": "text", "text": content}]}, ensure_ascii=ascii_only)
    )


async def listed(caller: Caller, size: int = 0, **conditions: Any) -> list[str]:
    """The rollout ids of all pages of a selection."""
    found: list[str] = []
    request = pb.ListRolloutsRequest(selection=pb.Selection(**conditions), page_size=size)
    while True:
        page = await caller.stub.ListRollouts(request)
        found += [rollout.spec.rollout_id for rollout in page.rollouts]
        assert len(page.rollouts) <= (size or 100)
        if not page.next_page_token:
            return found
        request.page_token = page.next_page_token


async def test_failed_and_cancelled_rollouts_are_selected_by_class(caller: Caller, gated: Gated) -> None:
    await caller.play(start(rollout_id="failed", agent="calculator"))  # its trainer is nowhere
    await caller.play(start(rollout_id="completed"))
    cancelled = (await caller.start(start(rollout_id="cancelled", agent="gated"))).rollout.uid
    await caller.start(start(rollout_id="running", agent="gated"))
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[cancelled])))
    await caller.ended(cancelled)
    assert await listed(caller, failure_classes=[outcome_pb2.FAILURE_CLASS_TRAINER]) == ["failed"]
    assert await listed(caller, failure_classes=[outcome_pb2.FAILURE_CLASS_CANCELLED]) == ["cancelled"]
    both = [outcome_pb2.FAILURE_CLASS_TRAINER, outcome_pb2.FAILURE_CLASS_CANCELLED]
    assert await listed(caller, failure_classes=both) == ["cancelled", "failed"]
    assert await listed(caller, failure_classes=[outcome_pb2.FAILURE_CLASS_TOOL]) == []
    gated.gate.set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ALPHA", ["by label", "by group", "alpha-id"]),
        ("not found", []),
        ('STRASSE "X"\n\\日本 </B>', ["escaped", "unescaped"]),
        ("\n", ["escaped", "unescaped"]),
        ("user", []),
        ("content", []),
        ("type", []),
        ("text", []),
        ("idle", ["escaped", "unescaped", "by label", "by group", "alpha-id"]),
        ("by label", ["by label"]),
        ("cancelled by nobody", []),
        ("%", []),
        (".*", []),
    ],
)
async def test_a_text_is_found_in_ids_labels_and_messages(caller: Caller, text: str, found: list[str]) -> None:
    await caller.play(start(rollout_id="alpha-id"))
    await caller.play(start(rollout_id="by group", group_id="the Alpha group"))
    await caller.play(start(rollout_id="by label", labels={"x": "AlPhA"}))
    await caller.play(start(rollout_id="unescaped", messages=[say(NEEDLE, ascii_only=False)]))
    await caller.play(start(rollout_id="escaped", messages=[say(NEEDLE)]))
    assert await listed(caller, text=text) == found
    assert await listed(caller, 1, text=text) == found


async def test_the_reason_of_an_end_is_searched(caller: Caller) -> None:
    uid = (await caller.start(start(agent="gated", rollout_id="a"))).rollout.uid
    assert await listed(caller, text="too EXPENSIVE") == []
    request = pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid]), reason="it is too expensive")
    await caller.stub.CancelRollouts(request)
    await caller.ended(uid)
    assert await listed(caller, text="too EXPENSIVE") == ["a"]


async def test_a_long_message_is_searched_to_its_end(caller: Caller) -> None:
    content = "ä" * 200_000 + "Needle" + "b" * 100_000
    for ascii_only in (True, False):
        await caller.play(start(rollout_id="long", messages=[say(content, ascii_only=ascii_only)]))
    assert await listed(caller, text="äneedleB") == ["long", "long"]


async def test_only_lists_search(caller: Caller) -> None:
    selection = pb.Selection(text="a", all=True)
    for call in (
        caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=selection)),
        caller.stub.RedeliverOutcomes(pb.RedeliverOutcomesRequest(selection=selection)),
    ):
        refused = await refusal(call)
        assert (refused.code, set(refused.fields)) == (INVALID, {"selection.text"})


@pytest.mark.parametrize(
    ("conditions", "field"),
    [
        ({"text": "x" * 257}, "selection.text"),
        ({"failure_classes": [0]}, "selection.failure_classes"),
        ({"failure_classes": [99]}, "selection.failure_classes"),
    ],
)
async def test_a_wrong_condition_is_named(caller: Caller, conditions: dict[str, Any], field: str) -> None:
    refused = await refusal(listed(caller, **conditions))
    assert (refused.code, set(refused.fields)) == (INVALID, {field})


async def test_a_scan_that_takes_long_ends_early_and_goes_on(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        await caller.play(start(rollout_id=f"{'odd' if number % 2 else 'even'} {number}"))
    monkeypatch.setattr(pages, "SLICE", -1.0)
    monkeypatch.setattr(pages, "_SLICES", 3)
    expected = [f"odd {number}" for number in range(19, 0, -2)]
    assert await listed(caller, 5, text="odd") == expected
    assert await listed(caller, 5, agent="idle") == [f"{'odd' if n % 2 else 'even'} {n}" for n in range(19, -1, -1)]
    page = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=pb.Selection(text="nowhere")))
    assert page.next_page_token
    assert not page.rollouts
