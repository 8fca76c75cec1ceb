"""DecodeTokens: the texts of a segment's tokens, while the rollout runs and after it."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2, token_pb2
from rollout_server import Run
from rollout_server.calculator import Calculator
from rollout_server.core.ledger import pack_tokens
from rollout_server.edge.rpc import prompts
from rollout_server.edge.rpc.token_window import TokenWindow
from rollout_server.edge.tokens.tokenizer import LoadedTokenizer
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer
from transformers import AutoTokenizer

from tests.edge.rpc.conftest import OpenServer
from tests.support.agents import Gated
from tests.support.grpc_trainer import GrpcTrainer, serving
from tests.support.server_client import Caller, refusal, until
from tests.support.start_requests import start, target

INVALID, MISSING = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
FURTHER, PRECONDITION = grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.FAILED_PRECONDITION


class Waiting(Gated):
    """Requests a completion, then waits for the gate."""

    name = "waiting"

    async def play(self, run: Run) -> None:
        """Wait behind the first turn."""
        await run.sample()
        await self.gate.wait()


async def texts(caller: Caller, uid: str, start: int = 0, stop: int = 0, segment: str = "0") -> list[pb.TokenText]:
    request = pb.DecodeTokensRequest(uid=uid, segment_id=segment, start=start, stop=stop)
    return [*(await caller.stub.DecodeTokens(request)).texts]


async def finished(caller: Caller, trainer: StrictTrainer, **changes: Any) -> pb.Rollout:
    return await caller.play(start(agent="calculator", completions=target(trainer.url), **changes))


def spans(rollout: pb.Rollout) -> list[token_pb2.Span]:
    return [*rollout.outcome.segments[0].spans]


async def test_the_texts_of_a_finished_rollout_are_those_of_its_tokens(caller: Caller, trainer: StrictTrainer) -> None:
    rollout = await finished(caller, trainer)
    found = await texts(caller, rollout.uid)
    ids = [token for span in spans(rollout) for token in span.token_ids]
    assert [text.start for text in found[1:]] == [text.stop for text in found[:-1]]
    assert (found[0].start, found[-1].stop) == (0, len(ids))
    assert "".join(text.text for text in found) == AutoTokenizer.from_pretrained(TOY_TOKENIZER).decode(ids)
    special = {text.text for text in found if text.special}
    assert special == {"<|im_start|>", "<|im_end|>"}
    for size in (1, 7, len(ids)):
        windows = [await texts(caller, rollout.uid, at, min(at + size, len(ids))) for at in range(0, len(ids), size)]
        assert [text for window in windows for text in window] == found


async def test_the_texts_of_a_running_rollout_are_there(open_server: OpenServer, trainer: StrictTrainer) -> None:
    waiting = Waiting()
    caller = await open_server(waiting)
    uid = (await caller.start(start(completions=target(trainer.url)))).rollout.uid
    assert (await refusal(texts(caller, uid))).code is MISSING

    async def has_turn() -> bool:
        return (await caller.get(uid)).metrics.turns == 1

    await until(has_turn)
    found = await texts(caller, uid)
    waiting.gate.set()
    await caller.finished(uid)
    assert found == await texts(caller, uid) != []


@pytest.mark.parametrize(
    ("window", "code"),
    [
        ((2, 1), INVALID),
        ((0, 4097), INVALID),
        ((2**64 - 1, 0), FURTHER),
        ((0, 4000), FURTHER),
        ((2**64 - 2, 2**64 - 1), FURTHER),
        ((0, 2**64 - 1), INVALID),
    ],
)
async def test_a_wrong_window_is_refused(
    caller: Caller, trainer: StrictTrainer, window: tuple[int, int], code: grpc.StatusCode
) -> None:
    uid = (await finished(caller, trainer)).uid
    assert (await refusal(texts(caller, uid, *window))).code is code


async def test_the_end_of_a_segment_has_no_texts(caller: Caller, trainer: StrictTrainer) -> None:
    rollout = await finished(caller, trainer)
    length = sum(len(span.token_ids) for span in spans(rollout))
    assert await texts(caller, rollout.uid, length) == []
    assert await texts(caller, rollout.uid, 5, 5) == []


@pytest.mark.parametrize("segment", ["", "1", "00", "\x00", "x" * 10_000])
async def test_an_unknown_segment_is_not_found(caller: Caller, trainer: StrictTrainer, segment: str) -> None:
    rollout = await finished(caller, trainer)
    refused = await refusal(texts(caller, rollout.uid, segment=segment))
    assert (refused.code, refused.reason) == (MISSING, "SEGMENT_NOT_FOUND")


async def test_without_a_tokenizer_there_are_no_texts(caller: Caller) -> None:
    def report(request: Any, response: Any) -> None:
        response.prompt_ids.values.extend([1, 2])
        trainer.spans.insert(0, token_pb2.Span(author=token_pb2.AUTHOR_OTHER, turn=1, token_ids=[1, 2]))
        response.after.CopyFrom(trainer.checkpoint())

    async with serving(GrpcTrainer([7])) as trainer:
        trainer.lies[1] = report
        rollout = await caller.play(start(agent="calculator", completions=target(trainer.url), tokenizer=None))
    refused = await refusal(texts(caller, rollout.uid))
    assert (refused.code, refused.reason) == (PRECONDITION, "NO_TOKENIZER")
    assert refused.text == "the rollout names no tokenizer, so its tokens have no texts"


async def test_a_tokenizer_that_is_gone_is_named(
    open_server: OpenServer, trainer: StrictTrainer, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(TOY_TOKENIZER, other)
    caller = await open_server(Calculator(), tokenizers={"toy": TOY_TOKENIZER, "other": other}, tokenizer_cache_size=1)
    rollout = await finished(caller, trainer, tokenizer=spec_pb2.Tokenizer(name="other"))
    assert await texts(caller, rollout.uid)
    shutil.rmtree(other)
    assert await texts(caller, (await finished(caller, trainer)).uid)  # loads the other one in its place
    refused = await refusal(texts(caller, rollout.uid))
    assert (refused.code, refused.reason) == (PRECONDITION, "NO_TOKENIZER")
    assert "'other'" in refused.text
    assert str(tmp_path) not in refused.text


async def test_many_calls_at_once_are_bounded(
    open_server: OpenServer, trainer: StrictTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 8)
    caller = await open_server(Calculator())
    uid = (await finished(caller, trainer)).uid
    calls = [asyncio.ensure_future(texts(caller, uid)) for _ in range(300)]
    info = await asyncio.wait_for(caller.stub.GetServerInfo(pb.GetServerInfoRequest()), 5)
    assert info.finished == 1
    results = await asyncio.gather(*calls, return_exceptions=True)
    codes = {result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)}
    found = [result for result in results if isinstance(result, list)]
    assert codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(found) >= 8
    assert all(each == found[0] != [] for each in found)
    assert await texts(caller, uid) == found[0]


async def test_the_texts_of_a_dropped_rollout_are_gone(open_server: OpenServer, trainer: StrictTrainer) -> None:
    caller = await open_server(Calculator(), max_records=1)
    uid = (await finished(caller, trainer)).uid
    reading = [asyncio.ensure_future(texts(caller, uid)) for _ in range(20)]
    await finished(caller, trainer)
    for result in await asyncio.gather(*reading, return_exceptions=True):
        assert isinstance(result, list) or (isinstance(result, grpc.aio.AioRpcError) and result.code() is MISSING)
    assert (await refusal(texts(caller, uid))).code is MISSING


def test_hostile_ids_have_texts_and_a_segment_without_tokens_has_none() -> None:
    tokenizer = LoadedTokenizer("toy", AutoTokenizer.from_pretrained(TOY_TOKENIZER), ThreadPoolExecutor(1))
    special = tokenizer.encode("<|im_end|>")[0]
    ids = pack_tokens([2**31 - 1, special, 10**6, *tokenizer.encode("🙂")[:1], special, *tokenizer.encode("é")])
    window = TokenWindow(ids, 100, 100, 100 + len(ids), (101, 103))
    found = window.texts(tokenizer)
    assert [text.start for text in found[1:]] == [text.stop for text in found[:-1]]
    assert [(text.start, text.text) for text in found if text.special] == [(101, "<|im_end|>"), (104, "<|im_end|>")]
    assert found[-1].text.endswith("é")
    assert TokenWindow(pack_tokens(), 0, 0, 0, ()).texts(tokenizer) == []
