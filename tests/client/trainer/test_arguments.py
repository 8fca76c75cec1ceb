"""Wrong arguments of `Trainer`, `SyncTrainer` and `rollouts`: refused at once, with what to do."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from rollout_client.trainer import Generated, Prompt, SamplingParams, SyncTrainer, Trainer, Turn, parsers
from rollout_server.app import Server
from rollout_server.calculator import Calculator
from rollout_server.local_stack.loop_thread import LoopThread

from tests.support.start_requests import settings

NOWHERE = "127.0.0.1:1"
MESSAGE = {"role": "user", "content": "Hi."}


async def generate(turn: Turn) -> Generated: ...


def plain(turn: Turn) -> Generated: ...


def unannotated(turn):  # type: ignore[no-untyped-def]
    """Return what cannot be awaited."""


def awaitable(turn: Turn) -> Awaitable[Generated]:
    return generate(turn)


@functools.wraps(generate)
def decorated(*arguments: Any) -> Any:
    return generate(*arguments)


class Engine:
    """Model whose methods are passed."""

    def __call__(self, turn: Turn) -> Generated: ...

    def plain(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated: ...


def decode(ids: Sequence[int]) -> str: ...


async def with_none(turn: Turn | None = None) -> Generated: ...


async def with_three(ids: Sequence[int], sampling: SamplingParams, engine: Any) -> Generated: ...


async def with_keyword(turn: Turn, *, engine: Any) -> Generated: ...


async def batch_of_two(turns: Sequence[Turn], engine: Any) -> list[Generated]: ...


def plain_batch(turns: Sequence[Turn]) -> list[Generated]: ...


NO_COROUTINE = "generate must be a coroutine function: write `async def generate`, or use SyncTrainer"
CALLED_AS = r"generate is called as generate\(turn\) or generate\(prompt_ids, sampling\), but its parameters are "
WRONG = [
    ({"end_ids": 7}, r"end_ids must be a collection of token ids such as \{7\}, not int"),
    ({"end_ids": "<|im_end|>"}, r"end_ids must be a collection of token ids such as \{7\}, not str"),
    ({"end_ids": b"7"}, r"end_ids must be a collection of token ids such as \{7\}, not bytes"),
    ({"end_ids": None}, r"end_ids must be a collection of token ids such as \{7\}, not NoneType"),
    ({"end_ids": ["<|im_end|>"]}, "end_ids must contain integers"),
    ({"end_ids": {None}}, "end_ids must contain integers"),
    ({"end_ids": {-1}}, r"end_ids contains an id outside 0 to 2\^31 - 1"),
    ({"parse": "hermes"}, "parse must be a function such as rollout_client.trainer.parsers.hermes, not str"),
    ({"parse": lambda: None}, r"parse is called as parse\(text\), but its parameters are \(\)"),
    ({"decode": lambda: ""}, r"decode is called as decode\(ids\), but its parameters are \(\)"),
    ({"render": "chatml"}, r"render must be callable"),
    ({"render": lambda messages: []}, r"render is called as render\(messages, tools\), but .* \(messages\)"),
    ({"generate": plain}, NO_COROUTINE),
    ({"generate": functools.partial(plain)}, NO_COROUTINE),
    ({"generate": Engine()}, NO_COROUTINE),
    ({"generate": Engine().plain}, NO_COROUTINE),
    ({"generate": with_none}, CALLED_AS + r"\(turn: .*\)"),
    ({"generate": with_three}, CALLED_AS + r"\(ids: .*\)"),
    ({"generate": with_keyword}, CALLED_AS + r"\(turn: .*\)"),
    (
        {"generate": None, "generate_batch": plain_batch},
        "generate_batch must be a coroutine function: write `async def g",
    ),
    ({"generate": None, "generate_batch": batch_of_two}, r"generate_batch is called as generate_batch\(turns\), but "),
]


@pytest.mark.parametrize(("fields", "text"), WRONG)
def test_a_wrong_argument_is_refused_at_construction(fields: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        Trainer(NOWHERE, **{"generate": generate, "decode": decode, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        generate,
        awaitable,
        unannotated,
        decorated,
        Engine().generate,
        lambda turn: Engine().generate(turn.ids, turn.sampling),
    ],
)
def test_a_function_that_may_return_an_awaitable_is_accepted(given: Any) -> None:
    Trainer(NOWHERE, generate=given, decode=str, parse=parsers.hermes, end_ids=range(2))


@pytest.mark.parametrize(
    ("name", "function"),
    [("generate", lambda turn: Generated([7])), ("generate_batch", lambda turns: [Generated([7])] * len(turns))],
)
async def test_a_function_that_returns_none_fails_with_what_to_do(
    name: str, function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with Server([Calculator()], settings()) as server:
        given: dict[str, Any] = {name: function, "decode": decode}
        async with Trainer(f"127.0.0.1:{server.grpc_port}", **given) as trainer:
            async for group in trainer.rollouts(["Hi."], n=1, tokenizer="toy"):
                assert all(each.reward is None for each in group.rollouts)
    assert f"which is not awaitable: write `async def {name}`, or use SyncTrainer" in caplog.text


@pytest.mark.parametrize(("fields", "text"), [each for each in WRONG if "coroutine" not in each[1]])
def test_so_it_is_without_asyncio(fields: dict[str, Any], text: str) -> None:
    SyncTrainer(NOWHERE, generate=plain, decode=decode)
    with pytest.raises((TypeError, ValueError), match=text):
        SyncTrainer(NOWHERE, **{"generate": plain, "decode": decode, **fields})


PROMPTS: list[tuple[Any, str]] = [
    ("Hi.", r"prompts must be a list of prompts, not str: write rollouts\(\[prompt\]\)"),
    (b"Hi.", "prompts must be a list of prompts, not bytes"),
    (MESSAGE, "prompts must be a list of prompts, not dict"),
    (Prompt([MESSAGE]), "prompts must be a list of prompts, not Prompt"),
    (7, "prompts must be a list of prompts, not int"),
    (
        [MESSAGE],
        r"a prompt must be a str, a list of messages or a Prompt, not dict; .* rollouts\(\[\[message, ...\]\]\)",
    ),
    ([b"Hi."], "a prompt must be a str, a list of messages or a Prompt, not bytes"),
]


@pytest.mark.parametrize(("prompts", "text"), PROMPTS)
async def test_one_prompt_is_no_list_of_prompts(prompts: Any, text: str) -> None:
    async with Server([Calculator()], settings()) as server:
        trainer = Trainer(f"127.0.0.1:{server.grpc_port}", generate=generate, decode=decode)
        async with trainer:
            with pytest.raises(TypeError, match=text):
                _ = [each async for each in trainer.rollouts(prompts, n=1, tokenizer="toy")]


def test_nor_is_it_without_asyncio() -> None:
    with LoopThread() as loop:
        server = loop.enter(Server([Calculator()], settings()))
        try:
            with SyncTrainer(f"127.0.0.1:{server.grpc_port}", generate=plain, decode=decode) as trainer:
                for prompts, text in PROMPTS:
                    with pytest.raises(TypeError, match=text):
                        next(trainer.rollouts(prompts, n=1, tokenizer="toy"))
        finally:
            loop.leave(server)
