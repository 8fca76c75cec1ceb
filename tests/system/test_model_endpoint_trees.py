"""Random trees of histories over HTTP: an agent branches, forgets, rewrites and repeats, and spells its history in other ways."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.api_shapes import ROUTES, api_answer, api_request
from tests.support.outside_agent import ADD, Endpoint, Stand, check_each_token_once, standing

MULTIPLY = {"type": "function", "function": {**ADD["function"], "name": "multiply"}}
CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {0}, "b": 1}}}}\n</tool_call>'
FORMS = (
    "<think>\nThought {0}.\n</think>\n\nAnswer {0}.\n" + CALL,
    "<think>\nThought {0}.\n</think>\n\nAnswer {0}.",
    CALL,
    "Answer {0}: both.\n" + CALL + "\n" + CALL.replace('"b": 1', '"b": 2'),
)
SPELLINGS = ("parts", "halves", "arguments", "ids", "reasoning", "thinking", "spaces", "nulls", "marks", "developer")
STEPS = ("next", "next", "next", "branch", "forget", "system", "tools", "forge", "again", "repeat", "together")


class Various(Sequence[str]):
    """A different text for each generation: calls, thoughts, or both."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: Any) -> Any:
        return FORMS[number % len(FORMS)].format(number)


@dataclass(frozen=True)
class Item:
    """A message of a history. `number` is the generation that an answer is; None: a message that the model did not write."""

    message: str
    number: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The message."""
        return dict(json.loads(self.message))


@dataclass(frozen=True)
class Request:
    """What an agent sends: equal requests ask for the same thing, in whatever spelling."""

    system: str
    tools: int
    items: tuple[Item, ...]

    def before(self, index: int) -> Request:
        """The request that the answer at this index replied to."""
        return replace(self, items=self.items[:index])


@dataclass
class Tree:
    """The agent's side of a rollout, and what must have become of each answer."""

    endpoint: Endpoint
    api: str
    fresh: int = 0
    open: list[Request] = field(default_factory=list)
    sent: list[Request] = field(default_factory=list)
    replies: dict[Request, list[int]] = field(default_factory=dict)
    continued: set[int] = field(default_factory=set)
    #: For an answer that went on in its parent's segment: the parent.
    same_segment: dict[int, int] = field(default_factory=dict)
    calls: int = 0

    def user(self) -> Item:
        """A message of the user that was not sent before."""
        self.fresh += 1
        return Item(json.dumps({"role": "user", "content": f"Number {self.fresh}?"}))

    def inputs(self, answer: Mapping[str, Any]) -> tuple[Item, ...]:
        """What follows an answer: results of its calls, or a message of the user."""
        calls = answer.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": f"{self.fresh}"} for call in calls]
        self.fresh += 1
        return tuple(Item(json.dumps(result)) for result in results) or (self.user(),)

    def own(self, request: Request) -> dict[int, int]:
        """The answers whose whole history the request repeats too, by index. Only they are the server's to restore."""
        return {
            index: item.number
            for index, item in enumerate(request.items)
            if item.number is not None and item.number in self.replies.get(request.before(index), ())
        }

    async def send(
        self, request: Request, spelling: frozenset[str], *, alone: bool = True, repeated: bool = False
    ) -> None:
        """Send a request, keep its answer, and open the request that follows."""
        own = self.own(request)
        parent = list(own.values())[-1] if own else None
        body = api_request(self.api, spelled(request, spelling, own), [ADD, MULTIPLY][: request.tools])
        reply = await self.endpoint.post(ROUTES[self.api], body, repeated=repeated)
        assert reply.status_code == 200, reply.text
        self.calls += 1
        message = api_answer(self.api, reply.json())
        number = number_of(message)
        known = self.replies.setdefault(request, [])
        if number not in known:
            if parent is not None and parent not in self.continued and alone:
                self.same_segment[number] = parent
            known.append(number)
        if parent is not None:
            self.continued.add(parent)
        answer = Item(json.dumps(message, sort_keys=True), number)
        self.sent.append(request)
        self.open.append(replace(request, items=(*request.items, answer, *self.inputs(message))))

    @property
    def abandoned(self) -> set[int]:
        """Answers that led nowhere while another one to the same request went on."""
        return {
            number
            for numbers in self.replies.values()
            if self.continued.intersection(numbers)
            for number in numbers
            if number not in self.continued
        }


def number_of(message: Mapping[str, Any]) -> int:
    """The number of the generation that an answer is."""
    if message.get("content"):
        return int(re.findall(r"Answer (\d+)", message["content"])[0])
    return int(json.loads(message["tool_calls"][0]["function"]["arguments"])["a"])


def spelled(request: Request, spelling: frozenset[str], own: Container[int]) -> list[dict[str, Any]]:
    """The messages of a request as a client may spell them. None of the spellings changes what they say.

    The reasoning and the outer spaces of answers are only changed at the indices `own`: elsewhere they are prompt.
    """
    role = "developer" if "developer" in spelling else "system"
    messages: list[dict[str, Any]] = [{"role": role, "content": request.system}]
    messages += [respelled(item.fields, spelling, own=index in own) for index, item in enumerate(request.items)]
    if "ids" in spelling:
        rename_ids(messages)
    return messages


def respelled(message: dict[str, Any], spelling: frozenset[str], *, own: bool) -> dict[str, Any]:
    """One message in another spelling."""
    content = message.get("content")
    if own:
        thought = message.get("reasoning_content")
        if "marks" not in spelling:
            message.pop("signature", None)
        if thought and "reasoning" in spelling:
            del message["reasoning_content"]
        elif thought and "thinking" in spelling:
            del message["reasoning_content"]
            content = f"<think>\n{thought}\n</think>\n\n{content or ''}"
        if content and "spaces" in spelling:
            content = f"{content}\n"
        if not content and "nulls" in spelling:
            content = "" if content is None else None
        for call in message.get("tool_calls") or ():
            if "arguments" in spelling:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
    if content and "parts" in spelling:
        content = [{"type": "text", "text": content}]
        if "marks" in spelling:
            content[0]["cache_control"] = {"type": "ephemeral"}
    elif content and "halves" in spelling and message["role"] == "user":
        content = [{"type": "text", "text": content[:3]}, {"type": "text", "text": content[3:]}]
    message["content"] = content
    return message


def rename_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Give each call another id, also where its result names it."""
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        for at, call in enumerate(message.get("tool_calls") or ()):
            names[call["id"]] = call["id"] = f"renamed_{index}_{at}"
        if "tool_call_id" in message:
            message["tool_call_id"] = names.get(message["tool_call_id"], message["tool_call_id"])


async def step(tree: Tree, kind: str, pick: int, where: int, spelling: frozenset[str]) -> None:
    """Do one step of the agent."""
    if not tree.open:
        tree.open.append(Request("Be brief.", 1, (tree.user(),)))
    request = tree.open[pick % len(tree.open)]
    answers = [index for index, item in enumerate(request.items) if item.number is not None]
    if kind == "branch" and answers:
        index = answers[where % len(answers)]
        answer = request.items[index]
        request = replace(request, items=(*request.items[: index + 1], *tree.inputs(answer.fields)))
    elif kind == "forget":
        request = replace(request, items=(tree.user(),))
    elif kind == "system":
        request = replace(request, system=f"It is day {tree.user().message}.")
    elif kind == "tools":
        request = replace(request, tools=2)
    elif kind == "forge" and answers:
        index = answers[where % len(answers)]
        forged = Item(json.dumps({**request.items[index].fields, "content": f"Forged {tree.user().message}."}))
        request = replace(request, items=(*request.items[:index], forged, *request.items[index + 1 :]))
    elif kind in ("again", "repeat") and tree.sent:
        request = tree.sent[pick % len(tree.sent)]
        known = list(tree.replies[request])
        await tree.send(request, spelling, repeated=kind == "repeat")
        if kind == "repeat" and not tree.continued.intersection(known):
            assert tree.replies[request] == known
        return
    elif kind == "together":
        requests = [request, tree.open[where % len(tree.open)], request]
        await asyncio.gather(*(tree.send(each, spelling, alone=False) for each in requests))
        return
    await tree.send(request, spelling)


async def play(
    stand: Stand, api: str, mode: str, odd: bool, steps: Sequence[tuple[str, int, int, frozenset[str]]]
) -> None:
    """Play the steps in one rollout and check its outcome.

    In message mode the engine renders the prompts. If the model's tokens are odd, no template renders them again: each turn drifts.
    """
    first = len(stand.seen)
    stand.engine.model.odd = odd
    tree = Tree(await stand.start(token_mode=mode), api)
    for kind, pick, where, spelling in steps:
        await step(tree, kind, pick, where, spelling)
    outcome = await tree.endpoint.finish(reward=1)
    masked = {number - first for number in tree.abandoned}
    placed = check_each_token_once(outcome, stand.seen[first:], masked)
    for number, parent in tree.same_segment.items():
        assert mode == "messages" or placed[number - first] == placed[parent - first]
    report = outcome["capture"]
    assert report["abandoned"] == len(masked)
    decided = report["continued"] + report["parted"] + report["joined"] + report["replayed"]
    assert decided == tree.calls - 1
    assert report["refused"] == 0


@pytest.fixture(scope="module")
def stand() -> Iterator[tuple[asyncio.Runner, Stand]]:
    """A server for all examples, in an event loop of its own."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield runner, runner.run(stack.enter_async_context(standing(Various())))
        finally:
            runner.run(stack.aclose())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from(list(ROUTES)),
    st.sampled_from(["tokens", "messages"]),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.integers(0, 9),
            st.integers(0, 9),
            st.frozensets(st.sampled_from(SPELLINGS), max_size=4),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_each_sampled_token_is_in_one_sample_and_no_other_trains(
    stand: tuple[asyncio.Runner, Stand],
    api: str,
    mode: str,
    odd: bool,
    steps: list[tuple[str, int, int, frozenset[str]]],
) -> None:
    runner, service = stand
    runner.run(play(service, api, mode, odd, steps))
