"""What an author does wrong while rollouts are played: each mistake ends its own rollout as it should, is told of by file and line,
and does no harm to a rollout beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from rollout_client import RolloutError
from rollout_server.local_stack import ScriptedModel

from tests.authoring import wrong
from tests.authoring.theatre import Theatre, place


@dataclass(frozen=True)
class Row:
    """A mistake, by its agent's name.

    Args:
        reads: what the log has of it; `{at}` stands for file and line of what is wrong.
        ends: the failure of its rollout, or a part of it; None: the rollout stops as it should.
        told: what the model reads of the call, or a part of it; None: it makes none.
        seconds: the time that the rollout has.
    """

    name: str
    reads: str
    ends: str | None = None
    told: str | None = None
    seconds: float | None = None


PLAY, REWARD, TIME = "agent's play failed in turn", "agent's reward failed in turn", "timeout: the rollout's"
MISTAKES = [
    Row("play-raises", "the play of agent play-raises failed at {at}", PLAY),
    Row("play-raises-oddly", "the play of agent play-raises-oddly failed at {at}", PLAY),
    Row("play-exits", "the play of agent play-exits failed at {at}", PLAY),
    Row("play-is-interrupted", "the play of agent play-is-interrupted failed at {at}", PLAY),
    Row("waits-for-nothing", "the play of agent waits-for-nothing failed at {at}", PLAY),
    Row("finishes-without-a-word", "the play of agent finishes-without-a-word failed at {at}", PLAY),
    Row("remarks-no-text", "the play of agent remarks-no-text failed at {at}", PLAY),
    Row("appends-for-ever", "the play of agent appends-for-ever failed at {at}", PLAY),
    Row("reward-has-odd-scores", "a score's name is a text of at most 256 characters, not 1 ({at})", REWARD),
    Row("task-exits", "a task called sys.exit(1) at {at}; that ends the task, not the program"),
    Row("group-raises", "the play of agent group-raises failed at {at}", PLAY),
    Row("reward-raises", "the reward of agent reward-raises failed at {at}", REWARD),
    Row("reward-is-nan", "returned nan, which is not a finite number ({at})", REWARD),
    Row("reward-is-a-text", "the reward of agent reward-is-a-text failed ({at})", REWARD),
    Row("reward-never-returns", "over: it waited at {at}", TIME, seconds=0.3),
    Row("play-never-returns", "over: it waited at {at}", TIME, seconds=0.3),
    Row(
        "plain-play-never-returns", "plain-play-never-returns ({at}) had not returned when the time", TIME, seconds=0.3
    ),
    Row("returns-early", "returned while a task that it had started went on at {at}; that is cancelled"),
    Row("samples-twice", "the play of agent samples-twice failed at {at}", PLAY),
    Row("appends-no-message", "the play of agent appends-no-message failed at {at}", PLAY),
    Row("appends-without-role", "the play of agent appends-without-role failed at {at}", PLAY),
    Row("invents-calls", "the play of agent invents-calls failed at {at}", PLAY),
    Row("calls-twice", "the play of agent calls-twice failed at {at}", PLAY, told="Unknown function"),
    Row("calls-no-calls", "the play of agent calls-no-calls failed at {at}", PLAY),
    Row("forks-wrongly", "the play of agent forks-wrongly failed at {at}", PLAY),
    Row("rewrites-history", "the play of agent rewrites-history failed at {at}", PLAY),
    Row("drops-history", "the play of agent drops-history failed at {at}", PLAY),
    Row("keeps-what-is-no-json", "what JSON can hold: Object of type object is not JSON serializable ({at})", PLAY),
    Row("tool-raises", "raised KeyError at {at}", told="Error: 'key'"),
    Row(
        "tool-returns-no-json",
        "tool odd ({at}) returned what cannot be written as text",
        told="Error: The result of odd",
    ),
    Row("tool-never-returns", "took longer than 0.1 s at {at}", told="Error: never took longer than 0.1 s"),
    Row("plain-tool-never-returns", "tool never_plain ({at}) took longer", told="Error: never_plain took longer"),
    Row("tool-outlasts-its-rollout", "over: it waited for tool endless ({at})", TIME, seconds=0.3),
    Row(
        "tool-floods",
        "tool flood ({at}) returned more than a result may have",
        told="100,000,000 characters are missing]",
    ),
    Row("tool-floods-json", "tool flood_json ({at}) returned what cannot be written", told="more than 4 MiB as JSON"),
    Row("tool-prints", "", told="printed"),
    Row("tool-blocks", "ms at {at} in blocks; all rollouts wait for it", told="slept"),
    Row("tool-exits", "ended with SystemExit at {at}", told="Error: SystemExit: 1"),
    Row("tool-dies", "tool dies", told="Error: too bad"),
    Row("tool-cancels", "", told="Error: The tool was cancelled"),
]


def script(name: str) -> ScriptedModel:
    """A model that calls the agent's tool, where it has one."""
    if name in wrong.CALLED:
        return ScriptedModel().calls(wrong.CALLED[name]).says("done")
    return ScriptedModel().says("one").says("two").says("three")


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row.name)
def test_a_mistake_is_its_authors_own(theatre: Theatre, caplog: pytest.LogCaptureFixture, row: Row) -> None:
    limits = {"time": row.seconds} if row.seconds else None
    played = theatre.play(row.name, script(row.name), limits=limits)
    assert (played.stop, played.failure is None) == (("stop", True) if row.ends is None else (None, False))
    assert (row.ends or "") in (played.failure or "")
    if row.told is not None:
        assert row.told in played.tool_results[0][-200:]
    wanted = row.reads.replace("{at}", place(wrong, row.name)) if "{at}" in row.reads else row.reads
    assert wanted in caplog.text


LEFT = {
    "play-swallows": "play {uid} does not give way to its cancellation and is left alone at {at}",
    "play-swallows-its-end": "",  # it is told of in the same words, after another five seconds
    "reward-swallows": "judge {uid} does not give way to its cancellation and is left alone at {at}",
    "tool-swallows": "tool stubborn ({at}) does not give way to its cancellation and is left alone, with the places it holds",
    "plain-play-never-returns": "play() of agent plain-play-never-returns ({at}) is still in its thread and is left alone",
}


def test_what_does_not_give_way_is_left_alone_and_named(theatre: Theatre, caplog: pytest.LogCaptureFixture) -> None:
    """Their rollouts have ended long before the server gives them up."""

    def play(name: str) -> str:
        limits = {"turns": 1} if name == "play-swallows-its-end" else {"time": 0.3}
        played = theatre.play(name, script(name), limits=limits if name != "tool-swallows" else None)
        stops = {"play-swallows-its-end": "max_turns", "tool-swallows": "stop"}
        assert played.stop == stops.get(name)
        assert (TIME in (played.failure or "")) is (name not in stops)
        return LEFT[name].format(uid=played.uid, at=place(wrong, name))

    with ThreadPoolExecutor(len(LEFT)) as pool:
        wanted = list(pool.map(play, LEFT))
    until(lambda: all(each in caplog.text for each in wanted))


@pytest.mark.parametrize(
    ("name", "reads"),
    [
        ("choose-tools-raises", "agent choose-tools-raises could not choose its tools at {at}"),
        ("chooses-no-tools", "choose_tools: 7 is neither a tool nor a function ({at})"),
    ],
)
def test_a_choice_of_tools_that_fails_refuses_the_rollout(
    theatre: Theatre, caplog: pytest.LogCaptureFixture, name: str, reads: str
) -> None:
    with pytest.raises(
        RolloutError, match="could not choose the tools of this rollout; the server's log has the reason"
    ):
        theatre.play(name, script(name))
    assert reads.format(at=place(wrong, name)) in caplog.text


def test_rollouts_share_their_agents_object(theatre: Theatre, caplog: pytest.LogCaptureFixture) -> None:
    """What they keep in `self` is theirs together, and no mistake that a server could find."""
    with ThreadPoolExecutor(4) as pool:
        for played in pool.map(lambda _: theatre.play("tool-prints", script("tool-prints")), range(4)):
            assert (played.stop, played.tool_results) == ("stop", ["printed"])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def until(holds: Callable[[], bool]) -> None:
    """Waits for what is about to be."""
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")
