"""Replay every transcript of the synchronous HTTP API against the whole server.

The exchanges must be equal, except for volatile values and the known faults of the reference.
"""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings

from tests.conformance.replay import ReplayTrainer, Transcript, fill, longest_context, plain
from tests.support.golden import CONFORMANCE, SYNC

Json = Any
FILES = sorted(SYNC.glob("*.json"))
INVALID = [path for path in FILES if path.stem.startswith("invalid_body_")]
VALID = [path for path in FILES if not path.stem.startswith("invalid_body_")]

VALIDATION_ERRORS = {
    "trainer_bad_json": "turn 1",
    "trainer_html": "turn 1",
    "trainer_empty_choices": "choices",
    "trainer_null_message": "choices[0].message",
    "trainer_missing_token_ids": "token_ids",
    "trainer_missing_token_ids_second_turn": "turn 2",
}
"""Scenarios that the reference classifies differently, and the texts that the message must contain."""


def _keep_last_answer(response: Json, transcript: Transcript) -> None:
    """The reference drops the completion that exceeds max_tokens_total."""
    response["final_messages"].append(transcript.callbacks[-1]["response"]["choices"][0]["message"])


def _keep_call_keys(response: Json, transcript: Transcript) -> None:
    """The reference drops unknown keys inside a tool call."""
    for message in response["final_messages"]:
        if message.get("tool_calls"):
            message["tool_calls"] = transcript.callbacks[0]["response"]["choices"][0]["message"]["tool_calls"]


def _refuse_strings(response: Json, _: Transcript) -> None:
    """In the reference, add("5", "3") returns 53."""
    next(m for m in response["final_messages"] if m["role"] == "tool")["content"] = "Error: Invalid arguments for "


CORRECTIONS: dict[str, Callable[[Json, Transcript], None]] = {
    "max_tokens_total": _keep_last_answer,
    "max_tokens_total_exact": _keep_last_answer,
    "tool_call_extra_keys": _keep_call_keys,
    "string_operands": _refuse_strings,
}
OWN_MASKS = frozenset(
    {"bad_json_arguments", "arguments_not_an_object", "wrong_arguments", "unknown_tool", "string_operands"}
)
"""Scenarios in which a tool's text is the server's own, and so is the next mask."""

RECOUNTED = "trainer_422_other_tokenizer"
"""A refused mask, after which nothing was generated, is sent again with the other count (D8)."""


@pytest.fixture(scope="module")
def without_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizers") / "without-template"
    shutil.copytree(CONFORMANCE, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _settings(transcript: Transcript, without_template: Path) -> Settings:
    return Settings(
        _env_file=None,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        tokenizers={"conformance": CONFORMANCE, "without-template": without_template},
        tokenizers_offline=True,
        **transcript.settings,
    )


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
async def test_same_exchanges(path: Path, without_template: Path) -> None:
    transcript = Transcript.load(path)
    if transcript.name == RECOUNTED:
        transcript = replace(transcript, exchanges=[*transcript.exchanges, transcript.callbacks[-1]])
    async with (
        Server([Calculator()], _settings(transcript, without_template)) as server,
        ReplayTrainer(transcript) as trainer,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=30) as client,
    ):
        places = {
            "http://TRAINER": trainer.url,
            "http://CLOSED": f"http://127.0.0.1:{_closed_port()}",
            "TOKENIZER": "conformance",
            "TOKENIZER_WITHOUT_TEMPLATE": "without-template",
        }
        for call in transcript.calls:
            response = await client.request(
                call["method"],
                call["path"],
                headers={k: v for k, v in call["headers"].items() if k != "content-type"},
                json=fill(call.get("request"), places),
            )
            assert response.status_code == call["status"]
            _compare_answer(response.json(), call["response"], transcript)
        _compare_requests(trainer, transcript)


@pytest.mark.parametrize("path", INVALID, ids=lambda path: path.stem)
async def test_invalid_bodies_call_nobody(path: Path, without_template: Path) -> None:
    transcript = Transcript.load(path)
    (call,) = transcript.calls
    async with (
        Server([Calculator()], _settings(transcript, without_template)) as server,
        ReplayTrainer(transcript) as trainer,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}") as client,
    ):
        body = call["request"]
        content = body if isinstance(body, str) else json.dumps(fill(body, {"http://TRAINER": trainer.url}))
        response = await client.post(call["path"], content=content, headers=call["headers"])
        assert response.status_code == call["status"] == 422
        for error in response.json()["detail"]:
            assert {"type", "loc", "msg"} <= error.keys()
        if transcript.name != "invalid_body_not_json":
            assert [e["loc"] for e in response.json()["detail"]] == [e["loc"] for e in call["response"]["detail"]]
        assert trainer.seen == []


def _compare_answer(actual: Json, recorded: Json, transcript: Transcript) -> None:
    if not isinstance(recorded, dict) or "final_messages" not in recorded:
        assert plain(recorded).items() <= plain(actual).items()
        return
    expected = json.loads(json.dumps(recorded))
    CORRECTIONS.get(transcript.name, lambda *_: None)(expected, transcript)
    if expected["status"] == "ERROR":
        _compare_error(actual, expected, transcript)
        return
    volatile = transcript.volatile | {"max_context_tokens", "prompt_length", "warnings"}
    assert plain(actual, volatile) == plain(expected, volatile)
    if len(transcript.calls) == 1:
        assert actual["metrics"]["max_context_tokens"] == longest_context(transcript.exchanges)
    drifted = transcript.name in ("mask_token_ids_surplus", "mask_nothing_new")
    if transcript.name not in OWN_MASKS:  # there the recorded trainer received another text than this server's
        assert [w["code"] for w in actual["extra_fields"].get("warnings", [])] == ["token_drift"] * drifted


def _compare_error(actual: Json, expected: Json, transcript: Transcript) -> None:
    assert (actual["status"], actual["finish_reason"], actual["final_messages"]) == ("ERROR", "error", [])
    assert actual["error_message"]
    category = actual["extra_fields"]["error_category"]
    name = transcript.name
    if name in VALIDATION_ERRORS:
        assert category == "validation_error"
        assert VALIDATION_ERRORS[name] in actual["error_message"]
    elif name in ("mask_negative", "trainer_other_tokenizer_negative"):
        assert category == "token_drift"
    elif name == "rollout_timeout":
        assert category == "timeout"
    elif name == "trainer_timeout":
        assert category == "network_error"
        assert "timeout" in actual["error_message"]
    elif name == "trainer_429_retry_after":
        assert category == "trainer_server_error"  # it retried, and the transcript has no further exchange
    else:
        assert category == expected["extra_fields"]["error_category"]
        assert actual["extra_fields"].get("http_status") == expected["extra_fields"].get("http_status")
    if name == "trainer_422":
        assert "response_mask length 17 does not match 18" in actual["error_message"]
    if name == "tokenizer_without_template":
        assert "chat template" in actual["error_message"]
    if name == "debug_trace_error":
        assert [entry["turn"] for entry in actual["extra_fields"]["trace"]] == [1]
    if expected["metrics"] is not None:
        counted = ("num_llm_calls", "num_tool_calls", "prompt_tokens", "response_tokens")
        assert [actual["metrics"][key] for key in counted] == [expected["metrics"][key] for key in counted]


def _compare_requests(trainer: ReplayTrainer, transcript: Transcript) -> None:
    recorded = transcript.callbacks
    if transcript.name == "trainer_429_retry_after":
        assert len(trainer.seen) == 2
        assert trainer.seen[0].key == trainer.seen[1].key
    else:
        assert len(trainer.seen) == len(recorded)
    if transcript.name == RECOUNTED:
        refused, again = (seen.body.pop("response_mask") for seen in trainer.seen[-2:])
        assert refused == recorded[-1]["request"]["response_mask"]
        assert set(again) == {0}
        assert len(again) != len(refused)
        recorded = [*recorded[:-2], *({**each, "request": _unmasked(each["request"])} for each in recorded[-2:])]
    for seen, exchange in zip(trainer.seen, recorded, strict=False):
        assert seen.path == exchange["path"]
        assert seen.authorization == exchange["headers"].get("authorization")
        actual, expected = plain(seen.body), plain(exchange["request"])
        if transcript.name in OWN_MASKS:
            for body in (actual, expected):
                assert set(body.pop("response_mask", [])) <= {0}
        if transcript.name in ("string_operands", "tool_call_extra_keys"):
            actual.pop("messages"), expected.pop("messages")
            expected.pop("response_mask", None), actual.pop("response_mask", None)
        assert actual == expected


def _unmasked(request: Json) -> Json:
    return {key: value for key, value in request.items() if key != "response_mask"}


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
