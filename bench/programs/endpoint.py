"""Drives the model endpoint of rollouts, and the bare proxy beside it, as an agent does: one HTTP request per completion.

Only the requests for completions are measured. Starts and ends of rollouts are not part of a call.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

import aiohttp
import msgspec

from bench.programs.drive import TOKENIZER, Order, Player, WrongRollout

_AGENT = "own-loop"
_LIMITS = {"generated_tokens": 1_000_000}
_WAIT_SECONDS = 30


class _Call(msgspec.Struct):
    """A tool call of a completion."""

    id: str
    function: Mapping[str, str]


class _Message(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    message: msgspec.Raw


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_COMPLETION = msgspec.json.Decoder(_Completion)
_MESSAGE = msgspec.json.Decoder(_Message)


@dataclass(frozen=True, slots=True)
class Access:
    """Base URL of chat completions, and the key; empty for the bare proxy. `uid` is that of the rollout."""

    base_url: str
    key: str = ""
    uid: str = ""


@dataclass(frozen=True, slots=True)
class ProxyRollouts:
    """Conversations through the bare proxy, which knows no rollouts."""

    http: aiohttp.ClientSession
    floor: str
    order: Order
    tools: Sequence[Any]

    @asynccontextmanager
    async def __call__(self, rollouts: int) -> AsyncIterator[Player]:
        """Yield a player of conversations."""
        access = Access(f"{self.floor}/proxy/{self.order.trainer.rpartition('/')[2]}/v1")
        yield lambda: _converse(self.http, access, self.order, self.tools)


@dataclass(frozen=True, slots=True)
class EndpointRollouts:
    """Conversations through the model endpoints of rollouts, which run before the first and end after the last call."""

    http: aiohttp.ClientSession
    server: str
    order: Order
    tools: Sequence[Any]

    @asynccontextmanager
    async def __call__(self, rollouts: int) -> AsyncIterator[Player]:
        """Start rollouts, yield a player that plays the next of them, then finish them all. Raises `WrongRollout`."""
        names = self.order.ids()
        accesses = [await self._start(names) for _ in range(rollouts)]
        waiting = iter(accesses)
        yield lambda: _converse(self.http, next(waiting), self.order, self.tools)
        for access in accesses:
            await self._finish(access)

    async def _start(self, names: Iterator[str]) -> Access:
        body = {
            "rollout_id": next(names),
            "agent": _AGENT,
            "messages": self.order.facts.opening,
            "completions": {"url": self.order.trainer},
            "sampling": {"temperature": 1.0, "top_p": 1.0, "max_tokens": 512, "logprobs": True},
            "tokenizer": {"name": TOKENIZER},
            "limits": _LIMITS,
        }
        started = await _request(self.http, "POST", f"{self.server}/v1/rollouts", body)
        access = started["access"]
        return Access(urljoin(self.server, f"{access['base_url']}/v1"), access["key"], started["rollout"]["uid"])

    async def _finish(self, access: Access) -> None:
        url = f"{access.base_url.removesuffix('/v1')}/finish"
        await _request(self.http, "POST", url, {"reward": 1.0}, access.key)
        rollout: dict[str, Any] = {"state": "running"}
        while rollout["state"] != "finished":
            url = f"{self.server}/v1/rollouts/{access.uid}?wait={_WAIT_SECONDS}&view=messages"
            rollout = await _request(self.http, "GET", url)
        outcome = rollout["outcome"]
        found = (outcome["end"], outcome.get("reward"), outcome["metrics"]["turns"], len(outcome["messages"]))
        # The last completion is the end of the conversation, as in the other APIs.
        expected = ("stop", 1.0, self.order.turns, self.order.facts.messages)
        if found != expected:
            raise WrongRollout(f"ended as {found}; expected {expected}: {outcome.get('failure')}")


async def _request(http: aiohttp.ClientSession, method: str, url: str, body: object = None, key: str = "") -> Any:
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    content = None if body is None else msgspec.json.encode(body)
    async with http.request(method, url, data=content, headers=headers) as response:
        text = await response.read()
    if not response.ok:
        raise WrongRollout(f"{method} {url}: HTTP {response.status}: {text[:500].decode(errors='replace')}")
    return msgspec.json.decode(text)


async def _converse(http: aiohttp.ClientSession, access: Access, order: Order, tools: Sequence[Any]) -> None:
    """Play one conversation. Raises `WrongRollout` if it does not end as scripted."""
    url, history = f"{access.base_url}/chat/completions", list[Any](order.facts.opening)
    headers = {"content-type": "application/json", "authorization": f"Bearer {access.key or 'none'}"}
    for turn in range(order.turns):
        content = msgspec.json.encode({"model": "bench", "messages": history, "tools": tools})
        try:
            async with http.post(url, data=content, headers=headers) as response:
                text = await response.read()
        except aiohttp.ClientError as error:
            raise WrongRollout(f"turn {turn + 1}: no response: {error!r}") from error
        if response.status != 200:
            raise WrongRollout(f"turn {turn + 1}: HTTP {response.status}: {text[:500].decode(errors='replace')}")
        raw = _COMPLETION.decode(text).choices[0].message
        message = _MESSAGE.decode(raw)
        history += [raw, *map(_result, message.tool_calls or ())]
    if (len(history), message.content) != (order.facts.messages, order.facts.closing):
        raise WrongRollout(f"{len(history)} messages, the last {message.content!r}; expected {order.facts}")


def _result(call: _Call) -> Mapping[str, str]:
    arguments = msgspec.json.decode(call.function["arguments"])
    return {"role": "tool", "content": str(arguments["a"] + arguments["b"]), "tool_call_id": call.id}
