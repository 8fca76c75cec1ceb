"""When the trainer's items are acknowledged."""

from __future__ import annotations

import asyncio

import pytest
from rollout_server.edge.stream.acknowledgement import _MOST, Acknowledgement


class Woken:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.received = Acknowledgement(self.event.set)


@pytest.fixture
async def woken() -> Woken:
    return Woken()


async def test_answers_are_acknowledged_together(woken: Woken) -> None:
    """A moment after the first of them, without any further item."""
    for sequence in (1, 2, 3):
        woken.received.take(sequence, at_once=False)
    assert (woken.event.is_set(), woken.received.next(at_once=False)) == (False, None)
    await asyncio.wait_for(woken.event.wait(), 30)
    assert [woken.received.next(at_once=False) for _ in range(2)] == [3, None]
    woken.event.clear()
    woken.received.take(4, at_once=False)
    await asyncio.wait_for(woken.event.wait(), 30)
    assert woken.received.next(at_once=False) == 4


async def test_many_are_not_kept_waiting(woken: Woken) -> None:
    for sequence in range(1, _MOST + 1):
        assert not woken.event.is_set()
        woken.received.take(sequence, at_once=False)
    assert (woken.event.is_set(), woken.received.next(at_once=False)) == (True, _MOST)


async def test_what_a_trainer_may_wait_for_is_acknowledged_at_once(woken: Woken) -> None:
    woken.received.take(1, at_once=False)
    woken.received.take(2, at_once=True)
    assert (woken.event.is_set(), woken.received.next(at_once=False)) == (True, 2)


async def test_a_stream_that_ends_acknowledges_at_once(woken: Woken) -> None:
    woken.received.take(1, at_once=False)
    assert [woken.received.next(at_once=True) for _ in range(2)] == [1, None]


async def test_a_welcome_acknowledges(woken: Woken) -> None:
    woken.received.take(1, at_once=True)
    woken.received.reset()
    assert woken.received.next(at_once=True) is None
    assert woken.received.seen == 1
