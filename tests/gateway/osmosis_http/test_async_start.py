"""`POST /v1/rollout/init` over real sockets: HTTP in front, a gRPC server on a Unix socket behind."""

import asyncio
import json
from typing import Any, Final

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from osmosis.rollout.v1 import message_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_gateway.settings import GatewaySettings

from tests.support.async_client_models import ClientAnswer
from tests.support.example_bodies import EXAMPLE, INIT_EXAMPLE
from tests.support.gateways import Gateway, serving
from tests.support.scripted_server import UID, Refusal
from tests.support.transcripts import exchanges, scenarios, without_nulls

Code = grpc.StatusCode
UNAUTHENTICATED: Final = Refusal(Code.UNAUTHENTICATED, "Invalid or missing API key")
PROPERTIES: Final = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def offer(server: Any, tools: list[dict[str, Any]]) -> None:
    """Make the server return the tools of a transcript, as its agent describes them."""
    for tool in tools:
        function = without_nulls(tool["function"])
        schema = json.dumps(function["parameters"])
        server.tools.append(
            message_pb2.Tool(name=function["name"], description=function["description"], parameters_json_schema=schema)
        )


async def test_a_rollout_is_accepted_and_nothing_is_waited_for(gateway: Gateway) -> None:
    gateway.server.go.clear()
    response = await gateway.init()
    assert (response.status_code, response.json()) == (202, {"rollout_id": "test-rollout-002", "tools": []})
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-rollout-uid"] == UID
    assert len(gateway.server.starts) == 1
    assert gateway.server.requests == gateway.server.acknowledged == []


async def test_every_recorded_request_is_answered_as_recorded(gateway: Gateway) -> None:
    recorded = [each for scenario in scenarios("", "init") for each in exchanges(scenario, "init")]
    accepted = [each for each in recorded if each["to"] == "server" and each["status"] == 202]
    offer(gateway.server, accepted[0]["response"]["tools"])
    small = [each for each in accepted if len(json.dumps(each["request"])) < 90_000]
    assert len(small) > 50
    for exchange in small:
        response = await gateway.init(exchange["request"], headers=exchange["headers"])
        ClientAnswer.model_validate_json(response.content, strict=True)
        answered = response.json()
        assert (response.status_code, answered["tools"]) == (202, without_nulls(exchange["response"]["tools"]))
        # The server decides which rollout a key identifies. This one starts a new one each time.
        assert answered["rollout_id"] == exchange["request"]["rollout_id"]


async def test_the_answer_names_the_rollout_that_was_found(gateway: Gateway) -> None:
    gateway.server.accepted = pb.StartRolloutResponse(attached=True)
    gateway.server.accepted.rollout.spec.rollout_id = "the-first-one"
    response = await gateway.init({**INIT_EXAMPLE, "idempotency_key": "key"})
    assert response.json()["rollout_id"] == "the-first-one"
    assert gateway.server.starts[0].request_id == "key"


async def test_tools_of_any_schema_validate(gateway: Gateway) -> None:
    tree = '{"type":"object","properties":{"children":{"type":"array","items":{"$ref":"#/$defs/T"}}}}'
    gateway.server.tools = [
        message_pb2.Tool(name="now"),
        message_pb2.Tool(name="tree", parameters_json_schema=f'{{"$ref":"#/$defs/T","$defs":{{"T":{tree}}}}}'),
        message_pb2.Tool(name="broken", parameters_json_schema="{", strict=True),
    ]
    response = await gateway.init()
    found = ClientAnswer.model_validate_json(response.content, strict=True)
    assert [(tool.function.name, tool.function.strict) for tool in found.tools] == [
        ("now", False),
        ("tree", False),
        ("broken", True),
    ]
    assert "$ref" not in response.text


async def test_messages_and_parameters_reach_the_server_as_they_were_sent(gateway: Gateway) -> None:
    message = '{ "content":"\\u00e9é", "role" :"robot","n":18446744073709551617,"n":1.50 }'
    content = json.dumps({**INIT_EXAMPLE, "messages": "HERE", "completion_params": "THERE", "metadata": "META"})
    content = content.replace('"HERE"', f"[ {message} ,\n{message}]").replace(
        '"THERE"', '{"seed":18446744073709551617}'
    )
    metadata = '{"ground_truth" :  "16", "n":1.50}'
    response = await gateway.client.post("/v1/rollout/init", content=content.replace('"META"', metadata).encode())
    assert response.status_code == 202
    spec = gateway.server.starts[0].spec
    assert [each.json for each in spec.messages] == [message, message]
    assert (spec.sampling.extra_json, spec.metadata_json) == ('{"seed":18446744073709551617}', metadata)


async def test_what_agents_read_as_it_was_sent_travels_on(gateway: Gateway) -> None:
    """`source_json` holds the keys as sent, without defaults and ignored keys. The typed fields include the defaults."""
    params = {"temperature": 1, "stop": "END", "seed": 7, "messages": [], "stream": True}
    response = await gateway.init(
        {**INIT_EXAMPLE, "completion_params": params, "idempotency_key": "k", "tool_server_url": "http://tools"}
    )
    assert response.status_code == 202
    [start] = gateway.server.starts
    assert json.loads(start.spec.source_json) == {
        "completion_params": {"temperature": 1, "stop": "END", "seed": 7},
        "idempotency_key": "k",
        "tool_server_url": "http://tools",
    }
    assert (start.spec.sampling.temperature, start.spec.sampling.top_p, [*start.spec.sampling.stop]) == (
        1.0,
        1.0,
        ["END"],
    )
    await gateway.init({**INIT_EXAMPLE, "completion_params": {}})
    assert json.loads(gateway.server.starts[1].spec.source_json) == {"completion_params": {}}


async def test_who_asks_and_the_request_id_travel_on(gateway: Gateway) -> None:
    for key in ("Bearer key", "raw-key"):
        headers = {"authorization": key, "x-request-id": "mine-1"}
        response = await gateway.init(headers=headers)
        assert response.headers["x-request-id"] == "mine-1"
        assert headers.items() <= gateway.server.metadata["StartRollout"].items()


async def test_a_wrong_key_is_401_in_the_servers_words(gateway: Gateway) -> None:
    gateway.server.refusals["StartRollout"] = UNAUTHENTICATED
    for key in (b"Bearer wrong", "Bearer schlüssel".encode()):
        response = await gateway.init(headers={b"authorization": key})
        assert (response.status_code, response.json()) == (401, {"detail": "Invalid or missing API key"})
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "content", [b"{", b'{"rollout_id": "r"}', json.dumps({**INIT_EXAMPLE, "max_turns": "x"}).encode()]
)
@pytest.mark.parametrize(("code", "status"), [(Code.UNAUTHENTICATED, 401), (Code.PERMISSION_DENIED, 403)])
async def test_a_stranger_hears_of_the_key_and_not_of_the_body(
    gateway: Gateway, content: bytes, code: grpc.StatusCode, status: int
) -> None:
    gateway.server.refusals["ListAgents"] = Refusal(code, "Invalid or missing API key")
    response = await gateway.client.post("/v1/rollout/init", content=content, headers={"authorization": "wrong"})
    assert (response.status_code, response.json()) == (status, {"detail": "Invalid or missing API key"})
    assert gateway.server.metadata["ListAgents"]["authorization"] == "wrong"
    assert gateway.server.starts == []


@pytest.mark.parametrize("scenario", scenarios("invalid_body_", "init"))
async def test_recorded_invalid_bodies_are_422_and_call_nobody(gateway: Gateway, scenario: str) -> None:
    (exchange,) = exchanges(scenario, "init")
    sent = exchange["request"]
    content = sent if isinstance(sent, str) else json.dumps(sent)
    response = await gateway.client.post("/v1/rollout/init", content=content.encode(), headers=exchange["headers"])
    assert response.status_code == exchange["status"] == 422
    detail = response.json()["detail"]
    assert all({"type", "loc", "msg"} <= each.keys() for each in detail)
    assert all("input" not in each for each in detail)
    if not isinstance(sent, str):
        assert [each["loc"] for each in detail] == [each["loc"] for each in exchange["response"]["detail"]]
    assert gateway.server.starts == []


@pytest.mark.parametrize("url", ["http://u:planted@/", "http://u:planted@[x]/", "http://u:planted@ho℀st/", "x:planted"])
@pytest.mark.parametrize("path", ["/v1/rollout/init", "/rollout"])
async def test_a_refusal_does_not_repeat_what_was_sent(gateway: Gateway, path: str, url: str) -> None:
    secrets = {"api_key": "planted", "callback_api_key": "planted", "max_turns": "planted", "metadata": ["planted"]}
    response = await gateway.client.post(path, json={**EXAMPLE, **INIT_EXAMPLE, **secrets, "server_url": url})
    assert response.status_code == 422
    assert {each["loc"][1] for each in response.json()["detail"]} >= {"server_url", "max_turns", "metadata"}
    assert "planted" not in response.text


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_what_a_web_page_could_send_unasked_is_refused(gateway: Gateway, kind: str) -> None:
    content = json.dumps(INIT_EXAMPLE).encode()
    response = await gateway.client.post("/v1/rollout/init", content=content, headers={"content-type": kind})
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body"])
    assert gateway.server.starts == []


async def test_limits_on_what_comes_in(gateway: Gateway) -> None:
    response = await gateway.init({**INIT_EXAMPLE, "metadata": {"k": "x" * 1_000}})
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["body", "metadata"])
    response = await gateway.init({**INIT_EXAMPLE, "messages": [{"role": "user", "content": "x" * 100_000}]})
    assert response.status_code == 413
    assert gateway.server.starts == []


async def test_fields_that_the_server_refuses_are_named_once_in_the_clients_words(gateway: Gateway) -> None:
    fields = ("spec.completions.url", "spec.outcome.url", "spec.messages[1]", "request_id")
    violations = [BadRequest.FieldViolation(field=field, description="is not allowed") for field in fields]
    details = (BadRequest(field_violations=violations),)
    gateway.server.refusals["StartRollout"] = Refusal(Code.INVALID_ARGUMENT, details=details)
    response = await gateway.init({**INIT_EXAMPLE, "idempotency_key": "k"})
    assert response.status_code == 422
    assert response.json()["detail"] == [
        {"type": "value_error", "loc": ["body", *place], "msg": "is not allowed"}
        for place in (("server_url",), ("messages", 1), ("idempotency_key",))
    ]


async def test_refusals_of_the_server_are_told(gateway: Gateway) -> None:
    gateway.server.refusals["StartRollout"] = Refusal(Code.ALREADY_EXISTS, "known with another payload")
    response = await gateway.init()
    assert (response.status_code, response.json()) == (409, {"detail": "known with another payload"})
    wait = (RetryInfo(retry_delay=Duration(seconds=2, nanos=1)),)
    for code, status in ((Code.RESOURCE_EXHAUSTED, 429), (Code.UNAVAILABLE, 503)):
        gateway.server.refusals["StartRollout"] = Refusal(code, "later", wait)
        response = await gateway.init()
        assert (response.status_code, response.json()) == (status, {"detail": "later"})
        assert response.headers["retry-after"] == "3"
    gateway.server.refusals["StartRollout"] = Refusal(Code.UNKNOWN, "KeyError: 'inside'", rich=False)
    response = await gateway.init()
    assert (response.status_code, response.json()) == (500, {"detail": "Internal server error"})


async def test_a_client_that_leaves_at_once_has_started_its_rollout(gateway: Gateway) -> None:
    content = json.dumps(INIT_EXAMPLE).encode()
    head = f"POST /v1/rollout/init HTTP/1.1\r\nhost: gateway\r\ncontent-length: {len(content)}\r\n\r\n"
    _, writer = await asyncio.open_connection(gateway.host, gateway.port)
    writer.write(head.encode() + content)
    await writer.drain()
    writer.close()
    await gateway.server.started.wait()
    assert gateway.server.starts[0].request_id == "test-rollout-002"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def objects(draw: st.DrawFn, /, **fixed: st.SearchStrategy[Any]) -> str:
    """JSON objects as people write them: white space, repeated keys, integers of any size."""
    pairs = draw(st.lists(st.tuples(st.text(max_size=5), JSON), max_size=4))
    pairs += [(key, draw(values)) for key, values in fixed.items()]
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    ascii_only = draw(st.booleans())
    members = [f"{json.dumps(key, ensure_ascii=ascii_only)}{space}:{json.dumps(each)}" for key, each in pairs]
    members.insert(0, f'"n"{space}: {"9" * draw(st.integers(1, 400))}')
    return "{" + f",{space}".join(members) + space + "}"


ROLES = st.text(min_size=1).filter(lambda role: bool(role.strip()))


@PROPERTIES
@given(messages=st.lists(objects(role=ROLES), max_size=4), params=objects(), metadata=objects(agent=st.none()))
async def test_whatever_is_written_travels_as_it_was_written(
    gateway: Gateway, messages: list[str], params: str, metadata: str
) -> None:
    outer = {"rollout_id": "r", "server_url": "http://t"}
    texts = {"messages": f"[{', '.join(messages)}]", "completion_params": params, "metadata": metadata}
    members = [f'"{key}": {json.dumps(value)}' for key, value in outer.items()]
    members += [f'"{key}" : {text}' for key, text in texts.items()]
    assume(len(metadata.encode()) <= 1_000)
    response = await gateway.client.post("/v1/rollout/init", content=f"{{{', '.join(members)}}}".encode())
    assert response.status_code == 202, response.text
    spec = gateway.server.starts[-1].spec
    assert [message.json for message in spec.messages] == messages
    assert spec.metadata_json == metadata
    known = {"temperature", "top_p", "max_tokens", "stop", "logprobs"}
    ignored = {"messages", "rollout_id", "response_mask", "stream", "stream_options"}
    expected = {key: value for key, value in json.loads(params).items() if key not in known | ignored}
    assert json.loads(spec.sampling.extra_json) == expected


@PROPERTIES
@given(changes=st.dictionaries(st.sampled_from([*INIT_EXAMPLE, "api_key", "idempotency_key", "tool_server_url"]), JSON))
async def test_whatever_stands_in_a_field_is_taken_or_named(gateway: Gateway, changes: dict[str, Any]) -> None:
    response = await gateway.init({**INIT_EXAMPLE, **changes})
    assert response.status_code in (202, 422)
    if response.status_code == 422:
        assert {each["loc"][1] for each in response.json()["detail"]} <= changes.keys()


async def test_messages_may_be_nested_deeply(gateway: Gateway) -> None:
    message = '{"role":"user","content":' + "[" * 250 + "]" * 250 + "}"
    content = json.dumps({**INIT_EXAMPLE, "messages": "HERE"}).replace('"HERE"', f"[{message}]")
    response = await gateway.client.post("/v1/rollout/init", content=content.encode())
    assert response.status_code == 202
    assert gateway.server.starts[0].spec.messages[0].json == message
    deeper = content.replace("[" * 250, "[" * 10_000).replace("]" * 250, "]" * 10_000)
    response = await gateway.client.post("/v1/rollout/init", content=deeper.encode())
    assert response.status_code == 422
    assert len(gateway.server.starts) == 1


async def test_the_synchronous_dialect_can_stay_open_where_a_key_is_demanded(gateway: Gateway, address: str) -> None:
    open_one = GatewaySettings(synchronous_key="gateways-own")
    async with serving(address, open_one) as (host, port):
        base = f"http://{host}:{port}"
        sent = {"": "Bearer gateways-own", "mine": "mine", "Bearer mine": "Bearer mine"}
        for given_key, expected in sent.items():
            headers = {"authorization": given_key} if given_key else {}
            assert (await gateway.client.post(f"{base}/rollout", json=EXAMPLE, headers=headers)).status_code == 200
            assert (await gateway.client.get(f"{base}/tools", headers=headers)).status_code == 200
            for rpc in ("RunRollout", "AcknowledgeOutcome", "ListTools"):
                assert gateway.server.metadata[rpc]["authorization"] == expected
        assert (await gateway.client.post(f"{base}/v1/rollout/init", json=INIT_EXAMPLE)).status_code == 202
        assert "authorization" not in gateway.server.metadata["StartRollout"]
