"""Groups of rollouts from a real server, with every token compared to the generated ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from socket import socket
from typing import Any

import grpc
import pytest
import trustme
from rollout_client import AsyncClient, RolloutError, RolloutFailed
from rollout_client.trainer import Generated, Prompt, SamplingParams, Serving, Trainer, parsers
from rollout_server import Run
from rollout_server.app import Server
from rollout_server.calculator import Calculator

from tests.support.start_requests import settings
from tests.support.tcp_proxy import TcpProxy
from tests.support.toy_model import CALL, END, ToyModel, by_turns, decode, encode, until

QUESTION = "Please calculate 5 plus 3."


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """The address of a server with the calculator."""
    async with Server([Calculator()], settings()) as server:
        yield f"127.0.0.1:{server.grpc_port}"


def trainer_of(address: str, model: ToyModel, **fields: object) -> Trainer:
    """A trainer with the toy model."""
    return Trainer(address, generate=model, decode=decode, parse=parsers.hermes, end_ids={END}, **fields)  # type: ignore[arg-type]


async def test_a_group_is_what_the_model_wrote(address: str) -> None:
    model = ToyModel(by_turns("Let me add.\n" + CALL, "It is 8.\n#### 8"))
    prompt = Prompt([{"role": "user", "content": QUESTION}], group_id="p1", metadata={"ground_truth": "8"})
    async with trainer_of(address, model) as trainer:
        (group,) = [
            each async for each in trainer.rollouts([prompt], n=3, tokenizer="toy", sampling={"max_tokens": 99})
        ]
    assert (group.id, group.prompt, len(group.rollouts)) == ("p1", prompt, 3)
    assert len({rollout.uid for rollout in group.rollouts}) == 3
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        assert (rollout.mismatch, rollout.checked, rollout.error, rollout.reward) == (None, True, "", 1.0)
        assert (sample.group_id, sample.end, sample.verified) == ("p1", "stop", True)
        trained = [token for token, trains in zip(sample.response_ids, sample.response_mask, strict=True) if trains]
        assert trained == [*encode("Let me add.\n" + CALL), END, *encode("It is 8.\n#### 8"), END]
        assert {span.policy_version for span in sample.spans or () if span.trains} == {"policy-1"}
        assert sample.logprobs is not None
        assert all(
            bool(value) == bool(trains) for value, trains in zip(sample.logprobs, sample.response_mask, strict=True)
        )
        assert rollout.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 5, "b": 3}'
    assert len(model.prompts) == 6
    assert {sampling.max_tokens for sampling in model.samplings} == {99}
    assert max(model.prompts, key=len) == [*sample.prompt_ids, *sample.response_ids][: len(max(model.prompts, key=len))]


class Ranked(Calculator):
    """Ranks the rollouts of a group by their index."""

    async def reward_group(self, runs: Sequence[Run]) -> list[float]:
        """Return the index of each run, and behind the point the number of runs."""
        return [(run.request.group_index or 0) + len(runs) / 10 for run in runs]


async def test_the_rollouts_of_a_stream_wait_for_the_reward_of_their_group() -> None:
    """Two slots are enough for five rollouts, and a group id may be used again in the next step."""
    prompt = Prompt([{"role": "user", "content": QUESTION}], group_id="p1")
    async with Server([Ranked()], settings(max_running=2)) as server:
        trainer = trainer_of(f"127.0.0.1:{server.grpc_port}", ToyModel())
        async with trainer:
            steps = [[each async for each in trainer.rollouts([prompt], n=5, tokenizer="toy")] for _ in range(2)]
    for (group,) in steps:
        assert sorted(each.reward or 0.0 for each in group.rollouts) == [0.5, 1.5, 2.5, 3.5, 4.5]
        assert {each.samples[0].reward for each in group.rollouts} == {0.5, 1.5, 2.5, 3.5, 4.5}
        assert [list(each.rollout.outcome.warnings) for each in group.rollouts] == [[]] * 5


async def test_a_failed_rollout_of_a_stream_does_not_delay_its_group() -> None:
    model, failing = ToyModel(), iter([True])

    async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        if "</tool_response>" in decode(prompt_ids) and next(failing, False):
            raise ValueError("out of memory")
        return await model(prompt_ids, sampling)

    async with Server([Ranked()], settings()) as server:
        trainer = Trainer(
            f"127.0.0.1:{server.grpc_port}", generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}
        )
        async with trainer:
            (group,) = [each async for each in trainer.rollouts([QUESTION], n=3, tokenizer="toy")]
    assert sorted(each.end for each in group.rollouts) == ["failure", "stop", "stop"]
    rewards = [each.reward for each in group.rollouts]
    assert len([reward for reward in rewards if reward is not None and round(reward % 1, 6) == 0.2]) == 2


async def test_groups_come_as_they_finish_from_prompts_without_end(address: str) -> None:
    taken = 0

    def endless() -> Iterator[str]:
        nonlocal taken
        while True:
            taken += 1
            yield QUESTION

    model = ToyModel()
    async with trainer_of(address, model) as trainer:
        seen = []
        async with aclosing(trainer.rollouts(endless(), n=2, at_once=4, tokenizer="toy")) as groups:
            async for group in groups:
                seen.append(group.id)
                if len(seen) == 5:
                    break
    assert len(set(seen)) == 5
    assert taken <= 5 + 2 + 2


async def test_leaving_ends_what_runs_on_the_server(address: str) -> None:
    model = ToyModel(gate=asyncio.Event())
    async with AsyncClient(address) as client:
        async with trainer_of(address, model) as trainer:
            groups = trainer.rollouts([QUESTION], n=3, tokenizer="toy")
            waiting = asyncio.ensure_future(anext(groups))
            await until(lambda: model.at_once == 3)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        ends = [each.outcome.WhichOneof("end") async for each in client.list()]
        while None in ends:
            await asyncio.sleep(0.01)
            ends = [each.outcome.WhichOneof("end") async for each in client.list()]
        assert ends == ["cancellation"] * 3
    assert model.cancelled == len(model.prompts)


async def test_an_outcome_that_comes_while_it_is_looked_for_is_not_missed() -> None:
    """The server forgets a rollout once its outcome was accepted, so a later fetch finds nothing."""
    async with Server([Calculator()], settings(max_records=0)) as server:
        address, serving = f"127.0.0.1:{server.grpc_port}", Serving(look=0.001)
        async with trainer_of(address, ToyModel(), serving=serving) as trainer:
            groups = [each async for each in trainer.rollouts([QUESTION] * 8, n=4, tokenizer="toy")]
    assert {(each.end, each.checked) for group in groups for each in group.rollouts} == {("stop", True)}


async def test_a_failing_model_fails_its_rollout_alone(address: str) -> None:
    good = ToyModel()

    async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        if "7" in decode(prompt_ids) and len(good.prompts) > 0:
            raise ValueError("secret")
        return await good(prompt_ids, sampling)

    async with Trainer(address, generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
        prompts = [Prompt([{"role": "user", "content": text}], text) for text in (QUESTION, QUESTION.replace("5", "7"))]
        groups = {each.id: each async for each in trainer.rollouts(prompts, n=1, tokenizer="toy")}
    (well,), (ill,) = (groups[prompt.group_id].rollouts for prompt in prompts)
    assert (well.end, well.mismatch) == ("stop", None)
    assert (ill.end, ill.mismatch) == ("failure", None)
    assert "generate failed in the trainer" in ill.error
    assert "secret" not in ill.error


@pytest.mark.parametrize(("train_on", "trains"), [(None, False), (["trainer"], True)])
async def test_a_group_keeps_its_members_when_one_fails(address: str, train_on: Any, trains: bool) -> None:
    model = ToyModel()
    failing = iter([True])

    async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        if "</tool_response>" in decode(prompt_ids) and next(failing, False):
            raise ValueError("out of memory")
        return await model(prompt_ids, sampling)

    async with Trainer(address, generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=3, tokenizer="toy", train_on=train_on)]
    assert sorted(each.end for each in group.rollouts) == ["failure", "stop", "stop"]
    (ill,) = (each for each in group.rollouts if each.end == "failure")
    assert (ill.failure_class, ill.reward, ill.mismatch, ill.checked) == ("trainer", None, None, True)
    assert [len(ill.samples), len(ill.untrainable)] == ([1, 0] if trains else [0, 1])
    for sample in (*ill.samples, *ill.untrainable):
        assert (sample.trainable, sample.untrainable_reason) == (trains, "" if trains else "failure_trainer")
    with pytest.raises(RolloutFailed, match="generate failed in the trainer"):
        ill.raise_for_failure()
    for well in group.rollouts:
        if well is not ill:
            well.raise_for_failure()
            assert [len(well.samples), len(well.untrainable), well.failure_class] == [1, 0, ""]


async def test_the_first_failed_rollout_of_a_cause_is_logged(address: str, caplog: pytest.LogCaptureFixture) -> None:
    async with trainer_of(address, ToyModel()) as trainer:
        groups = [each async for each in trainer.rollouts([QUESTION] * 2, n=2, tokenizer="misspelled")]
    errors = {rollout.uid: rollout.error for group in groups for rollout in group.rollouts}
    assert len(errors) == 4
    (logged,) = (record for record in caplog.records if record.levelname == "WARNING")
    uid = logged.getMessage().split()[1]
    assert logged.getMessage().startswith(f"rollout {uid} failed (class server): {errors[uid]}; further failures")
    assert "misspelled" in errors[uid]


async def test_thinking_and_parallel_calls_agree(address: str) -> None:
    calls = "\n".join([CALL, CALL.replace('"a": 5', '"a": 7'), "Two."])
    model = ToyModel(
        by_turns(f"<think>\nMaybe {CALL}?\n</think>\n\n{calls}", f"<think>\nEasy.\n</think>\n\n{CALL}", "8 and 10.")
    )
    trainer = Trainer(address, generate=model, decode=decode, parse=parsers.thinking(parsers.hermes), end_ids={END})
    async with trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=2, tokenizer="toy")]
    for rollout in group.rollouts:
        assert (rollout.mismatch, rollout.error, rollout.checked) == (None, "", True)
        assert [each["content"] for each in rollout.messages if each["role"] == "tool"] == ["8", "10", "8"]


async def test_a_port_that_is_taken_is_told(address: str) -> None:
    with pytest.raises(OSError, match="cannot listen"):
        async with trainer_of(address, ToyModel(), serving=Serving(listen=address)):
            pass


async def test_logprobs_may_be_unknown(address: str) -> None:
    model = ToyModel()

    async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
        return Generated((await model(prompt_ids, sampling)).ids)

    async with Trainer(address, generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}) as trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=1, tokenizer="toy")]
    (rollout,) = group.rollouts
    assert (rollout.mismatch, rollout.checked, rollout.samples[0].logprobs) == (None, True, None)


async def test_answers_that_were_cut_agree(address: str) -> None:
    model = ToyModel(cut=True)
    async with trainer_of(address, model) as trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=2, tokenizer="toy")]
    for rollout in group.rollouts:
        (sample,) = rollout.samples
        assert (rollout.mismatch, rollout.error, sample.truncated) == (None, "", True)


async def test_a_connection_that_breaks_harms_nothing(address: str) -> None:
    """The trainer's connection is cut in the middle of a turn, and again during the retry."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with TcpProxy(port) as line:
        model = ToyModel()
        begun = 0

        async def generate(prompt_ids: Sequence[int], sampling: SamplingParams) -> Generated:
            nonlocal begun
            begun += 1
            if begun in (1, 2, 4):
                line.cut()
                await asyncio.Event().wait()
            return await model(prompt_ids, sampling)

        serving = Serving(listen=f"127.0.0.1:{port}", address=line.address)
        async with Trainer(
            address, generate=generate, decode=decode, parse=parsers.hermes, end_ids={END}, serving=serving
        ) as trainer:
            (group,) = [each async for each in trainer.rollouts([QUESTION], n=1, tokenizer="toy")]
    (rollout,) = group.rollouts
    assert (rollout.mismatch, rollout.error, rollout.checked, len(rollout.samples)) == (None, "", True, 1)
    assert (begun, len(model.prompts)) == (5, 2)


async def test_the_port_may_speak_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    issued = authority.issue_cert("localhost")
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    serving = Serving(listen="localhost:0", credentials=grpc.ssl_server_credentials([pair]))
    async with (
        Server([Calculator()], settings(target_ca=str(tmp_path / "ca.pem"))) as server,
        trainer_of(f"127.0.0.1:{server.grpc_port}", ToyModel(), serving=serving) as trainer,
    ):
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=1, tokenizer="toy")]
    assert [(each.error, each.checked, len(each.samples)) for each in group.rollouts] == [("", True, 1)]


async def test_a_trainer_that_renders_is_sent_messages(address: str) -> None:
    def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        text = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in messages)
        return encode(f"{len(tools)} tools\n{text}<|im_start|>assistant\n")

    model = ToyModel(by_turns("Let me add.\n" + CALL, "8."))
    async with trainer_of(address, model, render=render) as trainer:
        (group,) = [each async for each in trainer.rollouts([QUESTION], n=1)]
    (rollout,) = group.rollouts
    # This template renders a completion with a call differently from the sampled tokens, so a new segment begins.
    assert (rollout.mismatch, rollout.error) == (None, "")
    assert [sample.kind for sample in rollout.samples] == ["main", "drift"]
    assert decode(model.prompts[0]).startswith("4 tools")


async def test_arguments_that_cannot_be_right_are_named(address: str) -> None:
    model = ToyModel()
    with pytest.raises(TypeError, match="generate"):
        Trainer(address, decode=decode)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="dekode"):
        Trainer(address, generate=model, decode=decode, dekode=decode)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="generating"):
        Trainer(address, generate=model, decode=decode, generating=0)
    with pytest.raises(ValueError, match="address"):
        Serving(listen="0.0.0.0:9001")
    trainer = trainer_of(address, model)
    with pytest.raises(RuntimeError, match="async with"):
        _ = [each async for each in trainer.rollouts([QUESTION], tokenizer="toy")]
    async with trainer:
        for prompts, n, fields, text in (
            ([QUESTION], 0, {}, "n must be"),
            ([QUESTION], 1, {"group_id": "g"}, "group_id"),
            ([QUESTION], 1025, {}, "remembered"),
            ([7], 1, {}, "a prompt must be"),
            ([{"role": "user"}], 1, {}, "a prompt must be"),
            ([QUESTION], 1, {"tokeniser": "toy"}, "tokenizer"),
            ([QUESTION], 1, {"metadata": "{}"}, "metadata"),
        ):
            with pytest.raises((TypeError, ValueError), match=text):
                _ = [each async for each in trainer.rollouts(prompts, n=n, **fields)]  # type: ignore[arg-type]
        with pytest.raises(RolloutError):  # in token mode one side needs the tokenizer
            _ = [each async for each in trainer.rollouts([QUESTION], n=1)]
    with pytest.raises(RuntimeError, match="once"):
        await trainer.__aenter__()
