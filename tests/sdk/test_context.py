"""A context without a server, as created by authors' own tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rollout_server.sdk import (
    CompletionsResult,
    RolloutContext,
    RolloutMetrics,
    RolloutRequest,
)
from rollout_server.sdk.core.base import debug_file
from rollout_server.sdk.core.schemas import MessageDict

from tests.sdk.calculator_agent import CalculatorAgentLoop
from tests.sdk.loops import user


class Scripted:
    """A client written by an author."""

    def __init__(self, *answers: MessageDict) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[MessageDict], dict[str, Any]]] = []

    async def chat_completions(self, messages: list[MessageDict], **kwargs: Any) -> CompletionsResult:
        self.asked.append((list(messages), kwargs))
        return CompletionsResult(self.answers.pop(0), [1, 2], [-0.1, -0.2], {"completion_tokens": 2}, "stop")

    def get_metrics(self) -> RolloutMetrics:
        return RolloutMetrics(num_llm_calls=len(self.asked), llm_latency_ms=7.0)


def context(llm: Scripted, **changes: Any) -> RolloutContext:
    request = RolloutRequest(
        rollout_id="r", server_url="http://localhost", messages=[user("Hi")], completion_params={"temperature": 0.7}
    )
    return RolloutContext(request=request, tools=[], llm=llm, **changes)


async def test_a_loop_runs_without_any_server() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 5, "b": 3}'}}
    llm = Scripted(
        {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "assistant", "content": "It is 8."}
    )
    result = await CalculatorAgentLoop().run(context(llm))
    assert (result.status, result.finish_reason, result.error_message) == ("COMPLETED", "stop", None)
    assert result.final_messages[2] == {"role": "tool", "content": "8", "tool_call_id": "call_1"}
    assert [len(messages) for messages, _ in llm.asked] == [1, 3]
    assert llm.asked[0][1] == {"temperature": 0.7}
    assert result.metrics is not None
    assert (result.metrics.num_llm_calls, result.metrics.num_tool_calls) == (2, 1)
    assert result.metrics.llm_latency_ms == 7.0
    assert result.metrics.total_latency_ms >= result.metrics.tool_latency_ms > 0


def test_results_say_what_they_are() -> None:
    ctx = context(Scripted())
    ctx.record_tool_call()
    ctx.record_tool_call(latency_ms=2.5)
    done = ctx.complete([user("Hi")], finish_reason="enough", reward=0.5)
    assert (done.status, done.finish_reason, done.reward, done.error_message) == ("COMPLETED", "enough", 0.5, None)
    assert done.metrics is not None
    assert (done.metrics.num_tool_calls, done.metrics.tool_latency_ms) == (2, 2.5)
    wrong = ctx.error("no")
    assert (wrong.status, wrong.finish_reason, wrong.error_message, wrong.final_messages) == (
        "ERROR",
        "error",
        "no",
        [],
    )


def test_events_go_to_the_file_and_never_fail(tmp_path: Path) -> None:
    quiet = context(Scripted())
    assert not quiet.debug_enabled
    quiet.log_event("nobody hears it")
    loud = context(Scripted(), _debug_dir=str(tmp_path))
    assert loud.debug_enabled
    loud.log_event("told", what={1, 2}.__class__, number=math.inf, text="ü")
    circle: list[Any] = []
    circle.append(circle)
    loud.log_event("circle", circle=circle)
    loud.log_event("huge", text="x" * 2_000_000)
    [line] = (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "event": "told",
        "rollout_id": "r",
        "what": "<class 'set'>",
        "number": math.inf,
        "text": "ü",
    }


def test_a_directory_that_cannot_be_written_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    context(Scripted(), _debug_dir=str(tmp_path / "file")).log_event("told")
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize(
    "rollout_id", ["../../etc/x", "..", ".", "a/b", "a\\b", "x" * 256, "ü" * 256, "a\0b", "\ud800"]
)
def test_debug_files_are_in_their_directory(tmp_path: Path, rollout_id: str) -> None:
    path = debug_file(str(tmp_path), rollout_id)
    assert path.resolve().parent == tmp_path.resolve()
    assert len(path.name.encode()) <= 255
    path.write_text("")


def test_ids_have_files_of_their_own(tmp_path: Path) -> None:
    ids = ["a", "A.", "a/b", "a%2Fb", "x" * 256, "x" * 255, "ü" * 256, "ü" * 255]
    assert len({debug_file(str(tmp_path), each) for each in ids}) == len(ids)
