"""Faults injected into one rollout of a group: the table of docs/failures.md, row by row."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1.outcome_pb2 import Outcome
from osmosis.rollout.v1.rollout_service_pb2 import Rollout
from rollout_client import (
    AsyncClient,
    RolloutFailed,
    Target,
    Tokenizer,
    TrainingSample,
    only_trainable,
    raise_for_failure,
    samples,
)
from rollout_client.errors import InvalidRequest
from rollout_client.export import to_trl, to_verl
from rollout_client.samples import failure_class_of
from rollout_server import Agent, Run
from rollout_server.app import Server
from rollout_server.core.outcome import POSSIBLE_CLASSES, TRAIN_BY_DEFAULT, FailureClass
from rollout_server.settings import Settings

from tests.support.faulty_endpoint import (
    TOO_LONG,
    FaultyEndpoint,
    Misbehave,
    break_off,
    call_many,
    close,
    ids_of,
    serve,
    status,
    text,
)

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "failures.md").read_text(encoding="utf-8")
FAULTY = "member 1"
MEMBERS = ("member 0", FAULTY, "member 2")


def table(title: str) -> list[list[str]]:
    """The rows of the page's first table below a title, without the header."""
    section = next(part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n"))
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


FAULTS = {name: rest for name, *rest in table("Faults")}


class Fragile(Agent):
    """Takes two turns. Its metadata name a fault to commit after the first."""

    name = "fragile"

    def __init__(self, *tools: Any) -> None:
        self.tools = tools

    async def play(self, run: Run) -> None:
        await run.sample()
        fault = run.metadata.get("fault")
        if fault == "play":
            raise LookupError("the world has ended")
        if fault == "time":
            await asyncio.Event().wait()
        await run.append({"role": "user", "content": "Go on."})
        reply = await run.sample()
        if reply.tool_calls:
            await run.call(reply.tool_calls)

    async def reward(self, run: Run) -> float:
        if run.metadata.get("fault") == "reward":
            raise LookupError("the judge is gone")
        return 1.0


@dataclass
class Injection:
    """How a fault is injected.

    Args:
        engine: the endpoint is an inference engine, otherwise a trainer.
        respond: what the endpoint does in the second turn.
        fault: what the agent does.
        fields: further fields of the spec of the faulty rollout.
        meanwhile: runs while the endpoint does not respond.
        turn: the turn of the failure.
    """

    respond: Misbehave | None = None
    engine: bool = False
    fault: str = ""
    fields: dict[str, Any] | None = None
    meanwhile: Callable[[Place, str], Awaitable[object]] | None = None
    turn: int = 2


@dataclass
class Place:
    """A server, a client of it, and the endpoint that generates."""

    server: Server
    client: AsyncClient
    endpoint: FaultyEndpoint

    async def start(self, member: str, *, engine: bool, **fields: Any) -> str:
        dialect = Target(self.endpoint.url, "vllm", model="m") if engine else Target(self.endpoint.url, "http_plain")
        messages = [{"role": "user", "content": member}]
        started = await self.client.start(messages=messages, completions=dialect, group_id="g", **fields)
        return started.uid


async def _cancel(place: Place, uid: str) -> None:
    await place.client.cancel(uid, reason="enough")


async def _drain(place: Place, uid: str) -> None:
    await place.server.drain()


NOT_HERE = Tokenizer("nobody/no-such-model")
INJECTIONS = {
    "the trainer returns 500": Injection(status(500)),
    "the trainer closes the connection": Injection(close),
    "the trainer returns malformed JSON": Injection(text('{"choices": [')),
    "the trainer returns 400": Injection(status(400)),
    "the trainer does not respond in time": Injection(),
    "the engine returns 500": Injection(status(500), engine=True),
    "the engine returns 429 until no retry is left": Injection(status(429), engine=True),
    "the engine breaks its response off": Injection(break_off, engine=True),
    "the engine returns malformed JSON": Injection(text("[1, 2"), engine=True),
    "the conversation exceeds the engine's context": Injection(status(400, TOO_LONG), engine=True),
    "the model calls too many tools at once": Injection(call_many(9), fields={"limits": {"calls_per_turn": 1}}),
    "a tool's process cannot import it": Injection(call_many(2)),
    "the agent raises in `play`": Injection(fault="play", turn=1),
    "the agent raises in `reward`": Injection(fault="reward"),
    "the time limit of the rollout expires": Injection(fault="time", fields={"limits": {"time": 0.5}}, turn=1),
    "the rollout is cancelled": Injection(meanwhile=_cancel),
    "the server is drained": Injection(meanwhile=_drain),
    "the tokenizer is missing": Injection(engine=True, fields={"tokenizer": NOT_HERE}, turn=1),
}


@asynccontextmanager
async def place(injection: Injection, *tools: Any, agent: Agent | None = None) -> AsyncIterator[Place]:
    endpoint = FaultyEndpoint()
    hangs = injection.respond is None and not injection.fault and not injection.fields
    misbehave = endpoint.hang if hangs else injection.respond
    endpoint.faults = {FAULTY: misbehave} if misbehave is not None else {}
    settings = Settings(
        _env_file=None,
        host="127.0.0.1",
        http=False,
        grpc_port=0,
        tokenizers_offline=True,
        drain_seconds=0,
        retries=1,
        retry_base_seconds=0.01,
        trainer_timeout_seconds=60 if injection.meanwhile else 0.5,
    )
    async with (
        serve(endpoint),
        Server([agent or Fragile(*tools)], settings) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield Place(server, client, endpoint)


async def group(at: Place, injection: Injection, **fields: Any) -> dict[str, Rollout]:
    """Run three rollouts, one of them with the fault, and return them by their first message."""
    uids = {}
    for member in MEMBERS:
        own = {**(injection.fields or {}), "metadata": {"fault": injection.fault}} if member == FAULTY else {}
        uids[member] = await at.start(member, engine=injection.engine, **fields, **own)
    done = {each: await at.client.wait(uids[each], timeout=60, view="full") for each in MEMBERS if each != FAULTY}
    if injection.meanwhile is not None:
        await at.endpoint.hanging.wait()
        await injection.meanwhile(at, uids[FAULTY])
    done[FAULTY] = await at.client.wait(uids[FAULTY], timeout=60, view="full")
    return done


@pytest.fixture
def tools(tmp_path: Path) -> list[Any]:
    """A tool that the server can serve, and whose process cannot import it."""
    module = tmp_path / "tools_of_failures.py"
    module.write_text(
        'from rollout_server import tool\n\n\n@tool(process=True)\ndef f() -> int:\n    """F."""\n    return 1\n'
    )
    sys.path.append(str(tmp_path))
    try:
        import tools_of_failures  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("tools_of_failures", None)
    module.write_text("raise LookupError('no such table')")
    return [tools_of_failures.f]


def assert_generated(sample: TrainingSample, turns: int) -> None:
    """The tokens with mask 1 are those of the completions, each after one message of the user, and nothing else."""
    trained = [token for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
    assert trained == [token for turn in range(turns) for token in ids_of(2 * turn + 1)]


def never_judged(outcome: Outcome) -> bool:
    return not outcome.HasField("reward") and not outcome.scores


def test_the_page_and_the_tests_have_the_same_faults() -> None:
    assert set(FAULTS) == set(INJECTIONS)


def test_the_tables_of_classes_and_categories_are_those_of_the_code() -> None:
    assert {name: trains == "yes" for name, trains, *_ in table("Classes")} == {
        each.name: each in TRAIN_BY_DEFAULT for each in FailureClass
    }
    assert {name: classes.split(", ") for name, classes in table("Categories")} == {
        category.name: [each.name for each in classes] for category, classes in POSSIBLE_CLASSES.items()
    }


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault(fault: str, tools: list[Any]) -> None:
    category, failure_class, verdict = FAULTS[fault]
    injection = INJECTIONS[fault]
    async with place(injection, *tools) as at:
        rollouts = await group(at, injection)

    # The sample: it says what failed and whether it trains, and holds the first turn as it was generated.
    failed = rollouts[FAULTY].outcome
    assert failure_class_of(failed) == failure_class.lower()
    with pytest.raises(RolloutFailed) as raised:
        raise_for_failure(rollouts[FAULTY])
    error = raised.value
    assert (error.failure_class, error.category) == (failure_class.lower(), category.lower())
    assert (error.uid, error.turn) == (rollouts[FAULTY].uid, injection.turn if category else 0)
    assert never_judged(failed)
    if injection.engine:
        assert "trainer" not in error.message
    found = samples(rollouts[FAULTY])
    assert [each.untrainable_reason or "trains" for each in found] == [verdict] * (verdict != "none")
    for sample in found:
        assert sample.trainable is (verdict == "trains")
        assert (sample.reward, sample.failure_class) == (None, failure_class.lower())
        assert_generated(sample, failed.metrics.turns)
        verl, trl = to_verl(sample), to_trl([sample])
        assert any(verl["response_mask"]) is any(trl["env_mask"][0]) is sample.trainable
        assert (verl["reward_score"], trl["rollout_reward"]) == (None, [None])
        assert trl["rollout_untrainable"] == [sample.untrainable_reason]

    # The group: the others completed, were judged, and train.
    for member in MEMBERS:
        if member != FAULTY:
            raise_for_failure(rollouts[member])
            assert rollouts[member].outcome.reward == 1.0
            assert_generated(samples(rollouts[member])[0], 2)
    kept, dropped = only_trainable([sample for member in MEMBERS for sample in samples(rollouts[member])])
    assert len(kept) == (3 if verdict == "trains" else 2)
    assert dropped == ({} if verdict in ("trains", "none") else {verdict: 1})


class Unjudged(Agent):
    """Has no reward function."""

    name = "unjudged"


async def test_a_rollout_that_nobody_judged_has_no_reward() -> None:
    async with place(Injection(), agent=Unjudged()) as at:
        uid = await at.start("member 0", engine=True)
        rollout = await at.client.wait(uid, timeout=60, view="samples")
    raise_for_failure(rollout)
    assert never_judged(rollout.outcome)
    (sample,) = samples(rollout)
    assert (sample.trainable, sample.reward, to_verl(sample)["reward_score"]) == (True, None, None)


@pytest.mark.parametrize(
    ("train_on", "fault", "trains"),
    [
        ([], "the time limit of the rollout expires", False),
        (["policy"], "the time limit of the rollout expires", False),
        (["trainer"], "the trainer returns 500", True),
        (["engine", "server"], "the trainer returns 500", False),
        (["cancelled"], "the rollout is cancelled", True),
    ],
)
async def test_the_request_says_which_failures_train(train_on: list[Any], fault: str, trains: bool) -> None:
    injection = INJECTIONS[fault]
    async with place(injection) as at:
        rollouts = await group(at, injection, train_on=train_on)
    assert [each.trainable for each in samples(rollouts[FAULTY])] == [trains]
    assert never_judged(rollouts[FAULTY].outcome)
    assert list(rollouts[FAULTY].spec.train_on.classes) == sorted(rollouts[FAULTY].spec.train_on.classes)
    assert rollouts[FAULTY].spec.HasField("train_on")
    assert all(each.trainable for member in ("member 0", "member 2") for each in samples(rollouts[member]))


async def test_wrong_classes_are_refused() -> None:
    injection = Injection()
    async with place(injection) as at:
        spec = Rollout().spec
        spec.messages.add().json = '{"role": "user", "content": "Hi"}'
        spec.completions.url = at.endpoint.url
        spec.rollout_id = "r"
        for classes, said in (([0], "UNSPECIFIED"), ([99], "99 is unknown"), ([1] * 9, "at most 8")):
            del spec.train_on.classes[:]
            spec.train_on.classes.extend(classes)
            with pytest.raises(InvalidRequest, match=re.escape(said)) as refused:
                await at.client.start(spec)
            assert [each.field for each in refused.value.fields if "train_on" in each.field] != []
        with pytest.raises(ValueError, match=r"train_on\[0\] must be one of policy"):
            await at.start("member 0", engine=False, train_on=["nobody"])
