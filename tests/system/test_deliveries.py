"""Hundreds of rollouts of the asynchronous HTTP API at once.

Each trainer receives exactly one outcome, whatever its responses are, and the server's record holds the tokens that the
trainer reported.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2_grpc, token_pb2
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.checks.verdict import JudgedTurn, TrainerSample, Verdict
from rollout_server.testing.script import Extensions, Fault, FaultKind, Reception, Script
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import rpc
from tests.system.test_many_rollouts import Sum

MANY = 100
PENDING = (pb.DELIVERY_STATE_UNSPECIFIED, pb.DELIVERY_STATE_PENDING)
BUSY = Fault.error(500, "busy")
IDS = frozenset({"token_ids", "prompt_token_ids", "logprobs"})

RECEPTIONS: Mapping[str, Sequence[Fault]] = {
    "ok": (),
    "500 twice": (BUSY, BUSY),
    "204": (Fault(kind=FaultKind.STATUS, status=204),),
    "429": (Fault.error(429, "slow down", {"retry-after": "1"}),),
    "408 and 425": (Fault.error(408, "slow"), Fault.error(425, "early")),
    "closed": (Fault(kind=FaultKind.CLOSED),),
    "reset twice": (Fault(kind=FaultKind.RESET), Fault(kind=FaultKind.RESET)),
    "truncated": (Fault.truncated(),),
}
"""Faults of the receiver that end in an acknowledgement: 204 is one itself; all others are followed by a 200."""


@dataclass(frozen=True)
class Yard:
    """A server, a strict trainer of the asynchronous HTTP API, and clients without a connection limit."""

    server: Server
    trainer: StrictTrainer
    http: aiohttp.ClientSession
    stub: rollout_service_pb2_grpc.RolloutServiceAsyncStub

    async def start(self, rollout_id: str, sum_: Sum) -> None:
        """Start a rollout over HTTP."""
        asked = {
            "rollout_id": rollout_id,
            "server_url": self.trainer.url,
            "messages": [{"role": "user", "content": sum_.question}],
            "completion_params": {"temperature": 0.7, "logprobs": True},
        }
        async with self.http.post("/v1/rollout/init", json=asked) as answer:
            assert answer.status == 202, await answer.text()
            said = await answer.json()
        assert said["rollout_id"] == rollout_id
        assert [tool["function"]["name"] for tool in said["tools"]] == ["add", "subtract", "multiply", "divide"]

    async def start_all(self, rollout_ids: Iterable[str]) -> None:
        """Start all of them at once, each with its own numbers."""
        numbered = enumerate(rollout_ids)
        await asyncio.gather(*(self.start(rollout_id, Sum(number)) for number, rollout_id in numbered))

    async def listed(self, view: Any = pb.ROLLOUT_VIEW_BASIC, **selection: Any) -> list[Any]:
        """All selected rollouts, page by page."""
        found, token = list[Any](), ""
        chosen = pb.Selection(**(selection or {"all": True}))
        while True:
            asked = pb.ListRolloutsRequest(selection=chosen, page_size=64, page_token=token, view=view)
            page = await self.stub.ListRollouts(asked)
            found.extend(page.rollouts)
            token = page.next_page_token
            if not token:
                return found

    async def settled(self) -> dict[str, Any]:
        """Wait until all deliveries are settled; return the rollouts by id, with samples."""
        while any(rollout.delivery.state in PENDING for rollout in await self.listed()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return {rollout.spec.rollout_id: rollout for rollout in await self.listed(pb.ROLLOUT_VIEW_FULL)}

    def verdict(self, rollout_id: str) -> Verdict:
        """The trainer's verdict on a rollout."""
        found = self.trainer.verdict(rollout_id)
        assert found is not None
        return found


@asynccontextmanager
async def yard(scripts: Mapping[str, Script], **settings: Any) -> AsyncIterator[Yard]:
    """Serve until the block ends. Pauses between attempts are short."""
    chosen = {
        "host": "127.0.0.1",
        "http_port": 0,
        "grpc_port": 0,
        "tokenizers_offline": True,
        "drain_seconds": 0,
        "max_running": 2 * MANY,
        "retry_base_seconds": 0.05,
        **settings,
    }
    async with Server([Calculator()], Settings(_env_file=None, **chosen)) as server:
        url = f"http://127.0.0.1:{server.http_port}"
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            StrictTrainer(dialect="plain", tools_from=url, scripts=scripts) as trainer,
            aiohttp.ClientSession(url, connector=connector) as http,
            rpc(server.grpc_port) as stub,
        ):
            yield Yard(server, trainer, http, stub)


def received(*faults: Fault, repeat_last: bool = False) -> Script:
    return Script(then_model=True, reception=Reception(faults, repeat_last))


def check_outcome(here: Yard, rollout_id: str, number: int, deliveries: int) -> None:
    """Assert that the trainer received one correct outcome, this many times."""
    verdict, sum_ = here.verdict(rollout_id), Sum(number)
    assert verdict.refusals == ()
    assert (verdict.accepted, len(verdict.turns), verdict.siblings, verdict.earlier) == (True, 3, 0, ())
    came = here.trainer.deliveries(rollout_id)
    assert len(came) == deliveries
    assert len({(delivery.raw, delivery.key) for delivery in came}) == 1
    body = came[0].body
    assert (body["status"], body["finish_reason"]) == ("COMPLETED", "stop")
    assert sum_.results[-1] in body["final_messages"][-1]["content"]
    assert sum_.owns_all(json.dumps(body["final_messages"]))


def check_sample(ours: token_pb2.Sample, theirs: TrainerSample) -> None:
    """Compare samples element by element."""
    assert tuple(ours.prompt_ids) == theirs.prompt_ids
    assert tuple(ours.response_ids) == theirs.response_ids
    assert tuple(ours.response_mask) == theirs.response_mask
    assert tuple(ours.logprobs.values) == theirs.logprobs


async def test_each_trainer_hears_one_outcome_however_it_takes_it() -> None:
    names = list(RECEPTIONS)
    kinds = {f"{names[number % len(names)]}/{number}": names[number % len(names)] for number in range(MANY)}
    scripts = {rollout_id: received(*RECEPTIONS[kind]) for rollout_id, kind in kinds.items()}
    async with yard(scripts) as here:
        await here.start_all(kinds)
        await asyncio.gather(*(here.trainer.completed(rollout_id) for rollout_id in kinds))
        rollouts = await here.settled()
        assert rollouts.keys() == kinds.keys()
        for number, (rollout_id, kind) in enumerate(kinds.items()):
            expected = 1 if kind == "204" else len(RECEPTIONS[kind]) + 1
            check_outcome(here, rollout_id, number, expected)
            assert here.verdict(rollout_id).concluded
            rollout = rollouts[rollout_id]
            assert rollout.delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
            assert rollout.delivery.attempts == expected
            (ours,) = rollout.outcome.samples
            check_sample(ours, here.verdict(rollout_id).sample)
            assert not rollout.outcome.warnings
        keys = Counter(here.trainer.deliveries(rollout_id)[0].key for rollout_id in kinds)
        assert set(keys.values()) == {1}


async def test_a_trainer_that_is_down_for_a_while_hears_of_all_afterwards() -> None:
    rollout_ids = [f"down/{number}" for number in range(MANY)]
    silence = received(Fault(kind=FaultKind.SILENCE))
    async with yard(dict.fromkeys(rollout_ids, silence)) as here:
        await here.start_all(rollout_ids)
        await asyncio.gather(*(here.trainer.delivered(rollout_id) for rollout_id in rollout_ids))
        async with here.trainer.down():  # this breaks the connections of all first deliveries
            while any(rollout.delivery.attempts < 4 for rollout in await here.listed()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert {rollout.delivery.state for rollout in await here.listed()} == {pb.DELIVERY_STATE_PENDING}
        rollouts = await here.settled()
        for number, rollout_id in enumerate(rollout_ids):
            check_outcome(here, rollout_id, number, deliveries=2)
            assert here.verdict(rollout_id).concluded
            assert rollouts[rollout_id].delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
            assert rollouts[rollout_id].delivery.attempts >= 5


async def test_a_refusal_is_final_and_listed_as_undeliverable() -> None:
    refused = [f"refused/{number}" for number in range(MANY // 10)]
    taken = [f"taken/{number}" for number in range(MANY // 10)]
    later = [f"later/{number}" for number in range(MANY // 10)]
    scripts = dict.fromkeys(refused, received(BUSY, Fault.error(400, "I do not like it"), repeat_last=True))
    scripts |= dict.fromkeys(later, received(BUSY, BUSY))
    async with yard(scripts) as here:
        await here.start_all([*refused, *taken])
        await here.settled()
        # Outcomes that are offered three times each, while the refused ones could be offered again.
        await here.start_all(later)
        rollouts = await here.settled()
        for number, rollout_id in enumerate(refused):
            check_outcome(here, rollout_id, number, deliveries=2)
            outcome = here.trainer.outcome(rollout_id)
            assert outcome is not None
            assert (outcome.answered, outcome.acknowledged) == (400, False)
            assert rollouts[rollout_id].delivery.state == pb.DELIVERY_STATE_REFUSED
            assert "I do not like it" in rollouts[rollout_id].delivery.error
        undeliverable = await here.listed(delivery_states=[pb.DELIVERY_STATE_REFUSED])
        assert sorted(rollout.spec.rollout_id for rollout in undeliverable) == sorted(refused)
        async with here.http.get("/v1/rollouts", params={"delivery": "refused", "page_size": "1000"}) as answer:
            assert answer.status == 200, await answer.text()
            shown = [rollout["spec"]["rollout_id"] for rollout in (await answer.json())["rollouts"]]
        assert sorted(shown) == sorted(refused)


GAPS: Mapping[str, Extensions] = {
    "all": Extensions(),
    "usage too": Extensions(usage=True),
    "no logprobs in turn 2": Extensions(omit=frozenset({"logprobs"}), turns=frozenset({2})),
    "no token_ids in turn 2": Extensions(omit=frozenset({"token_ids"}), usage=True, turns=frozenset({2})),
    "no prompt_token_ids in turn 2": Extensions(omit=frozenset({"prompt_token_ids"}), turns=frozenset({2})),
    "nothing but usage in turn 1": Extensions(omit=IDS, usage=True, turns=frozenset({1})),
    "nothing but usage in turn 3": Extensions(omit=IDS, usage=True, turns=frozenset({3})),
    "nothing but usage": Extensions(omit=IDS, usage=True),
    "nothing": Extensions(omit=IDS),
}
"""Fields that a trainer omits from its responses."""


def told_turns(extensions: Extensions) -> list[int]:
    """The turns, of three, whose tokens the trainer reported."""
    unknown = set() if extensions.omit <= {"logprobs"} else extensions.turns or {1, 2, 3}
    return [turn for turn in (1, 2, 3) if turn not in unknown]


def known_samples(
    verdict: Verdict, told: Sequence[int]
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Prompt, response and mask of each run of turns without a gap, cut out of the trainer's record."""
    whole = verdict.sample.prompt_ids + verdict.sample.response_ids
    mask = (0,) * len(verdict.sample.prompt_ids) + verdict.sample.response_mask
    samples = []
    for first, last in stretches(verdict.turns, told):
        begin, end = first.prompt_tokens, last.prompt_tokens + last.answer_tokens
        samples.append((whole[:begin], whole[begin:end], mask[begin:end]))
    return samples


def stretches(turns: Sequence[JudgedTurn], told: Sequence[int]) -> list[tuple[JudgedTurn, JudgedTurn]]:
    """First and last turn of each run of reported turns."""
    runs: list[list[JudgedTurn]] = []
    for turn in turns:
        if turn.number in told:
            if turn.number - 1 not in told:
                runs.append([])
            runs[-1].append(turn)
    return [(run[0], run[-1]) for run in runs]


async def test_the_record_holds_what_the_trainer_told_and_names_what_it_did_not() -> None:
    scripts = {name: Script(then_model=True, extensions=extensions) for name, extensions in GAPS.items()}
    async with yard(scripts) as here:
        await here.start_all(GAPS)
        rollouts = await here.settled()
        for number, (name, extensions) in enumerate(GAPS.items()):
            check_outcome(here, name, number, deliveries=1)
            assert here.verdict(name).concluded, name
            check_record(rollouts[name], here.verdict(name), told_turns(extensions))
        without = rollouts["no logprobs in turn 2"].outcome
        assert not without.samples[0].HasField("logprobs")
        assert [warning.turn for warning in without.warnings] == [2]


def check_record(rollout: Any, verdict: Verdict, told: Sequence[int]) -> None:
    """Assert that samples equal the trainer's, that a gap opens a segment of that kind, and that each gap has a warning."""
    outcome = rollout.outcome
    samples = [(tuple(s.prompt_ids), tuple(s.response_ids), tuple(s.response_mask)) for s in outcome.samples]
    assert samples == known_samples(verdict, told), rollout.spec.rollout_id
    kinds = [segment.origin.kind for segment in outcome.segments]
    # Everything before the first reported turn is in its prompt, so a late first report opens no gap segment.
    assert kinds == [token_pb2.SEGMENT_KIND_MAIN, token_pb2.SEGMENT_KIND_GAP][: len(samples)]
    unknown = [warning.turn for warning in outcome.warnings if warning.code == "tokens_unknown"]
    assert unknown == warned_turns(told)
    assert verdict.outcome is not None
    warned = verdict.outcome.body["extra_fields"].get("warnings", [])
    assert [warning["code"] for warning in warned].count("tokens_unknown") == len(unknown)


def warned_turns(told: Sequence[int]) -> list[int]:
    """The turns with a gap warning: where the gap begins, or after it if no turn was known before."""
    after = [told[0]] if told and told[0] > 1 else []
    return after + [turn for turn in (2, 3) if turn not in told and turn - 1 in told]
