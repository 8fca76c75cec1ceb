"""`SyncTrainer` with a server in another process, from threads and programs without an event loop."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rollout_client import AsyncClient, Client, Retry, RolloutError
from rollout_client.trainer import (
    Finished,
    Generated,
    ParsedCompletion,
    Prompt,
    SamplingParams,
    SyncTrainer,
    TryAgainLater,
    Turn,
    parsers,
)

from tests.support.processes import ANY_PORTS, COMMAND, environment
from tests.support.toy_model import ADDS, END, decode, encode

QUESTION = "Please calculate 5 plus 3."


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with subprocess.Popen(
        [*COMMAND, "serve", *ANY_PORTS], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        found = next(filter(None, (re.search(r"serving gRPC on port (\d+)", line) for line in process.stderr)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield f"127.0.0.1:{found[1]}"
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name == "SyncTrainer"] == []


def completion(ids: Sequence[int]) -> Generated:
    return Generated([*encode(ADDS(decode(ids))), END], policy_version="policy-1")


def generate(turn: Turn) -> Generated:
    return completion(turn.ids)


def trainer_of(server: Any, model: Any = generate, **fields: Any) -> SyncTrainer:
    return SyncTrainer(
        server, **{"generate": model, "decode": decode, "parse": parsers.hermes, "end_ids": {END}, **fields}
    )


def is_right(rollout: Finished) -> bool:
    """Whether a rollout ended well with every token that was generated."""
    trained = [
        token
        for sample in rollout.samples
        for token, trains in zip(sample.response_ids, sample.response_mask, strict=True)
        if trains
    ]
    told = [*encode(ADDS("<|im_start|>assistant")), END, *encode(ADDS(2 * "<|im_start|>assistant")), END]
    return (rollout.error, rollout.mismatch, rollout.checked) == ("", None, True) and trained == told


def ends(address: str, group_id: str) -> list[str]:
    """How the rollouts of a group ended; empty for one that runs."""
    with Client(address) as client:
        uids = [each.uid for each in client.list(group_id=group_id)]
        return [client.wait(uid, timeout=30).outcome.WhichOneof("end") or "" for uid in uids]


def test_all_functions_are_called_in_the_thread_that_iterates(address: str) -> None:
    threads = list[tuple[str, str]]()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(argument: Any) -> Any:
            threads.append((name, threading.current_thread().name))
            return function(argument)

        return call

    def prompts() -> Iterator[str]:
        for _ in range(3):
            threads.append(("prompts", threading.current_thread().name))
            yield QUESTION

    def iterate() -> None:
        functions = {
            "generate": watched("generate", generate),
            "decode": watched("decode", decode),
            "parse": watched("parse", parsers.hermes),
        }
        with SyncTrainer(address, end_ids={END}, **functions) as trainer:
            groups.extend(trainer.rollouts(prompts(), n=4, tokenizer="toy"))

    groups = list[Any]()
    iterating = threading.Thread(target=iterate, name="training")
    iterating.start()
    iterating.join()
    assert [is_right(each) for group in groups for each in group.rollouts] == [True] * 12
    assert set(threads) == {(name, "training") for name in ("generate", "decode", "parse", "prompts")}
    assert len([name for name, _ in threads if name == "generate"]) == 24


def of_ids(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
    return completion(prompt_ids)


async def on_the_loop(turn: Turn) -> Generated:
    assert threading.current_thread().name == "SyncTrainer"
    return completion(turn.ids)


@pytest.mark.parametrize("model", [generate, of_ids, on_the_loop])
def test_each_form_of_generate(address: str, model: Any) -> None:
    with trainer_of(address, model) as trainer:
        (group,) = trainer.rollouts([QUESTION], n=2, tokenizer="toy")
    assert [is_right(each) for each in group.rollouts] == [True] * 2


def test_groups_come_in_order_and_steps_follow_each_other(address: str) -> None:
    prompts = [Prompt([{"role": "user", "content": QUESTION}], group_id=f"g{index}") for index in range(12)]
    with trainer_of(address) as trainer:
        for _ in range(2):
            order = [group.id for group in trainer.rollouts(prompts, n=2, at_once=8, in_order=True, tokenizer="toy")]
            assert order == [prompt.group_id for prompt in prompts]


def test_leaving_the_loop_cancels_the_rest(address: str) -> None:
    taken = list[str]()

    def endless() -> Iterator[Prompt]:
        for index in itertools.count():
            taken.append(f"endless-{index}")
            yield Prompt([{"role": "user", "content": QUESTION}], group_id=taken[-1])

    with trainer_of(address) as trainer:
        with closing(trainer.rollouts(endless(), n=2, at_once=8, in_order=True, tokenizer="toy")) as groups:
            assert next(groups).id == "endless-0"
        assert 1 <= len(taken) <= 8
        assert ends(address, "endless-0") == ["stop"] * 2
        assert set(ends(address, taken[-1])) <= {"stop", "cancellation"}
        assert len(list(trainer.rollouts([QUESTION], n=2, tokenizer="toy"))) == 1


def test_an_error_of_the_loop_is_raised_and_ends_everything(address: str) -> None:
    prompts = [Prompt([{"role": "user", "content": QUESTION}], group_id=f"error-{index}") for index in range(4)]

    def train() -> None:
        with trainer_of(address) as trainer:
            for _ in trainer.rollouts(prompts, n=2, at_once=4, tokenizer="toy"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    found = [ends(address, prompt.group_id) for prompt in prompts]
    assert {end for each in found for end in each} <= {"stop", "cancellation"}


def test_an_error_of_the_prompts_is_raised(address: str) -> None:
    def prompts() -> Iterator[str]:
        yield QUESTION
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), trainer_of(address) as trainer:
        list(trainer.rollouts(prompts(), n=2, tokenizer="toy"))


@pytest.mark.parametrize("error", [ValueError("secret"), StopIteration("secret")])
def test_an_error_of_generate_fails_its_rollout_alone(address: str, error: Exception) -> None:
    def failing(turn: Turn) -> Generated:
        if turn.index == 1:
            raise error
        return generate(turn)

    with trainer_of(address, failing) as trainer:
        (group,) = trainer.rollouts([QUESTION], n=3, tokenizer="toy")
    assert [each.end for each in group.rollouts] == ["stop", "failure", "stop"]
    assert "generate failed in the trainer" in group.rollouts[1].error
    assert "secret" not in group.rollouts[1].error


def test_errors_of_the_other_functions_fail_the_rollout(address: str) -> None:
    def parse(text: str) -> ParsedCompletion:
        raise ValueError("secret")

    with trainer_of(address, parse=parse) as trainer:
        (group,) = trainer.rollouts([QUESTION], n=1, tokenizer="toy")
    assert "parse failed in the trainer" in group.rollouts[0].error


def test_generate_may_postpone_a_turn(address: str) -> None:
    postponed = set[tuple[str, int]]()

    def busy(turn: Turn) -> Generated:
        if (turn.uid, turn.turn) not in postponed:
            postponed.add((turn.uid, turn.turn))
            raise TryAgainLater(0.01)
        return generate(turn)

    with trainer_of(address, busy) as trainer:
        (group,) = trainer.rollouts([QUESTION], n=2, tokenizer="toy")
    assert [is_right(each) for each in group.rollouts] == [True] * 2
    assert len(postponed) == 4


def test_only_one_thread_waits(address: str) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def gated(turn: Turn) -> Generated:
        begun.set()
        assert go_on.wait(30)
        return generate(turn)

    with trainer_of(address, gated) as trainer:
        groups = list[Any]()
        first = threading.Thread(target=lambda: groups.extend(trainer.rollouts([QUESTION], n=2, tokenizer="toy")))
        first.start()
        assert begun.wait(30)
        with pytest.raises(RuntimeError, match="one thread at a time"):
            next(trainer.rollouts([QUESTION], n=1, tokenizer="toy"))
        go_on.set()
        first.join()
    assert [is_right(each) for each in groups[0].rollouts] == [True] * 2


def test_two_loops_may_alternate(address: str) -> None:
    with trainer_of(address) as trainer:
        both = [trainer.rollouts([QUESTION] * 3, n=2, tokenizer="toy") for _ in range(2)]
        pairs = list(zip(*both, strict=True))
    assert [is_right(each) for pair in pairs for group in pair for each in group.rollouts] == [True] * 12


def test_a_client_of_its_own_is_used_and_closed(address: str) -> None:
    client = AsyncClient(address)
    with trainer_of(client) as trainer:
        assert len(list(trainer.rollouts([QUESTION], n=1, tokenizer="toy"))) == 1
    with pytest.raises(RuntimeError, match="closed"):
        client._channel.check()


def test_wrong_use_is_told(address: str) -> None:
    trainer = trainer_of(address)
    with pytest.raises(RuntimeError, match="within `with`"):
        next(trainer.rollouts([QUESTION], tokenizer="toy"))
    with trainer:
        left = trainer.rollouts([QUESTION], n=1, at_once=1, tokenizer="toy")
        next(left)
        with pytest.raises(ValueError, match="n must be 1 or more"):
            next(trainer.rollouts([QUESTION], n=0, tokenizer="toy"))
    left.close()
    with pytest.raises(RuntimeError, match="only once"), trainer:
        pass
    with pytest.raises(RuntimeError, match="within `with`"):
        next(trainer.rollouts([QUESTION], tokenizer="toy"))
    with pytest.raises(TypeError, match="generate must be given and callable"):
        trainer_of(address, None)
    nowhere = AsyncClient("127.0.0.1:9", retry=Retry(patience=0.2))
    with pytest.raises(RolloutError), trainer_of(nowhere):
        pass


PROGRAM = f"""
import sys, time
from rollout_client.trainer import Generated, Prompt, SyncTrainer
address, ending = sys.argv[1:]

def generate(turn):
    if ending == "wait":
        print("begun", flush=True)
        time.sleep(600)
    return Generated([{END}])

trainer = SyncTrainer(address, generate=generate, decode=lambda ids: "")
prompts = [Prompt([{{"role": "user", "content": "Hi."}}], group_id=f"{{ending}}-{{index}}") for index in range(20)]
if ending == "never left":
    trainer.__enter__()
    groups = trainer.rollouts(prompts, n=2, at_once=4, tokenizer="toy")
    next(groups)
else:
    with trainer:
        for group in trainer.rollouts(prompts, n=2, at_once=4, tokenizer="toy"):
            print("begun", flush=True)
            if ending == "exit":
                sys.exit(3)
            if ending == "body":
                time.sleep(600)
"""


@pytest.mark.parametrize(("ending", "code"), [("exit", 3), ("never left", 0), ("wait", None), ("body", None)])
def test_programs_end(address: str, tmp_path: Path, ending: str, code: int | None) -> None:
    """A program that hangs would not end: the test's own time limit finds it."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, address, ending],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if code is None:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == (code if code is not None else -signal.SIGINT), errors
    if code is None:
        assert errors.rstrip().endswith("KeyboardInterrupt")
    else:
        assert errors == ""
    found = [ends(address, f"{ending}-{index}") for index in range(2)]
    assert {end for each in found for end in each} <= {"stop", "cancellation"}
