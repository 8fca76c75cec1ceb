"""One server with everything around it, and rounds of it: rollouts, a crash, a restart, and all checks."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from tests.durability import checks
from tests.durability.aims import Aim, Generations, Gun, Moment
from tests.durability.receivers import ReceivedDelivery, Receiver, case_of, receiver
from tests.durability.server import Forker, JournaledServer, journaled_server
from tests.durability.trainers import Trainers, trainers
from tests.durability.trials import KINDS, Clients, Trial, Unavailable, trial

TOOL_MOMENTS = {Moment.TOOL_BEFORE: "before", Moment.TOOL_MIDDLE: "middle", Moment.TOOL_AFTER: "after"}
WATCHED = 6
SECONDS = 60.0
"""A round that takes longer has failed: the server does not die, does not start, or never ends a rollout."""


@dataclass
class Stage:
    """The server, the trainers, the receiver and the clients of a test."""

    server: JournaledServer
    gun: Gun
    trainers: Trainers
    receiver: Receiver
    clients: Clients
    references: dict[tuple[str, int], checks.Reference] = field(default_factory=dict)
    rounds: int = 0
    _settled: Counter[str] = field(default_factory=Counter)

    async def prepare(self, trials: Iterable[Trial]) -> None:
        """Run the cases of these rollouts undisturbed, unless that was done before."""
        missing = {each.reference: each for each in trials if each.reference not in self.references}
        runs = {
            key: trial(each.kind, each.case.number, "undisturbed", steps=tuple(each.case.steps))
            for key, each in missing.items()
        }
        await asyncio.gather(*(self.clients.start(run) for run in runs.values()))
        if runs:
            found = await self.clients.settled([run.rollout_id for run in runs.values()])
            by_id = {rollout.spec.rollout_id: rollout for rollout in found}
            for key, run in runs.items():
                self.references[key] = checks.reference_of(by_id[run.rollout_id])

    async def crash_and_check(self, aim: Aim, trials: Sequence[Trial]) -> list[pb.Rollout]:
        """Run the rollouts, crash at the aim, restart, wait for all of them and check everything. Returns the rollouts."""
        async with asyncio.timeout(SECONDS):
            await self.prepare(trials)
            await self._crash(aim, trials)
            await self.server.restart()
            return await self.recover_and_check(trials)

    async def _crash(self, aim: Aim, trials: Sequence[Trial]) -> None:
        self.trainers.generations.counts.clear()
        self.load(aim)
        starts = [asyncio.create_task(self._started(each)) for each in trials]
        watches = [asyncio.create_task(self._watched(each, start)) for each, start in zip(trials, starts, strict=True)]
        if aim.moment is Moment.TIME:
            asyncio.get_running_loop().call_later(aim.delay, self.server.kill)
        await self.server.ended()
        await asyncio.gather(*starts, *watches)

    def load(self, aim: Aim) -> None:
        """Crash at this aim."""
        if aim.moment in TOOL_MOMENTS:
            strike = f"{aim.case} {aim.tool} {TOOL_MOMENTS[aim.moment]}"
            (self.server.directory / "strike").write_text(strike)
        else:
            self.gun.load(aim)

    async def _started(self, each: Trial) -> None:
        try:
            await self.clients.start(each)
        except (aiohttp.ClientError, ConnectionError, Unavailable):
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return
        self.gun.report(Moment.STARTED, each.case.number)

    async def _watched(self, each: Trial, start: asyncio.Task[None]) -> None:
        """Watch a rollout that was started over gRPC, if it is one of the first."""
        await start
        if each.uid and each.case.number % 100 < WATCHED:
            await self.clients.watch(each)

    async def recover_and_check(self, trials: Sequence[Trial]) -> list[pb.Rollout]:
        """Send all starts again, wait until all rollouts are settled, and check them."""
        acknowledged = {each.rollout_id for each in trials if each.uid}
        requested = set(self.trainers.keys_by_rollout())
        ids = [each.rollout_id for each in trials]
        known = {rollout.spec.rollout_id for rollout in await self.clients.listed(ids)}
        lost = [name for name in ids if name in acknowledged | requested and name not in known]
        assert lost == [], f"the server has lost rollouts that it had accepted: {lost}"
        again = [each for each in trials if each.needs_start]
        await asyncio.gather(*(self.clients.start(each) for each in again))
        found = await self.clients.settled(ids)
        await self._check(trials, found)
        return found

    async def _check(self, trials: Sequence[Trial], found: Sequence[pb.Rollout]) -> None:
        by_id = defaultdict[str, list[pb.Rollout]](list)
        for rollout in found:
            by_id[rollout.spec.rollout_id].append(rollout)
        keys, deliveries, effects = self.trainers.keys_by_rollout(), self.deliveries(), self.effects()
        counts, received = self.trainers.generations.counts, self.server.received()
        refusals = self.trainers.refusals([each.rollout_id for each in trials])
        assert refusals == [], f"trainers refused requests: {refusals}"
        for each in trials:
            runs = checks.check_runs(each, by_id[each.rollout_id], received)
            checks.check_generations(each, runs, keys.get(each.rollout_id, Counter()), counts)
            for rollout in runs:
                events = await self.clients.events(rollout.uid)
                assert len(events) == rollout.last_sequence, each.rollout_id
                checks.check_events(each, events)
                checks.check_result(each, rollout, self.references[each.reference], events)
                checks.check_effects(each, rollout, effects)
                checks.check_deliveries(each, rollout, deliveries[each.rollout_id])
            checks.check_response(each, runs[-1])
            self._settled[each.rollout_id] = len(deliveries[each.rollout_id])
        self.check_nothing_after_acknowledgement()

    def check_nothing_after_acknowledgement(self) -> None:
        """No outcome was delivered again after the server had recorded its acknowledgement."""
        deliveries = self.deliveries()
        late = {name: len(deliveries[name]) - count for name, count in self._settled.items()}
        assert not any(late.values()), {name: count for name, count in late.items() if count}

    def deliveries(self) -> defaultdict[str, list[ReceivedDelivery]]:
        """All deliveries so far by rollout id, also those to the trainer of the asynchronous HTTP API."""
        found = defaultdict[str, list[ReceivedDelivery]](list)
        for delivery in self.receiver.deliveries:
            found[delivery.rollout_id].append(delivery)
        for verdict in self.trainers.plain.verdicts():
            for received in self.trainers.plain.deliveries(verdict.rollout_id):
                delivery = ReceivedDelivery(verdict.rollout_id, received.key, received.raw, received.met == "200")
                found[verdict.rollout_id].append(delivery)
        return found

    def effects(self) -> list[str]:
        """The steps of tools so far."""
        folder = self.server.directory / "effects"
        return [file.name for file in folder.iterdir()] if folder.exists() else []

    def trials(self, number: int = 0, agents: Sequence[str] = ("steps",), each: int = 1) -> list[Trial]:
        """New rollouts: `each` of every kind and agent. Their cases begin at `number` and are the same in every round."""
        self.rounds += 1
        pairs = [(kind, agent) for agent in agents for kind in KINDS for _ in range(each)]
        made = [trial(kind, number + i, f"round-{self.rounds}", agent) for i, (kind, agent) in enumerate(pairs)]
        for one in made:
            self.receiver.failures[one.rollout_id] = case_of(one.rollout_id) % 3
        return made


@asynccontextmanager
async def stage(forker: Forker, directory: Path, **variables: str) -> AsyncIterator[Stage]:
    """Serve everything until the block ends."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(journaled_server(forker, directory, **variables))
        gun = Gun(server.kill, asyncio.get_running_loop())
        training = await stack.enter_async_context(trainers(Generations(gun)))
        receiving = await stack.enter_async_context(receiver(gun))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        yield Stage(server, gun, training, receiving, Clients(server, training, receiving, http))
