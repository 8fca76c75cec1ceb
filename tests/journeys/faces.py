"""The four APIs that start a rollout, and the ways to cancel one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import httpx
from rollout_client import Target

from tests.journeys.place import Deployment, Person, until
from tests.support.bodies import QUESTION, TOKENIZER

MESSAGES = [{"role": "user", "content": QUESTION}]
DIALECT_SAMPLING = {"temperature": 0.7, "max_tokens": 512, "logprobs": True}


@dataclass(frozen=True)
class Wanted:
    """A rollout to start. With the agent `gated` it waits until it is cancelled; with `calculator` it completes."""

    rollout_id: str
    agent: str = "gated"
    metadata: Mapping[str, Any] | None = None

    @property
    def hints(self) -> dict[str, Any]:
        """Metadata for the two Osmosis HTTP APIs."""
        return {"agent": self.agent, **(self.metadata or {})}


@dataclass(frozen=True)
class Begun:
    """A started rollout; `answer` is the pending response of the synchronous HTTP API."""

    uid: str
    answer: asyncio.Task[httpx.Response] | None = None


def synchronous_body(place: Deployment, wanted: Wanted) -> dict[str, Any]:
    """The body of `POST /rollout`."""
    return {
        "rollout_id": wanted.rollout_id,
        "server_url": place.trainer.url,
        "messages": MESSAGES,
        "sampling_params": DIALECT_SAMPLING,
        "tokenizer_name": TOKENIZER,
        "metadata": wanted.hints,
    }


async def synchronous(place: Deployment, person: Person, wanted: Wanted) -> Begun:
    """Start through `POST /rollout`, whose response is still pending."""
    known = set(await _uids(place, wanted))
    asking = asyncio.create_task(person.http.post("/rollout", json=synchronous_body(place, wanted)))

    async def begun() -> Sequence[str]:
        if asking.done():
            return [asking.result().headers["x-rollout-uid"]]
        return [uid for uid in await _uids(place, wanted) if uid not in known]

    (uid,) = await until(begun)
    return Begun(uid, asking)


async def asynchronous(place: Deployment, person: Person, wanted: Wanted) -> Begun:
    """Start through `POST /v1/rollout/init`."""
    asked = {
        "rollout_id": wanted.rollout_id,
        "server_url": place.trainer.url,
        "messages": MESSAGES,
        "completion_params": DIALECT_SAMPLING,
        "metadata": wanted.hints,
    }
    reply = await person.http.post("/v1/rollout/init", json=asked)
    assert reply.status_code == 202, reply.text
    return Begun(reply.headers["x-rollout-uid"])


async def plain(place: Deployment, person: Person, wanted: Wanted) -> Begun:
    """Start through `POST /v1/rollouts`."""
    asked = {
        "rollout_id": wanted.rollout_id,
        "request_id": wanted.rollout_id,
        "agent": wanted.agent,
        "messages": MESSAGES,
        "completions": {"url": place.trainer.url},
        "sampling": {"temperature": 0.7},
        "tokenizer": {"name": TOKENIZER},
        "metadata": wanted.metadata or {},
    }
    reply = await person.http.post("/v1/rollouts", json=asked)
    assert reply.status_code in {200, 201}, reply.text
    return Begun(reply.json()["rollout"]["uid"])


async def grpc(place: Deployment, person: Person, wanted: Wanted) -> Begun:
    """Start through StartRollout, on the last server."""
    started = await person.grpc[-1].start(
        rollout_id=wanted.rollout_id,
        request_id=wanted.rollout_id,
        agent=wanted.agent,
        messages=MESSAGES,
        completions=Target(place.trainer.url),
        sampling={"temperature": 0.7},
        tokenizer=TOKENIZER,
        metadata=wanted.metadata,
    )
    return Begun(started.uid)


Start: TypeAlias = Callable[[Deployment, Person, Wanted], Awaitable[Begun]]
STARTS: Mapping[str, Start] = {
    "synchronous": synchronous,
    "asynchronous": asynchronous,
    "plain": plain,
    "grpc": grpc,
}


async def cancel_one(place: Deployment, person: Person, uid: str) -> bool:
    """Cancel through `POST /v1/rollouts/{uid}/cancel`; return whether it had an effect."""
    reply = await person.http.post(f"/v1/rollouts/{uid}/cancel", json={"reason": person.name})
    return reply.is_success and bool(reply.json()["uids"])


async def cancel_some(place: Deployment, person: Person, uid: str) -> bool:
    """Cancel through `POST /v1/rollouts/cancel`."""
    rollout_id = (await place.state(uid)).spec.rollout_id
    reply = await person.http.post("/v1/rollouts/cancel", json={"rollout_ids": [rollout_id], "reason": person.name})
    return reply.is_success and bool(reply.json()["uids"])


async def cancel_grpc(place: Deployment, person: Person, uid: str) -> bool:
    """Cancel through the rpc CancelRollouts."""
    client = await place.over_grpc(person, uid)
    rollout_id = (await place.state(uid)).spec.rollout_id
    return bool(await client.cancel(rollout_id=rollout_id, reason=person.name))


Cancel: TypeAlias = Callable[[Deployment, Person, str], Awaitable[bool]]
CANCELS: Mapping[str, Cancel] = {"one": cancel_one, "some": cancel_some, "grpc": cancel_grpc}


async def _uids(place: Deployment, wanted: Wanted) -> list[str]:
    found = []
    for client in place.root.grpc:
        found += [rollout.uid async for rollout in client.list(rollout_id=wanted.rollout_id)]
    return found
