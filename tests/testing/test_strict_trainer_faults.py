"""Each fault acts on the wire as its name says, and does not change the rollout's state."""

import asyncio
import json

import httpx
import pytest
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer

from .conftest import until

CALL = {"rollout_id": "r", "messages": [{"role": "user", "content": "Say hello."}]}


async def answers(trainer: StrictTrainer, client: httpx.AsyncClient) -> list[httpx.Response]:
    """The responses to two identical requests: the fault's and the next one."""
    return [await client.post("/v1/chat/completions", json=CALL) for _ in range(2)]


@pytest.mark.parametrize(
    ("fault", "status", "body", "headers"),
    [
        (Fault.error(500, "engine died"), 500, '{"detail": "engine died"}', {"content-type": "application/json"}),
        (Fault.error(429, "slow down", {"retry-after": "1"}), 429, '{"detail": "slow down"}', {"retry-after": "1"}),
        (Fault.raw("<html></html>", "text/html"), 200, "<html></html>", {"content-type": "text/html"}),
        (Fault.raw('{"id": "x", "choices":'), 200, '{"id": "x", "choices":', {"content-type": "application/json"}),
        (Fault(kind=FaultKind.STATUS, status=503, body="", delay=0.01), 503, "", {}),
    ],
)
async def test_statuses_and_bodies(client, fault, status, body, headers) -> None:
    async with StrictTrainer(scripts={"r": Script((fault, ScriptedReply(content="Hello!")))}) as trainer:
        failed, healthy = await answers(trainer, client(trainer))
        verdict = trainer.verdict("r")
    assert (failed.status_code, failed.text) == (status, body)
    assert headers.items() <= dict(failed.headers).items()
    assert healthy.json()["choices"][0]["message"] == {"role": "assistant", "content": "Hello!"}
    assert verdict.accepted
    assert verdict.faults == (f"turn 1: status {status}",)


@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        (FaultKind.EMPTY_CHOICES, []),
        (FaultKind.NULL_MESSAGE, [{"index": 0, "message": None, "finish_reason": "stop"}]),
    ],
)
async def test_completions_without_a_message(client, kind, choices) -> None:
    async with StrictTrainer(scripts={"r": Script((Fault(kind=kind), ScriptedReply(content="Hello!")))}) as trainer:
        failed, healthy = await answers(trainer, client(trainer))
    assert failed.status_code == 200
    assert failed.json()["choices"] == choices
    assert failed.json()["prompt_token_ids"] == healthy.json()["prompt_token_ids"]
    assert len(failed.json()["token_ids"]) == len(failed.json()["logprobs"]) > 0


async def exchange_raw(trainer: StrictTrainer) -> bytes:
    """All bytes from a raw connection until its end. Raises ConnectionResetError if it is reset."""
    body = json.dumps(CALL).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: trainer\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(trainer.host, trainer.port)
    try:
        writer.write(head.encode() + body)
        return await reader.read()
    finally:
        writer.close()


async def test_a_reset_is_a_tcp_reset(client) -> None:
    script = Script(
        (Fault(kind=FaultKind.RESET), Fault(kind=FaultKind.RESET, delay=0.01), ScriptedReply(content="Hello!"))
    )
    async with StrictTrainer(scripts={"r": script}) as trainer:
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                await exchange_raw(trainer)
        assert (await client(trainer).post("/v1/chat/completions", json=CALL)).status_code == 200
        assert trainer.verdict("r").faults == ("turn 1: reset", "turn 1: reset")


async def test_a_truncated_answer_ends_before_its_length(client) -> None:
    script = Script((Fault.truncated('{"id": "x"'), Fault.truncated()))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        head, _, body = (await exchange_raw(trainer)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"content-length: 4106" in head.lower()
        assert body == b'{"id": "x"'
        with pytest.raises(httpx.RemoteProtocolError):
            await client(trainer).post("/v1/chat/completions", json=CALL)


async def test_silence_lasts_until_the_caller_gives_up(client) -> None:
    async with StrictTrainer(
        scripts={"r": Script((Fault(kind=FaultKind.SILENCE), ScriptedReply(content="Hi")))}
    ) as trainer:
        with pytest.raises(httpx.ReadTimeout):
            await client(trainer).post("/v1/chat/completions", json=CALL, timeout=0.2)
        assert (await client(trainer).post("/v1/chat/completions", json=CALL)).status_code == 200


@pytest.mark.parametrize("line", [Fault(kind=FaultKind.SILENCE), ScriptedReply(content="Late.", delay=600)])
async def test_closing_gives_up_what_is_held_back(client, line) -> None:
    async with StrictTrainer(scripts={"r": Script((line,))}) as trainer:
        asked = asyncio.create_task(client(trainer).post("/v1/chat/completions", json=CALL))
        await until(lambda: len(trainer.requests) == 1)
    with pytest.raises(httpx.TransportError):
        await asked


async def test_a_delayed_answer_comes(client) -> None:
    async with StrictTrainer(scripts={"r": Script((ScriptedReply(content="Late.", delay=0.05),))}) as trainer:
        late = await client(trainer).post("/v1/chat/completions", json=CALL)
    assert late.json()["choices"][0]["message"]["content"] == "Late."


async def test_a_delayed_answer_holds_up_no_other(client) -> None:
    async with StrictTrainer(scripts={"r": Script((ScriptedReply(content="Late.", delay=600),))}) as trainer:
        late = asyncio.create_task(client(trainer).post("/v1/chat/completions", json=CALL))
        await until(lambda: len(trainer.requests) == 1)
        other = await client(trainer).post("/v1/chat/completions", json=CALL | {"rollout_id": "other"})
        assert other.status_code == 200
        assert not late.done()
    with pytest.raises(httpx.TransportError):
        await late


async def test_a_script_that_is_used_up_says_so(client) -> None:
    async with StrictTrainer(scripts={"r": Script((ScriptedReply(content="Hi"),))}) as trainer:
        first, second = await answers(trainer, client(trainer))
    assert first.status_code == 200
    assert second.status_code == 500
    assert second.json()["detail"] == "the script has 1 lines, and all of them were used"


async def test_a_script_can_repeat_its_last_line(client) -> None:
    script = Script((Fault.error(503, "overloaded"), Fault.error(500, "no")), repeat_last=True)
    async with StrictTrainer(scripts={"r": script}) as trainer:
        statuses = [a.status_code for _ in range(2) for a in await answers(trainer, client(trainer))]
    assert statuses == [503, 500, 500, 500]


async def test_a_refused_call_uses_up_no_line(caller) -> None:
    calls = (tool_call("call_1", "add", '{"a": 5, "b": 3}'),)
    script = Script((ScriptedReply(content="Adding.", tool_calls=calls), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.turn()
        assert (await asking.post(response_mask=[0])).status_code == 422
        await asking.turn()
    assert asking.messages[-1]["content"] == "8"


async def test_a_fault_in_a_later_turn_keeps_the_turns_before(caller) -> None:
    calls = (tool_call("call_1", "add", '{"a": 5, "b": 3}'),)
    script = Script((ScriptedReply(tool_calls=calls), Fault.error(500, "engine died"), ScriptedReply(content="8")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        asking = caller(trainer)
        await asking.turn()
        before = trainer.verdict("r")
        assert (await asking.post()).status_code == 500
        assert trainer.verdict("r").sample == before.sample
        await asking.turn()
        assert trainer.verdict("r").faults == ("turn 2: status 500",)


async def test_a_reply_that_no_tokenizer_takes_is_the_trainers_fault(client) -> None:
    script = Script((ScriptedReply(content=[{"type": "image_url"}]), ScriptedReply(content="Hi")))
    async with StrictTrainer(scripts={"r": script}) as trainer:
        failed, healthy = await answers(trainer, client(trainer))
    assert failed.status_code == 500
    assert "the scripted reply" in failed.json()["detail"]
    assert healthy.status_code == 200
