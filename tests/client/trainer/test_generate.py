"""What `generate` is given: the turn with its place in the run, its images and the time that is left."""

from __future__ import annotations

import asyncio
import base64
import functools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from osmosis.rollout.v1 import completion_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2
from rollout_client.trainer import (
    Generated,
    Prompt,
    SamplingParams,
    Serving,
    Trainer,
    TryAgainLater,
    Turn,
    TurnImage,
    parsers,
)
from rollout_client.trainer.batches import Batches
from rollout_client.trainer.generation import takes_turn
from rollout_client.trainer.policy import AnnouncedPolicy
from rollout_server import Agent, Image, Run, tool
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.client.trainer.asker import Limits, refusal, standing
from tests.support.start_requests import settings
from tests.support.toy_model import ADDS, END, ToyModel, by_turns, decode, encode, until

QUESTION = "Please calculate 5 plus 3."
PROMPT = encode("<|im_start|>user\nAdd.<|im_end|>\n<|im_start|>assistant\n")
RESULT = encode("\n<|im_start|>user\n8<|im_end|>\n<|im_start|>assistant\n")
PIXEL = b"\x89PNG\r\n\x1a\n pixel"
PHOTO = '<tool_call>\n{"name": "photo", "arguments": {}}\n</tool_call>'
DATA_URL = "data:image/png;base64," + base64.b64encode(PIXEL).decode()


class Watching:
    """A model that takes turns and keeps them."""

    def __init__(self, says: Callable[[str], str] = ADDS) -> None:
        self.model = ToyModel(says)
        self.turns: list[Turn] = []

    async def __call__(self, turn: Turn) -> Generated:
        self.turns.append(turn)
        return await self.model(turn.ids, turn.sampling)


async def with_default(turn: Turn, temperature: float = 1.0, *, seed: int = 0) -> Generated: ...
async def with_two(ids: Sequence[int], sampling: SamplingParams) -> Generated: ...
async def with_any(*arguments: Any, **named: Any) -> Generated: ...
async def with_none(turn: Turn | None = None) -> Generated: ...
async def with_keyword(*, turn: Turn) -> Generated: ...


def test_the_signature_decides_once() -> None:
    assert [takes_turn(each) for each in (Watching(), with_default, lambda turn, /: turn)] == [True] * 3
    assert takes_turn(functools.partial(with_two, [1]))
    others = (
        ToyModel(),
        with_two,
        with_any,
        with_none,
        with_keyword,
        functools.partial(with_two, [1], SamplingParams()),
    )
    assert [takes_turn(each) for each in others] == [False] * 6
    assert not takes_turn(max)  # a signature that cannot be read


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with Server([Calculator(), Branching(), Showing()], settings()) as server:
        yield f"127.0.0.1:{server.grpc_port}"


def trainer_of(address: str, model: Any, **fields: Any) -> Trainer:
    return Trainer(address, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields)


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_a_turn_has_its_place(address: str, serving: Any) -> None:
    model = Watching()
    prompts = [Prompt([{"role": "user", "content": QUESTION}], group_id=name) for name in ("p1", "p2")]
    async with trainer_of(address, model, serving=serving) as trainer:
        fields = {"tokenizer": "toy", "limits": {"time": 300}, "sampling": {"max_tokens": 99}, "agent": "calculator"}
        groups = [each async for each in trainer.rollouts(prompts, n=3, **fields)]
    rollouts = {each.uid: (group.id, index, each) for group in groups for index, each in enumerate(group.rollouts)}
    assert {turn.uid for turn in model.turns} == set(rollouts)
    for turn in model.turns:
        group_id, index, finished = rollouts[turn.uid]
        assert (turn.group_id, turn.index, turn.segment_id) == (group_id, index, "0")
        assert turn.rollout_id == finished.rollout.spec.rollout_id
        assert (turn.sampling.max_tokens, turn.images) == (99, ())
        assert turn.seconds_left is not None
        assert 0 < turn.seconds_left <= 300
    for uid, (_, _, finished) in rollouts.items():
        first, second = sorted((turn for turn in model.turns if turn.uid == uid), key=lambda turn: turn.turn)
        (sample,) = finished.samples
        assert (first.turn, second.turn) == (1, 2)
        assert list(first.ids) == sample.prompt_ids
        assert list(second.ids) == [*sample.prompt_ids, *sample.response_ids][: len(second.ids)]
        assert first.seconds_left is not None
        assert second.seconds_left is not None
        assert first.seconds_left >= second.seconds_left


@pytest.mark.parametrize("serving", [None, Serving()])
async def test_a_turn_that_is_asked_for_again_has_less_time(address: str, serving: Any) -> None:
    model = Watching()

    async def busy(turn: Turn) -> Generated:
        done = await model(turn)
        if len(model.turns) == 1:
            raise TryAgainLater(0.02)
        return done

    async with trainer_of(address, busy, serving=serving) as trainer:
        fields = {"tokenizer": "toy", "limits": {"time": 300}, "agent": "calculator"}
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=1, **fields)]
    assert group.rollouts[0].error == ""
    left = [turn.seconds_left or 0.0 for turn in model.turns]
    assert [turn.turn for turn in model.turns] == [1, 1, 2]
    assert left[0] - 0.02 >= left[1] >= left[2] > 0


class Branching(Agent):
    """Samples once, and then twice at the same time: in its conversation and in a branch of it."""

    name = "branching"

    async def play(self, run: Run) -> None:
        await run.sample()
        await run.append({"role": "user", "content": "Go on."})
        branch = await run.fork()
        await asyncio.gather(run.sample(), branch.sample())


async def test_turns_of_a_rollout_are_told_apart(address: str) -> None:
    model = Watching(by_turns("It is 8."))
    async with trainer_of(address, model) as trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=2, tokenizer="toy", agent="branching")]
    for finished in group.rollouts:
        turns = [turn for turn in model.turns if turn.uid == finished.uid]
        assert {turn.segment_id for turn in turns} == {sample.segment_id for sample in finished.samples}
        keys = [(turn.segment_id, turn.turn) for turn in turns]
        assert len(set(keys)) == len(keys) == 3


@pytest.mark.parametrize("batches", [False, True])
async def test_the_time_left_is_that_of_the_beginning_of_the_call(batches: bool) -> None:
    """A turn waits for a free slot, or for a batch; its rollout's time goes on."""
    model, gate, running = Watching(), asyncio.Event(), asyncio.Event()

    async def slow(turn: Turn) -> Generated:
        running.set()
        await gate.wait()
        return await model(turn)

    async def slow_batch(turns: Sequence[Turn]) -> list[Generated | Exception]:
        return [await slow(turn) for turn in turns]

    generate = Batches(slow_batch, 1, 80_000.0, AnnouncedPolicy()).generate if batches else slow
    async with standing(generate, Limits(generating=2 if batches else 1)) as stand:
        first = asyncio.ensure_future(stand.completions.Complete(stand.asker(uid="u1").request(PROMPT)))
        await running.wait()
        request = stand.asker(uid="u2").request(PROMPT, time_left=Duration(seconds=40))
        second = asyncio.ensure_future(stand.completions.Complete(request))
        await until(lambda: len(stand.listener._turns._running) == 2)
        await asyncio.sleep(0.01)
        came = time.monotonic()
        await asyncio.sleep(0.1)
        waited = time.monotonic() - came
        gate.set()
        await asyncio.gather(first, second)
    assert model.turns[0].seconds_left is None
    left = model.turns[1].seconds_left
    assert left is not None
    assert 0 < left <= 40 - waited


async def test_the_time_left_is_what_the_request_says() -> None:
    model = Watching()
    async with standing(model) as stand:
        asker = stand.asker()
        first = asker.request(PROMPT)
        asker.took(first, await stand.completions.Complete(first))
        await stand.completions.Complete(asker.request(RESULT, time_left=Duration(seconds=0)))
        other = stand.asker(uid="u2").request(PROMPT, time_left=Duration(seconds=40, nanos=500_000_000))
        await stand.completions.Complete(other)
    none, over, left = (turn.seconds_left for turn in model.turns)
    assert (none, over) == (None, 0.0)
    assert left is not None
    assert 0 < left <= 40.5
    assert [(turn.group_id, turn.index) for turn in model.turns] == [("", 0)] * 3  # the trainer did not start them


def media(offset: int, length: int = 2, kind: str = "image/png", data: bytes = PIXEL) -> pb.MediaSpan:
    return pb.MediaSpan(offset=offset, length=length, blob=message_pb2.Blob(media_type=kind, inline=data))


def with_media(request: pb.CompleteRequest, *spans: pb.MediaSpan) -> pb.CompleteRequest:
    request.new_tokens.media.extend(spans)
    return request


async def test_images_of_tokens_stay_with_their_segment_and_its_branches() -> None:
    model = Watching()
    async with standing(model, Limits(remembered=1)) as stand:
        asker = stand.asker()
        first = with_media(asker.request(PROMPT), media(1), media(4, data=b"second"))
        asker.took(first, await stand.completions.Complete(first))
        branch = stand.asker(segment="1", tokens=list(asker.tokens), turns=list(asker.turns), base=asker.base)
        branch.turn, branch.messages = 2, 2
        added = len(asker.tokens) + 3
        second = with_media(asker.request(RESULT), media(added, 1, "image/jpeg", b"third"))
        asker.took(second, await stand.completions.Complete(second))
        await branch.ask(RESULT)
        await asker.ask(RESULT)
        await stand.asker(uid="other").ask(PROMPT)  # drops the record of the first rollout
        whole = with_media(
            asker.whole(RESULT), media(1), media(4, data=b"second"), media(added, 1, "image/jpeg", b"third")
        )
        asker.took(whole, await stand.completions.Complete(whole))
        await asker.ask(RESULT)
    prompt = (TurnImage(1, 2, "image/png", PIXEL), TurnImage(4, 2, "image/png", b"second"))
    all_three = (*prompt, TurnImage(added, 1, "image/jpeg", b"third"))
    assert [turn.images for turn in model.turns] == [prompt, all_three, prompt, all_three, (), all_three, all_three]


@pytest.mark.parametrize(
    ("span", "code", "text"),
    [
        (media(0, 0), grpc.StatusCode.INVALID_ARGUMENT, "one or more of the"),
        (media(len(PROMPT) - 1, 2), grpc.StatusCode.INVALID_ARGUMENT, "one or more of the"),
        (media(0, kind="audio/wav"), grpc.StatusCode.UNIMPLEMENTED, "not an image"),
        (media(0, data=b""), grpc.StatusCode.UNIMPLEMENTED, "not an image with its bytes"),
    ],
)
async def test_other_media_are_refused_by_name(span: pb.MediaSpan, code: grpc.StatusCode, text: str) -> None:
    model = Watching()
    async with standing(model) as stand:
        request = with_media(stand.asker().request(PROMPT), media(1), span)
        error = await refusal(stand.completions.Complete(request))
    assert (error.code, model.turns) == (code, [])
    assert "new_tokens.media[1]" in error.message
    assert text in error.message


async def test_a_function_of_ids_is_not_given_prompts_with_images() -> None:
    async with standing(ToyModel()) as stand:
        error = await refusal(stand.completions.Complete(with_media(stand.asker().request(PROMPT), media(1))))
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "MEDIA")
    assert "generate(turn)" in error.message


@tool
async def photo() -> list[str | Image]:
    """Take a photo."""
    return ["Here:", Image(b"a photo", "image/jpeg")]


class Showing(Agent):
    """Has a tool that returns an image."""

    name = "showing"
    tools = (photo,)


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
    """A template that prints images as `<image>`."""
    text = ""
    for each in messages:
        parts = each["content"] if isinstance(each["content"], list) else [{"type": "text", "text": each["content"]}]
        text += f"<|im_start|>{each['role']}\n" + "".join(part.get("text", "<image>") for part in parts)
        text += "".join(PHOTO for _ in each.get("tool_calls") or ())
        text += "<|im_end|>"
    return encode(text + "<|im_start|>assistant\n")


def question(url: str) -> Prompt:
    parts = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": url}}]
    return Prompt([{"role": "user", "content": parts}])


SHOWN = {"agent": "showing", "token_mode": "messages", "n": 2}


async def test_images_of_messages_and_tool_results_come_as_they_are(address: str) -> None:
    model = Watching(by_turns(PHOTO, "A cat."))
    async with trainer_of(address, model, render=render) as trainer:
        (group,) = [each async for each in trainer.rollouts([question(DATA_URL)], **SHOWN)]
    first = TurnImage(None, None, "image/png", PIXEL)
    second = TurnImage(None, None, "image/jpeg", b"a photo")
    assert [each.error for each in group.rollouts] == [""] * 2
    assert {(turn.turn, tuple(turn.images)) for turn in model.turns} == {(1, (first,)), (2, (first, second))}


@pytest.mark.parametrize(
    ("model", "url", "text"),
    [
        (ToyModel(), DATA_URL, "does not see them; give the trainer a function generate(turn)"),
        (Watching(), "https://example.org/cat.png", "messages[0].content[1] is an image that is not in the message"),
        (Watching(), "data:image/png;base64,%%%", "messages[0].content[1] is an image that is not in the message"),
    ],
)
async def test_images_that_generate_cannot_see_are_refused_by_name(
    address: str, model: Any, url: str, text: str
) -> None:
    async with trainer_of(address, model, render=render) as trainer:
        (group,) = [each async for each in trainer.rollouts([question(url)], **SHOWN)]
    for finished in group.rollouts:
        assert finished.end == "failure"
        assert text in finished.error


async def test_the_server_refuses_images_in_token_mode_by_name(address: str) -> None:
    model = Watching()
    async with trainer_of(address, model) as trainer:
        (group,) = [
            each async for each in trainer.rollouts([question(DATA_URL)], n=1, tokenizer="toy", agent="showing")
        ]
    assert "messages[0].content[1] is not text" in group.rollouts[0].error
    assert model.turns == []
