"""Message lists of loops: those that only grow are followed; others open a segment or are refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import token_pb2
from rollout_server.core.outcome import Failure
from rollout_server.runtime.errors import RolloutEnded
from rollout_server.sdk import OsmosisValidationError, RolloutContext, RolloutResult

from tests.sdk.calculator_agent import SCHEMAS
from tests.sdk.conftest import OpenPlace
from tests.sdk.loops import Loop, say, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIALECTS = ("masked", "plain")


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    """The same completion, as an author's classes would serialize it."""
    calls = [
        {
            "type": "function",
            "id": call["id"],
            "function": {
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), indent=1),
                "name": call["function"]["name"],
            },
        }
        for call in message.get("tool_calls") or []
    ]
    return {"tool_calls": calls or None, "content": message["content"] or "", "role": "assistant", "refusal": None}


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_answer_that_was_written_anew_is_the_same_answer(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, result = await say(ctx)
        messages[-1] = rewritten(messages[-1])
        call_id = result.tool_calls[0]["id"]
        messages.append({"role": "tool", "content": "8", "tool_call_id": call_id})
        messages, result = await say(ctx, *messages)
        messages[-1] = rewritten(messages[-1])
        return ctx.complete(messages, finish_reason="enough")

    place = await open_place(Loop(play))
    told = await place.of(dialect, "anew")
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "enough")
    first = next(message for message in told["final_messages"] if message["role"] == "assistant")
    assert "refusal" not in first
    assert place.accepted("anew")
    assert told["metrics"]["num_tool_calls"] == 1


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_user_messages_may_be_appended_before_and_between_turns(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, *ctx.request.messages, user("Hello?"))
        messages, _ = await say(ctx, *messages, user("And again?"))
        return ctx.complete([*messages, user("Thank you.")])

    place = await open_place(Loop(play))
    told = await place.of(dialect, "users")
    assert [message["role"] for message in told["final_messages"]] == [
        "user",
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]
    assert place.accepted("users")


async def compacting(ctx: RolloutContext) -> RolloutResult:
    await say(ctx)
    messages, _ = await say(ctx, user("In short: hello."))
    messages, _ = await say(ctx, *messages, user("Bye."))
    return ctx.complete(messages, reward=0.5)


@pytest.mark.parametrize("tokens", [None, "toy"])
async def test_a_rewritten_history_opens_a_segment(open_place: OpenPlace, tokens: str | None) -> None:
    place = await open_place(Loop(compacting))
    outcome = await place.over_grpc("short", **({"tokenizer": tokens} if tokens else {}))
    assert (outcome.stop.reason, outcome.reward) == ("stop", 0.5), outcome
    assert [sample.origin.kind for sample in outcome.samples] == [
        token_pb2.SEGMENT_KIND_MAIN,
        token_pb2.SEGMENT_KIND_COMPACTION,
    ]
    assert [json.loads(message.json)["role"] for message in outcome.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert (outcome.metrics.turns, outcome.extra_json) == (3, "")
    assert place.accepted("short")


async def test_a_trainer_that_only_derives_masks_is_shown_another_history(open_place: OpenPlace) -> None:
    """The protocol requires append-only lists. A lenient trainer accepts others; a strict one reports the error."""
    place = await open_place(Loop(compacting))
    lenient = await place.mocked("lenient")
    assert lenient["status"] == "COMPLETED"
    assert [message["role"] for message in lenient["final_messages"]] == ["user", "assistant", "user", "assistant"]
    strict = await place.plain("strict")
    assert strict["status"] == "ERROR"
    assert strict["extra_fields"]["http_status"] == 422


async def test_a_trainer_that_counts_masks_cannot_follow_a_rewritten_history(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        await say(ctx)
        messages, _ = await say(ctx, user("In short: hello."))
        return ctx.complete(messages)

    loop = Loop(play)
    place = await open_place(loop)
    told = await place.masked("short")
    assert told["status"] == "ERROR"
    assert "response_mask" in told["error_message"]
    assert "POST /v1/rollout/init" in told["error_message"]
    assert len(place.requests("short")) == 1
    [caught] = loop.caught
    assert isinstance(caught, OsmosisValidationError)


async def test_a_history_without_the_last_answer_is_another_one(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        await say(ctx)
        messages, _ = await say(ctx)
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    outcome = await place.over_grpc("again")
    assert outcome.stop.reason == "stop", outcome
    assert len(outcome.samples) == 2
    assert place.accepted("again")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_system_prompt_may_be_put_first(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, {"role": "system", "content": "Be kind."}, *ctx.request.messages)
        messages, _ = await say(ctx, *messages, user("Kinder."))
        return ctx.complete(messages, reward=0.5)

    place = await open_place(Loop(play, SCHEMAS))
    told = await place.of(dialect, "system")
    assert (told["status"], told["metrics"]["num_llm_calls"]) == ("COMPLETED", 2), told
    roles = ["system", "user", "assistant", "user", "assistant"]
    assert [message["role"] for message in told["final_messages"]] == roles
    assert "final_messages" not in told.get("extra_fields", {})
    masks = [seen.body.get("response_mask") for seen in place.requests("system")]
    assert [mask is not None for mask in masks] == [False, dialect == "masked"]
    assert place.accepted("system")


@pytest.mark.parametrize("tokens", [None, "toy"])
async def test_a_system_prompt_put_first_leaves_one_sample(open_place: OpenPlace, tokens: str | None) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, {"role": "system", "content": "Be kind."}, *ctx.request.messages)
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    outcome = await place.over_grpc("system", **({"tokenizer": tokens} if tokens else {}))
    assert outcome.stop.reason == "stop", outcome
    assert len(outcome.samples) == 1
    assert place.accepted("system")


async def test_other_messages_may_replace_those_of_the_request_before_the_first_turn_only(
    open_place: OpenPlace,
) -> None:
    """A trainer that counts masks has received no request until then."""

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, user("Something else."))
        await say(ctx, user("And now this."), *messages)
        raise AssertionError

    place = await open_place(Loop(play))
    told = await place.masked("replaced")
    assert "response_mask" in told["error_message"]
    assert [seen.body["messages"] for seen in place.requests("replaced")] == [[user("Something else.")]]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_last_messages_that_are_another_conversation_go_along(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        await say(ctx)
        return ctx.complete([user("Something else")])

    place = await open_place(Loop(play))
    told = await place.of(dialect, "else")
    assert [message["role"] for message in told["final_messages"]] == ["user", "assistant"]
    assert told["extra_fields"]["final_messages"] == [user("Something else")]


async def test_what_an_author_changes_later_is_not_changed_in_the_rollout(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        ctx.request.messages[0]["extra"] = "changed before the first turn"
        messages, result = await say(ctx)
        result.message["content"] = "Never said"
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    told = await place.plain("changed")
    answer = next(message for message in told["final_messages"] if message["role"] == "assistant")
    assert answer["content"] != "Never said"
    assert told["extra_fields"]["final_messages"][-1]["content"] == "Never said"


WRONG_LISTS = (
    (lambda: [], "messages is empty"),
    (lambda: "hello", "messages must be a list of dicts, not str"),
    (lambda: None, "messages must be a list of dicts, not NoneType"),
    (lambda: [user("a"), "b"], r"messages\[1\] is str; it must be a dict"),
    (lambda: [{"content": "a"}], r"messages\[0\] has no role"),
    (lambda: [{"role": "user", "content": float("nan")}], r"messages\[0\] is not JSON"),
    (lambda: [{"role": "user", "content": object()}], r"messages\[0\] is not JSON"),
)


@pytest.mark.parametrize("wrong", range(len(WRONG_LISTS)))
async def test_a_list_that_cannot_be_sent_is_refused_and_the_rollout_goes_on(open_place: OpenPlace, wrong: int) -> None:
    make, text = WRONG_LISTS[wrong]
    given: Any = make()

    async def play(ctx: RolloutContext) -> RolloutResult:
        with pytest.raises(OsmosisValidationError, match=text) as refused:
            await ctx.chat(given)
        assert refused.value.status_code == 400
        messages, _ = await say(ctx)
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    assert (await place.plain("wrong"))["status"] == "COMPLETED"
    assert place.accepted("wrong")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_sampling_parameters_hold_for_their_call(open_place: OpenPlace, dialect: str) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        assert ctx.request.completion_params["temperature"] == 0.7
        messages, _ = await say(ctx)
        result = await ctx.chat([*messages, user("More")], temperature=0.1, top_p=None, stop="END", vendor="ignored")
        messages += [user("More"), result.message]
        messages, _ = await say(ctx, *messages, user("Less"))
        return ctx.complete(messages)

    place = await open_place(Loop(play))
    told = await place.of(dialect, "own")
    assert told["status"] == "COMPLETED", told
    kept = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 512, "stop": None, "vendor": None}
    bodies = [{name: seen.body.get(name) for name in kept} for seen in place.requests("own")]
    assert bodies == [kept, kept | {"temperature": 0.1, "stop": ["END"]}, kept]
    assert place.accepted("own")


async def test_a_sampling_parameter_that_is_none_is_refused_by_name(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        with pytest.raises(OsmosisValidationError, match="max_tokens='many' is invalid; pass an integer") as refused:
            await ctx.chat([*messages, user("More")], max_tokens="many")
        assert refused.value.status_code == 400
        await ctx.chat([user("never sent")], temperature=7)
        raise AssertionError

    place = await open_place(Loop(play))
    told = await place.plain("wrong")
    assert told["status"] == "ERROR"
    assert "temperature=7: must be from 0 to 2" in told["error_message"]
    assert told["extra_fields"]["error_category"] == "validation_error"
    assert len(place.requests("wrong")) == 1


async def test_a_rollout_that_is_over_says_so_past_except_exception(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        while True:
            try:
                result = await ctx.chat(messages)
                messages += [result.message, user("More")]
            except Exception:
                continue

    loop = Loop(play)
    place = await open_place(loop)
    told = await place.plain("endless", max_turns=2)
    assert (told["status"], told["finish_reason"], told["metrics"]["num_llm_calls"]) == ("COMPLETED", "max_turns", 2)
    [caught] = loop.caught
    assert isinstance(caught, RolloutEnded)
    assert not isinstance(caught.end, Failure)
