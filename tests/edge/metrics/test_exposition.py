"""The exposition: its contents, and that callers cannot make it grow."""

from __future__ import annotations

import re

from rollout_server import Agent, Run
from rollout_server.calculator import Calculator
from rollout_server.core.outcome import Category, Failure
from rollout_server.edge.metrics.observer import MetricsObserver
from rollout_server.runtime.ports import Credentials
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.start_request import Caller, StartRequest

from tests.edge.metrics.counted import TARGET, USER, Counted, call, calling, done, failing, outcome_of, read, said

SECRET = "hunter2"


class Talking(Agent):
    """Write a note and finish with texts from the request."""

    name = "talking"

    async def play(self, run: Run) -> None:
        """Write a note, request a completion, finish."""
        word = str(run.metadata["word"])
        run.note(word, word)
        reply = await run.sample()
        await run.call(reply.tool_calls)
        await run.finish(word)


def test_every_family_has_a_name_a_type_and_a_text() -> None:
    exposed = read(MetricsObserver())
    for name, kind in exposed.families().items():
        assert re.fullmatch(r"(rollout|process|python)_[a-z_]+", name), name
        assert kind in ("counter", "gauge", "histogram")
        if name.startswith("rollout_"):
            assert (kind == "histogram") == name.endswith("_seconds")
    helps = re.findall(r"^# HELP (\S+) (.*)$", exposed.text, re.MULTILINE)
    assert all(text for _, text in helps)
    assert "_created" not in exposed.text


def test_the_process_shows_itself() -> None:
    exposed = read(MetricsObserver())
    assert exposed.value("process_resident_memory_bytes") > 0
    assert exposed.value("process_open_fds") > 0
    assert "python_info" in exposed.text


def test_counters_are_there_before_anything_is_counted() -> None:
    """Prometheus sees an increase to 1 only if the counter existed with 0 before."""
    names = {name for (name, _) in read(MetricsObserver()).samples()}
    assert {"rollout_tokens_total", "rollout_drift_total", "rollout_segments_total", "rollout_warnings_total"} <= names


async def test_an_agents_counters_are_there_before_its_first_rollout() -> None:
    samples = Counted(Calculator(), Talking()).exposed().samples()
    for agent in ("calculator", "talking"):
        failed = frozenset({"agent": agent, "end": "failure", "reason": "network"}.items())
        assert samples["rollout_finished_total", failed] == 0
        assert samples["rollout_accepted_total", frozenset({("agent", agent)})] == 0


async def test_servers_do_not_count_for_each_other() -> None:
    first, second = Counted(Calculator()), Counted(Calculator())
    await first.play(done)
    assert first.exposed().total("rollout_accepted_total") == 1
    assert second.exposed().total("rollout_accepted_total") == 0


async def test_words_of_others_are_no_labels() -> None:
    """However many different texts arrive, the number of series is constant and no text appears."""
    world = Counted(Talking(), Calculator())

    async def round_of(word: str) -> None:
        metadata = f'{{"word": "{word}"}}'
        await world.play(
            lambda ask: said(ask, call(word, f'{{"x": "{word}"}}', word), notes=((word, word),), policy_version=word),
            metadata_json=metadata,
            labels={word: word},
            group_id=word,
        )
        await world.play(failing(Failure(Category.NETWORK, word)), metadata_json=metadata)
        rollout = world.start(calling([call(word)]), metadata_json=metadata)
        world.roster.cancel(Selection(Caller("me"), uids=(rollout.uid,)), word)
        await outcome_of(rollout)

    await round_of(f"{SECRET}-first")
    series = set(world.exposed().samples())
    for number in range(50):
        await round_of(f"{SECRET}-{number}")
    assert set(world.exposed().samples()) == series
    assert SECRET not in world.exposed().text


async def test_nothing_of_a_request_shows() -> None:
    world = Counted(Calculator())
    wish = StartRequest(
        world.start(done).spec, f"caller-{SECRET}", f"request-{SECRET}", credentials=Credentials(SECRET, SECRET, SECRET)
    )
    rollout, _ = world.roster.start(world.roster.admission.admit(wish))
    await outcome_of(rollout)
    shown = world.exposed().text
    for text in (SECRET, rollout.uid, rollout.spec.rollout_id, TARGET.url, str(USER.fields()["content"])):
        assert f'"{text}"' not in shown
    assert SECRET not in shown
