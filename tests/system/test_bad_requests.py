"""Requests that cannot be run are refused with a helpful status and body; no trainer is called, and the server keeps serving."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.bodies import body
from tests.support.gated_model import GatedModel
from tests.system.conftest import Service, open_world

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY_BYTES = 2 * 1024 * 1024
METADATA_BYTES = 64 * 1024
SECRET = "sk-live-0123456789"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    """One service for all tests of the module, with a tokenizer that lacks its template."""
    bare = tmp_path_factory.mktemp("tokenizers") / "bare"
    shutil.copytree(TOY_TOKENIZER, bare, ignore=shutil.ignore_patterns("*.py", "*.jinja", "__pycache__"))
    async with AsyncExitStack() as stack:
        world = await open_world(
            stack,
            tokenizers={"toy": "toy", "bare": bare},
            max_request_bytes=BODY_BYTES,
            max_metadata_bytes=METADATA_BYTES,
        )
        yield world
        good = await world.http.post("/rollout", json=body("good", world.trainer.url))
        assert good.json()["status"] == "COMPLETED"


@pytest_asyncio.fixture(loop_scope="module")
async def world(shared: Service) -> AsyncIterator[Service]:
    """The shared service. After each test it asserts that no trainer was called, nothing runs, and the server works."""
    before = len(shared.trainer.requests)
    yield shared
    assert len(shared.trainer.requests) == before
    assert (await shared.http.get("/health")).json()["active_rollouts"] == 0


MESSAGE = {"role": "user", "content": "5 plus 3"}
INVALID: dict[str, tuple[dict[str, Any], list[Any]]] = {
    **{
        f"no_{name}": ({name: None}, [name]) for name in ("rollout_id", "messages", "sampling_params", "tokenizer_name")
    },
    "no_server_url": ({"server_url": None}, ["server_url"]),
    "empty_id": ({"rollout_id": ""}, ["rollout_id"]),
    "blank_id": ({"rollout_id": " \t"}, ["rollout_id"]),
    "long_id": ({"rollout_id": "x" * 257}, ["rollout_id"]),
    "number_as_id": ({"rollout_id": 5}, ["rollout_id"]),
    "ftp_url": ({"server_url": "ftp://trainer"}, ["server_url"]),
    "file_url": ({"server_url": "file:///etc/passwd"}, ["server_url"]),
    "url_without_host": ({"server_url": "http://"}, ["server_url"]),
    "url_with_password": ({"server_url": f"http://me:{SECRET}@trainer"}, ["server_url"]),
    "url_with_query": ({"server_url": "http://trainer?x=1"}, ["server_url"]),
    "url_with_line_break": ({"server_url": "http://trainer\r\nx: y"}, ["server_url"]),
    "url_with_port_of_six_digits": ({"server_url": "http://trainer:808080"}, ["server_url"]),
    "tools_by_request": ({"tool_server_url": "grpc://tools:50051"}, ["tool_server_url"]),
    "url_with_half_an_address": ({"server_url": "http://[::1"}, ["server_url"]),
    "messages_empty": ({"messages": []}, ["messages"]),
    "messages_no_list": ({"messages": MESSAGE}, ["messages"]),
    "message_no_object": ({"messages": [MESSAGE, "hello"]}, ["messages", 1]),
    "unknown_role": ({"messages": [MESSAGE, {"role": "developer", "content": ""}]}, ["messages", 1, "role"]),
    "no_role": ({"messages": [{"content": "x"}]}, ["messages", 0, "role"]),
    "content_a_number": ({"messages": [{"role": "user", "content": 5}]}, ["messages", 0, "content"]),
    "cold": ({"sampling_params": {"temperature": -0.1}}, ["sampling_params", "temperature"]),
    "hot": ({"sampling_params": {"temperature": 2.1}}, ["sampling_params", "temperature"]),
    "top_p": ({"sampling_params": {"top_p": 1.01}}, ["sampling_params", "top_p"]),
    "no_tokens": ({"sampling_params": {"max_tokens": 0}}, ["sampling_params", "max_tokens"]),
    "many_tokens": ({"sampling_params": {"max_tokens": 32769}}, ["sampling_params", "max_tokens"]),
    "stop_a_number": ({"sampling_params": {"stop": [1]}}, ["sampling_params", "stop", 0]),
    "stop_of_65": ({"sampling_params": {"stop": ["x"] * 65}}, ["sampling_params", "stop"]),
    "no_turns": ({"max_turns": 0}, ["max_turns"]),
    "many_turns": ({"max_turns": 101}, ["max_turns"]),
    "no_total": ({"max_tokens_total": 0}, ["max_tokens_total"]),
    "large_total": ({"max_tokens_total": 1_000_001}, ["max_tokens_total"]),
    "metadata_a_list": ({"metadata": []}, ["metadata"]),
    "metadata_too_large": ({"metadata": {"x": "x" * METADATA_BYTES}}, ["metadata"]),
    "template_kwargs": ({"metadata": {"chat_template_kwargs": 5}}, ["metadata", "chat_template_kwargs"]),
    "drift_policy": ({"metadata": {"on_drift": "ignore"}}, ["metadata", "on_drift"]),
    "no_time": ({"metadata": {"timeout_seconds": 0}}, ["metadata", "timeout_seconds"]),
    "blank_tokenizer": ({"tokenizer_name": " "}, ["tokenizer_name"]),
    "key_with_line_break": ({"callback_api_key": f"{SECRET}\r\nx: y"}, ["callback_api_key"]),
    "key_not_ascii": ({"callback_api_key": f"{SECRET}ü"}, ["callback_api_key"]),
}


@pytest.mark.parametrize(("changes", "loc"), INVALID.values(), ids=INVALID.keys())
async def test_what_does_not_validate_is_named(world: Service, changes: dict[str, Any], loc: list[Any]) -> None:
    whole = {"callback_api_key": SECRET, **changes}
    answer = await world.http.post("/rollout", json=body("bad", world.trainer.url, changes=whole))
    assert answer.status_code == 422
    for found in answer.json()["detail"]:
        assert found["loc"][: len(loc) + 1] == ["body", *loc]
        assert found["msg"]
        assert found["type"]
    assert SECRET not in answer.text


NOT_JSON = {
    "empty": b"",
    "text": b"hello",
    "cut": b'{"rollout_id": "x"',
    "list": b"[]",
    "nan": b'{"rollout_id": NaN}',
    "latin_1": b'{"rollout_id": "\xfc"}',
    "bom": b'\xef\xbb\xbf{"rollout_id": "x"}',
    "half_a_pair": b'{"rollout_id": "\\ud800"}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("content", NOT_JSON.values(), ids=NOT_JSON.keys())
async def test_what_is_no_json_object(world: Service, content: bytes) -> None:
    answer = await world.http.post("/rollout", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert all({"type", "loc", "msg"} <= found.keys() for found in answer.json()["detail"])


async def test_other_content_types(world: Service) -> None:
    text = json.dumps(body("bad", world.trainer.url))
    answer = await world.http.post("/rollout", content=text, headers={"content-type": "text/plain"})
    assert answer.status_code == 422
    assert "application/json" in answer.json()["detail"][0]["msg"]


async def pieces(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * 65536


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit(world: Service, chunked: bool) -> None:
    """aiohttp reads while it writes, so it receives the refusal in any case."""
    content: Any = pieces(256) if chunked else b" " * 2**24
    headers = {"content-type": "application/json"}
    async with (
        aiohttp.ClientSession(str(world.http.base_url)) as http,
        http.post("/rollout", data=content, headers=headers) as answer,
    ):
        assert answer.status == 413
        assert str(BODY_BYTES) in (await answer.json())["detail"]


async def test_a_client_that_writes_before_it_reads_hears_of_it_too(world: Service) -> None:
    answer = await world.http.post("/rollout", content=b" " * 2**24, headers={"content-type": "application/json"})
    assert answer.status_code == 413


OTHER: dict[str, tuple[dict[str, Any], int, str]] = {
    "unknown_agent": ({"metadata": {"agent": "nobody"}}, 404, "calculator"),
}


@pytest.mark.parametrize(("changes", "status", "named"), OTHER.values(), ids=OTHER.keys())
async def test_what_this_server_cannot_run(world: Service, changes: dict[str, Any], status: int, named: str) -> None:
    answer = await world.http.post("/rollout", json=body("bad", world.trainer.url, changes=changes))
    assert answer.status_code == status
    assert named in answer.json()["detail"]


FAILING: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown_tokenizer": (
        {"tokenizer_name": "nobody/nothing"},
        "tokenizer_error",
        ["'nobody/nothing'", "ROLLOUT_TOKENIZERS"],
    ),
    "no_template": ({"tokenizer_name": "bare"}, "tokenizer_error", ["'bare'", "chat template", "ROLLOUT_TEMPLATES"]),
    "directory": (
        {"tokenizer_name": str(TOY_TOKENIZER)},
        "tokenizer_error",
        ["directory", "ROLLOUT_TOKENIZER_DIRECTORIES"],
    ),
    "directory_upwards": ({"tokenizer_name": "../tokenizer"}, "tokenizer_error", ["directory"]),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        "validation_error",
        ["image"],
    ),
}


@pytest.mark.parametrize(("changes", "category", "named"), FAILING.values(), ids=FAILING.keys())
async def test_what_turns_out_not_to_run(
    world: Service, changes: dict[str, Any], category: str, named: list[str]
) -> None:
    """These requests were accepted, so the response is 200 with an error that a person can act on."""
    answer = await world.http.post("/rollout", json=body("bad", world.trainer.url, changes=changes))
    assert answer.status_code == 200
    said = answer.json()
    assert (said["status"], said["finish_reason"], said["final_messages"]) == ("ERROR", "error", [])
    assert said["extra_fields"]["error_category"] == category
    assert all(word in said["error_message"] for word in named)
    assert said["metrics"]["response_tokens"] == 0


async def test_other_paths_and_methods(world: Service) -> None:
    assert (await world.http.get("/rollout")).status_code == 405
    assert (await world.http.post("/rollouts", json={})).status_code == 404
    assert (await world.http.get("/tools?agent=nobody")).status_code == 404


async def test_an_id_of_256_characters_of_any_kind_is_one(shared: Service) -> None:
    for rollout_id in ("x" * 256, "ü" * 256, "../../etc/passwd", "a\nb\x00", "\N{GRINNING FACE}"):
        said = (await shared.http.post("/rollout", json=body(rollout_id, shared.trainer.url))).json()
        assert (said["rollout_id"], said["status"]) == (rollout_id, "COMPLETED")


async def test_an_id_that_runs_with_another_payload(shared: Service) -> None:
    async with AsyncExitStack() as stack:
        gate = GatedModel()
        stack.callback(gate.open)
        gated = await open_world(stack, model=gate)
        asked = body("r1", gated.trainer.url)
        running = asyncio.create_task(gated.http.post("/rollout", json=asked))
        await gate.asked()
        for changes in ({"max_turns": 9}, {"messages": [MESSAGE]}, {"tokenizer_name": "other"}, {"metadata": {"x": 1}}):
            answer = await gated.http.post("/rollout", json={**asked, **changes})
            assert answer.status_code == 409
            assert "'r1'" in answer.json()["detail"]
        gate.open()
        assert (await running).json()["status"] == "COMPLETED"
        assert len(gated.trainer.verdicts()) == 1
