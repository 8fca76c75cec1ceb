"""The service around the judge: keys, tools, external scripts, verdicts, many concurrent rollouts."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest
from rollout_server.testing.http.server import HttpServer
from rollout_server.testing.model.script_json import script_from_json
from rollout_server.testing.script import Fault, FaultKind, Script, ScriptedReply, tool_call
from rollout_server.testing.tokenizer.build import build
from rollout_server.testing.trainer import StrictTrainer
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from .conftest import QUESTION, TOOLS, Caller

CALL = {"rollout_id": "r", "messages": QUESTION}


async def test_health_is_open_and_says_what_answers(client) -> None:
    async with StrictTrainer(api_key="secret") as trainer:
        response = await client(trainer).get("/health")
    assert response.json() == {"status": "healthy", "service": "strict-trainer"}


@pytest.mark.parametrize("sent", [None, "Bearer wrong", "secret", "Bearer secretx", b"Bearer \xff"])
async def test_a_wrong_key_is_401_and_judges_nothing(client, sent) -> None:
    async with StrictTrainer(api_key="secret") as trainer:
        headers = {"authorization": sent} if sent else {}
        response = await client(trainer).post("/v1/chat/completions", json=CALL, headers=headers)
        assert response.status_code == 401
        assert response.json() == {"detail": "Invalid or missing API key"}
        assert trainer.verdicts() == ()
        assert len(trainer.requests) == 1


async def test_the_right_key_is_accepted(client) -> None:
    async with StrictTrainer(api_key="sécret") as trainer:
        headers = {"authorization": "Bearer sécret".encode("latin-1")}
        response = await client(trainer).post("/v1/chat/completions", json=CALL, headers=headers)
    assert response.status_code == 200


async def test_requests_are_kept_in_order_and_bounded(client) -> None:
    async with StrictTrainer(requests_kept=2) as trainer:
        for number in range(3):
            headers = {"Idempotency-Key": f"key-{number}"}
            await client(trainer).post("/v1/chat/completions", json=CALL | {"x": number}, headers=headers)
        assert [request.body["x"] for request in trainer.requests] == [1, 2]
        assert [request.headers["idempotency-key"] for request in trainer.requests] == ["key-1", "key-2"]


async def test_tools_are_rendered_where_they_are_told(caller) -> None:
    lengths = {}
    for name, options in {"with": {"tools": TOOLS}, "off": {"tools": TOOLS, "render_tools": False}, "none": {}}.items():
        async with StrictTrainer(**options) as trainer:
            asking = caller(trainer, tools=TOOLS if name == "with" else None)
            await asking.play()
            assert trainer.verdict("r").accepted
            assert len(asking.answers[0]["prompt_token_ids"]) == trainer.verdict("r").turns[0].prompt_tokens
            lengths[name] = trainer.verdict("r").turns[0].prompt_tokens
    assert lengths["with"] > lengths["off"] == lengths["none"]


async def test_tools_come_from_a_gateway_once(caller) -> None:
    asked = []

    async def tools(request):
        asked.append(request.url.path)
        return JSONResponse({"tools": TOOLS})

    gateway = await HttpServer.open(Starlette(routes=[Route("/tools", tools)]), "127.0.0.1", 0)
    try:
        async with StrictTrainer(tools_from=f"http://127.0.0.1:{gateway.port}/") as trainer:
            assert asked == []
            rollouts = [caller(trainer, rollout_id=f"r{i}", messages=list(QUESTION), tools=TOOLS) for i in range(5)]
            await asyncio.gather(*(rollout.play() for rollout in rollouts))
            assert all(verdict.accepted for verdict in trainer.verdicts())
    finally:
        await gateway.close()
    assert asked == ["/tools"]


async def test_a_gateway_without_tools_is_502_and_asked_again(client) -> None:
    replies = iter([JSONResponse({"tools": 5}), JSONResponse([]), JSONResponse({}, 500), JSONResponse({"tools": []})])

    async def tools(_request):
        return next(replies)

    gateway = await HttpServer.open(Starlette(routes=[Route("/tools", tools)]), "127.0.0.1", 0)
    async with StrictTrainer(tools_from=f"http://127.0.0.1:{gateway.port}") as trainer:
        responses = [await client(trainer).post("/v1/chat/completions", json=CALL) for _ in range(4)]
        await gateway.close()
    assert [response.status_code for response in responses] == [502, 502, 502, 200]
    assert "no tools from http://127.0.0.1" in responses[0].json()["detail"]


async def test_verdicts_over_http(caller) -> None:
    async with StrictTrainer() as trainer:
        asking = caller(trainer, rollout_id="a/b c")
        await asking.turn()
        await asking.post(response_mask=[0])
        await asking.play()
        one = (await asking.client.get("/verdict", params={"rollout_id": "a/b c"})).json()
        every = (await asking.client.get("/verdicts")).json()["verdicts"]
        unknown = await asking.client.get("/verdict", params={"rollout_id": "x"})
        sample = trainer.verdict("a/b c").sample
    new = len(asking.mask() or [])
    assert one["accepted"] is False
    assert [turn["number"] for turn in one["turns"]] == [1, 2, 3]
    assert one["refusals"][0]["turn"] == 2
    assert one["refusals"][0]["reason"] == "mask"
    assert one["sample"]["response_mask"] == list(sample.response_mask)
    assert every == [
        {
            "rollout_id": "a/b c",
            "accepted": False,
            "turns": 3,
            "drifted": 0,
            "refusals": one["refusals"],
            "faults": [],
            "siblings": 0,
            "outcome": None,
            "earlier": 0,
        }
    ]
    assert unknown.status_code == 404
    assert new > 0


async def test_another_program_sets_a_script(client, caller) -> None:
    script = {
        "lines": [
            {"reply": {"content": "Adding.", "tool_calls": [tool_call("call_1", "add", {"a": 5, "b": 3})]}},
            {"fault": {"kind": "status", "status": 503, "body": "busy", "headers": {"retry-after": "1"}}},
            {"reply": {"content": "8", "surplus": [1, 2], "omit": ["logprobs"], "finish_reason": "stop"}},
        ]
    }
    async with StrictTrainer() as trainer:
        asking = caller(trainer)
        await asking.turn()
        put = await client(trainer).put("/script", params={"rollout_id": "r"}, json=script)
        assert put.json() == {"rollout_id": "r", "lines": 3}
        asking = caller(trainer)
        await asking.turn()
        assert (await asking.post()).headers["retry-after"] == "1"
        answer = (await asking.post()).json()
        assert answer["choices"][0]["message"]["content"] == "8"
        assert "logprobs" not in answer
        assert answer["token_ids"][-2:] == [1, 2]
        assert trainer.verdict("r").accepted


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("{", "Expecting"),
        ("[]", '"lines"'),
        ('{"lines": []}', "at least one line"),
        ('{"lines": [{"reply": {}}], "x": 1}', "unknown keys"),
        ('{"lines": [{"reply": {}}], "repeat_last": 1}', "repeat_last"),
        ('{"lines": [{"reply": {}, "fault": {"kind": "reset"}}]}', "lines[0]"),
        ('{"lines": [{"reply": {}}, {"answer": {}}]}', "lines[1]"),
        ('{"lines": [{"reply": {"contents": "x"}}]}', "contents"),
        ('{"lines": [{"reply": {"omit": ["choices"]}}]}', "choices"),
        ('{"lines": [{"reply": {"delay": -1}}]}', "negative"),
        ('{"lines": [{"reply": {"cut": "yes"}}]}', "bool"),
        ('{"lines": [{"fault": {"kind": "fire"}}]}', "fire"),
        ('{"lines": [{"fault": {}}]}', "kind"),
    ],
)
async def test_what_is_no_script_is_refused(client, body, text) -> None:
    async with StrictTrainer() as trainer:
        response = await client(trainer).put("/script", params={"rollout_id": "r"}, content=body)
        missing = await client(trainer).put("/script", content=body)
    assert response.status_code == missing.status_code == 422
    assert text in response.json()["detail"]


def test_scripts_read_from_json_are_those_written_in_python() -> None:
    read = script_from_json(
        {
            "lines": [
                {"reply": {"content": None, "reasoning": "hm", "extra": {"x": 1}, "cut": True, "surplus": "text"}},
                {"reply": {"content": [{"type": "text", "text": "a"}], "override": {"logprobs": [1.5]}, "delay": 1}},
                {"fault": {"kind": "silence"}},
            ],
            "repeat_last": True,
        }
    )
    assert read == Script(
        (
            ScriptedReply(reasoning="hm", extra={"x": 1}, cut=True, surplus="text"),
            ScriptedReply(content=[{"type": "text", "text": "a"}], override={"logprobs": [1.5]}, delay=1.0),
            Fault(kind=FaultKind.SILENCE),
        ),
        repeat_last=True,
    )


async def test_250_rollouts_at_once(toy) -> None:
    async with StrictTrainer() as trainer, AsyncExitStack() as stack:
        # Several clients, because a client slows down with the square of its connections.
        made = [httpx.AsyncClient(base_url=trainer.url, timeout=110, trust_env=False) for _ in range(25)]
        clients = [await stack.enter_async_context(client) for client in made]
        rollouts = []
        for i in range(250):
            question = {"role": "user", "content": f"Add {i} and 3, then multiply the result by {i + 1}. #### please"}
            rollouts.append(Caller(clients[i % 25], toy, f"r{i}", messages=[question]))
        await asyncio.gather(*(rollout.play() for rollout in rollouts))
        verdicts = {verdict.rollout_id: verdict for verdict in trainer.verdicts()}
    assert len(verdicts) == 250
    assert all(verdict.accepted and len(verdict.turns) == 3 for verdict in verdicts.values())
    assert [rollout.messages[-1]["content"].split("#### ")[1] for rollout in rollouts] == [
        str((i + 3) * (i + 1)) for i in range(250)
    ]


async def test_a_given_port_is_used_and_a_taken_one_is_an_error() -> None:
    async with StrictTrainer() as first:
        with pytest.raises(OSError, match="ddress"):
            async with StrictTrainer(port=first.port):
                pass
        port = first.port
    async with StrictTrainer(port=port) as second:
        assert second.url == f"http://127.0.0.1:{port}"


async def test_a_tokenizer_without_a_template_is_an_error(tmp_path) -> None:
    build(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template"):
        async with StrictTrainer(tmp_path):
            pass
