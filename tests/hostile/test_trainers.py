"""Malicious trainers and engines: each response ends only its own rollout, and builds no large object."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, outcome_pb2, token_pb2
from rollout_client import AsyncClient, Target
from rollout_server import Agent, tool
from rollout_server.app import Server
from rollout_server.core.limits import CALLS_PER_TURN, MOST_CALLS_PER_TURN, Limits
from rollout_server.core.message import MalformedMessage, Message
from rollout_server.core.spec import Dialect, Spec
from rollout_server.core.spec import Target as SpecTarget
from rollout_server.core.spec_validation import Bounds, settle
from rollout_server.edge.rpc.field_count import TooManyFields, check_fields
from rollout_server.edge.trainer.chat_completion import parse_chat_completion
from rollout_server.edge.trainer.response_limits import (
    ANSWER_BYTES,
    ANSWER_VALUES,
    MESSAGE_BYTES,
    MESSAGE_VALUES,
    check_message,
    check_values,
)
from rollout_server.edge.wire.completion import (
    MalformedCompletion,
    completion_from_proto,
    parse_response,
    read_ledger,
)
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.run.tool_calls import _AT_ONCE
from rollout_server.settings import Settings
from rollout_server.testing.tokenizer import TOY_TOKENIZER

from tests.support.grpc_trainer import GrpcTrainer, serving
from tests.support.http_trainer import Act, answer, raw_trainer

pytestmark = pytest.mark.asyncio(loop_scope="module")
MOST = Limits().calls_read
VALIDATION = outcome_pb2.FAILURE_CATEGORY_VALIDATION


class Beat:
    """Count the rounds of the event loop, and the tool calls that began in each."""

    def __init__(self) -> None:
        self.round = 0
        self.begun: dict[int, int] = {}

    async def go_on(self) -> None:
        while True:
            self.round += 1
            await asyncio.sleep(0)


BEAT = Beat()


@tool
async def count(a: int) -> int:
    """Counts."""
    BEAT.begun[BEAT.round] = BEAT.begun.get(BEAT.round, 0) + 1
    return a


class Counting(Agent):
    """An agent that counts for as long as the model requests it."""

    name = "counting"
    tools = (count,)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[AsyncClient]:
    ports: Any = {"host": "127.0.0.1", "http_port": 0, "grpc_port": 0, "http": False, "retries": 0}
    settings = Settings(_env_file=None, tokenizers={"t": TOY_TOKENIZER}, tokenizers_offline=True, **ports)
    async with Server([Counting()], settings) as server, AsyncClient(f"127.0.0.1:{server.grpc_port}") as client:
        yield client


def call(number: int) -> dict[str, Any]:
    function = {"name": "count", "arguments": json.dumps({"a": number})}
    return {"id": f"c{number}", "type": "function", "function": function}


def calling(calls: int) -> bytes:
    return body(
        json.dumps({"role": "assistant", "content": None, "tool_calls": [call(n) for n in range(calls)]}).encode()
    )


def body(message: bytes = b'{"role": "assistant", "content": "8"}', more: bytes = b"") -> bytes:
    return b'{"choices": [{"message": ' + message + b', "finish_reason": "stop"}], "token_ids": [5, 6]' + more + b"}"


async def roll(client: AsyncClient, act: Act, dialect: str = "http_plain", **spec: Any) -> outcome_pb2.Outcome:
    """Run one rollout against a trainer that acts this way once, and then completes without calls."""
    BEAT.begun.clear()
    model = {"model": "m"} if dialect in ("openai", "vllm", "sglang") else {}
    async with raw_trainer(act, answer(body())) as trainer:
        target = Target(trainer.url, dialect=dialect, **model)
        fields = {"tokenizer": "t"} if dialect == "http_masked" else {}
        run = client.run(messages=[{"role": "user", "content": "Go."}], completions=target, **fields, **spec)
        async for _ in run:
            pass
        return (await client.get(run.uid, view="full")).outcome


def contents(outcome: outcome_pb2.Outcome) -> list[str]:
    messages = [json.loads(message.json) for message in outcome.messages]
    return [message["content"] for message in messages if message["role"] == "tool"]


every = pytest.mark.parametrize("dialect", ["http_plain", "http_masked", "openai", "vllm", "sglang"])


@every
async def test_far_too_many_calls_end_the_rollout_and_none_runs(client: AsyncClient, dialect: str) -> None:
    outcome = await roll(client, answer(calling(20_000)), dialect)
    assert outcome.failure.category == VALIDATION
    assert f"tool_calls contains 20000 calls; at most {MOST} are read" in outcome.failure.message
    assert "`limits.calls_per_turn`" in outcome.failure.message
    assert not BEAT.begun


async def test_of_more_calls_than_the_limit_the_first_run_a_few_at_a_time(client: AsyncClient) -> None:
    beat = asyncio.create_task(BEAT.go_on())
    outcome = await roll(client, answer(calling(CALLS_PER_TURN + 5)))
    beat.cancel()
    late = f"Error: Too many tool calls in one turn; the first {CALLS_PER_TURN} ran"
    assert contents(outcome) == [str(number) for number in range(CALLS_PER_TURN)] + [late] * 5
    assert sum(BEAT.begun.values()) == CALLS_PER_TURN
    assert max(BEAT.begun.values()) <= _AT_ONCE


@pytest.mark.parametrize(("calls", "refused"), [(16, False), (17, True)])
async def test_a_lower_limit_lowers_both(client: AsyncClient, calls: int, refused: bool) -> None:
    outcome = await roll(client, answer(calling(calls)), limits={"calls_per_turn": 2})
    assert outcome.HasField("failure") is refused
    assert sum(BEAT.begun.values()) == (0 if refused else 2)


@pytest.mark.parametrize(
    ("asked", "agents", "held"),
    [(None, None, CALLS_PER_TURN), (5, None, 5), (None, 500, 500), (7, 500, 7), (10**6, None, MOST_CALLS_PER_TURN)],
)
async def test_every_rollout_has_a_limit_of_calls(asked: int | None, agents: int | None, held: int) -> None:
    spec = Spec(
        "r",
        (Message.write({"role": "user"}),),
        SpecTarget("http://t", Dialect.HTTP_PLAIN),
        limits=Limits(calls_per_turn=asked),
    )
    assert settle(spec, "a", Limits(calls_per_turn=agents), Bounds()).limits.calls_per_turn == held


LARGE = 1_000_000
TINY: dict[str, tuple[bytes, str]] = {
    "ids": (body(more=b', "prompt_token_ids": [' + b"1," * 3 * LARGE + b"1]"), f"more than {ANSWER_VALUES} values"),
    "logprobs": (body(more=b', "logprobs": [' + b"0," * 3 * LARGE + b"0]"), f"more than {ANSWER_VALUES} values"),
    "unknown": (body(more=b', "more": [' + b"[]," * 3 * LARGE + b"0]"), f"more than {ANSWER_VALUES} values"),
    "choices": (
        b'{"choices": [{"message": {"role": "assistant", "content": ""}}' + b",{}" * 3 * LARGE + b"]}",
        f"more than {ANSWER_VALUES} values",
    ),
    "texts": (body(b'{"role": "assistant", "content": [' + b'"",' * 100_000 + b'""]}'), f"more than {MESSAGE_VALUES}"),
    "numbers": (body(b'{"role": "assistant", "content": [' + b"1," * 100_000 + b"1]}"), f"more than {MESSAGE_VALUES}"),
    "lists": (body(b'{"role": "assistant", "content": [' + b"[]," * 100_000 + b"1]}"), f"more than {MESSAGE_VALUES}"),
    "members": (body(b'{"role": "assistant", ' + b'"a":1,' * 100_000 + b'"b":1}'), f"more than {MESSAGE_VALUES}"),
    "number": (body(b'{"role": "assistant", "n": ' + b"9" * 3 * LARGE + b"}"), f"at most {MESSAGE_BYTES} are read"),
    "arguments": (
        body(json.dumps({"role": "assistant", "tool_calls": [call(int("9" * 4000))], "x": "9" * 3 * LARGE}).encode()),
        f"at most {MESSAGE_BYTES} are read",
    ),
}


@pytest.mark.parametrize(("data", "said"), TINY.values(), ids=TINY)
async def test_what_is_refused_takes_no_more_memory_than_a_piece_of_it(data: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RolloutFailed) as failed:
            parse_chat_completion(data, 1, ids_needed=False, most_calls=MOST)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert said in str(failed.value)
    # A copy of the message and a few slices; a list of so many objects is larger.
    assert peak < 2 * len(data) + 4 * 2**20


@every
@pytest.mark.parametrize("name", ["ids", "texts", "number"])
async def test_whoever_sends_it(client: AsyncClient, dialect: str, name: str) -> None:
    data, said = TINY[name]
    outcome = await roll(client, answer(data), dialect)
    assert (outcome.failure.category, said in outcome.failure.message) == (VALIDATION, True)


async def test_separators_in_texts_are_no_values() -> None:
    text = json.dumps("[{," * MESSAGE_VALUES + '\\"' * 10).encode()
    check_message(b'{"role": "assistant", "content": ' + text + b"}", MOST)
    check_values(b"[" + b",".join([text] * 5) + b"]", 10)
    with pytest.raises(MalformedMessage):
        check_values(b"[" + b",".join([text] * 5) + b"]", 4)


@pytest.mark.parametrize(
    "junk", [b'"' * LARGE, b"[" * LARGE, b'{"' * LARGE, b"\\" * LARGE, b'"\\' * LARGE, b",[" * LARGE]
)
async def test_what_is_no_json_is_refused_all_the_same(junk: bytes) -> None:
    with pytest.raises(RolloutFailed):
        parse_chat_completion(junk, 1, ids_needed=False, most_calls=MOST)


async def test_an_answer_is_read_up_to_its_limit_of_bytes(client: AsyncClient) -> None:
    sent = 0

    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
        while not writer.is_closing():
            writer.write(b" " * 2**20)
            await writer.drain()
            sent += 2**20

    outcome = await roll(client, flood)
    assert f"the response is larger than {ANSWER_BYTES} bytes" in outcome.failure.message
    assert sent < ANSWER_BYTES + 32 * 2**20  # data in the system's buffers on its way


@every
async def test_informational_responses_without_end(client: AsyncClient, dialect: str) -> None:
    sent = 0

    async def hint(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000)
            await writer.drain()
            sent += 1000

    outcome = await roll(client, hint, dialect)
    assert "the target sent more than 16 informational responses" in outcome.failure.message
    assert sent * 28 < 32 * 2**20


async def test_a_few_informational_responses_are_no_fault(client: AsyncClient) -> None:
    async def hint(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = body()
        hints = b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n" * 15
        writer.write(hints + b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(data) + data)

    assert (await roll(client, hint)).stop.reason == "stop"


SECRETS = {
    "text": b"ami-id\nAKIA-0123456789",
    "html": b"<title>AKIA-0123456789</title>",
    "json": b'{"Code": "Success", "AccessKeyId": "AKIA-0123456789"}',
    "message": b'{"message": "AKIA-0123456789"}',
    "list": b'["AKIA-0123456789"]',
    "nested": b'{"detail": {"key": "AKIA-0123456789"}}',
    "choices": b'{"choices": "AKIA-0123456789"}',
    "role": b'{"choices": [{"message": {"role": "AKIA-0123456789", "content": ""}}]}',
}


@every
@pytest.mark.parametrize("status", [200, 302, 404, 422, 500])
@pytest.mark.parametrize("data", SECRETS.values(), ids=SECRETS)
async def test_what_another_service_answers_is_not_read_back(
    client: AsyncClient, dialect: str, status: int, data: bytes
) -> None:
    outcome = await roll(client, answer(data, status, location="http://AKIA-0123456789"), dialect)
    assert outcome.HasField("failure")
    assert "AKIA" not in str(outcome)


def chatting(calls: int) -> Callable[[pb.CompleteRequest, pb.CompleteResponse], None]:
    def act(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        each = message_pb2.ToolCall(id="c", name="count", arguments_json='{"a": 1}')
        response.message.CopyFrom(message_pb2.Message(chat=message_pb2.ChatMessage(role="assistant")))
        response.message.chat.tool_calls.extend([each] * calls)

    return act


def written(calls: int) -> Callable[[pb.CompleteRequest, pb.CompleteResponse], None]:
    def act(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        message = {"role": "assistant", "content": "", "tool_calls": [call(number) for number in range(calls)]}
        response.message.json = json.dumps(message)

    return act


def in_parts(*parts: object, text: str = "") -> Callable[[pb.CompleteRequest, pb.CompleteResponse], None]:
    def act(request: pb.CompleteRequest, response: pb.CompleteResponse) -> None:
        response.message.chat.role = "assistant"
        response.message.chat.parts.add(text=text)
        for part in parts:
            response.message.chat.parts.add(json=json.dumps(part))

    return act


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (chatting(2000), f"tool_calls contains 2000 calls; at most {MOST} are read"),
        (written(2000), f"tool_calls contains 2000 calls; at most {MOST} are read"),
        (chatting(40_000), f"more than {MESSAGE_VALUES} fields"),
        (in_parts(text="x" * (MESSAGE_BYTES + 1)), f"at most {MESSAGE_BYTES} are read"),
        (in_parts(*[{"n": [1] * 40_000}] * 2), f"more than {MESSAGE_VALUES} values"),
        (lambda _, response: response.token_ids.extend([1] * 3 * LARGE), f"at most {ANSWER_VALUES} are allowed"),
        (
            lambda _, response: response.prompt_ids.values.extend([1] * 3 * LARGE),
            f"at most {ANSWER_VALUES} are allowed",
        ),
    ],
    ids=["chat", "json", "fields", "text", "values", "ids", "prompt"],
)
async def test_grpc_trainers_are_held_to_the_same(
    client: AsyncClient, act: Callable[[pb.CompleteRequest, pb.CompleteResponse], None], said: str
) -> None:
    async with serving(GrpcTrainer((5, 6), lies={1: act})) as trainer:
        run = client.run(messages=[{"role": "user", "content": "Go."}], completions=Target(trainer.url))
        async for _ in run:
            pass
        outcome = (await client.get(run.uid, view="full")).outcome
    assert outcome.failure.category == VALIDATION
    assert said in outcome.failure.message
    assert len(trainer.requests) == 1


EMPTY_PARTS = (b"\x0a\x00") * LARGE
"""A million empty messages in field 1."""


async def test_fields_are_counted_before_they_become_objects() -> None:
    chat = message_pb2.ChatMessage(role="assistant")
    data = pb.CompleteResponse(message=message_pb2.Message(chat=chat)).SerializeToString()
    assert (await parse_response(data)).message.chat == chat
    tracemalloc.start()
    try:
        for read in (parse_response, read_ledger):
            with pytest.raises(MalformedCompletion, match=f"more than {MESSAGE_VALUES} fields"):
                await read(EMPTY_PARTS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


@pytest.mark.parametrize(
    "junk", [b"\x0b", b"\x0a", b"\x0a\xff", b"\xff" * 20, b"\x0c\x0c", b"\x0a\x05\x0a\xff\xff\xff\xff"]
)
async def test_junk_for_a_message(junk: bytes) -> None:
    with pytest.raises(MalformedCompletion):
        await parse_response(junk)


async def test_the_count_of_fields_is_right() -> None:
    spans = [token_pb2.Span(author="AUTHOR_MODEL", turn=turn, token_ids=[1, 2, 3]) for turn in range(1, 4)]
    data = pb.ReadLedgerResponse(spans=spans).SerializeToString()
    check_fields(data, pb.ReadLedgerResponse.DESCRIPTOR, 12)
    with pytest.raises(TooManyFields):
        check_fields(data, pb.ReadLedgerResponse.DESCRIPTOR, 11)


async def test_a_stream_answers_with_too_many_calls() -> None:
    """A completion on a trainer's own stream is parsed already; its calls are counted before they are read."""
    response = pb.CompleteResponse()
    chatting(2000)(pb.CompleteRequest(), response)
    with pytest.raises(MalformedCompletion, match="tool_calls contains 2000 calls"):
        completion_from_proto(response, MOST)
