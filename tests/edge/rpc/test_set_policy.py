"""SetPolicy with every kind of trainer that the server calls: pauses, retries, steps, callers, and stale rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from aiohttp import web
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from osmosis.rollout.v1 import completion_service_pb2 as cpb
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from rollout_server import Agent, Run
from rollout_server.edge.api_keys import entry_of
from rollout_server.testing import TrainerDialect
from rollout_server.testing.http.mock_engine import MockEngine
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer
from transformers import AutoTokenizer

from tests.support import engines, grpc_trainer
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, Engine, OpenaiEngine, SglangEngine, VllmEngine
from tests.support.grpc_trainer import Fault, GrpcTrainer
from tests.support.http_trainer import Act, answer, raw_trainer
from tests.support.server_client import Caller, refusal, serving, until
from tests.support.start_requests import start, target
from tests.support.talking_agent import Talk
from tests.support.tcp_proxy import TcpProxy

TURNS = 3
ROLLOUTS = 4
SOON = error_details_pb2.RetryInfo(retry_delay=Duration(nanos=1000))
KEYS = {"alice": "key-of-alice-0123", "bob": "key-of-bob-4567"}
TOKENS = spec_pb2.TOKEN_MODE_TOKENS


class Judging(Agent):
    """Asks the judge, alone and in a conversation of its own, and then the rollout's own model."""

    name = "judging"

    async def play(self, run: Run) -> None:
        question = [{"role": "user", "content": "Well?"}]
        await run.model("judge").sample(question)
        await (await run.fork(question, model="judge")).sample()
        run.note("judged", "twice")
        await run.sample()


class Gate(Agent):
    """Samples, waits for the gate outside of all turns, and samples again."""

    name = "gate"

    def __init__(self) -> None:
        self.gate = asyncio.Event()

    async def play(self, run: Run) -> None:
        await run.sample()
        await self.gate.wait()
        await run.append({"role": "user", "content": "Go on."})
        await run.sample()


async def announce(caller: Caller, url: str = "", **update: Any) -> list[str]:
    """Announce a policy; return the uids of the rollouts that are cancelled."""
    request = pb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate(**update), completions_url=url)
    return list((await caller.stub.SetPolicy(request)).cancelled_uids)


def toy_ids() -> list[int]:
    return list(AutoTokenizer.from_pretrained(TOY_TOKENIZER).encode("Yes.<|im_end|>", add_special_tokens=False))


@asynccontextmanager
async def strict(dialect: TrainerDialect = TrainerDialect.MASKED) -> AsyncIterator[StrictTrainer]:
    says = tuple(ScriptedReply(content=f"Number {number}.") for number in range(TURNS))
    async with StrictTrainer(script=Script(says), dialect=dialect) as trainer:
        yield trainer


Requests = Callable[[], int]


@asynccontextmanager
async def over_grpc() -> AsyncIterator[tuple[spec_pb2.Target, Requests]]:
    async with strict() as trainer:
        yield target(f"grpc://{trainer.grpc_target}"), lambda: len(trainer.completions)


@asynccontextmanager
async def over_http(dialect: TrainerDialect, number: Any) -> AsyncIterator[tuple[spec_pb2.Target, Requests]]:
    async with strict(dialect) as trainer:
        yield target(trainer.url, dialect=number), lambda: len(trainer.requests)


@asynccontextmanager
async def over_engine(engine: Engine, number: Any) -> AsyncIterator[tuple[spec_pb2.Target, Requests]]:
    async with engines.serving(engine):
        yield target(engine.url, dialect=number, model=MODEL), lambda: len(engine.requests)


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "grpc": (over_grpc, {}),
    "masked": (lambda: over_http(TrainerDialect.MASKED, spec_pb2.DIALECT_HTTP_MASKED), {}),
    "plain": (lambda: over_http(TrainerDialect.PLAIN, spec_pb2.DIALECT_HTTP_PLAIN), {}),
    "openai": (lambda: over_engine(OpenaiEngine(EngineModel(("Yes.",))), spec_pb2.DIALECT_OPENAI), {}),
    "sglang": (
        lambda: over_engine(SglangEngine(EngineModel(("Yes.",))), spec_pb2.DIALECT_SGLANG),
        {"token_mode": TOKENS},
    ),
    "vllm": (lambda: over_engine(VllmEngine(EngineModel(("Yes.",))), spec_pb2.DIALECT_VLLM), {"token_mode": TOKENS}),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_nothing_is_requested_during_a_pause_and_all_go_on_after_it(kind: str) -> None:
    opened, fields = KINDS[kind]
    async with serving(Talk(TURNS)) as caller, opened() as (completions, requests), over_grpc() as (other, others):
        await announce(caller, paused=True)
        await announce(caller, other.url + "/")  # not this one
        rollouts = [
            await caller.start(start(rollout_id=f"r{n}", completions=completions, **fields)) for n in range(ROLLOUTS)
        ]
        for number in range(2):  # meanwhile the server has all the time that it needs
            ended = await caller.play(start(rollout_id=f"o{number}", completions=other))
            assert ended.outcome.stop.reason == "stop"
        assert (requests(), others()) == (0, 2 * TURNS)
        await announce(caller)
        for each in rollouts:
            assert (await caller.finished(each.rollout.uid)).outcome.stop.reason == "stop"
        assert requests() == ROLLOUTS * TURNS * (2 if kind == "vllm" else 1)  # vLLM parses each completion on request


async def test_a_pause_between_two_turns_and_the_step_of_the_next_one() -> None:
    agent = Gate()
    async with (
        serving(agent) as caller,
        grpc_trainer.serving(GrpcTrainer(toy_ids())) as trainer,
        over_grpc() as (other, _),
    ):
        uid = (await caller.start(start(completions=target(trainer.url)))).rollout.uid
        await announce(caller, trainer.url, step=4)
        await until(lambda: _has(trainer.requests, 1))
        await announce(caller, trainer.url, paused=True, version="v5")
        agent.gate.set()
        await caller.play(start(rollout_id="o", completions=other))
        assert len(trainer.requests) == 1
        await announce(caller, trainer.url, step=5, version="v5")
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"
        assert [request.policy_step for request in trainer.requests[1:]] == [5]


class SlowLine(TcpProxy):
    """Accepts a connection, and forwards it once `go` is set."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.accepted, self.go = asyncio.Event(), asyncio.Event()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        await self.go.wait()
        await super()._connected(reader, writer)


async def test_a_pause_that_begins_while_the_trainer_is_being_connected() -> None:
    async with (
        serving(Talk(TURNS)) as caller,
        grpc_trainer.serving(GrpcTrainer(toy_ids())) as trainer,
        over_grpc() as (other, _),
        SlowLine(int(trainer.url.rpartition(":")[2])) as line,
    ):
        uid = (await caller.start(start(completions=target(f"grpc://{line.address}")))).rollout.uid
        await line.accepted.wait()
        await announce(caller, paused=True)
        line.go.set()
        await announce(caller, other.url)
        await caller.play(start(rollout_id="o", completions=other))
        assert not trainer.requests
        await announce(caller, step=1)
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"
        assert {request.policy_step for request in trainer.requests} == {1}


class PausingTrainer(GrpcTrainer):
    """Announces a pause while it has the first request."""

    caller: Caller

    async def Complete(self, request: cpb.CompleteRequest, context: Any) -> cpb.CompleteResponse:  # noqa: N802 - the rpc
        if not self.requests:
            await announce(self.caller, paused=True)
        return await super().Complete(request, context)


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_a_refused_turn_is_not_requested_again_during_a_pause(code: grpc.StatusCode) -> None:
    trainer = PausingTrainer(toy_ids(), faults=[Fault(code, details=(SOON,))])
    async with (
        serving(Talk(TURNS), retry_after_seconds=1.0) as caller,
        grpc_trainer.serving(trainer),
        over_grpc() as (other, _),
    ):
        trainer.caller = caller
        uid = (await caller.start(start(completions=target(trainer.url)))).rollout.uid
        await until(lambda: _has(trainer.requests, 1))
        await announce(caller, other.url)
        await caller.play(start(rollout_id="o", completions=other))
        await asyncio.sleep(1.1)  # longer than refused turns are repeated, but the trainer could not be asked
        assert len(trainer.requests) == 1
        trainer.faults.append(Fault(code, details=(SOON,)))
        await announce(caller, step=2)
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"
        assert [request.turn_key for request in trainer.requests[:3]] == [trainer.requests[0].turn_key] * 3
        assert [request.policy_step for request in trainer.requests[1:]] == [2] * (TURNS + 1)


@pytest.mark.parametrize(
    ("dialect", "status"),
    [
        (spec_pb2.DIALECT_HTTP_MASKED, 429),
        (spec_pb2.DIALECT_HTTP_PLAIN, 429),
        (spec_pb2.DIALECT_HTTP_PLAIN, 500),
        (spec_pb2.DIALECT_OPENAI, 429),
        (spec_pb2.DIALECT_OPENAI, 500),
    ],
)
async def test_an_http_request_is_not_repeated_during_a_pause(dialect: Any, status: int) -> None:
    later = {"retry_after": "0"} if status == 429 else {}
    async with (
        serving(Talk(1), retry_base_seconds=0.01, retry_max_seconds=0.01) as caller,
        over_grpc() as (other, _),
        raw_trainer(pausing(caller, answer(b"{}", status, **later)), answer()) as trainer,
    ):
        model = MODEL if dialect == spec_pb2.DIALECT_OPENAI else ""
        completions = target(trainer.url, dialect=dialect, model=model)
        uid = (await caller.start(start(completions=completions))).rollout.uid
        await until(lambda: _has(trainer.requests, 1))
        await announce(caller, other.url)
        await caller.play(start(rollout_id="o", completions=other))
        await asyncio.sleep(0.25)  # longer than until it would be repeated
        assert len(trainer.requests) == 1
        await announce(caller)
        await caller.finished(uid)
        assert len(trainer.requests) == 2


def pausing(caller: Caller, act: Act) -> Act:
    """Announce a pause, and then do this."""

    async def announced(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await announce(caller, paused=True)
        await act(reader, writer)

    return announced


async def _has(found: list[Any], count: int) -> bool:
    return len(found) >= count


async def test_further_models_are_not_paused() -> None:
    class Echo:
        def reply(self, messages: Any) -> ScriptedReply:
            return ScriptedReply(content="Good.")

    async with (
        serving(Judging()) as caller,
        MockEngine({"judge": Echo()}) as judge,
        over_grpc() as (completions, requests),
    ):
        await announce(caller, paused=True)
        models = {"judge": target(judge.url, model="judge", dialect=spec_pb2.DIALECT_OPENAI)}
        uid = (await caller.start(start(completions=completions, models=models))).rollout.uid
        async for item in caller.watch(uid):
            if item.event.note.code == "judged":
                break
        assert (len(judge.requests), requests()) == (2, 0)
        await announce(caller)
        assert (await caller.finished(uid)).outcome.stop.reason == "stop"
        assert requests() == 1


@pytest.mark.parametrize(
    ("fields", "violated"),
    [
        ({}, "policy"),
        ({"completions_url": "grpc://a:1"}, "policy"),
        ({"policy": {"step": -1}}, "policy.step"),
        ({"policy": {"version": "v" * 257}}, "policy.version"),
        ({"policy": {"version": "a\u0000b", "step": 8}}, "policy.version"),
        ({"policy": {"step": 8}, "completions_url": "x" * 2049}, "completions_url"),
    ],
)
async def test_an_invalid_update_is_refused_and_has_no_effect(fields: dict[str, Any], violated: str) -> None:
    async with serving(Talk(1)) as caller, grpc_trainer.serving(GrpcTrainer(toy_ids())) as trainer:
        await announce(caller, step=7)
        refused = await refusal(caller.stub.SetPolicy(pb.SetPolicyRequest(**fields)))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert violated in refused.fields
        await caller.play(start(completions=target(trainer.url)))
        assert [request.policy_step for request in trainer.requests] == [7]


async def test_callers_do_not_affect_each_other() -> None:
    entries = tuple(entry_of(name, key) for name, key in KEYS.items())
    async with serving(Talk(TURNS), api_keys=entries) as server, over_grpc() as (completions, requests):
        alice, bob = ((("authorization", f"Bearer {key}"),) for key in KEYS.values())
        paused = pb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate(paused=True, step=9))
        await server.stub.SetPolicy(paused, metadata=alice)
        started = await server.stub.StartRollout(start(rollout_id="a", completions=completions), metadata=alice)
        async for _ in server.stub.RunRollout(
            pb.RunRolloutRequest(start=start(rollout_id="b", completions=completions)), metadata=bob
        ):
            pass
        assert requests() == TURNS
        await server.stub.SetPolicy(pb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate(step=1)), metadata=bob)
        await server.stub.SetPolicy(pb.SetPolicyRequest(policy=spec_pb2.PolicyUpdate()), metadata=alice)
        waiting = pb.WaitRolloutRequest(uid=started.rollout.uid)
        waited = await server.stub.WaitRollout(waiting, metadata=alice)
        assert waited.rollout.outcome.stop.reason == "stop"


STALE = spec_pb2.Staleness(max_lag=1, action=spec_pb2.STALE_ACTION_CANCEL)


def of_step(step: int) -> Callable[[cpb.CompleteRequest, cpb.CompleteResponse], None]:
    def lie(request: cpb.CompleteRequest, response: cpb.CompleteResponse) -> None:
        response.policy_step = step

    return lie


async def test_a_stale_rollout_is_cancelled_and_its_slot_at_the_trainer_is_free() -> None:
    """The second turn is at the trainer, which learns that nobody waits for it any more."""
    agent, trainer = Gate(), GrpcTrainer(toy_ids(), lies={1: of_step(3)})
    async with serving(agent) as caller, grpc_trainer.serving(trainer):
        uid = (await caller.start(start(completions=target(trainer.url), staleness=STALE))).rollout.uid
        await until(lambda: _has(trainer.requests, 1))
        trainer.silent = True
        agent.gate.set()
        await trainer.asked.wait()
        assert await announce(caller, step=4) == []
        assert await announce(caller, trainer.url, step=5) == [uid]
        await trainer.left.wait()
        rollout = await caller.finished(uid)
        assert rollout.outcome.cancellation.reason.startswith("stale: ")
        assert (rollout.outcome.policy_step, rollout.outcome.metrics.turns) == (5, 1)
        exposed = caller.server.exposition().decode()
        assert 'rollout_finished_total{agent="gate",end="cancellation",reason="stale"} 1.0' in exposed


class Hanging(SglangEngine):
    """Reports its weights as version 3, and hangs in its second completion until nobody waits for it any more."""

    def __init__(self) -> None:
        super().__init__(EngineModel(("Yes.",)))
        self.spoil = lambda body: body.update(metadata={"weight_version": "3"})
        self.hangs, self.left = asyncio.Event(), asyncio.Event()

    async def chat(self, request: web.Request) -> web.Response:
        if self.requests:
            self.hangs.set()
            await until(lambda: _is_gone(request))
            self.left.set()
        return await super().chat(request)


async def _is_gone(request: web.Request) -> bool:
    return request.transport is None


async def test_an_engine_is_freed_too() -> None:
    agent, engine = Gate(), Hanging()
    async with serving(agent) as caller, engines.serving(engine):
        completions = target(engine.url, dialect=spec_pb2.DIALECT_SGLANG, model=MODEL)
        request = start(completions=completions, staleness=STALE, token_mode=TOKENS)
        uid = (await caller.start(request)).rollout.uid
        agent.gate.set()
        await engine.hangs.wait()
        assert await announce(caller, step=5) == [uid]
        await engine.left.wait()
        assert (await caller.finished(uid)).outcome.cancellation.reason.startswith("stale: ")
