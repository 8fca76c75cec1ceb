"""`rollout run`: one rollout, as text and JSON, with a script and with trainers."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rollout_client import RolloutEvent
from rollout_server import Limits
from rollout_server.cli.progress import Progress
from rollout_server.testing import TrainerDialect
from rollout_server.testing.script import Script, ScriptedReply
from rollout_server.testing.trainer import StrictTrainer

from tests.cli.conftest import Invoke, complaint, document
from tests.support.engine_model import EngineModel
from tests.support.engines import Engine, OpenaiEngine, SglangEngine, VllmEngine, serving

BROKEN = """from rollout_server import Agent


class A(Agent):
    name = "a"

    async def play(self, run):
        print("hm")
        {}["key"]
"""
QUESTION = "How often does the letter r occur in strawberry?"


class Elsewhere:
    """An event loop in a separate thread, for the servers that commands of this thread call."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def open(self, stack: ExitStack, manager: AbstractAsyncContextManager[Any]) -> None:
        """Enter a context there until the end of the stack."""
        asyncio.run_coroutine_threadsafe(manager.__aenter__(), self.loop).result()
        stack.callback(
            lambda: asyncio.run_coroutine_threadsafe(manager.__aexit__(None, None, None), self.loop).result()
        )

    def close(self) -> None:
        """Stop the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture
def elsewhere() -> Iterator[Callable[[AbstractAsyncContextManager[Any]], None]]:
    """`elsewhere(context)`: enter a context in the other thread; it is left after the test."""
    with ExitStack() as stack:
        there = Elsewhere()
        stack.callback(there.close)
        yield lambda manager: there.open(stack, manager)


@pytest.fixture
def trainer(elsewhere: Callable[[StrictTrainer], None]) -> StrictTrainer:
    """A strict trainer that requires a key."""
    script = Script((ScriptedReply(content="It is 3."),), repeat_last=True)
    strict = StrictTrainer(script=script, dialect=TrainerDialect.EITHER, api_key="sesame-open", render_tools=False)
    elsewhere(strict)
    return strict


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_rollout_is_told_as_it_goes(project: Path, invoke: Invoke) -> None:
    told = invoke(
        "run", "agent.py", "--script", "scripted.py", "--prompt", QUESTION, "--ground-truth", "3", "--out", "kept"
    )
    assert told.exit_code == 0, told.stdout
    for said in (
        f"user      │ {QUESTION}",
        'assistant │ calls count_letter {"letter": "r", "word": "strawberry"}',
        ": 3",
        "assistant │ The letter occurs 3 times.",
        "2 turns, 1 tool call (0 failed)",
        " model, ",
        "reward 1",
        "next: rollout inspect kept",
    ):
        assert said in told.stdout
    assert invoke("inspect", "kept", "--tokenizer", "toy=toy").exit_code == 0


def test_json_lines_are_the_events_and_then_the_rollout(project: Path, invoke: Invoke) -> None:
    told = invoke("run", "agent.py", "--script", "scripted.py:ScriptedModel", "--prompt", QUESTION, "--json")
    *events, last = lines(told.stdout)
    kinds = [event["event"] for event in events if event["event"] != "segment_opened"]
    assert kinds == ["accepted", "asked", "answered", "tool_started", "tool_returned", "asked", "answered"]
    rollout = last["rollout"]
    assert (rollout["agent"], rollout["end"], rollout["turns"], rollout["reward"]) == (
        "letter-counter",
        "stop",
        2,
        None,
    )
    assert rollout["authors"]["model"] == rollout["tokens"]["generated"]
    assert [message["role"] for message in rollout["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_messages_come_from_a_file(project: Path, invoke: Invoke) -> None:
    """The built-in mock model calls the agent's tool with the last user message and repeats the result."""
    (project / "talk.json").write_text(
        json.dumps([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}])
    )
    (project / "one.json").write_text(json.dumps({"role": "user", "content": "three"}))
    for name, content in (("talk.json", "one"), ("one.json", "three")):
        told = lines(invoke("run", "agent.py", "--message", name, "--system", "Be kind.", "--json").stdout)[-1]
        messages = told["rollout"]["messages"]
        assert messages[0] == {"role": "system", "content": "Be kind."}
        [call] = [each for message in messages for each in message.get("tool_calls") or ()]
        assert content in call["function"]["arguments"].values()
        assert messages[-1]["content"] == messages[-2]["content"]


def test_an_agent_that_fails_is_told_at_its_own_line(project: Path, invoke: Invoke) -> None:
    (project / "broken.py").write_text(BROKEN)
    told = invoke("run", "broken.py", "--prompt", "hi", "--json")
    assert told.exit_code == 1
    rollout = lines(told.stdout)[-1]["rollout"]
    assert (rollout["end"], rollout["reason"]) == ("failure", "internal")
    assert "KeyError: 'key'" in told.stderr
    assert "broken.py:9" in told.stderr
    assert "Traceback" not in told.stderr


FORKING = """import asyncio

from rollout_server import Agent, Run


class Forking(Agent):
    name = "forking"

    async def play(self, run: Run) -> None:
        await run.once(lambda: {"seen": True})
        plan = await run.sample()
        run.mask(plan, "a plan\\n\\x1b[31mfinished")
        run.give_reward(-0.5)
        judge = await run.fork([{"role": "user", "content": "Are you sure?"}], role="judge", trainable=False)
        lost = asyncio.create_task(judge.sample())
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait([lost])
        branch = await run.fork()
        await branch.append({"role": "user", "content": "Another way."})
        await branch.sample()
        await run.append({"role": "user", "content": "Go on."})
        await run.sample()
        short = await run.fork([{"role": "user", "content": "In short."}], kind="compaction")
        await short.sample()
"""


def test_what_an_agent_does_beside_its_turns_is_told(project: Path, invoke: Invoke) -> None:
    (project / "forking.py").write_text(FORKING)
    told = invoke("run", "forking.py", "--prompt", "hi", "--out", "kept", "--json")
    assert told.exit_code == 0, told.stderr
    for said in (
        'observed  │ once {"seen": true}',
        "masked    │ turn 1 is excluded from training: a plan\nmasked    │ ␛[31mfinished",
        "reward    │ turn 1: -0.5",
        "fork      │ segment 1, a subagent of segment 0: 1 message, no tools, role judge, not trainable\n"
        "user      │ Are you sure?",
        "given up  │ turn 2: no completion; the conversation is closed",
        "fork      │ segment 2, a branch of segment 0: 2 messages, no tools\nuser      │ Another way.",
        "          │ in segment 0:\nuser      │ Go on.",
        "fork      │ segment 3, a compaction of segment 0: 1 message, no tools\nuser      │ In short.",
        " model (masked by the agent), ",
    ):
        assert said in told.stderr, said
    *events, _ = lines(told.stdout)
    found = {event["event"]: event for event in events}
    assert (found["observed"]["what"], found["observed"]["value"]) == ("once", {"seen": True})
    assert found["masked"]["reason"] == "a plan\n\x1b[31mfinished"
    assert found["forked"]["origin"] == {"parent_id": "0", "parent_tokens": 0, "kind": "compaction"}
    assert found["given_up"]["segment_id"] == "1"
    seen = invoke("inspect", "kept", "--tokenizer", "toy=toy").stdout
    assert re.search(
        r"segment 0 \(main\): \d+ of \d+ tokens have mask 1, \d+ generated tokens masked by the agent", seen
    )
    assert re.search(r"segment 2 \(branch of segment 0, \d+ shared tokens\): ", seen)
    assert "segment 3 (compaction of segment 0, new prompt): " in seen


def test_a_limit_ends_it(project: Path, invoke: Invoke) -> None:
    (project / "script.json").write_text(json.dumps({"lines": [{"reply": {"tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "count_letter", "arguments": "{}"}}
    ]}}], "repeat_last": True}))  # fmt: skip
    told = invoke("run", "agent.py", "--script", "script.json", "--prompt", "hi", "--turns", "2", "--json")
    rollout = lines(told.stdout)[-1]["rollout"]
    assert (rollout["reason"], rollout["turns"], rollout["tool_errors"]) == ("max_turns", 2, {"count_letter": 2})


@pytest.mark.parametrize(
    ("dialect", "more"), [("http-plain", ()), ("http-masked", ("--tokenizer", "toy")), ("grpc", ())]
)
def test_a_model_is_asked_where_there_is_one(
    project: Path, invoke: Invoke, trainer: StrictTrainer, dialect: str, more: tuple[str, ...]
) -> None:
    url = f"grpc://{trainer.grpc_target}" if dialect == "grpc" else trainer.url
    (project / "plain.py").write_text("from rollout_server import Agent\n\n\nclass P(Agent):\n    name = 'p'\n")
    asked = ("run", "plain.py", "--prompt", "hi", "--model-url", url, "--dialect", dialect, *more, "--json")
    told = invoke(*asked, "--api-key-env", "SESAME", SESAME="sesame-open")
    rollout = lines(told.stdout)[-1]["rollout"]
    assert (told.exit_code, rollout["messages"][-1]["content"]) == (0, "It is 3."), told.stderr
    assert rollout["endpoint"]["dialect"] == dialect
    assert "sesame" not in told.stdout + told.stderr
    refused = invoke(*asked)
    assert (refused.exit_code, lines(refused.stdout)[-1]["rollout"]["end"]) == (1, "failure")


@pytest.mark.parametrize(
    ("dialect", "kind"), [("openai", OpenaiEngine), ("vllm", VllmEngine), ("sglang", SglangEngine)]
)
def test_an_engine_is_asked_by_its_models_name(
    project: Path, invoke: Invoke, elsewhere: Callable[[Any], None], dialect: str, kind: type[Engine]
) -> None:
    engine = kind(EngineModel(["It is 3."]))
    elsewhere(serving(engine))
    named = ("--model-url", f"{engine.url}/v1", "--dialect", dialect, "--model", engine.model_name)
    told = invoke("run", "agent.py", "--prompt", "hi", *named, "--temperature", "0.5", "--max-tokens", "64", "--json")
    rollout = lines(told.stdout)[-1]["rollout"]
    assert (rollout["end"], rollout["messages"][-1]["content"]) == ("stop", "It is 3."), told.stderr
    [body] = engine.bodies()
    assert (body["temperature"], body["model"]) == (0.5, engine.model_name)
    assert [tool["function"]["name"] for tool in body["tools"]] == ["count_letter"]
    assert (rollout["authors"] is None) == (dialect == "openai")


WRONG = {
    "no_prompt": ((), "--prompt TEXT and --message FILE"),
    "both": (("--prompt", "a", "--message", "b"), "--prompt TEXT and --message FILE"),
    "no_folder": (("--prompt", "a", "--out", "gone/kept.pb"), "gone/kept.pb: No such file or directory"),
    "no_file": (("--message", "gone.json"), "gone.json"),
    "no_messages": (("--message", "agent.py"), "agent.py: this is not JSON"),
    "no_metadata": (("--prompt", "a", "--metadata", "["), "--metadata is not JSON"),
    "no_object": (("--prompt", "a", "--metadata", "[]"), "--metadata must be a JSON object"),
    "two_models": (("--prompt", "a", "--model-url", "http://x", "--script", "y.json"), "exclude each other"),
    "no_url": (("--prompt", "a", "--model", "m"), "--model needs --model-url"),
    "no_scheme": (("--prompt", "a", "--model-url", "localhost:1"), "must begin with http://"),
    "no_model": (("--prompt", "a", "--model-url", "http://x"), "--dialect openai needs --model NAME"),
    "no_dialect": (
        ("--prompt", "a", "--model-url", "http://x", "--dialect", "tcp"),
        "'tcp' must be one of openai, vllm",
    ),
    "wrong_scheme": (("--prompt", "a", "--model-url", "grpc://x", "--dialect", "vllm"), "does not go with a URL"),
    "no_tokenizer": (("--prompt", "a", "--model-url", "http://x", "--dialect", "http-masked"), "needs --tokenizer"),
    "no_key": (
        ("--prompt", "a", "--model-url", "http://x", "--model", "m", "--api-key-env", "UNSET"),
        "UNSET is not set",
    ),
    "no_script": (("--prompt", "a", "--script", "agent.py"), "no class with a method reply(messages)"),
    "broken_script": (("--prompt", "a", "--script", "wrong.json"), "wrong.json: this is not a script"),
}


@pytest.mark.parametrize(("flags", "said"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_with_the_command_line_is_told(
    project: Path, invoke: Invoke, flags: tuple[str, ...], said: str
) -> None:
    (project / "wrong.json").write_text("{}")
    assert said in complaint(invoke("run", "agent.py", *flags))
    found = document(invoke("run", "agent.py", *flags, "--json"))["error"]
    assert (found["command"], found["kind"]) == ("run", "failed")
    assert said in found["message"]


def shown(*messages: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    Progress(Console(file=out, width=80), Limits()).messages(messages)
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


def test_no_message_is_left_out() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert shown(
        {"role": "system", "content": ""},
        {"role": "user", "content": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "", "tool_call_id": "c"},
        {"role": "tool", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": []},
    ) == [
        "system │ ⟨empty⟩",
        "user │ ⟨empty⟩",
        "assistant │ calls f {}",
        "tool │ ⟨empty⟩",
        "tool │ ⟨empty⟩",
        "assistant │ Hm.",
        "assistant │ ⟨empty⟩",
        "user │ []",
    ]


def test_a_tool_that_returned_nothing_is_told() -> None:
    out = io.StringIO()
    event = RolloutEvent(turn=1)
    event.tool_returned.name = "forget"
    event.tool_returned.message.json = json.dumps({"role": "tool", "content": "", "tool_call_id": "c"})
    Progress(Console(file=out, width=80), Limits()).show(event)
    assert out.getvalue() == "tool      │ forget, 0 ms: ⟨empty⟩\n"


def test_no_text_passes_for_somebody_elses_or_moves_the_cursor() -> None:
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=80, color_system=None), Limits(turns=3))
    event = RolloutEvent(turn=1)
    event.answered.message.json = json.dumps({"role": "assistant", "content": "a\nuser      │ b\x1b[2J\u202ec"})
    with progress.live():
        progress.show(event)
    shown = [line for line in out.getvalue().splitlines() if "│" in line]
    assert "assistant │ user      │ b␛[2J⟨U+202E⟩c" in "".join(shown)
    assert "turn 1/3" in out.getvalue()


JUDGED = """
from rollout_server import Agent, Judge, Rubric


class Judged(Agent):
    name = "judged"
    rubric = Rubric(funcs=[Judge()])
"""
MODELS = """
from rollout_server.testing.script import ScriptedReply


class Model:
    def reply(self, messages):
        return ScriptedReply(content="It is 8.")


class Critic:
    def reply(self, messages):
        return ScriptedReply(content="yes" if "It is 8." in messages[0]["content"] else "no")


MODELS = {}
"""


def test_further_models_of_a_script(here: Path, invoke: Invoke) -> None:
    (here / "judged.py").write_text(JUDGED)
    (here / "models.py").write_text(MODELS.format('{"judge": Critic()}'))
    command = ("run", "judged.py", "--prompt", "5 + 3?", "--script", "models.py", "--json")
    told = invoke(*command)
    assert (told.exit_code, "model     │ judge: yes  (1 token, " in told.stderr) == (0, True), told.stderr
    *events, last = lines(told.stdout)
    (called,) = [event for event in events if event["event"] == "model_called"]
    assert (called["model"], called["message"]["content"], called["generated_tokens"]) == ("judge", "yes", 1)
    assert (last["rollout"]["reward"], last["rollout"]["scores"]) == (1.0, {"judge": 1.0})
    unnamed = invoke("run", "judged.py", "--prompt", "5 + 3?", "--script", "models.py:Critic", ROLLOUT_MODELS="")
    assert unnamed.exit_code == 0
    (here / "wrong.py").write_text(MODELS.format("[1]"))
    wrong = invoke(*command[:-2], "wrong.py:Model")
    assert (wrong.exit_code, "MODELS must be a dictionary of scripted models" in wrong.stderr) == (1, True)


def test_the_log_line_of_a_rubric_says_what_its_function_raised(here: Path, invoke: Invoke) -> None:
    strict = "from rollout_server import Agent, Rubric\n\n\ndef exact(response, answer):\n    return float(answer in response)\n"
    (here / "strict.py").write_text(
        f"{strict}\n\nclass Strict(Agent):\n    name = 'strict'\n    rubric = Rubric([exact])\n"
    )
    told = invoke("run", "strict.py", "--prompt", "5 + 3?", "--metadata", '{"ground_truth": 8}')
    line = f"agent strict: reward() failed at {here / 'strict.py'}:5: strict.py:5: TypeError: 'in <string>' requires string"
    assert (told.exit_code, line in told.stdout) == (1, True), told.stderr
    (here / "lax.py").write_text((here / "strict.py").read_text().replace("float(answer in response)", "None"))
    told = invoke("run", "lax.py", "--prompt", "5 + 3?")
    assert "agent strict: reward() failed: RewardFailed: reward function 'exact' (" in told.stdout


def test_a_failure_says_what_the_agent_raised(here: Path, invoke: Invoke) -> None:
    loop = "async def play(self, run):\n        raise LookupError('no such thing')"
    (here / "raises.py").write_text(
        f"from rollout_server import Agent\n\n\nclass Raises(Agent):\n    name = 'raises'\n\n    {loop}\n"
    )
    told = invoke("run", "raises.py", "--prompt", "5 + 3?")
    line = "failed: internal: The agent's play failed in turn 0: raises.py:8: LookupError: no such thing"
    assert (told.exit_code, line in told.stdout) == (1, True), told.stdout


OWN_LOOP = """
from rollout_server import own_loop


@own_loop
async def asking(task, http):
    messages = [{"role": "user", "content": task}]
    for more in ("Sure?", ""):
        response = await http.post("chat/completions", json={"model": "any", "messages": messages})
        reply = response.raise_for_status().json()["choices"][0]["message"]
        messages += [reply | {"content": "No."}, {"role": "user", "content": more}]
    return 1.0


@own_loop
async def silent(task):
    return 1.0
"""


def test_the_conversations_of_an_agent_that_owns_its_loop_are_told(project: Path, invoke: Invoke) -> None:
    (project / "own.py").write_text(OWN_LOOP)
    told = invoke("run", "own.py:asking", "--prompt", "hi").stdout
    assert "fork      │ segment 0, the agent's first conversation: 1 message, no tools\n" in told
    assert (
        "fork      │ segment 1, a drift of segment 0: 3 messages, no tools; a chat call parted at message 1 (content): "
        "'hi', now 'No.'\n"
    ) in told
    assert "calls     │ calls of the agent: 1 parted; " in told


def test_an_agent_that_calls_no_model_has_no_tokens_to_tell_of(project: Path, invoke: Invoke) -> None:
    (project / "own.py").write_text(OWN_LOOP)
    told = invoke("run", "own.py:silent", "--prompt", "hi").stdout
    assert "calls     │ calls of the agent: none after the first\n" in told
    assert "authors unknown" not in told
