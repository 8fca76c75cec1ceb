"""Mistakes of authors at run time: each ends only its own rollout, is reported with file and line, and harms no other rollout."""

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
        reads: texts in the log; `{at}` stands for file and line of the mistake.
        ends: a part of its rollout's failure message; None: the rollout succeeds.
        told: a part of the tool result that the model receives; None: there is no call.
        seconds: the time limit of the rollout.
        warns: a part of the outcome's warning.
    """

    name: str
    reads: str
    ends: str | None = None
    told: str | None = None
    seconds: float | None = None
    warns: str = ""


PLAY, REWARD, TIME = "agent's play failed in turn", "agent's reward failed in turn", "timeout: the rollout's"
MISTAKES = [
    Row("play-raises", "agent play-raises: play() failed at {at}", PLAY),
    Row("play-raises-oddly", "agent play-raises-oddly: play() failed at {at}", PLAY),
    Row("play-exits", "agent play-exits: play() failed at {at}", PLAY),
    Row("play-is-interrupted", "agent play-is-interrupted: play() failed at {at}", PLAY),
    Row("waits-for-nothing", "agent waits-for-nothing: play() failed at {at}", PLAY),
    Row("finishes-without-a-word", "agent finishes-without-a-word: play() failed at {at}", PLAY),
    Row("remarks-no-text", "agent remarks-no-text: play() failed at {at}", PLAY),
    Row("appends-for-ever", "agent appends-for-ever: play() failed at {at}", PLAY),
    Row("reward-has-odd-scores", "a score's name is a text of at most 256 characters, not 1 ({at})", REWARD),
    Row("task-exits", "a task called sys.exit(1) at {at}; this ends the task, not the program"),
    Row("group-raises", "agent group-raises: play() failed at {at}", PLAY),
    Row("setup-raises", "agent setup-raises: setup() failed at {at}", "agent's setup failed in turn 0"),
    Row(
        "cleanup-raises",
        "agent cleanup-raises: cleanup() failed at {at}",
        warns="The agent's cleanup failed; the server's log has the reason",
    ),
    Row(
        "cleanup-never-returns",
        "did not return within 0.1 s at {at}",
        warns="The agent's cleanup did not return within 0.1 s",
    ),
    Row("reward-raises", "agent reward-raises: reward() failed at {at}", REWARD),
    Row("reward-is-nan", "returned nan, which is not a finite number ({at})", REWARD),
    Row("reward-is-a-text", "agent reward-is-a-text: reward() failed ({at})", REWARD),
    Row("reward-never-returns", "its rollout; it was waiting at {at}", TIME, seconds=0.3),
    Row("play-never-returns", "its rollout; it was waiting at {at}", TIME, seconds=0.3),
    Row(
        "plain-play-never-returns",
        "plain-play-never-returns: play() ({at}) had not returned at the time limit",
        TIME,
        seconds=0.3,
    ),
    Row("returns-early", "returned while a task it started was still running at {at}; the task is cancelled"),
    Row("samples-twice", "agent samples-twice: play() failed at {at}", PLAY),
    Row("appends-no-message", "agent appends-no-message: play() failed at {at}", PLAY),
    Row(
        "appends-a-list", "AgentMistake: not a message, but a list; to append several messages, write `append(*m", PLAY
    ),
    Row("calls-a-reply", "AgentMistake: call: pass a list of calls, such as `reply.tool_calls`, not a Reply", PLAY),
    Row("reward-is-not-awaited", "returned a coroutine: an `await` is missing before the call ({at})", REWARD),
    Row("appends-without-role", "agent appends-without-role: play() failed at {at}", PLAY),
    Row("invents-calls", "agent invents-calls: play() failed at {at}", PLAY),
    Row("calls-twice", "agent calls-twice: play() failed at {at}", PLAY, told="Unknown function"),
    Row("calls-no-calls", "agent calls-no-calls: play() failed at {at}", PLAY),
    Row("forks-wrongly", "agent forks-wrongly: play() failed at {at}", PLAY),
    Row("rewrites-history", "agent rewrites-history: play() failed at {at}", PLAY),
    Row("drops-history", "agent drops-history: play() failed at {at}", PLAY),
    Row(
        "keeps-what-is-no-json",
        "cannot be serialized as JSON: Object of type object is not JSON serializable ({at})",
        PLAY,
    ),
    Row("tool-raises", "raised KeyError at {at}", told="Error: KeyError: 'key'"),
    Row(
        "tool-returns-no-json",
        "tool odd ({at}) returned a value that cannot be written as text",
        told="Error: The result of odd",
    ),
    Row("tool-never-returns", "took longer than 0.1 s at {at}", told="Error: never took longer than 0.1 s"),
    Row("plain-tool-never-returns", "tool never_plain ({at}) took longer", told="Error: never_plain took longer"),
    Row("tool-outlasts-its-rollout", "its rollout; it was waiting for tool endless ({at})", TIME, seconds=0.3),
    Row(
        "tool-floods",
        "tool flood ({at}) returned a result over the size limit",
        told="100,000,000 characters are missing]",
    ),
    Row(
        "tool-floods-json",
        "tool flood_json ({at}) returned a value that cannot be written",
        told="more than 4 MiB as JSON",
    ),
    Row("tool-prints", "", told="printed"),
    Row("tool-blocks", "", told="slept"),
    Row("tool-exits", "ended with SystemExit at {at}", told="Error: SystemExit: 1"),
    Row("tool-dies", "tool dies", told="Error: too bad"),
    Row("tool-cancels", "", told="Error: The tool was cancelled"),
]


def script(name: str) -> ScriptedModel:
    """A model that calls the agent's tool, if it has one."""
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
    if row.warns:
        assert [row.warns in text for text in played.warnings] == [True]
    wanted = row.reads.replace("{at}", place(wrong, row.name)) if "{at}" in row.reads else row.reads
    assert wanted in caplog.text


LEFT = {
    "play-swallows": "play {uid} ignores its cancellation and is abandoned at {at}",
    "play-swallows-its-end": "",  # the message is the same, after another five seconds
    "reward-swallows": "judge {uid} ignores its cancellation and is abandoned at {at}",
    "cleanup-swallows": "cleanup {uid} ignores its cancellation and is abandoned at {at}",
    "plain-cleanup-never-returns": "cleanup() of agent plain-cleanup-never-returns ({at}) is still running in its thread",
    "tool-swallows": "tool stubborn ({at}) ignores its cancellation and is abandoned with the slots it holds",
    "plain-play-never-returns": "play() of agent plain-play-never-returns ({at}) is still running in its thread and is abandoned",
}

STOPPING = ("cleanup-swallows", "plain-cleanup-never-returns", "tool-swallows")


def test_what_does_not_give_way_is_left_alone_and_named(theatre: Theatre, caplog: pytest.LogCaptureFixture) -> None:
    """Their rollouts end long before the server abandons their tasks."""

    def play(name: str) -> str:
        stops = {"play-swallows-its-end": "max_turns"} | dict.fromkeys(STOPPING, "stop")
        limits = {"turns": 1} if name == "play-swallows-its-end" else {"time": 0.3}
        played = theatre.play(name, script(name), limits=limits if name not in STOPPING else None)
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
    """State in `self` is shared by all rollouts. The server cannot detect this mistake."""
    with ThreadPoolExecutor(4) as pool:
        for played in pool.map(lambda _: theatre.play("tool-prints", script("tool-prints")), range(4)):
            assert (played.stop, played.tool_results) == ("stop", ["printed"])
    # gRPC itself logs an error if a client leaves while the last status is sent.
    own = [record for record in caplog.records if record.name.startswith("rollout_server")]
    assert not [record for record in own if record.levelno >= logging.WARNING]


def until(holds: Callable[[], bool]) -> None:
    """Poll until the condition holds."""
    for _ in range(6000):
        if holds():
            return
        time.sleep(0.01)
    raise AssertionError("the condition never held")
