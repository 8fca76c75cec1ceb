"""RenderPrompt: what it runs, what it refuses, and its bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1 import spec_pb2
from rollout_server import Agent, Environment, Reply, Request, Run, Step
from rollout_server.core.error import Busy
from rollout_server.edge.rpc import prompts
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.loader import LoaderSettings
from rollout_server.runtime.ports import Tool

from tests.edge.rpc.conftest import OpenServer
from tests.edge.rpc.test_statuses import right
from tests.support.agents import Idle
from tests.support.grpc_trainer import GrpcTrainer, serving
from tests.support.server_client import Caller, refusal
from tests.support.start_requests import spec, start, target

INVALID, PRECONDITION = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION


class World(Environment):
    """Speak before the first turn, and count the calls of its methods."""

    name = "world"

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def setup(self, run: Run) -> None:
        """Count."""
        self.calls.append("setup")

    async def reset(self, run: Run) -> str:
        """Count, and say something."""
        self.calls.append("reset")
        return "You are in a maze."

    async def step(self, run: Run, reply: Reply) -> Step:
        """End the episode."""
        self.calls.append("step")
        return Step(done=True)


class Failing(Agent):
    """Cannot choose its tools."""

    name = "failing"

    def choose_tools(self, request: Request) -> Sequence[Tool]:
        """Fail with a secret in the text."""
        raise RuntimeError("hush")


def render(**changes: Any) -> pb.RenderPromptRequest:
    """A request with a valid spec, except for the changes."""
    return pb.RenderPromptRequest(spec=spec(**changes))


async def test_nothing_of_the_agent_runs_and_no_rollout_is_recorded(open_server: OpenServer) -> None:
    world = World()
    caller = await open_server(world)
    async with serving(GrpcTrainer([7])) as trainer:
        fields: dict[str, Any] = {"completions": target(trainer.url)}
        rendered = await caller.stub.RenderPrompt(render(**fields))
        assert (world.calls, trainer.requests) == ([], [])
        assert not (await caller.stub.ListRollouts(pb.ListRolloutsRequest())).rollouts
        assert (await caller.stub.GetServerInfo(pb.GetServerInfoRequest())).finished == 0
        assert rendered == await caller.stub.RenderPrompt(render(**fields))
        await caller.finished((await caller.start(start(**fields))).rollout.uid)
        (request,) = trainer.requests
    # The environment speaks first, so its rollouts have a longer prompt, as the contract says.
    assert world.calls == ["setup", "reset", "step"]
    assert [*rendered.messages] == [*request.new_messages][:1]
    assert len(request.new_messages) == 2
    assert 0 < len(rendered.token_ids) < request.new_tokens.after.tokens


async def test_neither_an_endpoint_nor_an_id_is_needed(caller: Caller) -> None:
    whole = await caller.stub.RenderPrompt(render(agent="calculator"))
    assert len(whole.tools_json) == 4
    assert whole == await caller.stub.RenderPrompt(render(agent="calculator", completions=None, rollout_id=None))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"messages": None}, "spec.messages"),
        ({"messages": None, "completions": None}, "spec.messages"),
        ({"completions": target("ftp://127.0.0.1")}, "spec.completions.url"),
        ({"completions": target(dialect=spec_pb2.DIALECT_STREAM)}, "spec.completions.dialect"),
        ({"metadata_json": "[]"}, "spec.metadata_json"),
        (
            {"tokenizer": spec_pb2.Tokenizer(name="toy", template_kwargs_json='{"messages": []}')},
            "spec.tokenizer.template_kwargs_json",
        ),
        ({"token_mode": 99}, "spec.token_mode"),
    ],
)
async def test_a_wrong_field_is_named(caller: Caller, changes: dict[str, Any], field: str) -> None:
    refused = await refusal(caller.stub.RenderPrompt(render(**changes)))
    assert (refused.code, set(refused.fields)) == (INVALID, {field})


async def test_a_spec_is_needed(caller: Caller) -> None:
    refused = await refusal(caller.stub.RenderPrompt(pb.RenderPromptRequest()))
    assert (refused.code, set(refused.fields)) == (INVALID, {"spec"})


@pytest.mark.parametrize("name", [None, "/nowhere"])
async def test_without_a_tokenizer_nothing_is_rendered(caller: Caller, name: str | None) -> None:
    tokenizer = None if name is None else spec_pb2.Tokenizer(name=name)
    right(
        await refusal(caller.stub.RenderPrompt(render(completions=None, tokenizer=tokenizer))),
        PRECONDITION,
        "NO_TOKENIZER",
    )


async def test_what_cannot_be_started_is_not_rendered(open_server: OpenServer) -> None:
    caller = await open_server(Idle(), Failing())
    refused = await refusal(caller.stub.RenderPrompt(render(agent="failing")))
    right(refused, grpc.StatusCode.INTERNAL, "AGENT_FAILED")
    assert "hush" not in refused.text


async def test_tools_that_are_listed_when_a_rollout_runs_are_in_no_prompt_before(open_server: OpenServer) -> None:
    caller = await open_server(Idle())
    for url in ("grpc://tools:1", "https://tools"):
        refused = await refusal(caller.stub.RenderPrompt(render(completions=None, tools=target(url))))
        right(refused, PRECONDITION, "TOOLS_NOT_LISTED")
        assert "spec.tools" in refused.text


async def test_a_bounded_number_of_prompts_is_rendered_at_the_same_time(
    open_server: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 0)
    full = await open_server(Idle())
    refused = await refusal(full.stub.RenderPrompt(render()))
    right(refused, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS")
    assert refused.retry_after == 1.0
    monkeypatch.setattr(prompts, "MOST_PROMPTS", 2)
    caller = await open_server(Idle())
    for _ in range(3):  # a slot is free again after a success, a refusal and a caller that has left
        await caller.stub.RenderPrompt(render())
        await refusal(caller.stub.RenderPrompt(render(tokenizer=spec_pb2.Tokenizer(name="/nowhere"))))
        await refusal(caller.stub.RenderPrompt(render(agent="nobody")))
        left = caller.stub.RenderPrompt(render())
        left.cancel()
        await asyncio.wait([asyncio.ensure_future(left.code())])
    assert (await caller.stub.RenderPrompt(render())).token_ids


async def test_work_counts_until_it_ends_also_if_its_caller_has_left() -> None:
    renderer, gate = prompts.PromptRenderer(Tokenizers(LoaderSettings())), asyncio.Event()
    large = asyncio.create_task(renderer.run_bounded(gate.wait(), prompts.MOST_BYTES + 1))  # accepted, as it is alone
    await asyncio.sleep(0)
    for leave in (False, True):
        if leave:
            large.cancel()
            await asyncio.wait([large])
        with pytest.raises(Busy):
            await renderer.run_bounded(asyncio.sleep(0), 1)
    gate.set()
    await asyncio.sleep(0.01)  # the work ends in the next iterations of the loop
    small = [renderer.run_bounded(asyncio.sleep(0, number), prompts.MOST_BYTES // 4) for number in range(4)]
    assert await asyncio.gather(*small) == [0, 1, 2, 3]
