"""Rollouts of a real server whose tokens become too old: `max_lag` with each action, and random aborts and announcements."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rollout_client.export import write_jsonl
from rollout_client.trainer import Finished, Generated, Serving, Trainer, Turn
from rollout_server.calculator import Calculator

from tests.client.trainer.test_policy import QUESTION, groups_of, joined
from tests.client.trainer.test_stream_rollouts import Delegating
from tests.support.toy_model import ADDS, END, decode, encode, until
from tests.verification.rows import verified


class Aging:
    """A model whose step is the number of the turn, times four."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []

    async def __call__(self, turn: Turn) -> Generated:
        self.turns.append(turn)
        step = 4 * turn.turn
        ids = [*encode(ADDS(decode(turn.ids))), END]
        return Generated(ids, [-float(step)] * len(ids), policy_version=f"v{step}", policy_step=step)


async def one(trainer: Trainer, **fields: Any) -> Finished:
    (group,) = [each async for each in trainer.rollouts([QUESTION], n=1, tokenizer="toy", **fields)]
    return group.rollouts[0]


FIRST, SECOND = ([*encode(ADDS("<|im_start|>assistant" * turn)), END] for turn in (1, 2))


@pytest.mark.parametrize("serving", [None, Serving()])
@pytest.mark.parametrize("max_lag", [3, 4])
@pytest.mark.parametrize("action", ["cancel", "mask", "split", "keep"])
async def test_tokens_that_are_too_old(action: Any, max_lag: int, serving: Serving | None) -> None:
    """The first turn lags four steps behind the second."""
    async with joined(Aging(), serving=serving) as trainer:
        finished = await one(trainer, max_lag=max_lag, on_stale=action)
    assert (finished.mismatch, finished.checked) == (None, True)
    found = [(each.part, each.trainable, trained(each)) for each in (*finished.samples, *finished.untrainable)]
    whole = (0, True, [*FIRST, *SECOND])
    if max_lag == 4 or action == "keep":
        assert (finished.end, found) == ("stop", [whole])
    elif action == "cancel":
        assert (finished.end, finished.failure_class) == ("cancellation", "cancelled")
        assert finished.rollout.outcome.cancellation.reason.startswith("stale")
        assert found == [(0, False, [*FIRST, *SECOND])]
    elif action == "mask":
        assert (finished.end, found) == ("stop", [(0, True, SECOND)])
        (sample,) = finished.samples
        assert [span.reason for span in sample.spans or ()] == ["prompt", "stale", "environment", None]
        assert sample.policy_steps == (8, 8)
    else:
        assert (finished.end, found) == ("stop", [(1, True, SECOND), (0, False, FIRST)])
        assert [each.policy_steps for each in (*finished.samples, *finished.untrainable)] == [(8, 8), (4, 4)]
        assert finished.untrainable[0].untrainable_reason == "stale"
        assert finished.primary is finished.samples[0]


def trained(sample: Any) -> list[int]:
    return [token for token, trains in zip(sample.response_ids, sample.response_mask, strict=True) if trains]


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_an_announcement_cancels_what_is_too_old(serving: Serving | None) -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def generate(turn: Turn) -> Generated:
        if turn.turn == 2:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return Generated(FIRST)

    async with joined(generate, serving=serving) as trainer:
        await trainer.announce(version="v1", step=1)
        running = asyncio.create_task(one(trainer, max_lag=1, on_stale="cancel"))
        await begun.wait()
        await trainer.announce(step=2)
        assert not running.done()
        await trainer.announce(step=3)
        finished = await running
        await until(cancelled.is_set)
    assert finished.rollout.outcome.cancellation.reason.startswith("stale")
    assert (finished.mismatch, finished.checked, finished.samples) == (None, True, [])


class Erratic:
    """A model that is often aborted, whose weights change, and that records each token that it sampled."""

    def __init__(self, seed: int, texts: Callable[[str], str] = ADDS) -> None:
        self.random = Random(seed)
        self.texts = texts
        self.step = 0
        self.calls = 0
        self.sampled: dict[tuple[str, int], list[tuple[int, float, str, int | None]]] = {}

    async def __call__(self, turn: Turn) -> Generated:
        generated = self.complete(turn)
        for _ in range(self.random.choice((0, 0, 1, 5))):
            await asyncio.sleep(0)
        return generated

    async def batch(self, turns: Sequence[Turn]) -> list[Generated | Exception]:
        return [self.complete(turn) for turn in turns]

    def complete(self, turn: Turn) -> Generated:
        self.calls += 1
        prompt = turn.ids[: len(turn.ids) - turn.resumed]
        whole = [*encode(self.texts(decode(prompt))), END]
        known = self.sampled.setdefault((turn.uid, turn.turn), [])
        assert turn.ids[len(prompt) :] == whole[: turn.resumed] == [token for token, *_ in known]
        aborts = self.random.random() < 0.4 and len(known) < len(whole) - 1
        stop = self.random.randrange(turn.resumed, len(whole)) if aborts else len(whole)
        ids, value = whole[turn.resumed : stop], -self.random.randint(1, 9) / 4
        named = self.random.choice((("", None), ("", None), (f"v{self.step}", self.step), ("other", None)))
        known += [(token, value, *(named if named[0] else (f"v{self.step}", self.step))) for token in ids]
        return Generated(ids, [value] * len(ids), "abort" if aborts else "stop", *named)


async def weight_updates(trainer: Trainer, model: Erratic) -> None:
    """Announce a new step after every forty calls, half of the time with a pause."""
    while True:
        await until(lambda least=model.calls + 40: model.calls >= least)
        if pauses := model.random.random() < 0.5:
            await trainer.pause()
        model.step += 1
        announce = trainer.resume if pauses else trainer.announce
        await announce(version=f"v{model.step}", step=model.step)


def check_rollout(finished: Finished, model: Erratic, action: str) -> None:
    """Check that each sampled token of a completed turn is in one response of one sample, as it was sampled."""
    assert (finished.mismatch, finished.checked) == (None, True)
    assert finished.end == "stop" or (action, finished.end) == ("cancel", "cancellation"), finished.error
    outcome, found = finished.rollout.outcome, dict[int, list[tuple[int, float | None, str, int | None]]]()
    newest = outcome.policy_step
    for sample in sorted((*finished.samples, *finished.untrainable), key=lambda sample: sample.part):
        opening = len(sample.prompt_ids)
        for span in sample.spans or ():
            for at in range(span.start, span.stop) if span.author == "model" else ():
                assert at >= opening
                value = sample.logprobs[at - opening] if sample.logprobs is not None and span.trains else None
                token = (sample.response_ids[at - opening], value, span.policy_version, span.policy_step)
                found.setdefault(span.turn, []).append(token)
            stale = span.policy_step is not None and newest - span.policy_step > 1
            if span.author == "model" and action in ("mask", "split") and finished.end == "stop":
                assert stale == (span.reason == "stale" or sample.untrainable_reason == "stale")
    assert len(found) == outcome.metrics.turns
    for turn, tokens in found.items():
        sampled = model.sampled[finished.uid, turn]
        assert [(token, version, step) for token, _, version, step in tokens] == [
            (token, version, step) for token, _, version, step in sampled
        ]
        assert all(value in (None, own) for (_, value, _, _), (_, own, _, _) in zip(tokens, sampled, strict=True))


KINDS: dict[str, dict[str, Any]] = {"stream": {}, "serving": {"serving": Serving()}, "batches": {"batch_seconds": 60.0}}


@pytest.mark.parametrize(("kind", "count"), [("stream", 12), ("serving", 2), ("batches", 2)])
async def test_random_aborts_announcements_and_actions(kind: str, count: int, tmp_path: Path) -> None:
    """Sixteen times `count` rollouts: two agents, and all actions."""
    model = Erratic(int(os.environ.get("SEED", "7")))
    functions = {"generate": None, "generate_batch": model.batch} if kind == "batches" else {}
    async with joined(model, [Calculator(), Delegating()], **functions, **KINDS[kind]) as trainer:
        await trainer.announce(version="v0", step=0)
        updates = asyncio.create_task(weight_updates(trainer, model))
        plans = [
            (action, agent) for action in ("cancel", "mask", "split", "keep") for agent in ("calculator", "delegating")
        ]
        found = await asyncio.gather(
            *(
                groups_of(trainer, count, n=3 if agent == "calculator" else 1, agent=agent, max_lag=1, on_stale=action)
                for action, agent in plans
            )
        )
        updates.cancel()
    for (action, _), groups in zip(plans, found, strict=True):
        for group in groups:
            for finished in group.rollouts:
                check_rollout(finished, model, action)
    finished = [each for groups in found for group in groups for each in group.rollouts]
    assert any(len({span.policy_step for span in s.spans or ()}) > 2 for each in finished for s in each.samples)
    assert {s.part for each in finished for s in each.samples} > {0} or count < 10
    write_jsonl([s for each in finished for s in (*each.samples, *each.untrainable)], tmp_path / "samples.jsonl")
    report = verified(tmp_path / "samples.jsonl", (tmp_path / "samples.jsonl").read_bytes())
    assert report.ok, report.log.first()
