"""The strict trainer as a client: over a stream the same scripts give the same verdicts, and a lie harms no other rollout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from osmosis.rollout.v1 import message_pb2, outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as rs
from rollout_client import AsyncClient, samples
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings
from rollout_server.testing.checks.verdict import Verdict
from rollout_server.testing.grpc.train_stream import RefusedStartError, TrainStream
from rollout_server.testing.script import Fault, FaultKind, Lie, Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.support.severed_connection import Cut, SeveredLine
from tests.support.talking_agent import equal

MODES = {"tokens": spec_pb2.TOKEN_MODE_TOKENS, "messages": spec_pb2.TOKEN_MODE_MESSAGES}
TEXT = "Please calculate 5 plus 3, then multiply by 2."
both_modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    ports: Any = {"host": "127.0.0.1", "http": False, "http_port": 0, "grpc_port": 0, "drain_seconds": 0}
    settings = Settings(_env_file=None, tokenizers={"toy": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server([Calculator()], settings) as server:
        yield server


def adding(number: int, **more: Any) -> ScriptedReply:
    return ScriptedReply(tool_calls=(tool_call(f"call_{number}", "add", f'{{"a": {number}, "b": 1}}'),), **more)


def start(name: str, mode: str = "tokens", *, typed: bool = False, **spec: Any) -> rs.StartRolloutRequest:
    chat = message_pb2.ChatMessage(role="user", parts=[message_pb2.ContentPart(text=TEXT)])
    asked = (
        message_pb2.Message(chat=chat) if typed else message_pb2.Message(json=f'{{"role":"user","content":"{TEXT}"}}')
    )
    fields = {
        "rollout_id": name,
        "messages": [asked],
        "token_mode": MODES[mode],
        "tokenizer": spec_pb2.Tokenizer(name="toy") if mode == "tokens" else None,
        "limits": spec_pb2.Limits(turns=8),
    }
    return rs.StartRolloutRequest(request_id=name, spec=spec_pb2.RolloutSpec(**{**fields, **spec}))


async def played(stream: TrainStream, request: rs.StartRolloutRequest) -> outcome_pb2.Outcome:
    (uid,) = await stream.start(request)
    return (await stream.outcome(uid)).outcome


def same(outcome: outcome_pb2.Outcome, verdict: Verdict | None) -> bool:
    """Whether the only sample equals the trainer's, element by element."""
    assert verdict is not None
    (sample,) = samples(outcome)
    return equal(sample, verdict.sample) and (outcome.failure.message, verdict.refusals) == ("", ())


@pytest.mark.parametrize("typed", [False, True])
@both_modes
async def test_both_ways_the_same_script_gives_the_same_transcript(server: Server, mode: str, typed: bool) -> None:
    async with StrictTrainer() as trainer, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        async with trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream:
            streamed = await played(stream, start("streamed", mode, typed=typed))
        assert (stream.faults, stream.connections) == ((), 1)
        spec = start("called", mode, typed=typed).spec
        spec.completions.url = f"grpc://{trainer.grpc_target}"
        async for _ in (run := client.run(spec)):
            pass
        called = (await client.get(run.uid, view="samples")).outcome
        verdicts = [trainer.verdict(name) for name in ("streamed", "called")]
    assert [same(streamed, verdicts[0]), same(called, verdicts[1])] == [True, True]
    assert streamed.messages == called.messages
    assert {message.WhichOneof("form") for message in streamed.messages} == {"chat" if typed else "json"}
    assert streamed.samples == called.samples
    asked = [
        [seen.request for seen in trainer.completions if seen.request.rollout_id == v.rollout_id] for v in verdicts if v
    ]
    for one, other in zip(*asked, strict=True):
        for request in (one, other):
            request.uid = request.rollout_id = request.turn_key = ""
            assert request.HasField("time_left")
            request.ClearField("time_left")
        assert one == other


@both_modes
async def test_a_group_and_several_trainers_at_once(server: Server, mode: str) -> None:
    async with StrictTrainer() as one, StrictTrainer() as two:
        address = f"127.0.0.1:{server.grpc_port}"
        async with (
            one.connected(address, credit=2) as first,
            one.connected(address) as second,
            two.connected(address) as third,
        ):
            started = [
                (stream, trainer, name, await stream.start(start(name, mode), count=4))
                for stream, trainer, name in ((first, one, "a"), (second, one, "b"), (third, two, "c"))
            ]
            for stream, trainer, name, uids in started:
                ended = [(await stream.outcome(uid)).outcome for uid in uids]
                assert [same(each, trainer.verdict(f"{name}/{i}")) for i, each in enumerate(ended)] == [True] * 4
        assert [stream.faults for stream in (first, second, third)] == [()] * 3
        assert [len(stream.asks) for stream in (first, second, third)] == [12] * 3


async def cut_at(server: Server, mode: str, cut: Cut) -> bool:
    """Run a rollout over a connection that is cut there; return whether it was cut."""
    async with StrictTrainer() as trainer, SeveredLine(server.grpc_port, cut) as line:
        try:
            async with trainer.connected(line.address) as stream:
                outcome = await played(stream, start(f"r{cut.number}", mode))
        except Exception:
            assert cut.number == 1  # a stream is resumed only after it has begun
            return line.was_cut
        verdict = trainer.verdict(f"r{cut.number}")
        assert same(outcome, verdict)
        assert verdict is not None
        assert (stream.faults, len(verdict.turns), verdict.replays, verdict.siblings) == ((), 3, 0, 0)
        assert len({ask.turn_key for ask in stream.asks}) == len(stream.asks) == 3
    return line.was_cut


@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("to_server", [False, True])
async def test_a_cut_at_any_message_is_resumed(server: Server, to_server: bool, passes: bool) -> None:
    cuts = [Cut(to_server, number, passes) for number in range(1, 18)]
    was_cut = await asyncio.gather(*(cut_at(server, "tokens", cut) for cut in cuts))
    assert sum(was_cut) > 6
    assert was_cut == sorted(was_cut, reverse=True)
    assert not was_cut[-1]


DRIFT = outcome_pb2.FAILURE_CATEGORY_TOKEN_DRIFT
VALIDATION = outcome_pb2.FAILURE_CATEGORY_VALIDATION
ENDS: dict[Lie, tuple[int, str]] = {
    Lie.CHANGED_ID: (DRIFT, "turn 2: the trainer holds other tokens than this server"),
    Lie.DROPPED_ID: (DRIFT, "turn 2: the trainer holds other tokens than this server"),
    Lie.OTHER_TURN: (DRIFT, "turn 2: the trainer holds other tokens than this server"),
    Lie.REPLAYED_TURN: (DRIFT, "turn 2: "),
    Lie.PROMPT_DIGEST: (DRIFT, "turn 2: the trainer holds other tokens than this server"),
    Lie.AFTER_DIGEST: (DRIFT, "turn 2: the trainer holds other tokens than this server"),
    Lie.OVERSIZED_ID: (VALIDATION, "is not a token id"),
    Lie.NO_CHECKPOINTS: (VALIDATION, "prompt cannot be verified"),
}
WARNS: dict[Lie, str] = {
    Lie.SHORT_LOGPROBS: "logprobs_missing",
    Lie.TOO_LONG: "length_exceeded",
    Lie.STALE_POLICY: "policy_stale",
}
TRUE: dict[str, set[Lie]] = {
    "tokens": {Lie.ANSWERED_TWICE},
    # In message mode the reported ids are authoritative, and the model is not counted for.
    "messages": {Lie.ANSWERED_TWICE, Lie.PROMPT_DIGEST, Lie.TOO_LONG, Lie.NO_CHECKPOINTS},
}
"""Lies that do not change the accepted data."""


def test_every_lie_is_told() -> None:
    assert set(ENDS) | set(WARNS) | TRUE["tokens"] == set(Lie)


def lying(lie: Lie) -> tuple[int, Script]:
    """A script with a lie, and the turn of the lie."""
    turn = 3 if lie is Lie.STALE_POLICY else 2
    lines = [adding(1), adding(2), adding(3), ScriptedReply(content="Done.")]
    lines[turn - 1] = adding(turn, lie=lie)
    return turn, Script(tuple(lines))


@both_modes
async def test_each_lie_shows_on_its_turn_and_harms_nobody_beside_it(server: Server, mode: str) -> None:
    scripts = {lie.value: lying(lie)[1] for lie in Lie}
    scripts["honest"] = Script((adding(1), adding(2), adding(3), ScriptedReply(content="Done.")))
    sampling = spec_pb2.Sampling(max_tokens=64)
    async with (
        StrictTrainer(scripts=scripts) as trainer,
        trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream,
    ):
        ends = await asyncio.gather(*(played(stream, start(name, mode, sampling=sampling)) for name in scripts))
        outcomes = dict(zip(scripts, ends, strict=True))
        verdicts = {name: trainer.verdict(name) for name in scripts}
    assert same(outcomes["honest"], verdicts["honest"])
    assert (list(outcomes["honest"].warnings), stream.faults) == ([], ())
    for lie in Lie:
        assert shows(lie, mode, outcomes[lie.value], verdicts[lie.value]), lie


def shows(lie: Lie, mode: str, outcome: outcome_pb2.Outcome, verdict: Verdict | None) -> bool:
    """Whether a rollout ended as the lie requires."""
    turn, _ = lying(lie)
    assert verdict is not None
    assert all(each == f"turn {turn}: {lie.value}" for each in verdict.faults)
    warned = [(each.code, each.turn) for each in outcome.warnings]
    if lie in TRUE[mode]:
        return warned == [] and same(outcome, verdict)
    if lie in WARNS:
        return (warned, outcome.failure.message) == ([(WARNS[lie], turn)], "")
    category, text = ENDS[lie]
    (sample,) = samples(outcome)
    assert {span.turn for span in sample.spans or ()} == {1}  # the earlier, true turn stays
    return (outcome.failure.category, outcome.failure.turn) == (category, turn) and text in outcome.failure.message


async def test_a_changed_token_is_named_by_the_trainers_own_ledger(server: Server) -> None:
    script = Script((adding(1), adding(2, lie=Lie.CHANGED_ID), ScriptedReply(content="Done.")))
    async with (
        StrictTrainer(script=script) as trainer,
        trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream,
    ):
        outcome = await played(stream, start("r"))
    assert "since turn 2, from token" in outcome.failure.message
    assert "this server has '" in outcome.failure.message


@both_modes
async def test_one_that_forgot_is_sent_everything_once(server: Server, mode: str) -> None:
    script = Script((adding(1), adding(2, forgets=True), adding(3), ScriptedReply(content="Done.")))
    async with (
        StrictTrainer(script=script) as trainer,
        trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream,
    ):
        assert same(await played(stream, start("r", mode)), trainer.verdict("r"))
    assert [ask.turn for ask in stream.asks] == [1, 2, 3, 3, 4]
    assert not stream.asks[3].HasField("base")
    assert stream.faults == ()


async def test_faults_of_a_trainer_are_what_they_are_elsewhere(server: Server) -> None:
    busy = Fault.error(429, "full", {"retry-after": "0"})
    scripts = {
        "busy": Script((busy, busy, adding(1), ScriptedReply(content="Done."))),
        "lost": Script((adding(1), Fault(kind=FaultKind.LOST), ScriptedReply(content="Done."))),
        "broken": Script((adding(1), Fault.error(500, "no"), ScriptedReply(content="Done."))),
    }
    async with StrictTrainer(scripts=scripts) as trainer:
        async with trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream:
            ended = {name: await played(stream, start(name)) for name in scripts}
        verdicts = {name: trainer.verdict(name) for name in scripts}
    assert [same(ended[name], verdicts[name]) for name in ("busy", "lost")] == [True, True]
    assert ended["broken"].failure.category == outcome_pb2.FAILURE_CATEGORY_TRAINER_SERVER
    assert "turn 2" in ended["broken"].failure.message
    assert stream.connections == 2
    assert stream.faults == ()


async def test_a_start_that_cannot_be_is_refused(server: Server) -> None:
    async with StrictTrainer() as trainer, trainer.connected(f"127.0.0.1:{server.grpc_port}") as stream:
        with pytest.raises(RefusedStartError, match="agent"):
            await stream.start(start("r", agent="nobody"), count=2)
        with pytest.raises(RefusedStartError, match="messages"):
            await stream.start(start("r", messages=[]))
        assert same(await played(stream, start("r")), trainer.verdict("r"))
    assert stream.faults == ()
