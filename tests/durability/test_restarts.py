"""Restarts: what a server on the same journal resumes, ends, shows and delivers."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.durability import checks
from tests.durability.aims import Aim, Moment
from tests.durability.server import Forker, JournaledServer
from tests.durability.stage import Stage, stage
from tests.durability.trainers import TOOLS, StepsModel
from tests.durability.trials import trial
from tests.support.processes import COMMAND

SECRET = "the bearer token of a trainer"
INTERRUPTED = outcome_pb2.FAILURE_CATEGORY_INTERRUPTED


async def test_a_drained_server_parks_its_rollouts(here: Stage) -> None:
    """SIGTERM without time to finish, in the middle of a turn."""
    here.gun.kill = lambda: here.server.send(signal.SIGTERM)
    chosen = trial("grpc", 102, "drained", steps=("look", "look"))
    found = await here.crash_and_check(
        Aim(Moment.ASKED, 102, 1), [chosen, *here.trials(agents=("steps", "replayable"))]
    )
    outcomes = {rollout.spec.rollout_id: rollout.outcome for rollout in found}
    assert outcomes[chosen.rollout_id].HasField("stop")
    assert "Traceback" not in here.server.log


async def test_what_has_finished_is_the_same_after_a_crash(here: Stage) -> None:
    trials = here.trials()
    await here.prepare(trials)
    ids = [trial(each.kind, each.case.number, "undisturbed").rollout_id for each in trials]
    before = await here.clients.listed(ids, pb.ROLLOUT_VIEW_FULL)
    events = {rollout.uid: await here.clients.events(rollout.uid) for rollout in before}
    here.server.kill()
    await here.server.restart()
    after = await here.clients.listed(ids, pb.ROLLOUT_VIEW_FULL)
    assert after == before
    for uid, seen in events.items():
        assert await here.clients.events(uid) == seen
        assert await here.clients.events(uid, after=3) == seen[3:]


async def test_a_watch_goes_on_after_its_last_event(here: Stage) -> None:
    trials = here.trials()
    chosen = next(each for each in trials if each.kind == "grpc")
    found = await here.crash_and_check(Aim(Moment.ASKED, chosen.case.number, 2), trials)
    uid = next(rollout.uid for rollout in found if rollout.spec.rollout_id == chosen.rollout_id)
    assert chosen.events
    events = await here.clients.events(uid)
    assert [event.resumed.times for event in events if event.HasField("resumed")] == [1]
    assert await here.clients.events(uid, after=len(chosen.events)) == events[len(chosen.events) :]


async def test_a_rollout_survives_several_crashes(here: Stage) -> None:
    """One crash in each of its turns."""
    chosen = trial("grpc", 3, "crashes")
    await here.prepare([chosen])
    here.trainers.generations.counts.clear()
    turns = chosen.crashes = len(chosen.case.steps) + 1
    for turn in range(1, turns + 1):
        here.gun.load(Aim(Moment.ASKED, chosen.case.number, turn))
        if turn == 1:
            await here.clients.start(chosen)
        else:
            await here.server.restart()
        await here.server.ended()
    await here.server.restart()
    (rollout,) = await here.recover_and_check([chosen])
    assert rollout.outcome.HasField("stop")
    events = await here.clients.events(rollout.uid)
    assert [event.resumed.times for event in events if event.HasField("resumed")] == list(range(1, turns + 1))


async def test_an_outcome_waits_for_its_receiver_over_crashes(here: Stage) -> None:
    chosen = [trial("grpc", 2, "down"), trial("replaying", 6, "down")]
    await here.prepare(chosen)
    here.receiver.is_down = True
    here.trainers.generations.counts.clear()
    for each in chosen:
        await here.clients.start(each)
    for count in (2, 4):
        while len(here.receiver.deliveries) < count + 2:  # noqa: ASYNC110 - two are those of the undisturbed runs
            await asyncio.sleep(0.01)
        here.server.kill()
        await here.server.restart()
    here.receiver.is_down = False
    await here.recover_and_check(chosen)


@pytest.mark.parametrize(
    ("setting", "policy", "resumes"),
    [
        ("end", spec_pb2.INTERRUPT_POLICY_UNSPECIFIED, False),
        ("end", spec_pb2.INTERRUPT_POLICY_RESUME, True),
        ("resume", spec_pb2.INTERRUPT_POLICY_FAIL, False),
    ],
)
async def test_what_to_do_is_set_by_the_request_or_the_server(
    forker: Forker, tmp_path: Path, setting: str, policy: spec_pb2.InterruptPolicy.ValueType, resumes: bool
) -> None:
    async with stage(forker, tmp_path, ROLLOUT_ON_INTERRUPT=setting) as here:
        chosen = trial("grpc", 1, "policy")
        chosen.on_interrupt = policy
        await here.prepare([chosen])
        here.gun.load(Aim(Moment.ASKED, 1, 2))
        await here.clients.start(chosen)
        await here.server.restart()
        (rollout,) = await here.clients.settled([chosen.rollout_id])
        assert rollout.uid == chosen.uid
        assert rollout.delivery.state == pb.DELIVERY_STATE_ACKNOWLEDGED
        samples = [checks.tokens(sample) for sample in rollout.outcome.samples]
        if resumes:
            assert samples == here.references[chosen.reference].samples
        else:
            assert rollout.outcome.failure.category == INTERRUPTED
            assert rollout.outcome.metrics.turns == 1
            assert len(samples) == 1  # the first turn


async def test_a_response_that_a_crash_loses_leaves_a_finished_rollout(here: Stage) -> None:
    """Docs: "Not covered". The server crashed after `POST /rollout` acknowledged the outcome and before the client had it."""
    lost = trial("masked", 1, "lost")
    await here.prepare([lost])
    here.trainers.generations.counts.clear()
    await here.clients.start(lost)
    lost.response = None
    (done,) = await here.clients.settled([lost.rollout_id])
    # Until this is stored, the repeated request finds the finished rollout.
    while done.uid not in here.server.received():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.01)
    here.server.kill()
    await here.server.restart()
    older, newer = sorted(await here.recover_and_check([lost]), key=lambda rollout: rollout.create_time.ToNanoseconds())
    assert older.uid == done.uid
    assert [checks.tokens(sample) for sample in older.outcome.samples] == here.references[lost.reference].samples
    with pytest.raises(AssertionError, match="ran 2 times"):  # had its outcome not been acknowledged
        checks.check_runs(lost, [older, newer], received={newer.uid})


async def test_starts_that_race_attach_to_one_rollout(here: Stage) -> None:
    """Equal starts arrive at once before the crash and after it."""
    chosen = trial("grpc", 1, "raced")
    await here.prepare([chosen])
    here.trainers.generations.counts.clear()
    here.gun.load(Aim(Moment.ASKED, 1, 1))
    copies = [replace(chosen) for _ in range(8)]
    starts = asyncio.gather(*map(here.clients.start, copies), return_exceptions=True)
    await here.server.restart()
    await starts
    await asyncio.gather(*map(here.clients.start, copies))
    (chosen.uid,) = {each.uid for each in copies}
    await here.recover_and_check([chosen])


async def test_credentials_survive_and_are_not_stored_in_clear(here: Stage) -> None:
    chosen = trial("grpc", 1, "secret")
    trainer = StrictTrainer(
        dialect="plain", model=StepsModel(here.trainers.generations), tools=TOOLS, replays_keys=True, api_key=SECRET
    )
    async with trainer:
        request = here.clients.start_request(chosen)
        request.spec.completions.url = f"grpc://{trainer.grpc_target}"
        request.credentials.completions_bearer = SECRET
        here.gun.load(Aim(Moment.ASKED, 1, 2))
        await here.server.stub.StartRollout(request)
        await here.server.ended()
        stored = b"".join(file.read_bytes() for file in here.server.journal.iterdir())
        assert chosen.rollout_id.encode() in stored
        assert SECRET.encode() not in stored
        await here.server.restart()
        (rollout,) = await here.clients.settled([chosen.rollout_id])
    assert rollout.outcome.HasField("stop")
    assert rollout.outcome.metrics.turns == len(chosen.case.steps) + 1


async def test_a_second_server_on_the_journal_is_refused(here: Stage) -> None:
    second = JournaledServer(here.server.forker, here.server.directory)
    chosen = trial("grpc", 1, "first")
    await here.prepare([chosen])
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *second.arguments,
        cwd=second.directory,
        env=second.environment(),
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    here.trainers.generations.counts.clear()
    lines = error.decode().strip().splitlines()
    assert process.returncode == 1
    assert str(here.server.journal) in lines[-1]
    assert not any("Traceback" in line for line in lines)
    await here.clients.start(chosen)
    await here.recover_and_check([chosen])


async def test_a_journal_that_is_not_one_is_left_as_it_is(here: Stage) -> None:
    await here.prepare([trial("grpc", 1, "any")])
    here.server.kill()
    await here.server.ended()
    for file in here.server.journal.glob("journal.sqlite3*"):
        file.unlink()
    database = here.server.journal / "journal.sqlite3"
    database.write_bytes(b"These are not the rollouts that you are looking for. " * 100)
    content = database.read_bytes()
    here.server.launch()
    await here.server.ended()
    assert "serving gRPC" not in here.server.log
    assert str(here.server.journal) in here.server.log
    assert "Traceback" not in here.server.log
    assert database.read_bytes() == content


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("grpc", spec_pb2.TOKEN_MODE_TOKENS),
        ("engine", spec_pb2.TOKEN_MODE_TOKENS),
        ("engine", spec_pb2.TOKEN_MODE_UNSPECIFIED),
    ],
)
async def test_turns_of_one_rollout_are_rendered_by_one_template(
    here: Stage, kind: str, mode: spec_pb2.TokenMode.ValueType
) -> None:
    """After an update of the template a resumed rollout would continue with other tokens than it began with."""
    template = here.server.directory / "changed.jinja"
    template.write_text("{# a new version #}" + (TOY_TOKENIZER / "chat_template.jinja").read_text())
    for changes in (False, True):
        chosen = trial(kind, 1, f"template {changes}")
        request = here.clients.start_request(chosen)
        request.spec.token_mode = mode
        here.gun.load(Aim(Moment.ASKED, 1, 2))
        await here.server.stub.StartRollout(request)
        if changes:
            here.server.variables["ROLLOUT_TEMPLATES"] = f"toy={template}"
        await here.server.restart()
        (rollout,) = await here.clients.settled([chosen.rollout_id])
        assert rollout.outcome.HasField("stop") is not changes
        if changes:
            assert rollout.outcome.failure.category == INTERRUPTED
            assert "another version of tokenizer 'toy'" in rollout.outcome.failure.message
            assert rollout.outcome.metrics.turns == 1
            assert len(rollout.outcome.samples) == 1  # the first turn
