"""Fifty turns over HTTP with the toy tokenizer, and 16 with every other tokenizer and template.

A counting trainer accepts every mask, or the rollout explains why it cannot. The strict trainer imports nothing of the
renderer. This module accumulates the trainer's prompts and completions in plain lists, and compares them with the server's
records. `ROLLOUT_EXACT=all` runs every kind of conversation with every way to render.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from rollout_server.app import Server
from rollout_server.settings import Settings
from rollout_server.testing.checks.renderer import PlainRenderer
from rollout_server.testing.checks.verdict import RefusalReason, Verdict
from rollout_server.testing.tokenizer import TOY_TOKENIZER
from rollout_server.testing.trainer import StrictTrainer

from tests.exact.conversations import KINDS, Conversation, Guided, written
from tests.exact.families import EVERYTHING, Family, families
from tests.exact.naive import Record, assert_samples, assert_segments, records

PLAYED = [(kind, parse) for kind in KINDS for parse in (False, True)]
USUALLY = (("mixed", False), ("calls", True), ("calls", False))
"""The first entry runs with every template. The others run if it ends early, and with the built-in template."""


@dataclass(frozen=True, slots=True)
class CountingTrainers:
    """A server, and trainers of one tokenizer that differ in how they render arguments. Each starts on first use."""

    http: httpx.AsyncClient
    rollouts: Any
    directory: Path
    renderers: Mapping[bool, PlainRenderer]
    tools: list[Mapping[str, Any]]
    stack: AsyncExitStack
    trainers: dict[bool, StrictTrainer] = field(default_factory=dict)

    async def trainer(self, *, parse: bool) -> StrictTrainer:
        if parse not in self.trainers:
            made = StrictTrainer(self.directory, tools=self.tools, parse_arguments=parse, grpc_port=None)
            self.trainers[parse] = await self.stack.enter_async_context(made)
        return self.trainers[parse]


@asynccontextmanager
async def world(family: Family, at: Path) -> AsyncIterator[CountingTrainers]:
    directory = family.laid_out(at)
    settings = Settings(
        _env_file=None,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        tokenizers={"model": directory},
        tokenizers_offline=True,
        drain_seconds=0,
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(Server([Guided()], settings))
        url = f"http://127.0.0.1:{server.http_port}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=300, trust_env=False))
        tools = (await http.get("/tools")).json()["tools"]
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(
                f"127.0.0.1:{server.grpc_port}", options=[("grpc.max_receive_message_length", 2**28)]
            )
        )
        tokenizer = family.tokenizer()
        renderers = {parse: PlainRenderer(tokenizer, parse_arguments=parse) for parse in (False, True)}
        yield CountingTrainers(http, RolloutServiceStub(channel), directory, renderers, tools, stack)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", families())
async def test_fifty_turns(family: Family, tmp_path: Path) -> None:
    lengths = dict[tuple[str, bool], int]()
    async with world(family, tmp_path) as at:
        for kind, parse in PLAYED if EVERYTHING else USUALLY:
            if EVERYTHING or family.directory == TOY_TOKENIZER or family.turns not in lengths.values():
                conversation = written(kind, at.renderers[parse], at.tools, family.turns)
                if conversation.exchanges:
                    lengths[kind, parse] = await play(at, f"{kind} {parse}", conversation, parse=parse)
    assert family.turns in lengths.values(), f"no conversation completed: {lengths}"


async def play(at: CountingTrainers, rollout_id: str, conversation: Conversation, *, parse: bool) -> int:
    """Run one conversation, compare all records, and return the completed turns."""
    trainer, renderer = await at.trainer(parse=parse), at.renderers[parse]
    await trainer.put_script(rollout_id, conversation.script)
    said = await ask(at, rollout_id, trainer.url, conversation)
    verdict = trainer.verdict(rollout_id)
    assert verdict is not None
    bodies = [request.body for request in trainer.requests if request.body["rollout_id"] == rollout_id]
    answered = accepted(bodies, verdict, parse=parse)
    prompts = [renderer.prompt(body["messages"], at.tools) for body in answered]
    expected = records(list(zip(prompts, *answers(verdict), strict=True)))
    assert masks(answered) == [turn.new_tokens for turn in verdict.turns]
    outcome = await recorded(at, rollout_id)
    assert_samples(outcome.samples, expected)
    assert_segments(outcome.segments, expected)
    if all(turn.drift is None for turn in verdict.turns):
        (record,) = expected
        assert_sample(record, verdict)
    if said["status"] == "COMPLETED":
        assert len(verdict.turns) == len(conversation.exchanges)
        return len(verdict.turns)
    held = len(prompts[-1]) + verdict.turns[-1].answer_tokens
    assert_told_why(said, renderer, at.tools, [json.loads(message.json) for message in outcome.messages], held)
    return len(verdict.turns)


async def ask(at: CountingTrainers, rollout_id: str, url: str, conversation: Conversation) -> Any:
    body = {
        "rollout_id": rollout_id,
        "server_url": url,
        "messages": conversation.asked,
        "sampling_params": {"logprobs": True},
        "tokenizer_name": "model",
        "max_turns": 100,
        "max_tokens_total": 1_000_000,
        "metadata": conversation.metadata,
    }
    answer = await at.http.post("/rollout", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def recorded(at: CountingTrainers, rollout_id: str) -> Any:
    asked = pb.ListRolloutsRequest(selection=pb.Selection(rollout_ids=[rollout_id]), view=pb.ROLLOUT_VIEW_FULL)
    (rollout,) = (await at.rollouts.ListRollouts(asked)).rollouts
    got = await at.rollouts.GetRollout(pb.GetRolloutRequest(uid=rollout.uid, view=pb.ROLLOUT_VIEW_FULL))
    return got.rollout.outcome


def accepted(bodies: list[Any], verdict: Verdict, *, parse: bool) -> list[Any]:
    """The requests that were completed. Learning how a trainer renders arguments may take one refusal."""
    allowed = 1 if parse else 0
    assert len(verdict.refusals) <= allowed, verdict.refusals
    assert {refusal.reason for refusal in verdict.refusals} <= {RefusalReason.MASK}
    refused = {refusal.turn for refusal in verdict.refusals}
    found, number = [], 1
    for body in bodies:
        if number in refused:
            refused.remove(number)
            continue
        found.append(body)
        number += 1
    assert len(found) == len(verdict.turns)
    assert verdict.faults == ()
    return found


def masks(bodies: list[Any]) -> list[int]:
    lengths = []
    for body in bodies:
        mask = body["response_mask"] or []
        assert set(mask) <= {0}
        lengths.append(len(mask))
    return lengths


def answers(verdict: Verdict) -> tuple[list[list[int]], list[list[float]]]:
    """The completions, turn by turn, taken from the sample that the trainer accumulated."""
    sample = verdict.sample
    rows = zip(sample.response_ids, sample.response_mask, sample.logprobs, strict=True)
    generated = [(token, logprob) for token, mask, logprob in rows if mask]
    ids, logprobs = list[list[int]](), list[list[float]]()
    for turn in verdict.turns:
        head, generated = generated[: turn.answer_tokens], generated[turn.answer_tokens :]
        ids.append([token for token, _ in head])
        logprobs.append([logprob for _, logprob in head])
    assert not generated
    return ids, logprobs


def assert_sample(record: Record, verdict: Verdict) -> None:
    """Assert that without drift the trainer's own sample is equal, masks included."""
    sample = verdict.sample
    theirs = Record(*map(list, (sample.prompt_ids, sample.response_ids, sample.response_mask, sample.logprobs)))
    assert record == theirs.settled()


def assert_told_why(said: Any, renderer: PlainRenderer, tools: Any, messages: list[Any], held: int) -> None:
    """Assert the only reason for an early end.

    The conversation renders to fewer tokens than the trainer holds, and the error names the difference.
    """
    assert said["extra_fields"]["error_category"] == "token_drift", said["error_message"]
    fewer = re.search(r"renders to (\d+) tokens fewer", said["error_message"])
    assert fewer is not None
    assert int(fewer[1]) == held - len(renderer.prompt(messages, tools))
