"""Retries of the synchronous client, attempt by attempt, on grpcio's testing channel."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grpc
import grpc_testing
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import Busy, Client, Conflict, Retry, Rollout, RolloutError, Started, Unavailable

from tests.client.scripted import UID, Refusal, rollout

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutService"]
START, WAIT, GET = (SERVICE.methods_by_name[name] for name in ("StartRollout", "WaitRollout", "GetRollout"))
CUT = Refusal(grpc.StatusCode.UNAVAILABLE, "Socket closed", reason="")
FULL = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after=0.01)
TAKEN = pb.StartRolloutResponse(rollout=pb.Rollout(uid=UID))


@pytest.fixture
def channel() -> grpc_testing.Channel:
    return grpc_testing.channel([SERVICE], grpc_testing.strict_real_time())


@pytest.fixture
def client(channel: grpc_testing.Channel) -> Client:
    return Client(channel, retry=Retry(patience=20, first=0.01, longest=0.02))


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def start(client: Client) -> Started:
    return client.start(messages=[{"role": "user", "content": "x"}], completions="http://trainer")


def refuse(channel: grpc_testing.Channel, method: object, refusal: Refusal) -> object:
    """End the next call of a method with a status; return its request."""
    _, request, call = channel.take_unary_unary(method)
    call.terminate(None, refusal.trailers(), refusal.code, refusal.text)
    return request


def answer(channel: grpc_testing.Channel, method: object, response: object) -> object:
    """Respond to the next call of a method; return its request."""
    _, request, call = channel.take_unary_unary(method)
    call.send_initial_metadata(())
    call.terminate(response, (), grpc.StatusCode.OK, "")
    return request


def test_a_start_is_repeated_word_for_word(
    channel: grpc_testing.Channel, client: Client, thread: ThreadPoolExecutor
) -> None:
    starting = thread.submit(start, client)
    requests = [refuse(channel, START, refusal) for refusal in (CUT, FULL, CUT)]
    requests.append(answer(channel, START, TAKEN))
    assert starting.result(10).uid == UID
    assert all(request == requests[0] for request in requests)


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (Refusal(grpc.StatusCode.ALREADY_EXISTS), Conflict),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED), Busy),
        (Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, retry_after=60), Busy),
        (Refusal(grpc.StatusCode.UNAVAILABLE, reason="DRAINING", retry_after=60), Unavailable),
    ],
)
def test_what_is_final_is_sent_once(
    channel: grpc_testing.Channel,
    client: Client,
    thread: ThreadPoolExecutor,
    refusal: Refusal,
    kind: type[RolloutError],
) -> None:
    starting = thread.submit(start, client)
    refuse(channel, START, refusal)
    with pytest.raises(kind) as caught:
        starting.result(10)
    assert caught.value.attempts == 1


def test_a_wait_goes_on_after_refusals_and_polls(
    channel: grpc_testing.Channel, client: Client, thread: ThreadPoolExecutor
) -> None:
    waiting: Future[Rollout] = thread.submit(client.wait, UID)
    refuse(channel, WAIT, CUT)
    answer(channel, WAIT, pb.WaitRolloutResponse(rollout=rollout(pb.ROLLOUT_STATE_RUNNING)))
    refuse(channel, WAIT, CUT)
    answer(channel, WAIT, pb.WaitRolloutResponse(rollout=rollout()))
    assert waiting.result(10).state == pb.ROLLOUT_STATE_FINISHED


def test_closing_ends_a_pause(channel: grpc_testing.Channel, thread: ThreadPoolExecutor) -> None:
    client = Client(channel, retry=Retry(patience=1000, first=500, longest=500))
    getting = thread.submit(client.get, UID)
    refuse(channel, GET, CUT)
    client.close()
    with pytest.raises(RuntimeError, match="client is closed"):
        getting.result(10)
