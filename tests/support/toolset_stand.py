"""A server whose rollouts call tools of other programs, a strict trainer, and a model that calls what the prompt says."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from osmosis.rollout.v1 import outcome_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from rollout_server.agent import Agent
from rollout_server.runtime.tools.toolset import McpServer
from rollout_server.testing.script import ScriptedReply, tool_call
from rollout_server.testing.trainer import StrictTrainer
from rollout_server.tool import tool

from tests.support.bodies import tool_texts
from tests.support.forking import forker
from tests.support.server_client import Caller, serving
from tests.support.start_requests import json_message, start

Calls = Sequence[Sequence[tuple[str, Mapping[str, Any]]]]
"""What the model calls in a rollout: for each turn the names and arguments of its parallel calls."""


@tool
async def own(number: int) -> int:
    """Return the number: a tool of the agent itself."""
    return number


class Caught(Agent):
    """Offers its own tool and those of toolsets."""

    replayable = True

    def __init__(self, name: str, *toolsets: McpServer) -> None:
        self.name = name
        self.tools = (own, *toolsets)


class ObedientModel:
    """Makes the calls that the first user message lists, turn by turn, and then says "Done."."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the next completion."""
        plan = json.loads(str(next(each["content"] for each in messages if each["role"] == "user")))
        turn = sum(each["role"] == "assistant" for each in messages)
        if turn >= len(plan):
            return ScriptedReply(content="Done.")
        calls = [tool_call(f"call{turn:02}{at:03}", name, given) for at, (name, given) in enumerate(plan[turn])]
        return ScriptedReply(content="", tool_calls=tuple(calls))


@dataclass
class Stand:
    """A server, a client of it, and its trainer."""

    caller: Caller
    trainer: StrictTrainer
    started: int = 0
    uids: list[str] = field(default_factory=list)

    async def start(self, agent: str, calls: Calls, **changes: Any) -> str:
        """Start a rollout and return its uid. `tools`: the URL of the toolset of the request; `bearer`: its token."""
        request = self.request(agent, calls, **changes)
        uid = str((await self.caller.start(request)).rollout.uid)
        self.uids.append(uid)
        return uid

    def request(self, agent: str, calls: Calls, **changes: Any) -> pb.StartRolloutRequest:
        """A request to start a rollout."""
        self.started += 1
        tools, bearer = changes.pop("tools", None), changes.pop("bearer", "")
        dialect = spec_pb2.DIALECT_GRPC if str(tools).startswith("grpc") else spec_pb2.DIALECT_MCP
        fields: dict[str, Any] = {
            "rollout_id": f"r{self.started}",
            "agent": agent,
            "messages": [json_message(json.dumps({"role": "user", "content": json.dumps(calls)}))],
            "completions": spec_pb2.Target(url=f"grpc://{self.trainer.grpc_target}", dialect=spec_pb2.DIALECT_GRPC),
            "token_mode": spec_pb2.TOKEN_MODE_TOKENS,
            "tools": None if tools is None else spec_pb2.Target(url=tools, dialect=dialect),
        }
        request = start(**(fields | changes))
        if bearer:
            request.credentials.tools_bearer = bearer
        return request

    async def play(self, agent: str, calls: Calls, **changes: Any) -> Any:
        """Run a rollout and return it with its samples."""
        return await self.caller.finished(await self.start(agent, calls, **changes))

    async def cancel(self, *uids: str) -> None:
        """Cancel rollouts."""
        await self.caller.stub.CancelRollouts(pb.CancelRolloutsRequest(selection=pb.Selection(uids=uids)))

    async def results(self, agent: str, calls: Calls, **changes: Any) -> list[str]:
        """Run a rollout, check its samples, and return the texts of the tool messages."""
        rollout = await self.play(agent, calls, **changes)
        assert rollout.outcome.stop.reason == "stop", rollout.outcome
        self.check_samples(rollout.outcome)
        return texts_of(rollout.outcome)

    def check_samples(self, outcome: outcome_pb2.Outcome) -> None:
        """Assert that the trainer refused nothing and holds the same ids, mask and logprobs."""
        (ours,) = outcome.samples
        found = [each for each in self.trainer.verdicts() if each.sample.prompt_ids == tuple(ours.prompt_ids)]
        judged = [each for each in found if each.sample.response_ids == tuple(ours.response_ids)]
        assert judged, found
        assert judged[0].accepted
        assert all(turn.drift is None for turn in judged[0].turns)
        assert judged[0].sample.response_mask == tuple(ours.response_mask)
        assert 0 < sum(ours.response_mask) < len(ours.response_mask) or len(judged[0].turns) == 1


def texts_of(outcome: outcome_pb2.Outcome) -> list[str]:
    """The texts of the tool messages."""
    return tool_texts([json.loads(message.json) for message in outcome.messages])


@asynccontextmanager
async def standing(*agents: Agent, **settings: Any) -> AsyncIterator[Stand]:
    """Run a server with these agents and "plain", which has only its own tool."""
    async with AsyncExitStack() as stack:
        trainer = await stack.enter_async_context(StrictTrainer(model=ObedientModel()))
        chosen = {"drain_seconds": 0.0, "max_running": 64, "tokenizers_offline": True, **settings}
        chosen["targets"] = [rule.format(trainer=trainer.grpc_port) for rule in settings.get("targets", [])]
        caller = await stack.enter_async_context(serving(Caught("plain"), *agents, **chosen))
        yield Stand(caller, trainer)


def children() -> Mapping[int, str]:
    """The processes below this one, at any depth, that exist or are zombies, with their command lines."""
    parents, found = dict[int, int](), {os.getpid(): ""}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    for _ in parents:
        more = {number for number, parent in parents.items() if parent in found and number not in found}
        if not more:
            break
        found |= {number: _command(number) for number in more}
    del found[os.getpid()]
    return found


def _command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """All processes of this machine whose command line has the mark, also those that left their parents."""
    others = (int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid()))
    return [number for number in others if mark in _command(number)]


_POOLS = ("asyncio_", "Thread-", "tokens-", "request_", "response_")
"""Threads of pools, which a process has once."""


def _remains() -> tuple[set[int], list[str], list[str], list[str]]:
    descriptors = []
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            continue
    # gRPC opens a poller when it needs another one. An event loop that is left has sockets, too.
    descriptors = [each for each in descriptors if not each.startswith("anon_inode:[event")]
    tasks = [task.get_name() for task in asyncio.all_tasks() if not task.done()]
    names = [re.sub(r"\d+", "", each) for each in tasks]
    threads = [each.name for each in threading.enumerate() if not each.name.startswith(_POOLS)]
    return set(children()), sorted(descriptors), sorted(names), sorted(threads)


@cache
def _first() -> list[None]:
    return [None]


async def _warm() -> None:
    """Open once what a process opens once, such as the poller of gRPC."""
    if _first():
        _first().clear()
        forker()
        async with standing() as stand:
            await stand.results("plain", [[("own", {"number": 1})]])


@asynccontextmanager
async def nothing_remains() -> AsyncIterator[None]:
    """Check that processes, descriptors, tasks and threads at the end are those of the beginning. What ends late is waited for."""
    await _warm()
    before = _remains()
    yield
    for _ in range(100):
        after = _remains()
        if all(not _more(then, now) for then, now in zip(before, after, strict=True)):
            return
        await asyncio.sleep(0.05)
    raise AssertionError([_more(then, now) for then, now in zip(before, after, strict=True)])


def _more(then: Any, now: Any) -> list[Any]:
    left = list(then)
    return [each for each in now if each not in left or left.remove(each)]
