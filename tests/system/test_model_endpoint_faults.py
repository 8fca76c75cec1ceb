"""The model endpoint when something goes wrong: lost answers, rewritten histories, wrong keys, hostile bodies, floods."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from aiohttp import web
from rollout_gateway.settings import GatewaySettings

from tests.support.api_shapes import ROUTES, api_request
from tests.support.gateways import http_client, serving
from tests.support.outside_agent import (
    ADD,
    Endpoint,
    Stand,
    Texts,
    answer_text,
    check_each_token_once,
    history,
    prompt_text,
    request_body,
    standing,
)
from tests.support.server_client import until
from tests.support.tcp_proxy import TcpProxy

EVERY_API = pytest.mark.parametrize("api", ROUTES)
EVERY_FORM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    """A stack that closes what the test opens."""
    async with AsyncExitStack() as opened:
        yield opened


@pytest.fixture
async def stand(stack: AsyncExitStack) -> Stand:
    """A server with an engine that answers at once."""
    return await stack.enter_async_context(standing())


async def asked(stand: Stand, count: int = 1) -> None:
    """Wait until requests stand in front of the engine's gate."""

    async def are_there() -> bool:
        return stand.engine.waiting >= count

    await until(are_there)


async def noticed(stand: Stand) -> None:
    """Wait until the server knows that a caller has left."""

    async def is_noticed() -> bool:
        return stand.calls("disconnected") == 1

    await until(is_noticed)


async def proxied(stack: AsyncExitStack, stand: Stand) -> tuple[TcpProxy, httpx.AsyncClient]:
    """A proxy in front of the gateway, and its client."""
    proxy = await stack.enter_async_context(TcpProxy(stand.server.http_port))
    return proxy, await stack.enter_async_context(http_client(f"http://{proxy.address}", timeout=60))


@dataclass
class RawRequest:
    """A request to chat completions whose head is sent, but not its body."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, stand: Stand, rollout: Endpoint, key: str = "") -> RawRequest:
        """Send the head, with the rollout's own key unless another is given."""
        reader, writer = await asyncio.open_connection("127.0.0.1", stand.server.http_port)
        head = (
            f"POST {rollout.path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key or rollout.key}\r\n"
            "content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        )
        writer.write(head.encode())
        await writer.drain()
        return cls(reader, writer)

    async def status(self) -> int:
        """The status of the response."""
        return int((await self.reader.readline()).split()[1])

    def close(self) -> None:
        """Close the connection."""
        self.writer.transport.abort()


def segment(outcome: dict[str, Any], segment_id: str) -> dict[str, Any]:
    """A segment of an outcome."""
    (found,) = (each for each in outcome["segments"] if each["id"] == segment_id)
    return dict(found)


# Requests that the engine refuses


def refusal(status: int, text: str) -> web.Response:
    """An error of the engine."""
    return web.json_response({"error": {"message": text, "type": "BadRequestError", "code": status}}, status=status)


@pytest.mark.parametrize("mode", ["messages", "tokens"])
@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_that_the_engine_refuses_does_not_end_the_rollout(stand: Stand, mode: str, status: int) -> None:
    rollout = await stand.start(token_mode=mode)
    said = (await rollout.chat(history("One?")))["content"]
    stand.engine.first = [refusal(status, "stop cannot contain an empty string.")]
    body = request_body("chat", "One?", said, "Two?", stop=[""])
    refused = await rollout.post("chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_call")
    assert f"the engine answered {status}: stop cannot contain" in refused.json()["error"]["message"]
    await rollout.chat(history("One?", said, "Two?"))
    outcome = await rollout.finish(reward=1)
    assert (outcome["reward"], outcome["capture"]["refused"], len(stand.seen)) == (1, 1, 2)
    check_each_token_once(outcome, stand.seen)


async def test_an_engine_that_has_completed_nothing_yet_may_be_configured_wrongly(stand: Stand) -> None:
    """The failure then says what the engine's operator has to do."""
    stand.engine.first = [refusal(400, '"auto" tool choice requires --enable-auto-tool-choice to be set')]
    rollout = await stand.start(token_mode="messages")
    refused = await rollout.post("chat/completions", request_body("chat", "One?"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (410, "rollout_over")
    failure = await rollout.outcome()
    assert (failure["category"], failure["failure_class"]) == ("engine_client", "engine")
    assert "requires --enable-auto-tool-choice" in failure["message"]


# Lost answers


@EVERY_API
@EVERY_FORM
async def test_an_answer_whose_connection_broke_is_given_again_and_trains_once(
    stack: AsyncExitStack, stand: Stand, api: str, stream: bool
) -> None:
    rollout = await stand.start()
    proxy, http = await proxied(stack, stand)
    body = request_body(api, "One?", stream=stream)
    stand.engine.gate.clear()
    first = asyncio.create_task(rollout.post(ROUTES[api], body, http=http))
    await asked(stand)
    proxy.cut()
    with pytest.raises(httpx.TransportError):
        await first
    # Only once the server has noticed is an equal, unmarked request taken for the same one.
    await noticed(stand)
    second = asyncio.create_task(rollout.post(ROUTES[api], {**body, "stream": False}))
    stand.engine.gate.set()
    text = answer_text(api, await second)
    assert text == "Answer 0."
    reply = await rollout.post(ROUTES[api], request_body(api, "One?", text, "Two?"))
    assert answer_text(api, reply) == "Answer 1."
    outcome = await rollout.finish(reward=1)
    assert outcome["capture"]["joined"] + outcome["capture"]["replayed"] == 1
    assert set(check_each_token_once(outcome, stand.seen).values()) == {"0"}


@EVERY_API
@EVERY_FORM
async def test_an_answer_lost_behind_a_proxy_and_asked_again_trains_once(
    stack: AsyncExitStack, stand: Stand, api: str, stream: bool
) -> None:
    """The server delivered it to the proxy, so the repetition is a sibling, and the lost answer is masked as abandoned."""
    rollout = await stand.start()
    proxy, http = await proxied(stack, stand)
    body = request_body(api, "One?", stream=stream)
    proxy.lose_an_answer()
    with pytest.raises(httpx.TransportError):
        await rollout.post(ROUTES[api], body, http=http)
    text = answer_text(api, await rollout.post(ROUTES[api], {**body, "stream": False}))
    reply = await rollout.post(ROUTES[api], request_body(api, "One?", text, "Two?"))
    assert reply.status_code == 200, reply.text
    outcome = await rollout.finish(reward=1)
    lost = [] if text == "Answer 0." else [0]
    placed = check_each_token_once(outcome, stand.seen, masked=lost)
    assert len(stand.seen) == 2 + len(lost)
    assert outcome["capture"]["abandoned"] == len(lost)
    assert placed[len(lost)] == placed[len(lost) + 1]


@EVERY_API
async def test_a_repetition_that_says_so_gets_the_same_answer_although_the_first_was_delivered(
    stand: Stand, api: str
) -> None:
    rollout = await stand.start()
    body = request_body(api, "One?")
    first = await rollout.post(ROUTES[api], body)
    again = await rollout.post(ROUTES[api], body, repeated=True)
    assert answer_text(api, again) == answer_text(api, first) == "Answer 0."
    assert again.json()["id"] == first.json()["id"]
    outcome = await rollout.finish()
    assert outcome["capture"]["replayed"] == 1
    check_each_token_once(outcome, stand.seen)
    assert len(stand.seen) == 1


async def test_an_agent_that_gives_up_and_goes_on_elsewhere_loses_nothing(stack: AsyncExitStack, stand: Stand) -> None:
    """It never asks again for the answer that it lost; the rollout goes on, and no token is in two samples."""
    rollout = await stand.start()
    proxy, http = await proxied(stack, stand)
    stand.engine.gate.clear()
    first = asyncio.create_task(rollout.post("chat/completions", request_body("chat", "One?"), http=http))
    await asked(stand)
    proxy.cut()
    with pytest.raises(httpx.TransportError):
        await first
    stand.engine.gate.set()
    assert (await rollout.chat(history("Something else?")))["content"] == "Answer 1."
    outcome = await rollout.finish()
    assert outcome["end"] == "stop"
    check_each_token_once(outcome, stand.seen, masked=range(outcome["capture"]["abandoned"]))


@EVERY_API
async def test_a_call_that_waits_when_the_rollout_ends_is_told_so(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    stand.engine.gate.clear()
    call = asyncio.create_task(rollout.post(ROUTES[api], request_body(api, "One?")))
    await asked(stand)
    outcome = await rollout.finish(reward=1)
    stand.engine.gate.set()
    reply = await call
    assert reply.status_code == (400 if api == "responses" else 410), reply.text
    assert api == "messages" or reply.json()["error"]["code"] == "rollout_over"
    assert outcome["end"] == "stop"
    assert outcome["samples"] == []


# Silence


HEARTBEATS = {"chat": ": ", "responses": "event: response.in_progress", "messages": "event: ping"}


@asynccontextmanager
async def quick_heart(stand: Stand) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway that sends heartbeats at short intervals."""
    settings = GatewaySettings(heartbeat_seconds=0.02)
    async with (
        serving(f"127.0.0.1:{stand.server.grpc_port}", settings) as (host, port),
        http_client(f"http://{host}:{port}", timeout=60) as http,
    ):
        yield http


async def beating(stand: Stand, lines: AsyncIterator[str], api: str) -> list[str]:
    """Read a stream until it has had three heartbeats and the engine has its request, and open the engine's gate."""
    read: list[str] = []
    while sum(line.startswith(HEARTBEATS[api]) for line in read) < 3 or not stand.engine.waiting:
        read.append(await anext(lines))
    assert stand.engine.waiting == 1
    stand.engine.gate.set()
    return read


async def read_all(lines: AsyncIterator[str], read: list[str]) -> None:
    """Append the lines of a stream to a list."""
    async for line in lines:
        read.append(line)  # noqa: PERF401 - what was read before an error counts


@EVERY_API
async def test_a_stream_beats_while_the_engine_is_silent_and_then_has_the_answer(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    stand.engine.gate.clear()
    body = request_body(api, "One?", stream=True)
    async with (
        quick_heart(stand) as http,
        http.stream("POST", f"{rollout.path}/v1/{ROUTES[api]}", json=body, headers=rollout.headers()) as reply,
    ):
        assert reply.status_code == 200
        assert reply.headers["x-accel-buffering"] == "no"
        lines = reply.aiter_lines()
        text = "\n".join([*await beating(stand, lines, api), *[line async for line in lines]])
    assert "Answer 0." in text
    assert not any(line.startswith("id:") for line in text.splitlines())
    await rollout.chat(history("One?", "Answer 0.", "Two?"))
    outcome = await rollout.finish()
    assert set(check_each_token_once(outcome, stand.seen).values()) == {"0"}


@EVERY_API
async def test_a_stream_that_fails_after_heartbeats_ends_with_an_error_and_a_cut_connection(
    stack: AsyncExitStack, api: str
) -> None:
    stand = await stack.enter_async_context(standing(retries=0))
    rollout = await stand.start()
    stand.engine.gate.clear()
    stand.engine.first.append(web.Response(status=500))
    body = request_body(api, "One?", stream=True)
    read: list[str] = []
    async with (
        quick_heart(stand) as http,
        http.stream("POST", f"{rollout.path}/v1/{ROUTES[api]}", json=body, headers=rollout.headers()) as reply,
    ):
        lines = reply.aiter_lines()
        await beating(stand, lines, api)
        with pytest.raises(httpx.RemoteProtocolError):
            await read_all(lines, read)
    assert any("error" in line for line in read)
    assert len(stand.seen) == 0
    outcome = await rollout.outcome()
    assert outcome["end"] == "failure"
    assert outcome["samples"] == []


# Rewritten histories


@EVERY_API
async def test_a_client_that_strips_reasoning_continues_its_segment_exactly(stack: AsyncExitStack, api: str) -> None:
    stand = await stack.enter_async_context(standing(Texts(thinks=True), odd=True))
    rollout = await stand.start()
    texts = ["One?"]
    for number in range(4):
        reply = await rollout.post(ROUTES[api], request_body(api, *texts))
        assert "Thought" in reply.text
        texts += [answer_text(api, reply), f"Number {number}?"]
        assert "Thought" not in json.dumps(request_body(api, *texts))
    outcome = await rollout.finish()
    assert set(check_each_token_once(outcome, stand.seen).values()) == {"0"}
    assert "Thought 2." in prompt_text(stand.seen[3])
    assert outcome["capture"]["restored"] > 0


@EVERY_API
async def test_as_template_is_cut_where_the_reasoning_is_missing(stack: AsyncExitStack, api: str) -> None:
    stand = await stack.enter_async_context(standing(Texts(thinks=True)))
    rollout = await stand.start("as-template")
    texts = ["One?"]
    for number in range(3):
        reply = await rollout.post(ROUTES[api], request_body(api, *texts))
        texts += [answer_text(api, reply), f"Number {number}?"]
    outcome = await rollout.finish()
    placed = check_each_token_once(outcome, stand.seen)
    assert list(placed) == [0, 1, 2]
    assert len(set(placed.values())) == 3
    for number in (1, 2):
        assert "Thought" not in prompt_text(stand.seen[number])
        origin = segment(outcome, placed[number])["origin"]
        assert origin["kind"] == "drift"
        assert (origin["parting"]["message"], origin["parting"]["field"]) == (2 * number - 1, "reasoning")
        assert origin["parting"]["api"] == api


@EVERY_API
async def test_a_system_prompt_that_is_rewritten_each_turn_cuts_and_trains_each_token_once(
    stand: Stand, api: str
) -> None:
    rollout = await stand.start()
    texts = ["One?"]
    for number in range(4):
        body = request_body(api, *texts, system=f"It is day {number}.")
        texts += [answer_text(api, await rollout.post(ROUTES[api], body)), f"Number {number}?"]
    outcome = await rollout.finish()
    placed = check_each_token_once(outcome, stand.seen)
    assert len(set(placed.values())) == 4
    assert outcome["capture"]["parted"] == 3
    for number in range(1, 4):
        parting = segment(outcome, placed[number])["origin"]["parting"]
        assert (parting["message"], parting["field"]) == (0, "content")
        assert parting["found"] == f"It is day {number}."
    for number, turn in enumerate(stand.seen):
        assert f"It is day {number}." in prompt_text(turn)


@EVERY_API
async def test_a_prompt_that_is_too_long_tells_the_agent_to_compact_and_it_goes_on(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    first = answer_text(api, await rollout.post(ROUTES[api], request_body(api, "One?")))
    stand.engine.model.context = 300
    reply = await rollout.post(ROUTES[api], request_body(api, "One?", first, "Two? " * 500))
    assert reply.status_code == 400, reply.text
    stand.engine.model.context = 100_000
    if api == "messages":
        assert reply.json()["error"]["message"].startswith("prompt is too long")
    else:
        assert reply.json()["error"]["code"] == "context_length_exceeded"
    shorter = answer_text(api, await rollout.post(ROUTES[api], request_body(api, "In short: one.")))
    assert shorter == "Answer 1."
    outcome = await rollout.finish()
    assert outcome["end"] == "stop"
    assert outcome["capture"]["refused"] == 1
    assert len(set(check_each_token_once(outcome, stand.seen).values())) == 2


@EVERY_API
@pytest.mark.parametrize("mode", ["tokens", "messages"])
async def test_a_limit_that_does_not_fit_into_the_context_is_lowered(
    stack: AsyncExitStack, api: str, mode: str
) -> None:
    """As Claude Code asks with 32,000. The answer that fills the context is cut, and says so."""
    stand = await stack.enter_async_context(standing(["Well.", "A long answer. " * 100]))
    stand.engine.model.context = 200
    endpoint = await stand.start(token_mode=mode)
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    first = await endpoint.post(ROUTES[api], request_body(api, "One?", **{limit: 32_000}))
    assert answer_text(api, first) == "Well."
    second = await endpoint.post(ROUTES[api], request_body(api, "One?", "Well.", "Two?", **{limit: 32_000}))
    assert answer_text(api, second).startswith("A long answer. A long")
    body = second.json()
    told = {
        "chat": lambda: body["choices"][0]["finish_reason"] == "length",
        "responses": lambda: body["incomplete_details"]["reason"] == "max_output_tokens",
        "messages": lambda: body["stop_reason"] == "max_tokens",
    }
    assert told[api]()
    outcome = await endpoint.finish(reward=1)
    check_each_token_once(outcome, stand.seen)
    assert len(outcome["samples"]) == 1
    assert len(stand.seen[1].prompt) + len(stand.seen[1].ids) == 200


@EVERY_API
async def test_a_refused_call_is_counted_and_the_rollout_lives(stand: Stand, api: str) -> None:
    """In token mode the engine cannot be forced to call a tool."""
    rollout = await stand.start()
    forced = {"type": "any"} if api == "messages" else "required"
    body = api_request(api, history("One?"), [ADD], tool_choice=forced)
    reply = await rollout.post(ROUTES[api], body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith("tool_choice: is not supported")
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."
    outcome = await rollout.finish()
    assert outcome["capture"]["refused"] == 1
    check_each_token_once(outcome, stand.seen)


# Parallel agents


@EVERY_API
async def test_equal_calls_of_two_agents_at_once_are_siblings(stack: AsyncExitStack, stand: Stand, api: str) -> None:
    rollout = await stand.start()
    stand.engine.gate.clear()
    clients = [await stack.enter_async_context(http_client(stand.url, timeout=60)) for _ in range(2)]
    calls = [asyncio.create_task(rollout.post(ROUTES[api], request_body(api, "One?"), http=http)) for http in clients]
    await asked(stand, 2)
    stand.engine.gate.set()
    answers = [answer_text(api, await call) for call in calls]
    assert sorted(answers) == ["Answer 0.", "Answer 1."]
    for answer, http in zip(answers, clients, strict=True):
        reply = await rollout.post(ROUTES[api], request_body(api, "One?", answer, "Two?"), http=http)
        assert reply.status_code == 200, reply.text
    outcome = await rollout.finish()
    placed = check_each_token_once(outcome, stand.seen)
    assert placed[0] != placed[1]
    assert sorted([placed[2], placed[3]]) == sorted([placed[0], placed[1]])
    assert outcome["capture"]["abandoned"] == 0


# Keys


@EVERY_API
async def test_a_stolen_a_foreign_and_an_unknown_key_open_nothing(stand: Stand, api: str) -> None:
    mine, other = await stand.start(), await stand.start()
    for key in (other.key, f"{mine.key[:-6]}AAAAAA", mine.key[:-1], "junk", "x" * 5000):
        reply = await mine.post(ROUTES[api], request_body(api, "One?"), key=key)
        assert reply.status_code == 403, reply.text
        assert mine.key not in reply.text
        reply = await mine.stand.http.post(f"{mine.path}/finish", json={"reward": 1}, headers=mine.headers(key))
        assert reply.status_code == 403, reply.text
        reply = await mine.stand.http.get(f"{mine.path}/v1/models", headers=mine.headers(key))
        assert reply.status_code == 403, reply.text
    assert stand.engine.requests == []
    await mine.chat(history("One?"))
    for rollout, turns in ((mine, 1), (other, 0)):
        outcome = await rollout.finish()
        assert outcome["metrics"]["turns"] == turns
        assert len(outcome["samples"]) == turns


@EVERY_API
@EVERY_FORM
async def test_a_late_key_opens_nothing_and_tells_clients_to_stop(stand: Stand, api: str, stream: bool) -> None:
    rollout = await stand.start()
    await rollout.chat(history("One?"))
    await rollout.finish(reward=0.5)
    reply = await rollout.post(ROUTES[api], request_body(api, "Two?", stream=stream))
    assert reply.status_code == (400 if api == "responses" else 410), reply.text
    assert reply.headers["x-should-retry"] == "false"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert api == "messages" or reply.json()["error"]["code"] == "rollout_over"
    assert len(stand.seen) == 1
    found = (await stand.http.get(f"/v1/rollouts/{rollout.uid}", params={"view": "full"})).json()
    assert found["outcome"]["metrics"]["turns"] == 1


async def test_the_key_of_a_rollout_opens_no_other_api(stack: AsyncExitStack) -> None:
    key = "a-key-of-32-characters-and-more-.."
    hashed = hashlib.sha256(key.encode()).hexdigest()
    stand = await stack.enter_async_context(standing(api_keys=(f"trainer sha256:{hashed} admin",)))
    stand.http.headers["authorization"] = f"Bearer {key}"
    rollout = await stand.start()
    for path in ("/v1/rollouts", f"/v1/rollouts/{rollout.uid}", "/v1/agents"):
        assert (await stand.http.get(path, headers=rollout.headers())).status_code == 401
    reply = await rollout.post("chat/completions", request_body("chat", "One?"), key=key)
    assert reply.status_code == 403
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."


async def test_a_wrong_key_is_refused_before_the_body_is_read(stand: Stand) -> None:
    rollout = await stand.start()
    line = await RawRequest.open(stand, rollout, key="junk")
    assert await line.status() == 403
    line.close()


async def test_guesses_do_not_lock_the_agent_out(stand: Stand) -> None:
    rollout = await stand.start()
    body = request_body("chat", "One?")
    guesses = [rollout.post("chat/completions", body, key=f"rk_{rollout.uid}.{number}") for number in range(50)]
    assert {reply.status_code for reply in await asyncio.gather(*guesses)} <= {403, 429}
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."


# Hostile bodies


HI = '[{"role": "user", "content": "Hi."}]'
DEEP = "[" * 5_000 + "]" * 5_000
MESSAGES = {
    "not utf-8": '[{"role": "user", "content": "\xff\xfe"}]',
    "deep": DEEP,
    "deep content": f'[{{"role": "user", "content": {DEEP}}}]',
    "null": "null",
    "a number": "7",
    "wrong role": '[{"role": "king", "content": "x"}]',
    "a role that is an object": '[{"role": {}, "content": "x"}]',
    "content that is a number": '[{"role": "user", "content": 7}]',
    "an unknown part": '[{"role": "user", "content": [{"type": "hologram"}]}]',
}
"""Texts of the member with the messages that must be refused."""
MEMBERS = {
    "nan": '"temperature": NaN',
    "infinite": '"temperature": 1e999',
    "negative": '"max_tokens": -5, "max_output_tokens": -5',
    "tools": '"tools": [[[]]]',
    "a tool without a name": '"tools": [{"type": "function"}]',
    "two tools with one name": '"tools": [{0}, {0}]'.format(
        '{"type": "function", "name": "a", "function": {"name": "a"}}'
    ),
}
"""Further members that must be refused."""
WHOLE = {"no json": "{", "no object": "[]", "no messages": '{"model": "m", "max_tokens": 9}'}
"""Whole bodies that must be refused."""


def hostile_body(api: str, name: str) -> bytes:
    """The body with this name, in the shape of an API as far as it has one."""
    member = "input" if api == "responses" else "messages"
    further = MEMBERS.get(name, QUIET[api]).replace('"type": "function"', f'"type": "{TOOL_TYPES[api]}"')
    text = WHOLE.get(name) or (f'{{"model": "m", {further}, "{member}": {MESSAGES.get(name, HI)}}}')
    return text.encode("latin-1")


TOOL_TYPES = {"chat": "function", "responses": "function", "messages": "custom"}
QUIET = {"chat": '"temperature": 1', "responses": '"temperature": 1', "messages": '"max_tokens": 9'}


@EVERY_API
async def test_hostile_bodies_are_refused_in_the_shape_of_the_api_and_the_rollout_lives(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    headers = rollout.headers() | {"content-type": "application/json"}
    for name in (*WHOLE, *MESSAGES, *MEMBERS):
        body = hostile_body(api, name)
        reply = await stand.http.post(f"{rollout.path}/v1/{ROUTES[api]}", content=body, headers=headers)
        assert reply.status_code == 400, (name, reply.text[:300])
        error = reply.json()["error"]
        assert (error["type"], bool(error["message"])) == ("invalid_request_error", True), name
        assert len(reply.content) < 4096, name
    assert stand.engine.requests == []
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."
    outcome = await rollout.finish()
    assert outcome["end"] == "stop"
    check_each_token_once(outcome, stand.seen)


@EVERY_API
async def test_a_body_over_32_mib_is_refused_and_the_rollout_lives(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    headers = rollout.headers() | {"content-type": "application/json"}
    reply = await stand.http.post(f"{rollout.path}/v1/{ROUTES[api]}", content=b" " * (33 * 2**20), headers=headers)
    assert reply.status_code == 413, reply.text[:300]
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."
    assert (await rollout.finish())["end"] == "stop"


async def test_a_body_that_outgrows_the_limit_on_its_way_is_refused_and_the_rollout_lives(stand: Stand) -> None:
    """A text of JSON in a text of JSON has more backslashes."""
    rollout = await stand.start()
    called = [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": '"' * (6 * 2**20)}}]
    result = [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]
    roles = {"user": "x", "assistant": called}
    messages = [{"role": role, "content": content} for role, content in roles.items()]
    body = {"model": "m", "max_tokens": 9, "messages": [*messages, {"role": "user", "content": result}]}
    for route in ("messages", "messages/count_tokens"):
        reply = await rollout.post(route, body)
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "request_too_large"), reply.text[:300]
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."


@EVERY_API
async def test_very_many_messages_are_taken_or_refused_and_the_rollout_lives(stand: Stand, api: str) -> None:
    rollout = await stand.start()
    reply = await rollout.post(ROUTES[api], request_body(api, *["x"] * 20_001))
    assert reply.status_code in (200, 400, 413), reply.text[:300]
    other = await stand.start()
    assert (await other.chat(history("One?")))["content"].startswith("Answer ")
    assert (await rollout.chat(history("One?")))["content"].startswith("Answer ")
    assert (await rollout.finish())["end"] == "stop"


async def test_a_flood_of_calls_is_bounded_and_other_rollouts_are_served(stack: AsyncExitStack, stand: Stand) -> None:
    flooded, other = await stand.start(), await stand.start()
    stand.engine.gate.clear()
    calls = [
        asyncio.create_task(flooded.post("chat/completions", request_body("chat", f"Number {number}?")))
        for number in range(200)
    ]

    async def rest_is_refused() -> bool:
        return sum(call.done() for call in calls) >= 200 - 64

    await until(rest_is_refused)
    stand.engine.gate.set()
    assert (await other.chat(history("One?")))["content"].startswith("Answer ")
    replies = [await call for call in calls]
    statuses = {reply.status_code for reply in replies}
    assert statuses <= {200, 429, 503}
    assert sum(reply.status_code == 200 for reply in replies) == 64
    assert all("retry-after" in reply.headers for reply in replies if reply.status_code != 200)
    assert (await flooded.chat(history("Once more?")))["content"].startswith("Answer ")
    outcome = await flooded.finish()
    assert outcome["end"] == "stop"
    assert outcome["metrics"]["turns"] == 65


async def test_connections_that_never_send_their_bodies_keep_nobody_out(stand: Stand) -> None:
    rollout = await stand.start()
    lines = await asyncio.gather(*(RawRequest.open(stand, rollout) for _ in range(300)))
    assert (await rollout.chat(history("One?")))["content"] == "Answer 0."
    for line in lines:
        line.close()
    outcome = await rollout.finish()
    assert set(check_each_token_once(outcome, stand.seen).values()) == {"0"}
