"""The model endpoint of a rollout over gRPC: its key, its statuses, and what the start of a rollout returns."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import agent_service_pb2 as agent_pb
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.agent_service_pb2_grpc import AgentServiceStub
from osmosis.rollout.v1.group_pb2 import StartGroupRequest
from rollout_client import AsyncClient, InvalidRequest, NotPossible, PermissionDenied
from rollout_server import Agent, Run
from rollout_server.edge.api_keys import BURST
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from transformers import AutoTokenizer

from tests.edge.rpc.conftest import OpenServer
from tests.edge.rpc.test_statuses import right
from tests.support.agents import Gated
from tests.support.server_client import Caller, refusal
from tests.support.start_requests import start

DENIED, OVER = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.FAILED_PRECONDITION
USER = '{"role": "user", "content": "What is 5 plus 3?"}'
SCHEMA = '{"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}'


class Elsewhere(Agent):
    """Runs elsewhere; here it waits until it is cancelled."""

    name = "elsewhere"
    external = True

    async def play(self, run: Run) -> None:
        """Wait."""
        await asyncio.Event().wait()


@pytest.fixture
async def caller(open_server: OpenServer, gated: Gated) -> Caller:
    """A server of an agent that runs elsewhere, and of one that does not."""
    return await open_server(Elsewhere(), gated, public_url="https://agents.example/base/")


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a key."""
    return (("authorization", f"Bearer {key}"),)


def agents(caller: Caller) -> Any:
    """A stub of AgentService."""
    return AgentServiceStub(caller.channel)


async def begin(caller: Caller, **changes: Any) -> tuple[str, str]:
    """Start a rollout. Return its uid and its key."""
    started = await caller.start(start(agent="elsewhere", **changes))
    return started.rollout.uid, started.access.key


def prompt(*messages: str, **fields: Any) -> agent_pb.ModelPrompt:
    """A prompt of messages."""
    return agent_pb.ModelPrompt(messages=[agent_pb.HistoryMessage(json=each) for each in messages], **fields)


def requests(uid: str) -> dict[str, Any]:
    """A request of every unary rpc."""
    return {
        "ConfirmCompletion": agent_pb.ConfirmCompletionRequest(uid=uid, completion_id="c"),
        "CountTokens": agent_pb.CountTokensRequest(uid=uid, prompt=prompt(USER)),
        "GetModelAccess": agent_pb.GetModelAccessRequest(uid=uid),
        "FinishRollout": agent_pb.FinishRolloutRequest(uid=uid, reward=1.0),
        "ListRolloutTools": agent_pb.ListRolloutToolsRequest(uid=uid),
        "CallRolloutTool": agent_pb.CallRolloutToolRequest(uid=uid, name="add"),
    }


async def test_the_start_of_an_agent_that_runs_elsewhere_returns_its_access(caller: Caller) -> None:
    started = await caller.start(start("r1", agent="elsewhere"))
    uid = started.rollout.uid
    assert started.access.base_url == f"https://agents.example/base/r/{uid}"
    attached = await caller.start(start("r1", agent="elsewhere"))
    assert attached.attached
    assert attached.access == started.access
    stream = caller.stub.RunRollout(pb.RunRolloutRequest(start=start("r1", agent="elsewhere")))
    assert (await stream.read()).started.access == started.access
    stream.cancel()
    assert started.access.key not in str(await caller.get(uid, pb.ROLLOUT_VIEW_FULL))
    assert not (await caller.start(start(agent="gated"))).HasField("access")


async def test_without_a_public_url_the_access_names_the_port_or_only_the_path(open_server: OpenServer) -> None:
    server = await open_server(Elsewhere(), http=True)
    started = await server.start(start())
    assert started.access.base_url == f"http://127.0.0.1:{server.server.http_port}/r/{started.rollout.uid}"
    without = await (await open_server(Elsewhere())).start(start())
    assert without.access.base_url == f"/r/{without.rollout.uid}"


async def test_the_members_of_a_group_have_an_access_each(caller: Caller) -> None:
    started = await caller.stub.StartGroup(StartGroupRequest(spec=start(agent="elsewhere").spec, count=2))
    uids = [member.uid for member in started.group.members]
    requests = [pb.GetRolloutRequest(uid=uid, include_access=True) for uid in uids]
    found = [(await caller.stub.GetRollout(request)).access for request in requests]
    assert [access.base_url.rpartition("/")[2] for access in found] == uids
    for uid, access in zip(uids, found, strict=True):
        request = agent_pb.GetModelAccessRequest(uid=uid)
        assert (await agents(caller).GetModelAccess(request, metadata=bearer(access.key))).model == "rollout"
    other = (await caller.start(start(agent="gated"))).rollout.uid
    assert not (await caller.stub.GetRollout(pb.GetRolloutRequest(uid=other, include_access=True))).HasField("access")


async def test_the_client_returns_the_access_and_shows_no_key(caller: Caller) -> None:
    async with AsyncClient(caller.address) as client:
        started = await client.start(start(agent="elsewhere").spec)
        assert started.access is not None
        assert started.access.key not in repr(started)
        assert await client.access(started.uid) == started.access
        assert (await client.start(start(agent="gated").spec)).access is None
        with pytest.raises(PermissionDenied):
            await client.finish(started.uid, started.access.key + "x", reward=1.0)
        with pytest.raises(InvalidRequest, match="at most 256"):
            await client.finish(started.uid, started.access.key, scores={str(n): 1.0 for n in range(257)})
        await client.cancel(started.uid)
        await client.wait(started.uid)
        with pytest.raises(NotPossible, match="has ended"):
            await client.finish(started.uid, started.access.key, reward=1.0)


async def test_a_key_names_the_model_and_the_state(caller: Caller) -> None:
    uid, key = await begin(caller)
    found = await agents(caller).GetModelAccess(agent_pb.GetModelAccessRequest(uid=uid), metadata=bearer(key))
    assert found == agent_pb.GetModelAccessResponse(model="rollout", state=pb.ROLLOUT_STATE_RUNNING)
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
    await caller.finished(uid)
    found = await agents(caller).GetModelAccess(agent_pb.GetModelAccessRequest(uid=uid), metadata=bearer(key))
    assert found.state == pb.ROLLOUT_STATE_FINISHED


@pytest.mark.parametrize("rpc", [*requests("")])
async def test_a_call_needs_the_key_of_its_rollout(caller: Caller, rpc: str) -> None:
    (uid, key), (other, foreign) = await begin(caller), await begin(caller)
    method = getattr(agents(caller), rpc)
    wrong = [
        (),
        bearer(""),
        bearer("rk_" + uid),
        bearer(key[:-1] + ("A" if key[-1] != "A" else "B")),
        bearer(foreign),
        (*bearer(key), *bearer(key)),
    ]
    for given in wrong:
        refused = await refusal(method(requests(uid)[rpc], metadata=given))
        right(refused, DENIED, "MODEL_KEY_INVALID")
        assert key not in refused.text
        assert foreign not in refused.text
    right(await refusal(method(requests(other)[rpc], metadata=bearer(key))), DENIED, "MODEL_KEY_INVALID")


async def test_a_wrong_key_is_refused_before_the_request_is_read(caller: Caller) -> None:
    _, key = await begin(caller)
    call: Any = caller.channel.unary_stream("/osmosis.rollout.v1.AgentService/CallModel")
    right(await refusal(call(b"\xff\xff", metadata=bearer("rk_x")).read()), DENIED, "MODEL_KEY_INVALID")
    refused = await refusal(call(b"\xff\xff", metadata=bearer(key)).read())
    right(refused, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")


async def test_many_wrong_keys_are_answered_slowly_and_never_logged(
    caller: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    uid, _ = await begin(caller)
    method, request = agents(caller).GetModelAccess, agent_pb.GetModelAccessRequest(uid=uid)
    guesses = [f"rk_{uid}.guess{number}" for number in range(3 * BURST)]
    for refused in await asyncio.gather(*(refusal(method(request, metadata=bearer(guess))) for guess in guesses)):
        assert refused.code is DENIED
    # After the burst, a few more in each second are logged: a machine that stalls logs more of them.
    assert caplog.text.count("refused the API key") < len(guesses)
    assert "guess" not in caplog.text


async def test_a_key_of_a_rollout_is_valid_nowhere_else(open_server: OpenServer) -> None:
    server = await open_server(Elsewhere(), api_key="the-key")
    me = bearer("the-key")
    started = await server.stub.StartRollout(start(), metadata=me)
    uid, key = started.rollout.uid, started.access.key
    refused = await refusal(server.stub.GetRollout(pb.GetRolloutRequest(uid=uid), metadata=bearer(key)))
    assert refused.code is grpc.StatusCode.UNAUTHENTICATED
    refused = await refusal(agents(server).GetModelAccess(agent_pb.GetModelAccessRequest(uid=uid), metadata=me))
    right(refused, DENIED, "MODEL_KEY_INVALID")
    await agents(server).GetModelAccess(agent_pb.GetModelAccessRequest(uid=uid), metadata=bearer(key))


@pytest.mark.parametrize("rpc", ["ListRolloutTools", "CallRolloutTool"])
async def test_calls_of_tools_wait_for_the_agent_to_begin(caller: Caller, rpc: str) -> None:
    """Here it never does, so they wait for the end of the rollout."""
    uid, key = await begin(caller)
    waiting = getattr(agents(caller), rpc)(requests(uid)[rpc], metadata=bearer(key))
    await agents(caller).GetModelAccess(requests(uid)["GetModelAccess"], metadata=bearer(key))
    assert not waiting.done()
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
    right(await refusal(waiting), OVER, "ROLLOUT_OVER")


async def test_after_the_end_of_the_rollout_its_calls_are_over(caller: Caller) -> None:
    uid, key = await begin(caller)
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
    await caller.finished(uid)
    stub = agents(caller)
    for rpc in requests(uid).keys() - {"GetModelAccess"}:
        right(await refusal(getattr(stub, rpc)(requests(uid)[rpc], metadata=bearer(key))), OVER, "ROLLOUT_OVER")
    call = stub.CallModel(agent_pb.CallModelRequest(uid=uid, prompt=prompt(USER)), metadata=bearer(key))
    refused = await refusal(call.read())
    right(refused, OVER, "ROLLOUT_OVER")
    assert refused.text == "the rollout has ended (cancelled); it takes no further calls"


async def test_the_key_of_a_rollout_that_was_dropped_is_over(open_server: OpenServer) -> None:
    server = await open_server(Elsewhere(), max_records=0)
    uid, key = await begin(server)
    await server.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[uid])))
    request, stub = agent_pb.GetModelAccessRequest(uid=uid), agents(server)
    while True:
        try:
            await stub.GetModelAccess(request, metadata=bearer(key))
        except grpc.aio.AioRpcError:
            break
        await asyncio.sleep(0.01)
    right(await refusal(stub.GetModelAccess(request, metadata=bearer(key))), OVER, "ROLLOUT_OVER")


async def test_a_count_is_that_of_the_rendered_prompt(caller: Caller) -> None:
    uid, key = await begin(caller)
    tool = message_pb2.Tool(name="add", description="Adds.", parameters_json_schema=SCHEMA)
    given = prompt(USER, instructions=["Be brief."], tools=[tool], hosted_tools=["web_search"])
    request = agent_pb.CountTokensRequest(uid=uid, prompt=given)
    counted = await agents(caller).CountTokens(request, metadata=bearer(key))
    tokenizer = AutoTokenizer.from_pretrained(TOY_TOKENIZER)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 5 plus 3?"}]
    parameters = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
    expected = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    assert counted.tokens == len(tokenizer(expected, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (prompt("no json"), "messages[0]"),
        (prompt(USER, "[]"), "messages[1]"),
        (prompt(USER, previous_completion_id="c"), "previous"),
        (prompt('{"role": "user", "content": [' + "1," * 100_000 + "1]}"), "messages"),
        (prompt(USER, tools=[message_pb2.Tool(name="")]), "tools[0].name"),
        (
            prompt(USER, tools=[message_pb2.Tool(name="a", parameters_json_schema="3")]),
            "tools[0].parameters_json_schema",
        ),
    ],
)
async def test_a_wrong_field_of_a_prompt_is_named(caller: Caller, given: agent_pb.ModelPrompt, field: str) -> None:
    uid, key = await begin(caller)
    request = agent_pb.CountTokensRequest(uid=uid, prompt=given)
    refused = await refusal(agents(caller).CountTokens(request, metadata=bearer(key)))
    assert (refused.code, set(refused.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, {field})


async def test_without_a_tokenizer_nothing_is_counted(caller: Caller) -> None:
    uid, key = await begin(caller, tokenizer=None, completions={"url": "grpc://127.0.0.1:9"})
    refused = await refusal(agents(caller).CountTokens(requests(uid)["CountTokens"], metadata=bearer(key)))
    right(refused, OVER, "NO_TOKENIZER")
