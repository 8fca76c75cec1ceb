"""`run.model(name)` on a real server: keys, target rules, retries, limits, events and samples."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from osmosis.rollout.v1 import outcome_pb2
from rollout_client import AsyncClient, Credentials, InvalidRequest, Target, samples
from rollout_server import Agent, ModelFailed, Run, ToolContext, tool
from rollout_server.app import Server
from rollout_server.settings import WrongSettings
from rollout_server.testing.http.mock_engine import MockEngine
from rollout_server.testing.script import ScriptedReply

from tests.edge.engine.rolling import check_whole
from tests.support.engine_model import EngineModel
from tests.support.engines import MODEL, OpenaiEngine, VllmEngine, serving
from tests.support.start_requests import settings

KEY = "kEy-of-the-judge"
QUESTION = [{"role": "user", "content": "5 plus 3?"}]
FAST: Mapping[str, Any] = {"retry_base_seconds": 0.01, "retry_max_seconds": 0.02, "retries": 2, "tokenizers": {}}
ENGINE_SERVER, ENGINE_CLIENT = outcome_pb2.FAILURE_CATEGORY_ENGINE_SERVER, outcome_pb2.FAILURE_CATEGORY_ENGINE_CLIENT


class Echo:
    """Replies with the last message; a number of words is its number of tokens."""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay

    def reply(self, messages: Any) -> ScriptedReply:
        return ScriptedReply(content=messages[-1]["content"], delay=self.delay)


class Judged(Agent):
    """Ask the judge for the number in the metadata, which is the reward."""

    name = "judged"

    async def reward(self, run: Run) -> float:
        reply = await run.model("judge").sample(
            [{"role": "user", "content": str(run.metadata["number"])}], temperature=0, max_tokens=5
        )
        assert reply.usage is None or reply.usage[1] > 0
        return float(reply.content)


class Forgiving(Judged):
    """Give -1 where the judge fails."""

    name = "forgiving"

    async def reward(self, run: Run) -> float:
        try:
            return await super().reward(run)
        except ModelFailed as failed:
            return -1.0 if failed.failure.message.startswith("model 'judge', in turn 1: its endpoint") else -2.0


@tool
async def ask(question: str, context: ToolContext) -> str:
    """Ask the judge."""
    return (await context.model("judge").sample([{"role": "user", "content": question}])).content


@tool(process=True)
def ask_in_a_process(context: ToolContext) -> str:
    """Ask the judge."""
    return str(context.model("judge"))


class Tooled(Agent):
    """Tools that ask the judge, and a plain function that does."""

    name = "tooled"
    tools = (ask, ask_in_a_process)

    def reward(self, run: Run) -> float:
        return float(run.wait(run.model("judge").sample([{"role": "user", "content": "0.5"}])).content)


class Misnamed(Agent):
    """Ask for a model that does not exist."""

    name = "misnamed"

    async def play(self, run: Run) -> None:
        try:
            run.model("jugde")
        except Exception as error:
            run.note("error", str(error))
        await run.sample()


class Greedy(Agent):
    """Call the judge until that is refused."""

    name = "greedy"

    async def play(self, run: Run) -> None:
        try:
            while True:
                await run.model("judge").sample([{"role": "user", "content": "one two three"}])
        except Exception as error:
            run.note("error", f"{type(error).__name__}: {error}")


AGENTS = (Judged(), Forgiving(), Tooled(), Misnamed(), Greedy())


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[AsyncClient]:
    async with (
        Server(AGENTS, settings(**FAST, **fields)) as server,
        AsyncClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        yield client


@asynccontextmanager
async def policy(*says: str) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(EngineModel(says or ("#### 8",)))
    async with serving(engine):
        yield engine


async def rolled(client: AsyncClient, engine: VllmEngine, agent: str = "judged", **fields: Any) -> Any:
    """Run one rollout to its end and return it with all its events."""
    completions = Target(engine.url, "vllm", model=MODEL)
    fields = {"completions": completions, "messages": QUESTION, "metadata": {"number": 3}, "agent": agent, **fields}
    run = client.run(detail="messages", **fields)
    events = [event async for event in run]
    return await client.get(run.uid, view="full"), events


def judge_at(engine: MockEngine | OpenaiEngine, **fields: Any) -> dict[str, Target]:
    return {"judge": Target(engine.url, **{"model": "judge", **fields})}


def notes(events: list[Any]) -> list[str]:
    return [event.note.text for event in events if event.HasField("note")]


async def test_a_judge_of_the_request_gets_its_own_key_and_its_tokens_are_in_no_sample() -> None:
    async with served() as client, policy() as engine, MockEngine({"judge": Echo()}, KEY) as judge:
        credentials = Credentials(completions_bearer="kEy-of-the-policy", model_bearers={"judge": KEY})
        rollout, events = await rolled(client, engine, models=judge_at(judge), credentials=credentials)
    assert rollout.outcome.reward == 3.0
    assert {headers["Authorization"] for headers in engine.headers} == {"Bearer kEy-of-the-policy"}
    (body,) = judge.requests
    expected = {"model": "judge", "temperature": 0.0, "max_tokens": 5, "messages": [{"role": "user", "content": "3"}]}
    assert body == expected
    (called,) = [event.model_called for event in events if event.HasField("model_called")]
    assert (called.model, json.loads(called.message.json)["content"]) == ("judge", "3")
    assert (called.finish_reason, called.prompt_tokens, called.generated_tokens, called.attempts) == ("stop", 1, 1, 1)
    (sample,) = samples(rollout.outcome)
    check_whole(sample, engine.model.seen)
    assert KEY not in str(rollout)
    assert rollout.spec.models["judge"].url == judge.url


async def test_the_text_is_in_events_with_messages_only() -> None:
    async with served() as client, policy() as engine, MockEngine({"judge": Echo()}) as judge:
        rollout, _ = await rolled(client, engine, models=judge_at(judge))
        basic = [event async for event in client.watch(rollout.uid, detail="basic")]
    (called,) = [event.model_called for event in basic if event.HasField("model_called")]
    assert (called.model, called.generated_tokens, called.HasField("message")) == ("judge", 1, False)


async def test_a_wrong_key_is_the_engines_failure_and_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with served() as client, policy() as engine:
        quoting = OpenaiEngine(EngineModel(("3",)))
        quoting.first = [web.json_response({"error": {"message": f"no such key: Bearer {KEY}"}}, status=401)]
        async with serving(quoting):
            credentials = Credentials(model_bearers={"judge": KEY})
            rollout, events = await rolled(client, engine, models=judge_at(quoting), credentials=credentials)
    failure = rollout.outcome.failure
    text = "model 'judge', in turn 1: its endpoint answered 401 (the key is in `credentials.model_bearers` or ROLLOUT_MODELS_KEYS)"
    assert failure.message == f"{text}: no such key: Bearer [redacted]"
    assert (failure.category, failure.http_status, rollout.outcome.HasField("reward")) == (ENGINE_CLIENT, 401, False)
    assert KEY not in str((rollout, events)) + caplog.text


async def test_models_and_keys_of_the_settings(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"# of the judge\njudge={KEY}\n", encoding="utf-8")
    async with policy() as engine, MockEngine({"judge": Echo()}, KEY) as own, MockEngine({"judge": Echo()}) as other:
        for given in ({"models_keys": f"judge={KEY}"}, {"models_keys_file": keys}):
            async with served(models=own.entries, **given) as client:
                rollout, _ = await rolled(client, engine)
                assert rollout.outcome.reward == 3.0
                assert "judge" not in rollout.spec.models
                # A request's model replaces the server's, whose key it does not get.
                await rolled(client, engine, models=judge_at(other))
        assert (len(own.requests), len(other.requests)) == (2, 2)
        async with served(models=own.entries, models_by_request=False) as client:
            with pytest.raises(InvalidRequest, match="only its own models"):
                await rolled(client, engine, models=judge_at(other))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"models": {"judge": Target("http://j", model="")}}, "spec.models[judge].model: has 0 characters"),
        ({"models": {"judge": Target("http://j", "grpc", model="m")}}, "spec.models[judge].dialect: must be one of"),
        ({"models": {"judge": Target("grpc://j", model="m")}}, "spec.models[judge].dialect: must be one of"),
        ({"models": {"judge": Target("http://u:p@j", model="m")}}, "spec.models[judge].url"),
        ({"models": {"a judge": Target("http://j", model="m")}}, "is not a name of 1 to 64 letters"),
        ({"models": {f"j{n}": Target("http://j", model="m") for n in range(17)}}, "has 17 entries, at most 16"),
        ({"credentials": Credentials(model_bearers={"judge": KEY})}, "has a name that is not in spec.models"),
        (
            {
                "models": {"judge": Target("http://j", model="m")},
                "credentials": Credentials(model_bearers={"judge": f"{KEY}\n"}),
            },
            "credentials.model_bearers[judge]: must be printable ASCII",
        ),
    ],
)
async def test_what_is_refused(fields: dict[str, Any], text: str) -> None:
    async with served() as client, policy() as engine:
        with pytest.raises(InvalidRequest) as caught:
            await rolled(client, engine, **fields)
    assert text in str(caught.value)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"models": ["judge=http://j"]}, "ROLLOUT_MODELS: 'judge' is not NAME=URL|MODEL"),
        ({"models": ["judge=http://j|m|grpc"]}, "with openai, vllm or sglang"),
        ({"models": ["judge=http://169.254.169.254|m"]}, "the URL of judge names an address that is reserved"),
        ({"models": ["judge=http://127.0.0.1|m"], "host": "0.0.0.0"}, "this machine's own"),
        ({"models": ["judge=http://j|m"], "models_keys": f"user={KEY}"}, "key 1 is not NAME=KEY with a NAME of"),
        ({"models": ["judge=http://j|m"], "models_keys": "judge=ü"}, "the key of judge must be printable ASCII"),
        ({"models": ["judge=http://j|m", "judge=http://k|m"]}, "'judge' is there twice"),
        ({"models": ["judge=http://j|m"], "models_keys": "judge=a,judge=b"}, "key 2 is the second one of judge"),
        ({"models_keys_file": "missing"}, "ROLLOUT_MODELS_KEYS_FILE"),
    ],
)
async def test_settings_that_cannot_be_used(given: dict[str, Any], text: str) -> None:
    with pytest.raises(WrongSettings) as caught:
        async with served(**given):
            raise AssertionError("it started")
    assert text in str(caught.value)
    assert KEY not in str(caught.value)


async def test_an_exposed_server_calls_no_loopback_address() -> None:
    async with MockEngine({"judge": Echo()}) as judge, policy() as engine:
        port, policys = judge.url.rpartition(":")[2], engine.url.rpartition(":")[2]
        exposed = {"host": "0.0.0.0", "targets": [f"127.0.0.1:{policys}"]}
        async with served(**exposed) as client:
            with pytest.raises(InvalidRequest, match=r"spec.models\[judge\].url: names an address"):
                await rolled(client, engine, models=judge_at(judge))
        async with served(host="0.0.0.0", targets=[f"127.0.0.1:{policys}", "localhost"]) as client:
            there = {"judge": Target(f"http://localhost:{port}", model="judge")}
            rollout, _ = await rolled(client, engine, models=there)
    failure = rollout.outcome.failure
    assert failure.category == ENGINE_CLIENT
    assert "its endpoint at localhost:" in failure.message
    assert "which is this machine's own" in failure.message
    assert judge.requests == []


async def test_passing_failures_are_retried_and_lasting_ones_may_be_caught() -> None:
    async with served() as client, policy() as engine:
        flaky = OpenaiEngine(EngineModel(("3",)), model_name="judge")
        flaky.first = [web.Response(status=503), web.Response(status=502)]
        async with serving(flaky):
            rollout, events = await rolled(client, engine, models=judge_at(flaky))
            (called,) = [event.model_called for event in events if event.HasField("model_called")]
            assert (rollout.outcome.reward, called.attempts) == (3.0, 3)
            keys = {headers["idempotency-key"] for headers in flaky.headers}
            assert keys == {f"{rollout.uid}/model/judge/1"}
        nowhere = {"judge": Target("http://127.0.0.1:9", model="judge")}
        caught, _ = await rolled(client, engine, "forgiving", models=nowhere)
        assert caught.outcome.reward == -1.0
        failed, _ = await rolled(client, engine, models=nowhere)
        assert failed.outcome.failure.category == ENGINE_SERVER
        assert "could not be reached" in failed.outcome.failure.message
        assert not failed.outcome.HasField("reward")


async def test_tools_and_plain_functions() -> None:
    call = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
    says = call.format("ask", '{"question": "Why?"}'), call.format("ask_in_a_process", "{}"), "Done."
    async with served() as client, MockEngine({"judge": Echo()}) as judge:
        async with policy(*says) as engine:
            rollout, events = await rolled(client, engine, "tooled", models=judge_at(judge))
        assert rollout.outcome.reward == 0.5
        results = [json.loads(e.tool_returned.message.json)["content"] for e in events if e.HasField("tool_returned")]
        assert results[0] == "Why?"
        assert "cannot use `model` of the rollout" in results[1]
        nowhere = {"judge": Target("http://127.0.0.1:9", model="judge")}
        async with policy(f"{says[0]}\n{says[0]}") as engine:
            failed, _ = await rolled(client, engine, "tooled", models=nowhere)
        assert failed.outcome.failure.category == ENGINE_SERVER
        assert failed.outcome.failure.message.startswith("model 'judge', in turn 1")


async def test_an_unknown_name_says_which_there_are() -> None:
    async with served(models=["user=http://u|m"]) as client, policy() as engine:
        there = {"judge": Target("http://j", model="m")}
        _, events = await rolled(client, engine, "misnamed", models=there)
        (text,) = notes(events)
    assert text.startswith(
        "model: there is no model 'jugde'; there are judge, user; name it in `models` of the request"
    )


@pytest.mark.parametrize(
    ("given", "calls", "text"),
    [
        ({"models_calls": 3}, 3, "has used 3 calls, at most 3 are allowed (ROLLOUT_MODELS_CALLS)"),
        ({"models_tokens": 4}, 2, "has used 6 generated tokens, at most 4 are allowed (ROLLOUT_MODELS_TOKENS)"),
    ],
)
async def test_limits_of_a_rollout(given: dict[str, int], calls: int, text: str) -> None:
    async with served(**given) as client, policy() as engine, MockEngine({"judge": Echo()}) as judge:
        for _ in range(2):  # each rollout has its own limits
            _, events = await rolled(client, engine, "greedy", models=judge_at(judge))
            assert notes(events) == [f"AgentMistake: model 'judge': the rollout {text}"]
    assert len(judge.requests) == 2 * calls


class Gated(OpenaiEngine):
    """Echoes the last message. The first eight requests wait for each other, and for a ninth if the server sends one."""

    now = most = 0

    def __init__(self) -> None:
        super().__init__(EngineModel(("",)))
        self.full = asyncio.Event()

    async def chat(self, request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        self.now += 1
        self.most = max(self.most, self.now)
        if self.now == 8 and not self.full.is_set():
            await asyncio.sleep(0.2)
            self.full.set()
        await self.full.wait()
        self.now -= 1
        message = {"role": "assistant", "content": body["messages"][-1]["content"]}
        return web.json_response({"choices": [{"message": message, "finish_reason": "stop"}]})


async def test_200_rollouts_at_once_get_their_own_scores() -> None:
    judge = Gated()
    async with served(max_running=200, models_concurrency=8) as client, policy() as engine, serving(judge):
        numbers = range(200)
        ran = await asyncio.gather(
            *(rolled(client, engine, models=judge_at(judge), metadata={"number": number}) for number in numbers)
        )
    assert [rollout.outcome.reward for rollout, _ in ran] == [float(number) for number in numbers]
    assert judge.most == 8


async def test_a_cancelled_rollout_does_not_wait_for_a_model() -> None:
    async with served() as client, policy() as engine, MockEngine({"judge": Echo(delay=60)}) as judge:
        completions = Target(engine.url, "vllm", model=MODEL)
        fields = {"completions": completions, "messages": QUESTION, "metadata": {"number": 3}, "agent": "judged"}
        started = await client.start(models=judge_at(judge), **fields)
        while not judge.requests:  # noqa: ASYNC110 - the engine has no event
            await asyncio.sleep(0.01)
        await client.cancel(started.uid, reason="enough")
        ended = await client.wait(started.uid, timeout=20)
    assert ended.outcome.cancellation.reason == "enough"
