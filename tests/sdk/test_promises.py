"""Behaviour that agents of the earlier SDK and their trainers rely on."""

from __future__ import annotations

import importlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from rollout_server.core.message import Message
from rollout_server.core.spec import Dialect, Sampling, Spec, Target
from rollout_server.runtime.agent_protocol import Request
from rollout_server.sdk import (
    OsmosisLLMClient,
    OsmosisValidationError,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    create_tool_result,
    osmosis_reward,
    osmosis_rubric,
)
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema
from rollout_server.sdk.http import read_completion
from rollout_server.sdk.request_view import request_of
from rollout_server.sdk.testing import RolloutCompletionTracker, create_mock_trainer_app, fake_token_ids
from rollout_server.testing.script import ScriptedReply, tool_call

from tests.sdk.calculator_agent import SCHEMAS, CalculatorAgentLoop
from tests.sdk.conftest import OpenPlace
from tests.sdk.lenient import LenientTrainer, lenient_trainer
from tests.sdk.loops import Loop, say, user

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def trainer() -> AsyncIterator[LenientTrainer]:
    async with lenient_trainer() as trainer:
        yield trainer


async def test_a_rollout_may_begin_without_messages(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        assert ctx.request.messages == []
        first = await ctx.chat([])
        messages, _ = await say(ctx, first.message, user("And now?"))
        return ctx.complete(messages)

    told = await trainer.play(await open_place(Loop(play)), "empty", messages=[])
    assert told["status"] == "COMPLETED", told
    assert trainer.asked[0]["messages"] == []
    assert trainer.asked[1]["messages"] == [{"role": "assistant", "content": "1 answers "}, user("And now?")]
    assert [message["role"] for message in told["final_messages"]] == ["assistant", "user", "assistant"]


async def test_a_rollout_may_begin_and_end_without_messages(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        return ctx.complete([])

    told = await trainer.play(await open_place(Loop(play)), "nothing", messages=[])
    assert (told["status"], told["final_messages"], trainer.asked) == ("COMPLETED", [], [])


async def test_the_synchronous_dialect_refuses_an_empty_list(open_place: OpenPlace) -> None:
    place = await open_place(CalculatorAgentLoop())
    body = {"rollout_id": place.id("none"), "server_url": place.trainer.url, "messages": [], "sampling_params": {}}
    answer = await place.http.post("/rollout", json=body | {"tokenizer_name": "toy"})
    assert answer.status_code == 422
    assert place.requests("none") == []


Ending = Callable[[RolloutContext, list[dict[str, Any]]], RolloutResult]


@pytest.mark.parametrize(
    ("ending", "told_messages"),
    [
        (lambda ctx, messages: ctx.error("gone", final_messages=messages), ["Hello", "1 answers Hello"]),
        (
            lambda ctx, messages: ctx.error("gone", final_messages=[*messages, user("Sorry.")]),
            ["Hello", "1 answers Hello", "Sorry."],
        ),
        (lambda ctx, messages: ctx.error("gone", [user("Something else.")]), ["Something else."]),
        (lambda ctx, messages: ctx.error("gone"), []),
    ],
)
async def test_the_messages_of_an_error_are_those_that_the_loop_names(
    open_place: OpenPlace, trainer: LenientTrainer, ending: Ending, told_messages: list[str]
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        return ending(ctx, messages)

    told = await trainer.play(await open_place(Loop(play)), "gone")
    assert (told["status"], told["finish_reason"], told["error_message"]) == ("ERROR", "error", "gone")
    assert [message["content"] for message in told["final_messages"]] == told_messages
    assert "final_messages" not in told["extra_fields"]


async def test_the_messages_of_an_error_that_are_too_many_are_left_out(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        return ctx.error("gone", [user("x" * 2**20)])

    told = await trainer.play(await open_place(Loop(play)), "large")
    assert (told["status"], told["final_messages"]) == ("ERROR", [])


async def test_an_error_of_the_synchronous_dialect_has_no_messages(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        return ctx.error("gone", messages)

    told = await (await open_place(Loop(play))).masked("gone")
    assert (told["status"], told["final_messages"]) == ("ERROR", [])
    assert len(told["extra_fields"]["final_messages"]) == 2


@pytest.mark.parametrize("dialect", ["masked", "plain"])
async def test_two_calls_with_one_id_are_two_calls(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, result = await say(ctx)
        for call in result.tool_calls:
            messages.append(create_tool_result(call["id"], "8"))
            ctx.record_tool_call(1.0)
        messages, _ = await say(ctx, *messages)
        return ctx.complete(messages)

    place = await open_place(Loop(play, SCHEMAS))
    calls = (tool_call("same", "add", '{"a": 5, "b": 3}'), tool_call("same", "add", '{"a": 1, "b": 7}'))
    await place.script("same", ScriptedReply(tool_calls=calls), ScriptedReply(content="Done."))
    told = await place.of(dialect, "same")
    assert (told["status"], told["metrics"]["num_tool_calls"]) == ("COMPLETED", 2), told
    assert [message["role"] for message in told["final_messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert place.accepted("same")


async def test_parameters_are_those_that_were_sent_and_gaps_are_the_loops_to_fill(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    seen: list[RolloutRequest] = []

    async def play(ctx: RolloutContext) -> RolloutResult:
        seen.append(ctx.request)
        messages, _ = await say(ctx)
        parameters = {"max_tokens": 77, "temperature": 0.9} | ctx.request.completion_params
        result = await ctx.chat([*messages, user("More")], **parameters)
        return ctx.complete([*messages, user("More"), result.message])

    place = await open_place(Loop(play))
    sent = {"temperature": 0.5, "stop": "END", "seed": 7, "messages": [], "rollout_id": "another"}
    told = await trainer.play(place, "sent", completion_params=sent)
    assert told["status"] == "COMPLETED", told
    assert seen[0].completion_params == {"temperature": 0.5, "stop": "END", "seed": 7}
    kept = {"temperature": 0.5, "top_p": 1.0, "stop": ["END"], "logprobs": True, "seed": 7}
    asked = [{name: body.get(name) for name in (*kept, "max_tokens")} for body in trainer.asked]
    assert asked == [kept | {"max_tokens": 512}, kept | {"max_tokens": 77}]


async def test_parameters_may_be_given_by_position(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        complete: Any = ctx.llm.chat_completions
        result = await complete(list(ctx.request.messages), 0.2, 0.8, 33, "END", False)
        return ctx.complete([*ctx.request.messages, result.message])

    assert (await trainer.play(await open_place(Loop(play)), "place"))["status"] == "COMPLETED"
    names = ("temperature", "top_p", "max_tokens", "stop", "logprobs")
    assert [trainer.asked[0][name] for name in names] == [0.2, 0.8, 33, ["END"], False]


async def test_tools_know_the_key_of_their_request_and_stay_as_they_were_given(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    given: list[Any] = []

    class Keyed(CalculatorAgentLoop):
        def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
            tools: Any = [schema.model_dump() for schema in SCHEMAS]
            return list(tools) if request.idempotency_key == "tools-key" else []

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            given.extend(ctx.tools)
            return ctx.complete(list(ctx.request.messages))

    told = await trainer.play(await open_place(Keyed()), "keyed", idempotency_key="tools-key")
    assert told["status"] == "COMPLETED"
    assert given == [schema.model_dump() for schema in SCHEMAS]


async def test_an_answer_without_a_finish_reason_has_stopped(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, result = await say(ctx)
        return ctx.complete(messages, finish_reason=result.finish_reason)

    told = await trainer.play(await open_place(Loop(play)), "reason")
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "stop")


async def test_a_system_prompt_put_first_is_no_other_conversation(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, {"role": "system", "content": "Be kind."}, *ctx.request.messages)
        return ctx.complete(messages)

    assert (await trainer.play(await open_place(Loop(play)), "first"))["extra_fields"] == {}


async def test_the_client_reads_answers_that_hold_no_more_than_a_message(trainer: LenientTrainer) -> None:
    async with OsmosisLLMClient(trainer.url, "client") as client:
        result = await client.chat_completions([user("Hello")])
    assert (result.content, result.finish_reason, result.token_ids) == ("1 answers Hello", "stop", [])
    assert result.usage == {"prompt_tokens": 10, "completion_tokens": 7}


async def test_the_client_names_a_count_that_is_no_number() -> None:
    body = b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": "ten"}}'
    with pytest.raises(OsmosisValidationError, match=r"usage\.prompt_tokens"):
        read_completion(body)


async def test_a_source_that_is_no_asynchronous_request_is_not_taken_for_one() -> None:
    """Over gRPC a caller may set any object there."""
    spec = Spec(
        "r",
        (Message.write(user("Hello")),),
        Target("http://t", Dialect.HTTP_PLAIN),
        sampling=Sampling(temperature=0.5),
        source_json='{"completion_params": ["top_p"]}',
    )
    assert request_of(Request(spec)).completion_params["temperature"] == 0.5


async def answer_of(app: FastAPI, *messages: dict[str, Any]) -> dict[str, Any]:
    """A completion of the mock trainer."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://mock") as client:
        body = {"rollout_id": "r", "messages": list(messages)}
        return dict((await client.post("/v1/chat/completions", json=body)).json())


@pytest.mark.parametrize(
    ("messages", "text", "calls"),
    [
        ([user("Please CALCULATE that.")], "I'll help you with that calculation.", ["add"]),
        ([user("sum it up")], "I'll help you with that calculation.", ["add"]),
        ([user("Hello")], "OK.", []),
        ([], "OK.", []),
        ([user("add"), {"role": "tool", "content": "8", "tool_call_id": "c"}], "The calculation is complete.", []),
        ([user("add"), {"role": "assistant", "content": "add"}], "OK.", []),
        ([{"role": "user", "content": [{"type": "text", "text": "add"}]}], "OK.", []),
    ],
)
async def test_the_mock_trainer_says_what_the_sdks_says(
    messages: list[dict[str, Any]], text: str, calls: list[str]
) -> None:
    told = await answer_of(create_mock_trainer_app(), *messages)
    choice = told["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
    assert [call["function"]["name"] for call in choice["message"].get("tool_calls", [])] == calls
    assert all(
        json.loads(call["function"]["arguments"]) == {"a": 5, "b": 3}
        for call in choice["message"].get("tool_calls", [])
    )
    assert len(told["token_ids"]) == told["usage"]["completion_tokens"] == len(fake_token_ids(text))
    assert told["logprobs"] == [0.0] * len(text)


async def test_the_mock_trainers_prompts_extend_each_other() -> None:
    app = create_mock_trainer_app(RolloutCompletionTracker())
    messages = [user("add")]
    first = await answer_of(app, *messages)
    answer = first["choices"][0]["message"]
    second = await answer_of(app, *messages, answer, create_tool_result("call_mock_add", "8"))
    held = first["prompt_token_ids"] + first["token_ids"]
    assert second["prompt_token_ids"][: len(held)] == held


async def test_a_generator_of_tool_calls_decides_instead() -> None:
    app = create_mock_trainer_app(
        tool_call_generator=lambda last: [tool_call("c", "search", "{}")] if last["role"] == "user" else None
    )
    told = await answer_of(app, user("Hello"))
    assert told["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "search"
    told = await answer_of(app, {"role": "tool", "content": "8", "tool_call_id": "c"})
    assert told["choices"][0]["message"] == {"role": "assistant", "content": "The calculation is complete."}


def exact(solution_str: str, ground_truth: str, extra_info: dict = None) -> float:  # type: ignore[assignment,type-arg]  # noqa: RUF013
    return float(solution_str == ground_truth)


async def test_rewards_are_checked_functions() -> None:
    reward = osmosis_reward(exact)
    assert (reward("8", "8"), reward("8", "9", {"a": 1})) == (1.0, 0.0)
    loose: Any = reward
    assert loose("8", ground_truth="8", data_source="gsm8k") == 1.0
    assert reward.__name__ == "exact"
    for module in ("", ".utils"):
        assert importlib.import_module(f"rollout_server.sdk{module}").osmosis_reward is osmosis_reward

    def whole(solution_str: str, ground_truth: str, extra_info: dict = None) -> int:  # type: ignore[assignment,type-arg]  # noqa: RUF013
        return 1

    with pytest.raises(TypeError, match="whole returned int; it must return a float"):
        osmosis_reward(whole)("8", "8")


def one(solution_str: str, ground_truth: str) -> float:
    return 0.0


def two(solution_str: str, ground_truth: int, extra_info: dict = None) -> float:  # type: ignore[assignment,type-arg]  # noqa: RUF013
    return 0.0


def three(solution_str: str, ground_truth: str, extra_info: dict) -> float:  # type: ignore[type-arg]
    return 0.0


def four(answer: str, ground_truth: str, extra_info: dict = None) -> float:  # type: ignore[assignment,type-arg]  # noqa: RUF013
    return 0.0


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (one, "one: the first parameters must be solution_str, ground_truth, extra_info"),
        (two, "two: ground_truth must be annotated as str"),
        (three, "three: extra_info needs a default"),
        (four, "four: the first parameters must be"),
    ],
)
async def test_a_reward_with_another_signature_is_refused(function: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        osmosis_reward(function)


async def test_rubrics_are_checked_functions() -> None:
    def polite(solution_str: str, ground_truth: str | None, extra_info: dict) -> float:  # type: ignore[type-arg]
        return float("please" in solution_str)

    rubric: Any = osmosis_rubric(polite)
    assert rubric("please", None, {}) == rubric("please", "x", extra_info={}, data_source="d") == 1.0
    for wrong in (("please", None), (5, None, {}), ("please", 5, {})):
        with pytest.raises(TypeError, match="is missing or has a wrong type"):
            rubric(*wrong)
    for refused in (one, two, exact_with_default, listed):
        with pytest.raises(TypeError):
            osmosis_rubric(refused)
    assert osmosis_rubric(three)("a", "b", {}) == 0.0


def exact_with_default(solution_str: str, ground_truth: str = "", extra_info: Any = None) -> float:
    return 0.0


def listed(solution_str: list[str], ground_truth: str, extra_info: Any) -> float:
    return 0.0
