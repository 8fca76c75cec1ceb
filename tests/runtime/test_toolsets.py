"""Sessions of rollouts with toolsets: one each, opened by the first call and closed with the rollout, lost with their state."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest
from rollout_server import Agent, Request, ToolError, tool
from rollout_server.core.message import ToolCall
from rollout_server.core.outcome import Category, Failure, Stop
from rollout_server.core.record import TOOLS, Observed
from rollout_server.core.spec import Dialect, Target
from rollout_server.runtime.ports import Content, Credentials, Tool
from rollout_server.runtime.registry.selection import Selection
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.run.lifecycle import AgentFailed, list_toolsets
from rollout_server.runtime.start_request import StartRequest
from rollout_server.runtime.tools.policy import ToolPolicy
from rollout_server.runtime.tools.protocols import ToolFailed, ToolsetLost
from rollout_server.runtime.tools.remote_tool import ToolsetLimits
from rollout_server.runtime.tools.resources import ToolResources
from rollout_server.runtime.tools.toolset import (
    ListedTool,
    McpServer,
    ToolsetCall,
    ToolsetCaller,
    ToolsetSource,
)
from rollout_server.runtime.tools.toolsets import Toolsets

from tests.support.journal import KeptJournal
from tests.support.runtime_harness import (
    FOREVER,
    ME,
    RuntimeHarness,
    Say,
    Script,
    a_spec,
    call,
    contents,
    outcome_of,
    wait,
)

COUNTER = McpServer("http://counter/mcp", policy=ToolPolicy(timeout=30.0), retries=2)
SHARED = replace(COUNTER, session="shared")
SERVICE = Target("grpc://tools:1", Dialect.GRPC)
SCHEMA = json.dumps({"type": "object", "properties": {"by": {"type": "integer"}}})


@dataclass
class Counters:
    """Opens sessions with a counter each, and records what happens to them. What a call does is the argument `do`."""

    listed: Sequence[ListedTool] = (
        ListedTool("count", "Count.", SCHEMA),
        ListedTool("look", "", SCHEMA, idempotent=True),
    )
    seconds: float = 0.0
    refusal: str = ""
    opened: list[ToolsetCaller] = field(default_factory=list)
    closed: int = 0
    calls: list[ToolsetCall] = field(default_factory=list)
    observed: list[tuple[str, str]] = field(default_factory=list)

    @asynccontextmanager
    async def connect(self, source: ToolsetSource, caller: ToolsetCaller) -> AsyncIterator[CounterSession]:
        task = asyncio.current_task()
        await wait(self.seconds)
        if self.refusal:
            raise ToolFailed(self.refusal)
        self.opened.append(caller)
        try:
            yield CounterSession(self)
        finally:
            assert asyncio.current_task() is task
            self.closed += 1

    def resources(self, limits: ToolsetLimits | None = None) -> ToolResources:
        def observe(name: str, result: str, seconds: float) -> None:
            self.observed.append((name, result))

        return ToolResources(toolsets=Toolsets(self, limits, observe))


class CounterSession:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._count = 0

    async def list_tools(self) -> Sequence[ListedTool]:
        return self._counters.listed

    async def call(self, call: ToolsetCall) -> Content:
        self._counters.calls.append(call)
        self._count += 1
        match call.arguments.get("do"):
            case "hang":
                await wait(FOREVER)
            case "refuse":
                raise ToolError("no such count")
            case "break":
                raise ToolFailed("the answer is no JSON")
            case "die":
                raise ToolsetLost("the program exited")
        return str(self._count)


@tool
async def own() -> str:
    """A tool of the agent."""
    return "own"


def counting(*sources: McpServer) -> Agent:
    class Counting(Agent):
        name = "counting"
        tools = (own, *sources)

    return Counting()


async def harness_of(
    new_world: Callable[..., RuntimeHarness], counters: Counters, *sources: McpServer, **settings: object
) -> RuntimeHarness:
    agent, resources = counting(*sources), counters.resources()
    await list_toolsets([agent], resources.toolsets)
    return new_world(agent, tools=resources, **settings)


def counts(number: int, **arguments: object) -> Say:
    return Say("", tuple(call("count", f"c{at}", **arguments) for at in range(number)))  # type: ignore[arg-type]


def known(harness: RuntimeHarness) -> Sequence[Rollout]:
    return [rollout for _, rollout in harness.roster.select(Selection(ME))]


def observed_lists(rollout: Rollout) -> list[Observed]:
    return [r for r in rollout.log.records if isinstance(r, Observed) and r.what == TOOLS]


async def test_each_rollout_has_a_session_and_its_state(new_world: Callable[..., RuntimeHarness]) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, COUNTER)
    assert (len(counters.opened), counters.closed) == (1, 1)  # to list the tools
    rollouts = [harness.start(counts(1), counts(1), counts(1), Say("done")) for _ in range(50)]
    for rollout in rollouts:
        assert contents(await outcome_of(rollout), "tool") == ["1", "2", "3"]
    assert sorted(caller.uid for caller in counters.opened[1:]) == sorted(rollout.uid for rollout in rollouts)
    await asyncio.sleep(1)  # an outcome does not wait for the sessions to close
    assert counters.closed == 51
    assert len({made.key for made in counters.calls}) == 150
    assert {made.key.partition("/")[0] for made in counters.calls} == {rollout.uid for rollout in rollouts}


async def test_a_shared_session_serves_all_rollouts_and_is_opened_again_when_it_is_lost(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, SHARED)
    for expected in ("1", "2", "3"):
        assert contents(await outcome_of(harness.start(counts(1), Say("done"))), "tool") == [expected]
    assert (len(counters.opened), counters.closed) == (1, 0)
    dies = await outcome_of(harness.start(counts(1, do="die"), counts(1), Say("done")))
    assert contents(dies, "tool") == ["Error: the program exited", "1"]
    assert (len(counters.opened), counters.closed) == (2, 1)


async def test_a_rollout_never_goes_on_with_a_new_session_in_place_of_one_that_was_lost(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, COUNTER)
    outcome = await outcome_of(harness.start(counts(1), counts(1, do="die"), counts(1), Say("done")))
    assert isinstance(outcome.end, Stop)
    first, second, third = contents(outcome, "tool")
    assert (first, second) == ("1", "Error: the program exited")
    assert "was lost earlier in this rollout, with its state" in str(third)
    assert len(counters.opened) == 2
    assert [result for _, result in counters.observed] == ["ok", "failed", "failed"]


async def test_errors_of_a_toolset_are_results_of_one_rollout(new_world: Callable[..., RuntimeHarness]) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, COUNTER)
    bad = harness.start(counts(1, do="refuse"), counts(1, do="break"), counts(1, do="hang"), Say("done"))
    good = harness.start(counts(1), Say("done"))
    assert contents(await outcome_of(good), "tool") == ["1"]
    assert contents(await outcome_of(bad), "tool") == [
        "Error: no such count",
        "Error: the answer is no JSON",
        "Error: count took longer than 30 s",
    ]
    assert sorted(result for _, result in counters.observed) == ["error", "failed", "ok", "timeout"]


async def test_only_idempotent_tools_are_called_again_and_with_the_same_key(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, COUNTER)
    says = Say("", (call("count", "a", do="break"), call("look", "b", do="break")))
    await outcome_of(harness.start(says, Say("done")))
    by_name = {name: [made.key for made in counters.calls if made.name == name] for name in ("count", "look")}
    assert len(by_name["count"]) == 1
    assert len(by_name["look"]) == 3
    assert len({*by_name["look"]}) == 1


async def test_a_requested_toolset_is_listed_for_its_rollout_and_the_list_is_recorded(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters)
    spec = a_spec(rollout_id="mine", tools=SERVICE, metadata_json='{"a":1}')
    harness.scripts["mine"] = Script(counts(1), Say("done"))
    rollout, _ = harness.wish(StartRequest(spec, "me", credentials=Credentials(tools="secret")))
    assert contents(await outcome_of(rollout), "tool") == ["1"]
    assert [tool.name for tool in rollout.tools] == ["own", "count", "look"]
    assert counters.opened == [ToolsetCaller(rollout.uid, '{"a":1}', "secret")]
    await asyncio.sleep(1)
    assert counters.closed == 1
    [listed] = observed_lists(rollout)
    [entry] = json.loads(listed.value_json)["toolsets"]
    assert entry["toolset"] == SERVICE.url
    assert [each["name"] for each in entry["tools"]] == ["count", "look"]
    assert len(entry["sha256"]) == 64


@pytest.mark.parametrize(
    ("counters", "text"),
    [
        (Counters(refusal="the port is closed"), "the port is closed"),
        (Counters(seconds=FOREVER), "did not answer within 30 s"),
        (Counters(listed=[ListedTool("own", "", SCHEMA)]), "two tools have the name 'own'"),
        (Counters(listed=[ListedTool("a", "", SCHEMA)] * 2), "two tools with the name 'a'"),
        (Counters(listed=[ListedTool(f"t{at}", "", SCHEMA) for at in range(10_000)]), "10,000 tools, at most 256"),
        (Counters(listed=[ListedTool("a" * 129, "", SCHEMA)]), "1 to 128 letters"),
        (Counters(listed=[ListedTool("a\n", "", SCHEMA)]), "1 to 128 letters"),
        (Counters(listed=[ListedTool("a", "b" * 2**20, SCHEMA)]), "more than 1048576 bytes"),
        (Counters(listed=[ListedTool("a", "\ud800", SCHEMA)]), "lone surrogate"),
        (Counters(listed=[ListedTool("a", "", "{")]), "is not JSON"),
        (Counters(listed=[ListedTool("a", "", '{"type":"array"}')]), "does not describe an object"),
        (Counters(listed=[ListedTool("a", "", '{"type":"object","x":' + "[" * 70 + "]" * 70 + "}")]), "64 levels"),
        (
            Counters(listed=[ListedTool("a", "", '{"type":"object","properties":{"b":{"$ref":"http://x"}}}')]),
            "refers to 'http://x'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_toolset_that_cannot_be_offered_fails_its_rollout_with_the_reason(
    new_world: Callable[..., RuntimeHarness], counters: Counters, text: str
) -> None:
    harness = await harness_of(new_world, counters)
    rollout = harness.start(tools=SERVICE)
    end = (await outcome_of(rollout)).end
    assert isinstance(end, Failure)
    assert end.category is Category.TOOL
    assert text in end.message
    assert SERVICE.url in end.message or "'own'" in end.message
    assert not harness.opened  # the trainer was not called


async def test_the_agents_own_toolsets_keep_a_server_from_starting_if_they_cannot_be_offered() -> None:
    cases = [
        (Counters(refusal="the port is closed"), (COUNTER,), "the port is closed"),
        (Counters(listed=[ListedTool("own", "", SCHEMA)]), (COUNTER,), "of the agent ("),
        (Counters(), (COUNTER, replace(COUNTER, address="http://other/mcp")), "http://other/mcp"),
        (Counters(), (replace(COUNTER, include=("missing",)),), "no tool 'missing'"),
    ]
    for counters, sources, text in cases:
        with pytest.raises(AgentFailed, match="counting") as raised:
            await list_toolsets([counting(*sources)], counters.resources().toolsets)
        assert text in str(raised.value)


async def test_include_chooses_the_tools_and_their_order() -> None:
    agent = counting(replace(COUNTER, include=("look",)))
    await list_toolsets([agent], Counters().resources().toolsets)
    assert [tool.name for tool in agent.offered_tools] == ["own", "look"]


async def test_a_cancelled_rollout_does_not_wait_for_a_toolset_that_opens_or_hangs(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, COUNTER)
    hangs = harness.start(counts(1, do="hang"))
    counters.seconds = FOREVER
    opens, lists = harness.start(counts(1)), harness.start(tools=SERVICE)
    await asyncio.sleep(1)
    await harness.roster.drain(0)
    for rollout in (hangs, opens, lists):
        assert isinstance((await outcome_of(rollout)).end, Failure)
    assert counters.closed == len(counters.opened)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("session with")]


async def test_sessions_are_opened_a_few_at_a_time_and_calls_of_one_toolset_are_limited(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    counters = Counters()
    agent, resources = counting(COUNTER), counters.resources(ToolsetLimits(opening=2, calls=3))
    await list_toolsets([agent], resources.toolsets)
    harness = new_world(agent, tools=resources)
    counters.seconds = 1.0
    for _ in range(6):
        harness.start(counts(1, do="hang"))
    await asyncio.sleep(1.5)
    assert len(counters.opened) == 1 + 2
    await asyncio.sleep(2)
    assert len(counters.opened) == 1 + 6
    assert len(counters.calls) == 3


async def test_a_later_process_offers_the_recorded_list_and_does_not_ask_again() -> None:
    journal, counters = KeptJournal(), Counters()
    agent = counting()
    harness = RuntimeHarness(agent, journal=journal, tools=counters.resources())
    spec = a_spec(tools=SERVICE, completions=Target("grpc://trainer:50051", Dialect.GRPC, replays_turn_keys=True))
    harness.start(counts(1), Say("late", seconds=FOREVER), spec=spec)
    await asyncio.sleep(1)
    later = Counters(listed=[])
    again = RuntimeHarness(counting(), journal=journal.after_crash(), tools=later.resources())
    again.scripts["r"] = Script(Say("", (call("count", "c9"), call("look", "c10"))), Say("done"))
    await again.restore()
    [rollout] = known(again)
    outcome = await outcome_of(rollout)
    assert isinstance(outcome.end, Stop)
    assert contents(outcome, "tool") == ["1", "1", "2"]
    assert {each.name: each.idempotent for each in later.calls} == {"count": False, "look": True}
    assert [tool.name for tool in rollout.tools] == ["own", "count", "look"]
    assert len(later.opened) == 1
    assert len(observed_lists(rollout)) == 1
    await harness.roster.drain(0)


async def test_a_later_process_ends_a_rollout_whose_session_had_state_or_whose_list_is_another_one() -> None:
    for say, listed, text in (
        (counts(1), Counters().listed, "its session with http://counter/mcp ended with the server"),
        (Say("", (call("own", "c"),)), Counters().listed[:1], "http://counter/mcp lists other tools now"),
    ):
        journal, counters = KeptJournal(), Counters()
        agent, resources = counting(COUNTER), counters.resources()
        await list_toolsets([agent], resources.toolsets)
        harness = RuntimeHarness(agent, journal=journal, tools=resources)
        replays = Target("grpc://trainer:50051", Dialect.GRPC, replays_turn_keys=True)
        harness.start(say, Say("late", seconds=FOREVER), spec=a_spec(completions=replays))
        await asyncio.sleep(1)
        later = counting(COUNTER)
        resources = Counters(listed=listed).resources()
        await list_toolsets([later], resources.toolsets)
        again = RuntimeHarness(later, journal=journal.after_crash(), tools=resources)
        await again.restore()
        [rollout] = known(again)
        end = (await outcome_of(rollout)).end
        assert isinstance(end, Failure)
        assert end.category is Category.INTERRUPTED
        assert text in end.message
        await harness.roster.drain(0)


async def test_arguments_that_cannot_be_sent_do_not_reach_the_session(new_world: Callable[..., RuntimeHarness]) -> None:
    counters = Counters()
    harness = await harness_of(new_world, counters, SHARED)
    calls = tuple(ToolCall(f"c{at}", "count", text) for at, text in enumerate(('{"do":"\\ud800"}', '{"do":1e999}')))
    outcome = await outcome_of(harness.start(Say("", calls), counts(1), Say("done")))
    refused = "Error: Invalid arguments for count: they have a value that JSON cannot express"
    assert contents(outcome, "tool") == [refused, refused, "1"]


async def test_a_server_that_never_answers_keeps_only_its_own_rollouts_waiting(
    new_world: Callable[..., RuntimeHarness],
) -> None:
    class OneHangs(Counters):
        def connect(self, source: ToolsetSource, caller: ToolsetCaller) -> AbstractAsyncContextManager[CounterSession]:
            self.seconds = FOREVER if str(source) == "grpc://hangs:1" else 0.0
            return super().connect(source, caller)

    harness = await harness_of(new_world, OneHangs())
    hanging = [harness.start(tools=Target("grpc://hangs:1", Dialect.GRPC)) for _ in range(40)]
    good = harness.start(counts(1), Say("done"), tools=SERVICE)
    async with asyncio.timeout(1):
        assert contents(await outcome_of(good), "tool") == ["1"]
    assert {rollout.outcome for rollout in hanging} == {None}


async def test_nothing_is_kept_of_a_toolset_that_nobody_uses(new_world: Callable[..., RuntimeHarness]) -> None:
    counters = Counters()
    resources = counters.resources()
    harness = new_world(counting(), tools=resources)
    for number in range(20):
        says = counts(2, do="hang" if number % 2 else "")
        harness.start(says, Say("done"), tools=Target(f"grpc://tools:{number + 1}", Dialect.GRPC))
    await asyncio.sleep(1)
    await harness.roster.drain(0)
    await asyncio.sleep(10)
    assert resources.toolsets.sessions == 0
    assert resources.toolsets._slots == {}


async def test_two_toolsets_of_one_address_are_told_apart() -> None:
    first, second = (replace(COUNTER, include=(name,)) for name in ("count", "look"))
    agent = counting(first, second)
    await list_toolsets([agent], Counters().resources().toolsets)
    assert [tool.name for tool in agent.offered_tools] == ["own", "count", "look"]
    for twice in ((COUNTER, COUNTER), (first, COUNTER)):
        with pytest.raises(AgentFailed, match="two tools have the name 'count'"):
            await list_toolsets([counting(*twice)], Counters().resources().toolsets)


async def test_tools_that_an_agent_chooses_have_different_names() -> None:
    class Choosing(Agent):
        name = "choosing"
        tools = (COUNTER,)

        def choose_tools(self, request: Request) -> Sequence[Tool | McpServer]:
            return [COUNTER, *self.offered_tools]

    agent = Choosing()
    await list_toolsets([agent], Counters().resources().toolsets)
    with pytest.raises(ValueError, match="two tools have the name 'count'"):
        agent.tools_for(Request(a_spec()))


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://tools/mcp?key=secret", "https://tools/mcp"),
        (("/opt/bin/python", "-m", "mcp_server_git", "/srv"), "python -m mcp_server_git"),
        (("npx", "-y", "a-server", "--key", "secret"), "npx -y a-server"),
        (("a-server", "--key", "secret"), "a-server"),
    ],
)
def test_the_name_of_a_toolset_has_no_secret(address: str | tuple[str, ...], name: str) -> None:
    assert str(McpServer(address)) == name
