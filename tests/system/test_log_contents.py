"""The most verbose log of a real server contains ids, turns and categories, but no contents, tokens or keys."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from tests.support.bodies import body, rpc, run, start_request, tool_texts
from tests.support.http_trainer import answer, raw_trainer
from tests.support.processes import Serving, serve

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "sk-wombat-0123456789"
CONTENT = "quokka-2284"
TRAINERS_WORDS = "numbat-5513"
ARGUMENT = "dunnart-9071"

AGENT = """
from rollout_server import Agent, tool


@tool
async def burst(text: str) -> str:
    \"\"\"Bursts\"\"\"
    raise ValueError(f"cannot take {text}")


class Fragile(Agent):
    name = "fragile"
    tools = (burst,)
"""


@dataclass(frozen=True)
class Logged:
    """A server's log, and its rollouts by id."""

    text: str
    answers: Mapping[str, Mapping[str, Any]]
    hub_connections: int

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def finished(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["message"].startswith("rollout finished")]


def broken(text: str) -> tuple[Any, ...]:
    """Ways in which a trainer fails, most of them with a text."""
    message = {"role": "assistant", "content": text, "tool_calls": [{"id": text, "function": text}]}
    return (
        Fault.error(401, f"{text}: {SECRET} is no key of ours"),
        Fault.error(500, f"{text} " * 100),
        Fault.error(429, text),
        Fault.raw(f"<html>{text}</html>", "text/html"),
        Fault.raw(json.dumps({"choices": [{"message": message}], "token_ids": [1, 2, 3]})),
        Fault.raw(json.dumps({"choices": [{"message": message}], "token_ids": text})),
        Fault(kind=FaultKind.RESET),
        Fault.truncated(f'{{"{text}": '),
        Fault(kind=FaultKind.STATUS, status=302, headers={"location": f"/{text}"}),
    )


CALLS = (
    tool_call("1", CONTENT, "{}"),
    tool_call("2", "add", f'{{"a": {CONTENT}'),
    tool_call("3", "add", {"a": CONTENT, "b": 1}),
    tool_call("4", "divide", {"a": 1, "b": 0}),
    tool_call("5", "multiply", {"a": 10.0**300, "b": 10.0**300}),
)
SCRIPTS = {
    "tools": Script((ScriptedReply(content=CONTENT, tool_calls=CALLS), ScriptedReply(content=CONTENT))),
    "drift": Script((ScriptedReply(tool_calls=CALLS[3:4], surplus=(5, 6, 7)), ScriptedReply(content=CONTENT))),
    "late": Script((Fault(kind=FaultKind.SILENCE),)),
    "left": Script((Fault(kind=FaultKind.SILENCE),)),
    **{f"broken {number}": Script((fault,)) for number, fault in enumerate(broken(TRAINERS_WORDS))},
    "fragile": Script(
        (ScriptedReply(tool_calls=(tool_call("1", "burst", {"text": ARGUMENT}),)), ScriptedReply(content=CONTENT))
    ),
}
CHANGES: dict[str, dict[str, Any]] = {
    "late": {"metadata": {"timeout_seconds": 0.5}},
    "traced": {"metadata": {"debug_trace": True, "note": CONTENT}},
    "tokenizer": {"tokenizer_name": "nobody/nothing"},
    "fragile": {"metadata": {"agent": "fragile"}},
}


async def came(trainer: StrictTrainer, rollout_id: str) -> None:
    """Wait for the rollout's first completion request."""
    while all(request.body["rollout_id"] != rollout_id for request in trainer.requests):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def play(server: Serving, trainer: StrictTrainer, client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Run rollouts of every kind over HTTP, and one over gRPC."""

    def asked(rollout_id: str) -> dict[str, Any]:
        changes = {"callback_api_key": SECRET, **CHANGES.get(rollout_id, {})}
        return body(rollout_id, trainer.url, f"{CONTENT}: 5 plus 3?", changes)

    answers = {}
    for rollout_id in ["plain", "traced", "tokenizer", *SCRIPTS]:
        asking = asyncio.create_task(client.post("/rollout", json=asked(rollout_id)))
        if rollout_id == "left":
            await came(trainer, rollout_id)
            asking.cancel()
        else:
            answers[rollout_id] = (await asking).json()
    async with rpc(server.grpc_port) as stub:
        request = start_request("grpc", trainer.url, f"{CONTENT}: 5 plus 3?")
        request.credentials.completions_bearer = SECRET
        assert [item async for item in run(stub, request)]
    await client.post("/rollout", json={**asked("invalid"), "max_turns": 0})
    await client.post("/rollout", content=json.dumps(asked("cut"))[:-1], headers={"content-type": "application/json"})
    await client.post("/rollout", json={**asked("key"), "callback_api_key": f"{SECRET}\n"})
    await client.get("/tools", headers={"authorization": f"Bearer {SECRET}"})
    return answers


@asynccontextmanager
async def talkative(directory: Path, hub: str) -> AsyncIterator[tuple[Serving, StrictTrainer, httpx.AsyncClient]]:
    (directory / "fragile.py").write_text(AGENT)
    agents = ("rollout_server.calculator:Calculator", "fragile.py:Fragile")
    env = {"ROLLOUT_LOG_LEVEL": "debug", "ROLLOUT_DETACH_GRACE_SECONDS": "0", "HF_ENDPOINT": hub}
    async with (
        serve(*agents, "--log-format", "json", cwd=directory, **env) as server,
        StrictTrainer(scripts=SCRIPTS, render_tools=False) as trainer,
        httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client,
    ):
        yield server, trainer, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def logged(tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """The complete log of one server."""
    async with raw_trainer(answer(b"", 404)) as hub:
        async with talkative(tmp_path_factory.mktemp("talkative"), hub.url) as (server, trainer, client):
            answers = await play(server, trainer, client)
            server.send(signal.SIGINT)
            assert await server.ended() == 0
        return Logged(server.text, answers, hub.connections)


async def test_the_rollouts_were_what_they_were_meant_to_be(logged: Logged) -> None:
    categories = Counter(answer["extra_fields"].get("error_category") for answer in logged.answers.values())
    assert categories == {
        None: 5,
        "timeout": 1,
        "tokenizer_error": 1,
        "trainer_client_error": 1,
        "trainer_server_error": 1,
        "rate_limited": 1,
        "validation_error": 4,
        "network_error": 2,
    }


async def test_an_agent_from_a_file_is_played(logged: Logged) -> None:
    assert tool_texts(logged.answers["fragile"]["final_messages"]) == [f"Error: cannot take {ARGUMENT}"]


async def test_every_line_is_one_json_object(logged: Logged) -> None:
    for line in logged.lines:
        assert {"time", "level", "logger", "message"} <= line.keys()


async def test_one_line_for_each_rollout(logged: Logged) -> None:
    ids = [*logged.answers, "left", "grpc"]
    assert sorted(line["rollout_id"] for line in logged.finished) == sorted(ids)
    assert len({line["rollout_uid"] for line in logged.finished}) == len(ids)
    for line in logged.finished:
        assert line["level"] == "INFO"
        assert isinstance(line["turn"], int)
        said = logged.answers.get(line["rollout_id"])
        if said is not None:
            assert f"turns={said['metrics']['num_llm_calls']}" in line["message"]
            category = said["extra_fields"].get("error_category")
            assert ("category=" in line["message"]) == (category is not None)


@pytest.mark.parametrize("word", [SECRET, CONTENT, TRAINERS_WORDS])
async def test_no_keys_no_contents_no_words_of_trainers(logged: Logged, word: str) -> None:
    assert [line for line in logged.text.splitlines() if word in line] == []


async def test_no_arguments_of_a_tool_that_raises(logged: Logged) -> None:
    assert [line for line in logged.text.splitlines() if ARGUMENT in line] == []


async def test_no_tokens(logged: Logged) -> None:
    assert re.findall(r"\d+(?:,\s?\d+){2,}", logged.text) == []


async def test_nothing_is_told_as_our_own_fault(logged: Logged) -> None:
    assert [line for line in logged.lines if line["level"] in ("ERROR", "CRITICAL")] == []


async def test_a_server_that_never_fetches_tokenizers_asks_nobody(logged: Logged) -> None:
    assert logged.hub_connections == 0


SAY = """
import logging, sys
from rollout_server import logs
logs.set_up("text", "info")
logging.getLogger("x").info("rollout finished", extra={"rollout_uid": "u1", "rollout_id": sys.argv[1], "turn": 3})
"""


async def say(rollout_id: str) -> str:
    """The text format of a log line about a rollout."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SAY, rollout_id, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    return said.decode()


async def test_text_lines_end_with_the_ids() -> None:
    assert (await say("r1")).endswith("rollout finished [rollout_uid=u1 rollout_id=r1 turn=3]\n")


async def test_an_id_cannot_write_a_line_of_its_own() -> None:
    assert (await say("r1]\n2026-11-20 ERROR forged")).count("\n") == 1
