"""Every kind of failure as an exception: from the real server if it can cause it, otherwise from a scripted one."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import grpc
import pytest
import rollout_client
from google.rpc.status_pb2 import Status
from grpc import StatusCode
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import (
    AsyncClient,
    Busy,
    Conflict,
    DeadlineExceeded,
    EventsGone,
    FieldError,
    InvalidRequest,
    NotFound,
    NotPossible,
    PermissionDenied,
    Retry,
    RolloutError,
    ServerFault,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from rollout_client.errors import failure_of
from rollout_server.app import Server

from tests.client.conftest import IMPATIENT, ServerAndTrainer
from tests.client.scripted import DETAILS, Held, Refusal, Stage
from tests.support.agents import Idle
from tests.support.start_requests import settings


async def test_wrong_fields_are_named(world: ServerAndTrainer, client: AsyncClient) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.start(**world.asked(completions="ftp://trainer", tokenizer=None, sampling={"temperature": 3}))
    error = caught.value
    assert (error.code, error.reason, error.retryable) == (StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST", False)
    assert {"spec.completions.url", "spec.sampling.temperature"} <= {each.field for each in error.fields}
    for each in error.fields:
        assert each.field in str(error)


async def test_what_is_not_there(world: ServerAndTrainer, client: AsyncClient) -> None:
    for call in (
        client.get("nowhere"),
        client.wait("nowhere"),
        client.acknowledge("nowhere"),
        client.cancel("nowhere"),
    ):
        with pytest.raises(NotFound, match="nowhere") as caught:
            await call
        assert caught.value.reason == "ROLLOUT_NOT_FOUND"
    with pytest.raises(NotFound, match="nobody"):
        await client.start(**world.asked(agent="nobody"))
    with pytest.raises(NotFound, match="nobody"):
        await client.tools("nobody")
    with pytest.raises(NotFound):
        await anext(client.watch("nowhere"))


async def test_a_request_id_with_another_spec(world: ServerAndTrainer, client: AsyncClient) -> None:
    await client.start(**world.asked(request_id="one", rollout_id="r"))
    with pytest.raises(Conflict, match="another payload"):
        await client.start(**world.asked(request_id="one", rollout_id="r", priority=1))
    with pytest.raises(Conflict):
        await client.run(**world.asked(request_id="one", rollout_id="r", priority=1)).started()


async def test_an_outcome_that_is_not_there_yet(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start(**world.asked(agent="gated"))
    with pytest.raises(NotPossible) as caught:
        await client.acknowledge(started.uid)
    assert caught.value.reason == "ROLLOUT_NOT_FINISHED"


async def test_events_beyond_the_last_one(world: ServerAndTrainer, client: AsyncClient) -> None:
    started = await client.start(**world.asked())
    last = (await client.wait(started.uid)).last_sequence
    with pytest.raises(EventsGone) as caught:
        await anext(client.watch(started.uid, after_sequence=last + 1))
    assert (caught.value.oldest, caught.value.newest) == (1, last)


async def test_a_server_without_room(world: ServerAndTrainer) -> None:
    async with (
        Server([world.gated], settings(max_running=1, max_queued=0)) as small,
        AsyncClient(f"127.0.0.1:{small.grpc_port}", retry=IMPATIENT) as client,
    ):
        await client.start(**world.asked())
        with pytest.raises(Busy) as caught:
            await client.start(**world.asked())
    assert caught.value.retryable
    assert caught.value.retry_after is not None


async def test_a_request_over_the_servers_limit(world: ServerAndTrainer) -> None:
    async with (
        Server([Idle()], settings(max_request_bytes=1024)) as small,
        AsyncClient(f"127.0.0.1:{small.grpc_port}", retry=IMPATIENT) as client,
    ):
        with pytest.raises(TooLarge) as caught:
            await client.start(**world.asked(metadata={"long": "x" * 2_000_000}))
        assert (caught.value.code, caught.value.retryable) == (StatusCode.RESOURCE_EXHAUSTED, False)


async def test_a_port_that_nobody_listens_on(world: ServerAndTrainer) -> None:
    async with Server([Idle()], settings()) as gone:
        address = f"127.0.0.1:{gone.grpc_port}"
    async with AsyncClient(address, retry=IMPATIENT) as client:
        with pytest.raises(Unavailable) as caught:
            await client.server_info()
    assert caught.value.attempts > 1
    assert not caught.value.from_server
    assert "attempts" in str(caught.value)


async def test_an_answer_that_does_not_come(stage: Stage, actor: AsyncClient) -> None:
    held = Held()
    stage.script.says("GetRollout", [held])
    with pytest.raises(DeadlineExceeded) as caught:
        await actor.get("u", timeout=0.2)
    assert isinstance(caught.value, TimeoutError)
    await held.left.wait()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (StatusCode.UNAUTHENTICATED, Unauthenticated),
        (StatusCode.PERMISSION_DENIED, PermissionDenied),
        (StatusCode.INTERNAL, ServerFault),
        (StatusCode.DATA_LOSS, ServerFault),
        (StatusCode.FAILED_PRECONDITION, NotPossible),
        (StatusCode.ABORTED, RolloutError),
        (StatusCode.UNIMPLEMENTED, RolloutError),
        (StatusCode.UNAVAILABLE, Unavailable),
    ],
)
async def test_what_the_server_says_itself(
    stage: Stage, actor: AsyncClient, code: StatusCode, kind: type[RolloutError]
) -> None:
    said = Refusal(code, "because", reason="WORD", metadata=(("request_id", "theirs"),))
    stage.script.says("GetRollout", said)
    stage.script.says("WatchRollout", said)
    for call in (actor.get("u"), anext(actor.watch("u"))):
        with pytest.raises(RolloutError) as caught:
            await call
        error = caught.value
        assert (type(error), error.code, error.reason, error.message) == (kind, code, "WORD", "because")
        assert (error.request_id, error.from_server) == ("theirs", True)
        assert error.retryable is (code is StatusCode.UNAVAILABLE)
        assert len(stage.script.seen) == 1 or code is StatusCode.UNAVAILABLE
        stage.script.seen.clear()


@pytest.mark.parametrize(
    "code", [StatusCode.UNAVAILABLE, StatusCode.INTERNAL, StatusCode.UNKNOWN, StatusCode.CANCELLED]
)
async def test_a_status_without_a_reason_was_made_on_the_way(
    stage: Stage, actor: AsyncClient, code: StatusCode
) -> None:
    for domain in ("", "somebody.else"):
        stage.script.says("GetRollout", Refusal(code, "RST_STREAM", reason="WORD" if domain else "", domain=domain))
        with pytest.raises(Unavailable) as caught:
            await actor.get("u")
        assert (caught.value.code, caught.value.from_server, caught.value.retryable) == (code, False, True)
        sent = {call.metadata["x-request-id"] for call in stage.script.seen}
        assert sent == {caught.value.request_id}
        stage.script.seen.clear()


async def test_retry_advice_and_fields(stage: Stage) -> None:
    said = Refusal(StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=1.5, fields=(("spec.agent", "is busy"),))
    stage.script.says("StartRollout", said)
    async with AsyncClient(stage.address, retry=Retry(patience=0)) as client:
        with pytest.raises(Busy) as caught:
            await client.start(messages=[], completions="http://t")
    assert (caught.value.retry_after, caught.value.fields) == (1.5, (FieldError("spec.agent", "is busy"),))
    assert "try again after 1.5 s" in str(caught.value)
    assert "spec.agent: is busy" in str(caught.value)


async def test_it_is_tried_again_after_as_long_as_the_server_says(stage: Stage, actor: AsyncClient) -> None:
    full = Refusal(StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=0.05)
    draining = Refusal(StatusCode.UNAVAILABLE, "stopping", reason="DRAINING", retry_after=0.05)
    taken = pb.StartRolloutResponse(rollout=pb.Rollout(uid="u"))
    stage.script.says("StartRollout", full, draining, Refusal(StatusCode.UNAVAILABLE, "cut", reason=""), taken)
    assert (await actor.start(messages=[], completions="http://t")).uid == "u"
    requests = stage.script.asked("StartRollout")
    assert len(requests) == 4
    assert len({request.SerializeToString(deterministic=True) for request in requests}) == 1
    assert requests[0].request_id


class Broken(grpc.RpcError):
    """A status with malformed trailing metadata."""

    def __init__(self, trailers: Any) -> None:
        self._trailers = trailers

    def code(self) -> StatusCode:
        return StatusCode.NOT_FOUND

    def details(self) -> None:
        return None

    def trailing_metadata(self) -> Any:
        return self._trailers


GARBLED = Status(code=5)
GARBLED.details.add(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff\xff")
ODD = Refusal(StatusCode.OUT_OF_RANGE, metadata=(("oldest", "²"), ("newest", "-1"))).trailers()


@pytest.mark.parametrize(
    "trailers",
    [None, (), ((DETAILS, b"\xff\xff"),), ((DETAILS, "text"),), ((DETAILS, GARBLED.SerializeToString()),), ODD],
)
def test_details_that_make_no_sense_break_nothing(trailers: Any) -> None:
    error = failure_of(Broken(trailers), "mine")
    assert (type(error), error.request_id) == (NotFound, "mine")
    assert "NOT_FOUND" in str(error)


KINDS = [each for each in vars(rollout_client).values() if isinstance(each, type) and issubclass(each, RolloutError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_travel_between_processes(kind: type[RolloutError]) -> None:
    error = kind(
        StatusCode.RESOURCE_EXHAUSTED,
        "full",
        reason="WORD",
        fields=(FieldError("spec", "no"),),
        retry_after=2.0,
        request_id="r",
    )
    error.attempts = 3
    error.add_note("seen by a worker")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kind
        assert vars(again) == vars(error)
        assert str(again) == str(error)


async def test_no_error_holds_the_key(stage: Stage) -> None:
    stage.script.says("GetRollout", Refusal(StatusCode.UNAUTHENTICATED, "unknown key"))
    async with AsyncClient(stage.address, api_key="hush-hush") as client:
        with pytest.raises(Unauthenticated) as caught:
            await client.get("u")
        assert "hush" not in f"{caught.value!r} {caught.value} {vars(caught.value)} {client!r}"
        assert caught.value.__context__ is None
    assert stage.script.seen[0].metadata["authorization"] == "Bearer hush-hush"
