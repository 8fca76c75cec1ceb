"""Model calls over gRPC, with a real engine behind them: completions, refusals, and the end of the agent's work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from aiohttp import web
from osmosis.rollout.v1 import agent_service_pb2 as agent_pb
from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_client import AsyncClient, Conflict
from rollout_server import ExternalAgent
from rollout_server.core.capture.rules import CaptureOptions
from rollout_server.runtime.capture.endpoint import MOST_CALLS
from rollout_server.testing.trainer import StrictTrainer

from tests.edge.rpc.conftest import OpenServer
from tests.edge.rpc.test_agent_service import agents, bearer, prompt
from tests.edge.rpc.test_statuses import right
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, VllmEngine, serving
from tests.support.server_client import Caller, refusal, until
from tests.support.start_requests import json_message, start

INVALID, IMPOSSIBLE = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
USER = '{"role": "user", "content": "What is 5 plus 3?"}'
MORE = '{"role": "user", "content": "And 4 plus 4?"}'
OTHER = '{"role": "user", "content": "Name this chat."}'


class Elsewhere(ExternalAgent):
    """Runs elsewhere."""

    name = "elsewhere"
    capture = CaptureOptions(model="shown")


class Here(Elsewhere):
    """Opens a model endpoint, but the server itself ends its rollouts."""

    name = "here"
    external = False


class GatedEngine(VllmEngine):
    """An engine that waits for its gate before it generates. `asked` counts the requests at the gate."""

    gate: asyncio.Event
    asked: asyncio.Semaphore

    async def chat(self, request: web.Request) -> web.Response:
        self.asked.release()
        await self.gate.wait()
        return await super().chat(request)


@dataclass
class Endpoint:
    """The model endpoint of one rollout."""

    caller: Caller
    uid: str
    key: str
    model: str = "client-model"
    fields: dict[str, Any] = field(default_factory=dict)

    def stream(self, *messages: str, **fields: Any) -> Any:
        """Begin a call."""
        request = agent_pb.CallModelRequest(
            uid=self.uid, prompt=fields.pop("prompt", prompt(*messages)), api=agent_pb.MODEL_API_CHAT, **fields
        )
        return agents(self.caller).CallModel(request, metadata=bearer(self.key))

    async def call(self, *messages: str, **fields: Any) -> agent_pb.ModelCompletion:
        """Call the model."""
        completion: agent_pb.ModelCompletion = await last(self.stream(*messages, **fields))
        return completion

    async def refused(self, *messages: str, **fields: Any) -> Any:
        """Call the model, which must be refused."""
        return await refusal(last(self.stream(*messages, **fields)))

    async def confirm(self, completion_id: str) -> None:
        """Confirm a completion."""
        request = agent_pb.ConfirmCompletionRequest(uid=self.uid, completion_id=completion_id)
        await agents(self.caller).ConfirmCompletion(request, metadata=bearer(self.key))

    async def finish(self, **fields: Any) -> agent_pb.FinishRolloutResponse:
        """End the work."""
        request = agent_pb.FinishRolloutRequest(uid=self.uid, **fields)
        response: agent_pb.FinishRolloutResponse = await agents(self.caller).FinishRollout(
            request, metadata=bearer(self.key)
        )
        return response


async def last(stream: Any) -> agent_pb.ModelCompletion:
    """The completion of a call. Its id came first, unless it existed already."""
    *before, item = [each async for each in stream]
    assert [each.begun.completion_id for each in before] == [item.completion.id] * (not item.completion.replayed)
    completion: agent_pb.ModelCompletion = item.completion
    return completion


@pytest.fixture
async def engine() -> AsyncIterator[GatedEngine]:
    """An engine whose gate is open."""
    engine = GatedEngine(EngineModel(["It is 8.", "8 again.", "A name."]))
    engine.gate, engine.asked = asyncio.Event(), asyncio.Semaphore(0)
    engine.gate.set()
    async with serving(engine):
        yield engine


@pytest.fixture
async def caller(open_server: OpenServer) -> Caller:
    """A server of agents that own their loops."""
    return await open_server(Elsewhere(), Here())


async def begin(caller: Caller, engine: VllmEngine, agent: str = "elsewhere", **changes: Any) -> Endpoint:
    """Start a rollout on the engine."""
    target = spec_pb2.Target(url=engine.url, dialect=spec_pb2.DIALECT_VLLM, model=MODEL)
    started = await caller.start(start(agent=agent, completions=target, **changes))
    uid = started.rollout.uid
    return Endpoint(caller, uid, started.access.key or caller.server._model_keys.key(uid))


async def test_a_conversation_of_two_calls_is_one_exact_sample(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    first = await endpoint.call(USER)
    message = json.loads(first.message_json)
    assert (message["role"], message["content"]) == ("assistant", "It is 8.")
    assert (first.finish_reason, first.turn, first.replayed) == ("stop", 1, False)
    await endpoint.confirm(first.id)
    second = await endpoint.call(USER, first.message_json, MORE)
    await endpoint.confirm(second.id)
    assert second.turn == 2
    generated = engine.model.seen
    assert [len(each.prompt) for each in generated] == [first.prompt_tokens, second.prompt_tokens]
    assert [len(each.ids) for each in generated] == [first.generated_tokens, second.generated_tokens]
    assert await endpoint.finish(reward=0.5, scores={"tests": 1.0}) == agent_pb.FinishRolloutResponse()
    outcome = (await caller.finished(endpoint.uid)).outcome
    text = caller.server.exposition().decode()
    assert 'rollout_model_call_decisions_total{decision="continued"} 1.0' in text
    assert 'rollout_model_call_decisions_total{decision="parted"} 0.0' in text
    assert (outcome.reward, dict(outcome.scores), outcome.capture.continued) == (0.5, {"tests": 1.0}, 1)
    [sample] = outcome.samples
    assert [*sample.prompt_ids, *sample.response_ids] == [*generated[1].prompt, *generated[1].ids]
    ids = [each for each, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
    assert ids == [*generated[0].ids, *generated[1].ids]


async def test_an_answer_that_was_not_delivered_is_returned_again(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    first = await endpoint.call(USER)
    again = await endpoint.call(USER)
    assert (again.id, again.replayed, again.message_json) == (first.id, True, first.message_json)
    await endpoint.confirm(first.id)
    sibling = await endpoint.call(USER)
    assert (sibling.id != first.id, sibling.replayed, sibling.turn) == (True, False, 2)
    right(
        await refusal(
            agents(caller).ConfirmCompletion(
                agent_pb.ConfirmCompletionRequest(uid=endpoint.uid, completion_id="x"), metadata=bearer(endpoint.key)
            )
        ),
        grpc.StatusCode.NOT_FOUND,
        "COMPLETION_NOT_FOUND",
    )
    text = caller.server.exposition().decode()
    assert 'rollout_model_calls_total{result="completed"} 2.0' in text
    assert 'rollout_model_calls_total{result="replayed"} 1.0' in text


async def test_a_caller_that_leaves_cancels_nothing(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    engine.gate.clear()
    stream = endpoint.stream(USER)
    await stream.initial_metadata()
    await engine.asked.acquire()
    stream.cancel()

    async def has_left() -> bool:
        return 'result="disconnected"} 1.0' in caller.server.exposition().decode()

    await until(has_left)
    engine.gate.set()
    completion = await endpoint.call(USER)
    assert json.loads(completion.message_json)["content"] == "It is 8."
    assert len(engine.model.seen) == 1


async def test_what_is_wrong_with_a_call_is_named(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    odd = '{"role": "user", "content": [{"type": "video"}]}'
    for fields, name in (
        ({"prompt": prompt(USER, odd)}, "messages[1].content[0].type"),
        ({"prompt": prompt('{"role": "robot"}')}, "messages[0].role"),
        ({"prompt": prompt()}, "messages"),
        ({"prompt": prompt(USER), "model": "m" * 257}, "model"),
        ({"prompt": prompt(USER), "sampling": spec_pb2.Sampling(temperature=3)}, "sampling.temperature"),
        ({"prompt": prompt(USER), "sampling": spec_pb2.Sampling(extra_json="3")}, "sampling.extra_json"),
    ):
        refused = await endpoint.refused(**fields)
        assert (refused.code, set(refused.fields)) == (INVALID, {name})
    refused = await endpoint.refused(MORE, prompt=prompt(MORE, previous_completion_id="unknown"))
    right(refused, INVALID, "UNKNOWN_COMPLETION")
    assert engine.model.seen == []
    assert (await endpoint.call(USER)).turn == 1


async def test_a_prompt_that_is_too_long_says_how_long_and_the_rollout_lives(
    caller: Caller, engine: GatedEngine
) -> None:
    engine.model.context = 60
    endpoint = await begin(caller, engine)
    long = json.dumps({"role": "user", "content": "word " * 100})
    refused = await endpoint.refused(long)
    right(refused, INVALID, "CONTEXT_LENGTH_EXCEEDED")
    assert refused.metadata["maximum"] == "60"
    assert int(refused.metadata["tokens"]) > 60
    assert (await endpoint.call(USER)).finish_reason == "stop"


async def test_a_trainer_of_one_conversation_refuses_a_second_one(caller: Caller) -> None:
    async with StrictTrainer() as trainer:
        started = await caller.start(start(completions=spec_pb2.Target(url=trainer.url), messages=[json_message(USER)]))
        endpoint = Endpoint(caller, started.rollout.uid, started.access.key)
        first = await endpoint.call(USER)
        await endpoint.confirm(first.id)
        right(await endpoint.refused(OTHER), IMPOSSIBLE, "ONE_CONVERSATION")
        await endpoint.call(USER, first.message_json, MORE)
        await endpoint.finish(reward=1.0)
        assert (await caller.finished(started.rollout.uid)).outcome.stop.reason == "stop"


async def test_calls_wait_for_an_agent_in_the_queue(open_server: OpenServer, engine: GatedEngine) -> None:
    caller = await open_server(Elsewhere(), max_running=1)
    first, second = await begin(caller, engine), await begin(caller, engine)
    waiting = asyncio.create_task(second.call(USER))
    await first.call(USER)
    assert not waiting.done()
    await first.finish(reward=1.0)
    assert (await waiting).turn == 1


async def test_too_many_calls_at_the_same_time_are_told_to_wait(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    engine.gate.clear()
    prompts = [json.dumps({"role": "user", "content": f"Number {number}"}) for number in range(MOST_CALLS)]
    calls = [asyncio.create_task(endpoint.call(each)) for each in prompts]
    for _ in calls:
        await engine.asked.acquire()
    refused = await endpoint.refused(USER)
    right(refused, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert refused.retry_after
    engine.gate.set()
    assert sorted(completion.turn for completion in await asyncio.gather(*calls)) == list(range(1, MOST_CALLS + 1))


async def test_a_call_under_way_is_over_when_its_rollout_ends(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    engine.gate.clear()
    stream = endpoint.stream(USER)
    await engine.asked.acquire()
    await caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=[endpoint.uid])))
    right(await refusal(last(stream)), IMPOSSIBLE, "ROLLOUT_OVER")
    right(await endpoint.refused(USER), IMPOSSIBLE, "ROLLOUT_OVER")
    engine.gate.set()


async def test_a_finished_work_can_be_repeated_but_not_changed(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    await endpoint.call(USER)
    async with AsyncClient(caller.address) as client:
        assert await client.finish(endpoint.uid, endpoint.key, reward=0.5, extra={"log": [1]}) is False
        await caller.finished(endpoint.uid)
        assert await client.finish(endpoint.uid, endpoint.key, reward=0.5, extra={"log": [1]}) is True
        with pytest.raises(Conflict, match="another result"):
            await client.finish(endpoint.uid, endpoint.key, reward=0.6)
        assert (await client.get(endpoint.uid)).outcome.reward == 0.5


@pytest.mark.parametrize(
    ("failure_class", "category"),
    [
        ("UNSPECIFIED", "INTERNAL"),
        ("ENVIRONMENT", "INTERNAL"),
        ("POLICY", "VALIDATION"),
        ("TOOL", "TOOL"),
        ("DEADLINE", "TIMEOUT"),
    ],
)
async def test_the_failure_of_an_agent_has_its_class(
    caller: Caller, engine: GatedEngine, failure_class: str, category: str
) -> None:
    endpoint = await begin(caller, engine)
    given: Any = outcome_pb2.FailureClass.Value(f"FAILURE_CLASS_{failure_class}")
    await endpoint.finish(failure=outcome_pb2.Failure(message="out of memory", failure_class=given), reward=1.0)
    outcome = (await caller.finished(endpoint.uid)).outcome
    told = "ENVIRONMENT" if failure_class == "UNSPECIFIED" else failure_class
    assert outcome.failure.message == "out of memory"
    assert outcome.failure.failure_class == outcome_pb2.FailureClass.Value(f"FAILURE_CLASS_{told}")
    assert outcome.failure.category == outcome_pb2.FailureCategory.Value(f"FAILURE_CATEGORY_{category}")
    assert not outcome.HasField("reward")


async def test_what_is_wrong_with_a_result_is_named(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    for fields, name in (
        ({"reward": float("nan")}, "reward"),
        ({"scores": {"a": float("inf")}}, "scores"),
        ({"scores": {"a" * 257: 1.0}}, "scores"),
        ({"scores": {str(number): 1.0 for number in range(257)}}, "scores"),
        ({"extra_json": "[]"}, "extra_json"),
        ({"extra_json": "x" * (1024 * 1024 + 1)}, "extra_json"),
        ({"failure": outcome_pb2.Failure(failure_class=outcome_pb2.FAILURE_CLASS_TRAINER)}, "failure.failure_class"),
        ({"failure": outcome_pb2.Failure(failure_class=99)}, "failure.failure_class"),
    ):
        refused = await refusal(endpoint.finish(**fields))
        right(refused, INVALID, "INVALID_REQUEST")
        assert set(refused.fields) == {name}
    assert (await endpoint.call(USER)).turn == 1


async def test_an_agent_that_the_server_runs_is_not_finished_from_elsewhere(
    caller: Caller, engine: GatedEngine
) -> None:
    endpoint = await begin(caller, engine, agent="here")
    assert (await endpoint.call(USER)).turn == 1
    right(await refusal(endpoint.finish(reward=1.0)), IMPOSSIBLE, "NOT_EXTERNAL")


async def test_the_name_of_the_model_is_that_of_the_agent(caller: Caller, engine: GatedEngine) -> None:
    endpoint = await begin(caller, engine)
    await endpoint.call(USER)
    request = agent_pb.GetModelAccessRequest(uid=endpoint.uid)
    assert (await agents(caller).GetModelAccess(request, metadata=bearer(endpoint.key))).model == "shown"


async def test_the_access_works_over_http_until_the_end(open_server: OpenServer, engine: GatedEngine) -> None:
    caller = await open_server(Elsewhere(), http=True)
    target = spec_pb2.Target(url=engine.url, dialect=spec_pb2.DIALECT_VLLM, model=MODEL)
    started = await caller.start(start(completions=target))
    url, key = started.access.base_url, {"authorization": f"Bearer {started.access.key}"}
    body = {"model": "any", "messages": [json.loads(USER)]}
    async with httpx.AsyncClient(trust_env=False) as http:
        reply = await http.post(f"{url}/v1/chat/completions", json=body, headers=key)
        assert reply.json()["choices"][0]["message"]["content"] == "It is 8."
        counted = await http.post(f"{url}/v1/messages/count_tokens", json={**body, "max_tokens": 1}, headers=key)
        assert counted.json() == {"input_tokens": reply.json()["usage"]["prompt_tokens"]}
        models = (await http.get(f"{url}/v1/models", headers=key)).json()
        assert [model["id"] for model in models["data"]] == ["shown"]
        wrong = await http.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": "Bearer rk_x"})
        assert wrong.status_code == 403
        ended = await http.post(f"{url}/finish", json={"reward": 0.5}, headers=key)
        assert ended.status_code == 200
        assert (await caller.finished(started.rollout.uid)).outcome.reward == 0.5
        assert (await http.post(f"{url}/finish", json={"reward": 0.5}, headers=key)).status_code == 200
        assert (await http.post(f"{url}/finish", json={"reward": 0.6}, headers=key)).status_code == 409
        over = await http.post(f"{url}/v1/chat/completions", json=body, headers=key)
        assert over.status_code == 410
