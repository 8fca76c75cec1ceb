"""Invalid input of every kind: the right status, a message that names the field, and a server that keeps serving."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2

from tests.edge.rpc.bad_fields import (
    IDENTITY,
    MESSAGES,
    METADATA_BYTES,
    NUMBERS,
    OBJECTS,
    TARGETS,
    WORDS,
    Changes,
    Messages,
)
from tests.support.agents import Gated, Idle
from tests.support.server_client import Caller, Refusal, refusal, serving
from tests.support.start_requests import json_message, seconds, spec, start, target

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Caller]:
    """One server for all invalid input, with a small limit for metadata."""
    async with serving(Idle(), Gated(), max_metadata_bytes=METADATA_BYTES) as caller:
        yield caller


@pytest_asyncio.fixture(loop_scope="module")
async def caller(server: Caller) -> AsyncIterator[Caller]:
    """The server; after each test it must still serve a valid request."""
    yield server
    assert (await server.play(start())).outcome.stop.reason == "stop"


def wrong(refused: Refusal, *fields: str) -> None:
    """Assert that the request is refused for exactly these fields, and that the message names them."""
    assert (refused.code, refused.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert list(refused.fields) == list(fields)
    assert all(f"{field}: " in refused.text for field in fields)
    assert refused.metadata["request_id"] == refused.request_id


@pytest.mark.parametrize(
    ("changes", "field"), IDENTITY + TARGETS + NUMBERS + OBJECTS + WORDS, ids=lambda v: v if isinstance(v, str) else ""
)
async def test_a_wrong_field_is_named(caller: Caller, changes: Changes, field: str) -> None:
    wrong(await refusal(caller.start(start(**({"group_id": field} | changes)))), field)
    request = pb.ListRolloutsRequest(selection=pb.Selection(group_id=field))
    assert not (await caller.stub.ListRollouts(request)).rollouts


@pytest.mark.parametrize(("messages", "field"), MESSAGES, ids=lambda v: v if isinstance(v, str) else "")
async def test_a_wrong_message_is_named(caller: Caller, messages: Messages, field: str) -> None:
    wrong(await refusal(caller.start(start(messages=messages))), field)


async def test_a_run_is_refused_like_a_start_before_its_first_item(caller: Caller) -> None:
    running = caller.stub.RunRollout(pb.RunRolloutRequest(start=start(rollout_id="")))
    wrong(await refusal(running.read()), "spec.rollout_id")


async def test_a_missing_part_is_named_and_not_what_would_be_in_it(caller: Caller) -> None:
    wrong(await refusal(caller.start(pb.StartRolloutRequest(request_id="r"))), "spec")
    wrong(await refusal(caller.stub.RunRollout(pb.RunRolloutRequest()).read()), "start")
    wrong(await refusal(caller.stub.RunRollout(pb.RunRolloutRequest(start=pb.StartRolloutRequest())).read()), "spec")
    # `spec` in place of `start`: the same field number 2 has another meaning in the other message.
    astray = pb.RunRolloutRequest.FromString(start().SerializeToString())
    refused = await refusal(caller.stub.RunRollout(astray).read())
    wrong(refused, "start")
    assert "spec and credentials belong in it" in refused.text


async def test_all_wrong_fields_are_named_at_once(caller: Caller) -> None:
    request = start(rollout_id=" ", messages=[json_message('{"role": "x"}')], sampling={"top_p": 2}, tokenizer=None)
    wrong(
        await refusal(caller.start(request)),
        "spec.rollout_id",
        "spec.messages[0].role",
        "spec.sampling.top_p",
        "spec.tokenizer",
    )


async def test_a_thousand_wrong_messages_fit_into_a_status(caller: Caller) -> None:
    refused = await refusal(caller.start(start(messages=[json_message("[]")] * 1000)))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert 1 <= len(refused.fields) <= 1000
    assert refused.text.startswith("spec.messages[0]: ")


@pytest.mark.parametrize("url", ["http://name:pass-word-1@trainer:8081", "http://pass-word-1@trainer"])
async def test_a_url_with_a_password_is_refused_without_repeating_it(caller: Caller, url: str) -> None:
    refused = await refusal(caller.start(start(completions=target(url))))
    wrong(refused, "spec.completions.url")
    assert "pass-word-1" not in f"{refused.text}{refused.fields}{refused.metadata}"


@pytest.mark.parametrize("bearer", ["schlüssel-1", "key-1\nx-other: 1", "key-1\x00", "key-1\x7f"])
async def test_a_bearer_that_is_no_header_is_refused_without_repeating_it(caller: Caller, bearer: str) -> None:
    request = start()
    request.credentials.completions_bearer = bearer
    refused = await refusal(caller.start(request))
    wrong(refused, "credentials.completions_bearer")
    assert "schl" not in refused.text
    assert "key-1" not in refused.text


async def test_a_memory_that_the_server_does_not_know_is_refused(caller: Caller) -> None:
    request = start("id")
    request.request_memory = 99  # type: ignore[assignment]
    wrong(await refusal(caller.start(request)), "request_memory")


async def test_a_request_id_has_a_length(caller: Caller) -> None:
    assert not (await caller.start(start("ü" * 256))).attached
    wrong(await refusal(caller.start(start("x" * 257))), "request_id")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_mode": spec_pb2.TOKEN_MODE_TOKENS}, "TOKEN_MODE_UNSUPPORTED"),
    ],
)
async def test_what_this_server_cannot_run_is_refused(caller: Caller, changes: Changes, reason: str) -> None:
    refused = await refusal(caller.start(start(**changes)))
    assert (refused.code, refused.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    assert refused.metadata["request_id"] == refused.request_id


@pytest.mark.parametrize("token", ["x", "!", "MQ==", "é", "MS54", "a" * 10_000, "LTEuMA==", "\x00"])
async def test_a_page_token_that_is_not_ours_is_refused(caller: Caller, token: str) -> None:
    wrong(await refusal(caller.stub.ListRollouts(pb.ListRolloutsRequest(page_token=token))), "page_token")


async def test_a_page_token_belongs_to_its_selection(caller: Caller) -> None:
    for _ in range(3):
        await caller.start(start(labels={"a": "1", "b": "2"}))
    selection = pb.Selection(labels={"b": "2", "a": "1"})
    page = await caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=selection, page_size=1))
    for other in (None, pb.Selection(all=True), pb.Selection(labels={"a": "1"})):
        request = pb.ListRolloutsRequest(selection=other, page_token=page.next_page_token)
        wrong(await refusal(caller.stub.ListRollouts(request)), "page_token")
    request = pb.ListRolloutsRequest(selection=selection, page_token=page.next_page_token)
    assert len((await caller.stub.ListRollouts(request)).rollouts) == 2


async def test_pages_have_a_size(caller: Caller) -> None:
    wrong(await refusal(caller.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1001))), "page_size")
    await caller.stub.ListRollouts(pb.ListRolloutsRequest(page_size=1000))


@pytest.mark.parametrize(
    ("conditions", "field"),
    [
        ({"uids": ["x"] * 1001}, "selection.uids"),
        ({"rollout_ids": ["x"] * 1001}, "selection.rollout_ids"),
        ({"states": [pb.ROLLOUT_STATE_UNSPECIFIED]}, "selection.states"),
        ({"states": [99]}, "selection.states"),
    ],
)
async def test_a_selection_has_bounds(caller: Caller, conditions: Changes, field: str) -> None:
    selection = pb.Selection(**conditions)
    wrong(await refusal(caller.stub.ListRollouts(pb.ListRolloutsRequest(selection=selection))), field)
    wrong(await refusal(caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=selection))), field)


async def test_cancelling_needs_a_selection(caller: Caller) -> None:
    uid = (await caller.start(start(agent="gated"))).rollout.uid
    newer = pb.Selection.FromString(b"\x7a\x01x")  # a condition of a later version
    for selection in (None, pb.Selection(all=False), newer):
        request = pb.CancelRolloutsRequest(selection=selection)
        wrong(await refusal(caller.stub.CancelRollouts(request)), "selection")
    request = pb.CancelRolloutsRequest(selection=pb.Selection(all=True), reason="x" * 1001)
    wrong(await refusal(caller.stub.CancelRollouts(request)), "reason")
    assert (await caller.get(uid)).state == pb.ROLLOUT_STATE_RUNNING


async def test_waiting_has_no_negative_time(caller: Caller) -> None:
    uid = (await caller.start(start())).rollout.uid
    for timeout in (seconds(-1), seconds(-0.001)):
        request = pb.WaitRolloutRequest(uid=uid, timeout=timeout)
        wrong(await refusal(caller.stub.WaitRollout(request)), "timeout")


async def test_a_request_over_the_limit_is_refused_and_one_within_it_is_not() -> None:
    async with serving(Idle(), max_request_bytes=2_000_000) as caller:
        fitting = start(messages=[json_message('{"role":"user","content":"' + "x" * 1_990_000 + '"}')])
        assert fitting.ByteSize() < 2_000_000
        # It is returned twice, in spec and outcome, and must fit into the response.
        assert (await caller.play(fitting, pb.ROLLOUT_VIEW_MESSAGES)).outcome.stop.reason == "stop"
        refused = await refusal(caller.start(start(messages=[json_message("x" * 3_100_000)])))
        assert refused.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in refused.text
        assert (await caller.play(start())).outcome.stop.reason == "stop"


async def test_what_lies_on_the_bounds_is_taken(caller: Caller) -> None:
    taken = spec(
        rollout_id="x" * 256,
        group_id="ü" * 256,
        completions=target("HTTPS://[::1]:65535/base//"),
        labels={f"{n:0256}": "y" * 256 for n in range(64)},
        sampling={"temperature": 2, "top_p": 0, "max_tokens": 32_768, "stop": [str(n) for n in range(64)]},
        limits={"turns": 1, "generated_tokens": 1, "calls_per_turn": 1, "tool_turns": 0, "bytes": 1},
        metadata_json='{"x": "' + "y" * (METADATA_BYTES - 9) + '"}',
        cancel_after_detach=seconds(5),
    )
    shown = (await caller.play(pb.StartRolloutRequest(spec=taken))).spec
    assert shown.completions.url == "HTTPS://[::1]:65535/base"
    for name in ("rollout_id", "group_id", "labels", "sampling", "metadata_json", "cancel_after_detach"):
        assert getattr(shown, name) == getattr(taken, name)
