"""The rollouts of a crash test, one kind per API and trainer protocol, and how a client starts them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc
from osmosis.rollout.v1 import event_pb2, message_pb2, spec_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.durability.aims import Case
from tests.durability.receivers import Receiver
from tests.durability.server import JournaledServer
from tests.durability.trainers import Trainers
from tests.support.bodies import body
from tests.support.engines import MODEL

KINDS = ("grpc", "masked", "plain", "replaying", "engine")
"""The trainer's protocol. `masked` and `plain` are started over HTTP, all others over gRPC."""
REPLAYING = frozenset({"grpc", "replaying"})
"""Kinds whose trainer declares that it replays turn keys."""
DELIVERED = frozenset({"grpc", "replaying", "plain"})
"""Kinds whose outcome is delivered."""
PLANS = (("note", "look"), ("look", "note+look", "note"), ("look",), ("note+note", "look", "look"))


@dataclass
class Trial:
    """One rollout of a crash test.

    Args:
        uid: from the acknowledgement of the start; empty: the start was not acknowledged.
        response: the body of the response to POST /rollout, if it arrived.
        on_interrupt: of the spec, if the start goes over gRPC.
        crashes: how often the server crashes meanwhile.
        events: the recorded events that a watcher saw before the crash.
    """

    kind: str
    agent: str
    case: Case
    rollout_id: str
    uid: str = ""
    response: dict[str, Any] | None = None
    on_interrupt: spec_pb2.InterruptPolicy.ValueType = spec_pb2.INTERRUPT_POLICY_UNSPECIFIED
    crashes: int = 1
    events: list[event_pb2.RolloutEvent] = field(default_factory=list)

    @property
    def reference(self) -> tuple[str, int]:
        """The key of the undisturbed run with the same trainer."""
        return self.kind, self.case.number

    @property
    def needs_start(self) -> bool:
        """Whether the client sends its start again after a crash: it always does, unless it has the response to POST /rollout."""
        return self.response is None


def trial(kind: str, number: int, run: str, agent: str = "steps", steps: tuple[str, ...] = ()) -> Trial:
    """A rollout. `run` tells apart the rollouts of one case."""
    case = Case(number, steps or PLANS[number % len(PLANS)])
    return Trial(kind, agent, case, f"{kind}/{number}/{run}")


class Unavailable(Exception):
    """The server returned 503."""


@dataclass
class Clients:
    """Starts rollouts and watches them. The clients survive the server."""

    server: JournaledServer
    trainers: Trainers
    receiver: Receiver
    http: aiohttp.ClientSession

    async def start(self, trial: Trial) -> None:
        """Start a rollout, or attach to it. Raises an error of the connection if the server dies meanwhile."""
        if trial.kind == "masked":
            trial.response = await self._post("/rollout", self.masked_body(trial), 200, trial)
            return
        before = trial.uid
        if trial.kind == "plain":
            await self._post("/v1/rollout/init", self.plain_body(trial), 202, trial)
        else:
            response = await self.server.stub.StartRollout(self.start_request(trial))
            trial.uid = response.rollout.uid
            assert response.attached or not before, f"{trial.rollout_id} was started again"
        assert before in ("", trial.uid), f"{trial.rollout_id} was {before} and is {trial.uid}"

    async def watch(self, trial: Trial) -> None:
        """Collect the events of a rollout until the stream ends or breaks."""
        request = pb.WatchRolloutRequest(uid=trial.uid, detail=event_pb2.EVENT_DETAIL_FULL)
        try:
            async for item in self.server.stub.WatchRollout(request):
                if item.event.sequence:
                    trial.events.append(item.event)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise

    async def _post(self, path: str, content: Mapping[str, Any], status: int, trial: Trial) -> dict[str, Any]:
        async with self.http.post(self.server.url + path, json=content) as response:
            if response.status == 503:
                raise Unavailable(await response.text())
            assert response.status == status, await response.text()
            if status == 202:
                trial.uid = response.headers["x-rollout-uid"]
            received: dict[str, Any] = await response.json()
            return received

    def masked_body(self, trial: Trial) -> dict[str, Any]:
        """The body of POST /rollout."""
        metadata = {"agent": trial.agent}
        return body(trial.rollout_id, self.trainers.masked.url, trial.case.question, {"metadata": metadata})

    def plain_body(self, trial: Trial) -> dict[str, Any]:
        """The body of POST /v1/rollout/init."""
        return {
            "rollout_id": trial.rollout_id,
            "server_url": self.trainers.plain.url,
            "messages": [{"role": "user", "content": trial.case.question}],
            "completion_params": {"temperature": 0.7, "logprobs": True},
            "metadata": {"agent": trial.agent},
        }

    def start_request(self, trial: Trial) -> pb.StartRolloutRequest:
        """The request of StartRollout."""
        spec = spec_pb2.RolloutSpec(
            rollout_id=trial.rollout_id,
            agent=trial.agent,
            messages=[message_pb2.Message(json=json.dumps({"role": "user", "content": trial.case.question}))],
            completions=self._completions(trial.kind),
            sampling=spec_pb2.Sampling(temperature=0.7, max_tokens=512, logprobs=True),
            tokenizer=spec_pb2.Tokenizer(name="toy"),
            on_interrupt=trial.on_interrupt,
        )
        if trial.kind == "grpc":
            spec.outcome.url = self.receiver.grpc_url
        elif trial.kind == "replaying":
            spec.outcome.url = self.receiver.http_url
        return pb.StartRolloutRequest(request_id=trial.rollout_id, spec=spec)

    def _completions(self, kind: str) -> spec_pb2.Target:
        if kind == "grpc":
            return spec_pb2.Target(url=f"grpc://{self.trainers.grpc.grpc_target}", replays_turn_keys=True)
        if kind == "engine":
            return spec_pb2.Target(url=self.trainers.engine.url, dialect=spec_pb2.DIALECT_VLLM, model=MODEL)
        url = self.trainers.replaying.url
        return spec_pb2.Target(url=url, dialect=spec_pb2.DIALECT_HTTP_PLAIN, replays_turn_keys=True)

    async def listed(self, rollout_ids: list[str], view: Any = pb.ROLLOUT_VIEW_BASIC) -> list[pb.Rollout]:
        """All rollouts with these ids, page by page."""
        found, token = list[pb.Rollout](), ""
        while True:
            selection = pb.Selection(rollout_ids=rollout_ids)
            request = pb.ListRolloutsRequest(selection=selection, page_size=64, page_token=token, view=view)
            page = await self.server.stub.ListRollouts(request)
            found.extend(page.rollouts)
            token = page.next_page_token
            if not token:
                return found

    async def settled(self, rollout_ids: list[str]) -> list[pb.Rollout]:
        """Wait until all of them have finished and no delivery is pending. Returns them with samples."""
        while True:
            found = await self.listed(rollout_ids)
            unsettled = [
                rollout.spec.rollout_id
                for rollout in found
                if rollout.state != pb.ROLLOUT_STATE_FINISHED or rollout.delivery.state == pb.DELIVERY_STATE_PENDING
            ]
            if not unsettled and {rollout.spec.rollout_id for rollout in found} == set(rollout_ids):
                return await self.listed(rollout_ids, pb.ROLLOUT_VIEW_SAMPLES)
            assert self.server.is_alive, self.server.log
            await asyncio.sleep(0.05)

    async def events(self, uid: str, after: int = 0) -> list[event_pb2.RolloutEvent]:
        """The recorded events of a finished rollout after a sequence number."""
        request = pb.WatchRolloutRequest(uid=uid, after_sequence=after, detail=event_pb2.EVENT_DETAIL_FULL)
        return [item.event async for item in self.server.stub.WatchRollout(request) if item.event.sequence]
