"""Several concurrent chats of one loop: each has its own conversation, and no token is trained twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import pytest
import pytest_asyncio
from osmosis.rollout.v1 import token_pb2
from osmosis.rollout.v1.outcome_pb2 import Outcome
from rollout_server.sdk import OsmosisRolloutError, RolloutContext, RolloutResult, create_tool_result
from rollout_server.testing.script import ScriptedReply

from tests.sdk.calculator_agent import SCHEMAS
from tests.sdk.conftest import OpenPlace
from tests.sdk.lenient import LenientTrainer, lenient_trainer
from tests.sdk.loops import Loop, say, user

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAIN, BRANCH, SUBAGENT = (
    token_pb2.SEGMENT_KIND_MAIN,
    token_pb2.SEGMENT_KIND_BRANCH,
    token_pb2.SEGMENT_KIND_SUBAGENT,
)


@pytest_asyncio.fixture(loop_scope="module")
async def trainer() -> AsyncIterator[LenientTrainer]:
    async with lenient_trainer() as trainer:
        yield trainer


async def best_of_three(ctx: RolloutContext) -> RolloutResult:
    """Continue with the second of three completions."""
    messages, _ = await say(ctx)
    messages.append(user("Three ways, please."))
    results = await asyncio.gather(*(ctx.chat(messages, temperature=warmth) for warmth in (0.1, 0.5, 0.9)))
    assert all(result.usage["completion_tokens"] == (len(result.token_ids) or 7) for result in results)
    messages += [results[1].message, user("Go on.")]
    messages, _ = await say(ctx, *messages)
    return ctx.complete(messages, finish_reason="chosen", reward=0.5)


def check_samples(outcome: Outcome) -> None:
    """Assert that every completion is trained exactly once, in the sample of its turn, and that masks contain nothing else."""
    trained: list[int] = []
    for sample in outcome.samples:
        prompt, *rest = sample.spans
        assert (prompt.start, prompt.stop) == (0, len(sample.prompt_ids))
        assert all(before.stop == after.start for before, after in pairwise(sample.spans))
        written = [(span.author == token_pb2.AUTHOR_MODEL, span.stop - span.start) for span in rest]
        assert sample.response_mask == b"".join(bytes([is_model]) * length for is_model, length in written)
        trained += [span.turn for span in rest if span.author == token_pb2.AUTHOR_MODEL]
    assert sorted(trained) == list(range(1, outcome.metrics.turns + 1))
    assert sum(sum(sample.response_mask) for sample in outcome.samples) == outcome.metrics.generated_tokens


@pytest.mark.parametrize("tokens", [None, "toy"])
async def test_chats_at_once_are_branches_whose_answers_train_once(open_place: OpenPlace, tokens: str | None) -> None:
    place = await open_place(Loop(best_of_three))
    outcome = await place.over_grpc("three", **({"tokenizer": tokens} if tokens else {}))
    assert (outcome.stop.reason, outcome.reward, outcome.metrics.turns) == ("chosen", 0.5, 5), outcome
    assert [sample.origin.kind for sample in outcome.samples] == [MAIN, BRANCH, BRANCH]
    main, *branches = outcome.samples
    first_answer = next(span for span in main.spans if span.author == token_pb2.AUTHOR_MODEL)
    for branch in branches:
        shared = branch.origin.parent_tokens
        assert (branch.origin.parent_id, shared) == (main.segment_id, first_answer.stop)
        assert [*branch.prompt_ids][:shared] == [*main.prompt_ids, *main.response_ids][:shared]
    check_samples(outcome)
    assert place.accepted("three")


async def test_the_asynchronous_dialect_is_asked_for_each_and_told_the_chosen_one(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    place = await open_place(Loop(best_of_three))
    told = await trainer.play(place, "three")
    assert (told["status"], told["finish_reason"], told["reward"]) == ("COMPLETED", "chosen", 0.5), told
    warmth = [body["temperature"] for body in trainer.asked]
    assert (warmth[0], sorted(warmth[1:4]), warmth[4:]) == (1.0, [0.1, 0.5, 0.9], [1.0])
    assert trainer.lists()[1] == trainer.lists()[2] == trainer.lists()[3]
    chosen = f"{warmth.index(0.5) + 1} answers Three ways, please."
    assert trainer.lists()[4][-2:] == [chosen, "Go on."]
    assert told["final_messages"][:-1] == trainer.asked[4]["messages"]
    assert told["metrics"]["num_llm_calls"] == 5
    assert told["metrics"]["prompt_tokens"] == 10 + 3 * 30 + 50
    assert "final_messages" not in told["extra_fields"]


async def test_ids_that_a_trainer_reports_show_no_drift_in_branches(open_place: OpenPlace) -> None:
    place = await open_place(Loop(best_of_three))
    told = await place.mocked("ids")
    assert (told["status"], told["metrics"]["num_llm_calls"]) == ("COMPLETED", 5), told
    warnings = [(warning["code"], warning["turn"]) for warning in told["extra_fields"]["warnings"]]
    assert sorted(warnings) == [("conversation_unnamed", 3), ("conversation_unnamed", 4)]


async def test_three_chats_in_the_first_turn(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages = list(ctx.request.messages)
        results = await asyncio.gather(*(ctx.chat(messages) for _ in range(3)))
        return ctx.complete([*messages, results[2].message])

    place = await open_place(Loop(play))
    outcome = await place.over_grpc("first")
    assert (outcome.stop.reason, outcome.metrics.turns) == ("stop", 3), outcome
    check_samples(outcome)
    assert [sample.origin.kind for sample in outcome.samples] == [MAIN, BRANCH, BRANCH]
    assert place.accepted("first")


async def test_lists_that_differ_share_what_they_have_in_common(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        parts = [[*messages, user("In parts."), user(f"Part {number}")] for number in range(3)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ctx.chat(part)) for part in parts]
        return ctx.complete([*parts[0], tasks[0].result().message])

    place = await open_place(Loop(play))
    outcome = await place.over_grpc("parts", tokenizer="toy")
    assert (outcome.stop.reason, outcome.metrics.turns) == ("stop", 4), outcome
    assert [sample.origin.kind for sample in outcome.samples] == [MAIN, BRANCH, BRANCH]
    check_samples(outcome)
    assert place.accepted("parts")


async def test_tool_results_that_branches_share_count_once(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    trainer.calls["Add."] = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, result = await say(ctx, user("Add."))
        messages.append(create_tool_result(result.tool_calls[0]["id"], "8"))
        ctx.record_tool_call(3.0)
        results = await asyncio.gather(*(ctx.chat(messages) for _ in range(3)))
        return ctx.complete([*messages, results[0].message])

    told = await trainer.play(await open_place(Loop(play, SCHEMAS)), "tools")
    metrics = told["metrics"]
    assert (told["status"], metrics["num_tool_calls"], metrics["tool_latency_ms"]) == ("COMPLETED", 1, 3.0), told
    assert [len(each) for each in trainer.lists()] == [1, 3, 3, 3]


async def test_each_branch_may_have_another_result_of_a_call(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    trainer.calls["Add."] = [
        {"id": name, "type": "function", "function": {"name": "add", "arguments": "{}"}} for name in "cd"
    ]

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx, user("Add."))
        messages.append(create_tool_result("c", "8"))
        lists = [[*messages, create_tool_result("d", str(number))] for number in range(3)]
        results = await asyncio.gather(*map(ctx.chat, lists))
        return ctx.complete([*lists[0], results[0].message])

    told = await trainer.play(await open_place(Loop(play, SCHEMAS)), "results")
    assert (told["status"], told["metrics"]["num_tool_calls"]) == ("COMPLETED", 4), told
    assert sorted(each[3:] for each in trainer.lists()[1:]) == [["0"], ["1"], ["2"]]


# A chat may be cancelled wherever it waits: after 0 to ROUNDS - 1 iterations of the event loop.
ROUNDS = 8


async def test_a_chat_that_is_given_up_early_leaves_the_others_theirs(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        async def give_up(rounds: int) -> None:
            for _ in range(rounds):
                await asyncio.sleep(0)
            chats[1].cancel()

        for rounds in range(ROUNDS):
            chats: list[asyncio.Task[Any]] = []
            # Created before the chats, so that it runs first in each iteration.
            giving_up = asyncio.create_task(give_up(rounds))
            chats += [asyncio.create_task(ctx.chat([user(f"{rounds}")])) for _ in range(3)]
            results = await asyncio.gather(*chats, return_exceptions=True)
            await giving_up
            assert isinstance(results[1], asyncio.CancelledError)
            assert [each.message["content"].split()[2] for each in (results[0], results[2])] == [f"{rounds}"] * 2
        return ctx.complete([])

    told = await trainer.play(await open_place(Loop(play)), "early", max_turns=5 * ROUNDS)
    assert told["status"] == "COMPLETED", told


async def test_what_a_chat_that_is_given_up_has_appended_is_not_appended_again(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    trainer.calls["Add."] = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]

    async def play(ctx: RolloutContext) -> RolloutResult:
        for rounds in range(ROUNDS):
            messages, _ = await say(ctx, user(f"{rounds}"), user("Add."))
            messages += [create_tool_result("c", "8"), user("And?")]
            chat = asyncio.create_task(ctx.chat(messages))
            for _ in range(rounds):
                await asyncio.sleep(0)
            chat.cancel()
            await asyncio.wait([chat])
            await say(ctx, *messages)
        return ctx.complete([])

    told = await trainer.play(await open_place(Loop(play, SCHEMAS)), "again", max_turns=5 * ROUNDS)
    assert told["status"] == "COMPLETED", told
    assert {tuple(each[3:]) for each in trainer.lists() if len(each) > 2} == {("8", "And?")}


@pytest.mark.parametrize("tokens", [None, "toy"])
async def test_workers_beside_each_other_keep_their_conversations(open_place: OpenPlace, tokens: str | None) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        async def work(number: int) -> list[dict[str, Any]]:
            mine = [*ctx.request.messages, user(f"You are worker {number}.")]
            for _ in range(3):
                mine, _ = await say(ctx, *mine)
                mine.append(user("And?"))
            return mine

        first, _ = await asyncio.gather(work(1), work(2))
        return ctx.complete(first)

    place = await open_place(Loop(play))
    outcome = await place.over_grpc("workers", **({"tokenizer": tokens} if tokens else {}))
    assert (outcome.stop.reason, outcome.metrics.turns, len(outcome.samples)) == ("stop", 6, 2), outcome
    check_samples(outcome)
    assert place.accepted("workers")


async def test_a_chat_that_begins_while_another_waits_is_a_conversation_of_its_own(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    trainer.holds["slow"] = asyncio.Event()

    async def play(ctx: RolloutContext) -> RolloutResult:
        slow = asyncio.create_task(ctx.chat([*ctx.request.messages, user("slow")]))
        await trainer.arrived(1)
        messages, _ = await say(ctx, *ctx.request.messages, user("late"))
        trainer.holds["slow"].set()
        await slow
        return ctx.complete(messages)

    told = await trainer.play(await open_place(Loop(play)), "late")
    assert told["status"] == "COMPLETED", told
    assert [message["content"] for message in told["final_messages"]] == ["Hello", "late", "2 answers late"]
    assert trainer.lists() == [["Hello", "slow"], ["Hello", "late"]]


async def test_a_late_chat_trains_its_own_answer_only(open_place: OpenPlace) -> None:
    """The loop does not have to wait for the other chat."""

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        asked = len(place.trainer.completions)
        waiting = asyncio.create_task(ctx.chat([*messages, user("One")]))
        while len(place.trainer.completions) == asked:  # noqa: ASYNC110 - the trainer has no event for it
            await asyncio.sleep(0.01)
        late, _ = await say(ctx, *messages, user("Two"))
        assert not waiting.done()
        return ctx.complete(late, finish_reason="late")

    place = await open_place(Loop(play))
    await place.script(
        "own",
        ScriptedReply(content="First."),
        ScriptedReply(content="Never.", delay=600),
        ScriptedReply(content="Second."),
    )
    outcome = await place.over_grpc("own", tokenizer="toy")
    assert (outcome.stop.reason, outcome.metrics.turns) == ("late", 2), outcome
    assert [sample.origin.kind for sample in outcome.samples] == [MAIN, SUBAGENT]
    assert sum(sum(sample.response_mask) for sample in outcome.samples) == outcome.metrics.generated_tokens
    late = json.loads(outcome.extra_json)["final_messages"]
    assert [message["content"] for message in late[1:]] == ["First.", "Two", "Second."]


async def test_the_loop_may_stop_waiting_for_a_chat(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    """The first completion is used and the other chat is cancelled, whichever conversation it has."""
    trainer.holds["slow"] = asyncio.Event()

    async def play(ctx: RolloutContext) -> RolloutResult:
        lists = [[*ctx.request.messages, user(text)] for text in ("quick", "slow", "slow")]
        tasks = [asyncio.create_task(ctx.chat(each)) for each in lists]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        [first] = done
        messages, _ = await say(ctx, *lists[0], first.result().message, user("Go on"))
        return ctx.complete(messages)

    told = await trainer.play(await open_place(Loop(play)), "race")
    assert told["status"] == "COMPLETED", told
    question, answer, more = [message["content"] for message in told["final_messages"]][1:4]
    assert (question, answer[1:], more) == ("quick", " answers quick", "Go on")


async def test_a_chat_that_took_too_long_does_not_end_the_rollout(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    trainer.holds["slow"] = asyncio.Event()

    async def play(ctx: RolloutContext) -> RolloutResult:
        slow = asyncio.create_task(ctx.chat([*ctx.request.messages, user("slow")]))
        await trainer.arrived(1)
        slow.cancel()
        await asyncio.wait([slow])
        messages, _ = await say(ctx, *ctx.request.messages, user("shorter"))
        return ctx.complete(messages, finish_reason="second try")

    told = await trainer.play(await open_place(Loop(play)), "slow")
    assert (told["status"], told["finish_reason"]) == ("COMPLETED", "second try"), told
    assert [message["content"] for message in told["extra_fields"]["final_messages"]][1:] == [
        "shorter",
        "2 answers shorter",
    ]


async def test_a_trainer_that_counts_masks_has_counted_a_turn_that_was_given_up(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        waiting = asyncio.create_task(ctx.chat(list(ctx.request.messages)))
        while not place.requests("counted"):  # noqa: ASYNC110 - the trainer has no event for it
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        return ctx.complete(list(ctx.request.messages))

    place = await open_place(Loop(play))
    await place.script("counted", ScriptedReply(content="Never.", delay=600))
    told = await place.masked("counted")
    assert told["status"] == "ERROR"
    assert "cancelled the completion request" in told["error_message"]


async def test_one_of_several_that_fails_ends_the_rollout(open_place: OpenPlace, trainer: LenientTrainer) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        texts = ("one", "refuse", "two")
        results = await asyncio.gather(*(ctx.chat([user(text)]) for text in texts), return_exceptions=True)
        assert any(isinstance(each, OsmosisRolloutError) for each in results)
        return ctx.error("one of them failed")

    told = await trainer.play(await open_place(Loop(play)), "fails")
    assert (told["status"], told["extra_fields"]["error_category"]) == ("ERROR", "trainer_client_error"), told


async def test_a_trainer_that_counts_masks_has_one_conversation(open_place: OpenPlace) -> None:
    async def play(ctx: RolloutContext) -> RolloutResult:
        await asyncio.gather(*(ctx.chat(list(ctx.request.messages)) for _ in range(3)))
        raise AssertionError

    place = await open_place(Loop(play))
    told = await place.masked("three")
    assert (told["status"], told["extra_fields"]["error_category"]) == ("ERROR", "validation_error")
    assert "For several conversations use a gRPC trainer" in told["error_message"]
    assert len(place.requests("three")) <= 1


async def test_a_side_question_leaves_the_conversation_that_is_completed(
    open_place: OpenPlace, trainer: LenientTrainer
) -> None:
    """The last list continues an earlier conversation, not the most recent one."""

    async def play(ctx: RolloutContext) -> RolloutResult:
        messages, _ = await say(ctx)
        await ctx.chat([user("Was that right?")])
        return ctx.complete([*messages, user("Thanks.")], reward=1.0)

    told = await trainer.play(await open_place(Loop(play)), "aside")
    assert [message["content"] for message in told["final_messages"]] == ["Hello", "1 answers Hello", "Thanks."]
    assert "final_messages" not in told["extra_fields"]
