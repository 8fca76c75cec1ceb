"""Replay every transcript of the asynchronous HTTP API against the whole server.

The exchanges must be equal, except for volatile values and the reference's faults in `corrections`. Waits are shortened,
and no time is measured.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import rollout_service_pb2_grpc
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.settings import Settings

from tests.conformance.corrections import COMPLETED, CORRECTIONS, EVERYWHERE, Correction, corrected, outcomes
from tests.conformance.replay import ReplayTrainer, Seen, Transcript, fill, plain
from tests.support.golden import INIT

Json = Any
Serve = Callable[[Mapping[str, str]], Awaitable[Server]]
FILES = sorted(INIT.glob("*.json"))
KEY = "server-key-0001"

SETTLED = (pb.DELIVERY_STATE_ACKNOWLEDGED, pb.DELIVERY_STATE_REFUSED, pb.DELIVERY_STATE_EXPIRED)

ERRORS = {
    "chat_401": ("turn 1", "401", "Invalid or missing API key"),
    "chat_422": ("turn 1", "422", "messages are not append-only"),
    "chat_500_forever": ("turn 1", "500", "engine died"),
    "chat_500_second_turn_forever": ("turn 2", "503", "engine died"),
    "chat_bad_json": ("turn 1", "JSON"),
    "chat_empty_choices": ("turn 1", "choices"),
    "chat_missing_choices": ("turn 1", "choices"),
    "chat_null_message": ("turn 1", "choices[0].message"),
    "chat_timeout": ("turn 1", "timeout"),
    "completed_error_500_then_ok": ("turn 1", "422"),
    "completion_params_wrong_type": ("temperature",),
}
"""Texts that the message of an ERROR must contain."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serve() -> AsyncIterator[Serve]:
    """`await serve(server_settings)`: one server per set of settings, because the transcripts' rollout ids differ."""
    running: dict[str, Server] = {}
    async with AsyncExitStack() as stack:

        async def server(recorded: Mapping[str, str]) -> Server:
            named = {"api_key" if name == "server_api_key" else name: value for name, value in recorded.items()}
            name = json.dumps(named)
            if name not in running:
                ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0}
                waits: Any = {"retry_base_seconds": 0.02, "delivery_retries": 2, "drain_seconds": 0}
                settings = Settings(_env_file=None, tokenizers_offline=True, **ports, **waits, **named)
                running[name] = await stack.enter_async_context(Server([Calculator()], settings))
            return running[name]

        yield server


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
async def test_same_exchanges(path: Any, serve: Serve) -> None:
    recorded = Transcript.load(path)
    transcript = corrected(recorded)
    server = await serve(transcript.settings)
    hold = 0.5 if recorded.name in ("duplicate_while_running", "duplicate_concurrent") else 0.0
    async with (
        asyncio.timeout(60),
        ReplayTrainer(transcript, hold) as trainer,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=30, trust_env=False) as client,
    ):
        await _play(transcript, trainer, client)
        await trainer.until(len(transcript.callbacks))
        states = await _quiet(server, transcript)
        _compare_requests(trainer.seen, transcript)
    assert states == [_settled(exchange) for exchange in outcomes(transcript.exchanges)[-1:]]


def test_each_correction_is_of_something_that_is_compared() -> None:
    recorded = [Transcript.load(path) for path in FILES]
    assert {*CORRECTIONS} <= {transcript.name for transcript in recorded}
    for name, correction in CORRECTIONS.items():
        assert _changes(correction, next(transcript for transcript in recorded if transcript.name == name)), name
    for correction in EVERYWHERE:
        assert any(_changes(correction, transcript) for transcript in recorded), correction.reason


def _changes(correction: Correction, transcript: Transcript) -> bool:
    copied = json.loads(json.dumps(transcript.exchanges))
    return bool(
        plain(correction.apply(copied), transcript.volatile) != plain(transcript.exchanges, transcript.volatile)
    )


async def _play(transcript: Transcript, trainer: ReplayTrainer, client: httpx.AsyncClient) -> None:
    """Send the client's calls, each after the trainer has received everything before it.

    Concurrent calls are sent concurrently.
    """
    if transcript.name == "duplicate_concurrent":
        await asyncio.gather(*(_call(call, transcript, trainer, client) for call in transcript.calls))
        return
    before = 0
    for exchange in transcript.exchanges:
        if exchange["to"] == "trainer":
            before += 1
            continue
        await trainer.until(before)
        await _call(exchange, transcript, trainer, client)


async def _call(
    call: Mapping[str, Json], transcript: Transcript, trainer: ReplayTrainer, client: httpx.AsyncClient
) -> None:
    body = fill(call.get("request"), {"http://TRAINER": trainer.url})
    content = body if isinstance(body, str) else None if body is None else json.dumps(body)
    headers = {name: value.encode() for name, value in call["headers"].items()}
    response = await client.request(call["method"], call["path"], content=content, headers=headers)
    assert response.status_code == call["status"], response.text
    actual, expected = response.json(), call["response"]
    if response.status_code == 202:
        assert plain(actual) == plain(expected)
    elif response.status_code == 200:
        assert plain(expected, transcript.volatile).items() <= plain(actual, transcript.volatile).items()
    elif response.status_code == 422:
        _compare_invalid(actual, expected, transcript)
    else:
        assert isinstance(actual["detail"], str)
        assert actual["detail"]
        assert KEY not in response.text


def _compare_invalid(actual: Json, expected: Json, transcript: Transcript) -> None:
    for error in actual["detail"]:
        assert {"type", "loc", "msg"} <= error.keys()
        assert error["msg"]
    if transcript.name == "metadata_too_large":  # the reference names only the body
        assert [error["loc"] for error in actual["detail"]] == [["body", "metadata"]]
    elif transcript.name != "invalid_body_not_json":
        assert [error["loc"] for error in actual["detail"]] == [error["loc"] for error in expected["detail"]]


def _settled(delivery: Mapping[str, Json]) -> Any:
    """The expected delivery state after this final response."""
    status = delivery["status"]
    if status is None or status >= 500 or status in (408, 425, 429):
        return pb.DELIVERY_STATE_EXPIRED
    return pb.DELIVERY_STATE_ACKNOWLEDGED if status < 300 else pb.DELIVERY_STATE_REFUSED


def _resampled(transcript: Transcript) -> bool:
    """Whether a turn was retried after an attempt that may have generated a completion."""
    asked = [exchange for exchange in transcript.callbacks if exchange["path"] != COMPLETED]
    return any(
        first["request"] == again["request"] and (first["status"] is None or first["status"] >= 500)
        for first, again in itertools.pairwise(asked)
    )


async def _quiet(server: Server, transcript: Transcript) -> list[Any]:
    """Wait until the transcript's rollouts have ended and their deliveries are settled; return the delivery states."""
    rollout_ids = {call["request"]["rollout_id"] for call in transcript.calls if call["status"] == 202}
    metadata = (("authorization", f"Bearer {KEY}"),) if "server_api_key" in transcript.settings else ()
    if not rollout_ids:
        return []
    asked = pb.ListRolloutsRequest(selection=pb.Selection(rollout_ids=sorted(rollout_ids)))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        while True:
            rollouts = (await stub.ListRollouts(asked, metadata=metadata)).rollouts
            states = [rollout.delivery.state for rollout in rollouts]
            if all(state in SETTLED for state in states):
                return states
            await asyncio.sleep(0.01)


def _compare_requests(seen: Sequence[Seen], transcript: Transcript) -> None:
    recorded = transcript.callbacks
    assert [request.path for request in seen] == [exchange["path"] for exchange in recorded]
    for request, exchange in zip(seen, recorded, strict=True):
        assert request.authorization == exchange["headers"].get("authorization")
        if request.path == COMPLETED:
            _compare_outcome(request.body, exchange["request"], transcript)
        else:
            assert plain(request.body) == plain(exchange["request"])
            assert "response_mask" not in request.body
            assert None not in request.body.values()
    _check_keys(seen)


def _check_keys(seen: Sequence[Seen]) -> None:
    """Assert one key per turn and its attempts, and one outcome, repeated byte for byte under its own key."""
    told = [request for request in seen if request.path == COMPLETED]
    assert len({(request.raw, request.key) for request in told}) <= 1
    asked = [request for request in seen if request.path != COMPLETED]
    turns = [list(group) for _, group in itertools.groupby(asked, lambda request: len(request.body["messages"]))]
    keys = [{request.key for request in turn} for turn in turns] + ([{told[0].key}] if told else [])
    assert all(len(each) == 1 and each != {None} for each in keys)
    assert len(set().union(*keys)) == len(keys)
    for turn in turns:
        assert len({request.raw for request in turn}) == 1


def _compare_outcome(actual: Json, recorded: Json, transcript: Transcript) -> None:
    actual, expected = dict(actual), dict(recorded)
    extra, error = actual.pop("extra_fields"), actual.pop("error_message", None)
    expected.pop("extra_fields"), expected.pop("error_message", None)
    codes = {warning["code"] for warning in extra.pop("warnings", [])}
    assert ("resampled" in codes) == _resampled(transcript)
    if transcript.name == "agent_exception":
        return _check_no_turns(actual, error)
    assert plain(actual, transcript.volatile) == plain(expected, transcript.volatile)
    if expected["status"] == "COMPLETED":
        assert error is None
        assert extra == {}
        assert codes <= {"resampled", "tokens_unknown"}
    else:
        assert error
        assert all(part in error for part in ERRORS[transcript.name])
        assert extra["error_category"]
    return None


def _check_no_turns(actual: Json, error: str | None) -> None:
    """With max_turns 0 no trainer is called. The agent's error may have any text, but reveals no internals."""
    assert actual["metrics"]["num_llm_calls"] == 0
    assert (error is None) == (actual["status"] == "COMPLETED")
    assert "local variable" not in (error or "")
