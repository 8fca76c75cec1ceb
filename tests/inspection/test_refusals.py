"""Errors are printed in one line; keys and certificates are read like the client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from pydantic import SecretStr
from rollout_client import AsyncClient, Tls
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.testing.trainer import StrictTrainer

from tests.inspection.conftest import TOY, Invoke
from tests.support.calculator_tools import calculator_tools
from tests.support.certificates import Authority
from tests.support.start_requests import settings

KEY = "hush-hush-hush-hush"
PLAIN: dict[str, Any] = {
    "uid": "u1",
    "state": "finished",
    "outcome": {"end": "stop", "reason": "stop", "truncated": False, "segments": [], "samples": []},
}


def plain(**outcome: object) -> bytes:
    return json.dumps({**PLAIN, "outcome": {**PLAIN["outcome"], **outcome}}).encode()


def span(**changes: object) -> dict[str, object]:
    whole = {
        "author": "model",
        "mask_reason": None,
        "turn": 1,
        "token_ids": [1],
        "logprobs": None,
        "policy_version": "",
    }
    return whole | changes


def segment(*spans: object) -> dict[str, object]:
    origin = {"parent_id": "", "parent_tokens": 0, "kind": "main"}
    return {"id": "0", "origin": origin, "spans": spans, "verified": True}


SAMPLE = {"segment_id": "0", "prompt_ids": [1], "response_ids": [2], "response_mask": [1], "logprobs": None}
SAMPLE |= {"spans": [], "origin": {"parent_id": "", "parent_tokens": 0, "kind": "main"}, "verified": True}
FILES = {
    "empty": (b" \n", "the file is empty"),
    "text": (b"hello", "no rollout"),
    "bytes": (bytes(range(256)), "no rollout"),
    "list": (b"[]", "no rollout"),
    "broken_json": (b'{"uid": ', "not JSON"),
    "deep": (b'{"a":' * 100_000, "nested too deeply"),
    "other_json": (b'{"a": 1}', "no rollout"),
    "running": (json.dumps({"uid": "u1", "state": "running", "outcome": None}).encode(), "has not finished"),
    "no_uid": (json.dumps({"state": "finished"}).encode(), "'uid' is missing"),
    "lesser_view": (plain(samples=[SAMPLE]), 'view "full"'),
    "no_word": (plain(end="exploded"), "'exploded'"),
    "no_id": (plain(segments=[segment(span(token_ids=[-1]))]), "-1"),
    "id_is_text": (plain(segments=[segment(span(token_ids=["\u001b[31m"]))]), "not a rollout of the REST API"),
    "wide_id": (plain(segments=[segment(span(token_ids=[2**40]))]), "not a rollout of the REST API"),
    "word_is_list": (plain(segments=[segment(span(author=[]))]), "not a rollout of the REST API"),
    "no_object": (plain(segments=[7]), "not a rollout of the REST API"),
    "other_type": (plain(warnings=["\u001b[31mred"]), "Warning is not an object"),
    "half_logprobs": (plain(segments=[segment(span(logprobs=[]))]), "the numbers of logprobs and tokens differ"),
    "contradiction": (plain(segments=[segment(span())], samples=[SAMPLE]), "tokens of its spans differ"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "named"), FILES.values(), ids=FILES.keys())
async def test_a_file_that_is_of_no_use_is_told_in_one_line(
    invoke: Invoke, tmp_path: Path, content: bytes, named: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    for told in (await invoke("file"), await invoke("-", stdin=content)):
        assert told.exit_code == 1
        assert told.stdout == ""
        assert named in told.stderr
        assert told.stderr.startswith("rollout inspect: ")
        assert len(told.stderr.splitlines()) == 1
        assert "\x1b" not in told.stderr


async def test_what_is_neither_a_file_nor_a_uid(invoke: Invoke, tmp_path: Path) -> None:
    for target in ("no/such/file", "two words", "a" * 5000, "x.json"):
        told = await invoke(target)
        assert (told.exit_code, told.stdout) == (1, "")
        assert len(told.stderr.splitlines()) == 1
    assert "Is a directory" in (await invoke(tmp_path)).stderr
    assert "'toy' is not NAME=DIRECTORY" in (await finished(invoke, tmp_path, "--tokenizer", "toy")).stderr


async def finished(invoke: Invoke, tmp_path: Path, *arguments: str) -> Any:
    spans = [span(author="other", mask_reason="prompt"), span(token_ids=[2])]
    (tmp_path / "u1").write_bytes(plain(segments=[segment(*spans)], samples=[SAMPLE]))
    return await invoke("u1", *arguments)


async def test_a_tokenizer_is_the_one_that_is_named_or_the_only_one_given(invoke: Invoke, tmp_path: Path) -> None:
    assert "names no tokenizer" in (await finished(invoke, tmp_path)).stderr
    assert (await finished(invoke, tmp_path, *TOY)).stderr == ""
    assert "names no tokenizer" in (await finished(invoke, tmp_path, *TOY, "--tokenizer", "other=toy")).stderr
    missing = await finished(invoke, tmp_path, "--tokenizer", "x=nowhere")
    assert missing.exit_code == 0
    assert "token ids are shown" in missing.stderr
    assert "M      1│ 2" in missing.stdout


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[tuple[str, pb.Rollout, Path]]:
    """The address of a server with a key and certificates, one of its rollouts, and its CA file."""
    authority = Authority()
    pair, ca = authority.put(tmp_path), authority.put_ca(tmp_path)
    guards = settings(api_key=SecretStr(KEY), tls_cert=pair.cert, tls_key=pair.key)
    async with Server([Calculator()], guards) as server, StrictTrainer(tools=calculator_tools()) as trainer:
        address = f"localhost:{server.grpc_port}"
        async with AsyncClient(address, api_key=KEY, tls=Tls(ca=ca)) as client:
            started = await client.start(
                completions=trainer.url, tokenizer="toy", messages=[{"role": "user", "content": "Go."}]
            )
            yield address, await client.wait(started.uid, timeout=60), ca


async def test_a_server_with_a_key_and_certificates(invoke: Invoke, guarded: tuple[str, pb.Rollout, Path]) -> None:
    address, rollout, ca = guarded
    asked = (rollout.uid, "--server", address, "--tls-ca", ca)
    told = await invoke(*asked, *TOY, ROLLOUT_API_KEY=KEY)
    assert (told.exit_code, told.stderr) == (0, "")
    assert told.stdout.startswith(f"rollout {rollout.uid}, ")
    wrong = {
        "set ROLLOUT_API_KEY": await invoke(*asked),
        "UNAUTHENTICATED": await invoke(*asked, ROLLOUT_API_KEY="another-key-of-mine"),
        "ROLLOUT_NOT_FOUND": await invoke("nobody", *asked[1:], ROLLOUT_API_KEY=KEY),
        "certificate and key": await invoke(*asked, "--tls-certificate", ca, ROLLOUT_API_KEY=KEY),
        "nowhere.pem": await invoke(*asked[:3], "--tls-ca", "nowhere.pem", ROLLOUT_API_KEY=KEY),
        "is not a uid": await invoke("no/uid", *asked[1:], ROLLOUT_API_KEY=KEY),
    }
    for named, each in wrong.items():
        assert (each.exit_code, each.stdout) == (1, ""), named
        assert named in each.stderr
        assert len(each.stderr.splitlines()) == 1
        assert KEY not in each.stderr
        assert "another-key-of-mine" not in each.stderr


async def test_no_key_is_taken_from_the_command_line(invoke: Invoke) -> None:
    told = await invoke("u1", "--key", KEY)
    assert told.exit_code == 2
    assert "No such option" in told.stderr


async def test_nobody_there_is_said_soon(invoke: Invoke) -> None:
    told = await invoke("u1", "--server", "127.0.0.1:9")
    assert told.exit_code == 1
    assert "UNAVAILABLE" in told.stderr
    assert len(told.stderr.splitlines()) == 1
