"""Workloads of the benchmark, the APIs that they use, and their targets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec


class Api(StrEnum):
    """How a rollout is started, and how the server reaches the trainer."""

    SYNC = "POST /rollout"
    INIT = "init and callback"
    GRPC_HTTP = "gRPC, HTTP trainer"
    MESSAGES = "gRPC, messages"
    TOKENS = "gRPC, tokens"
    STREAM = "trainer's stream"
    ENDPOINT = "captured endpoint"


class Floor(StrEnum):
    """A minimal loop beside the server."""

    HTTP = "HTTP loop"
    MESSAGES = "gRPC loop, messages"
    TOKENS = "gRPC loop, tokens"
    PROXY = "bare proxy"


FLOORS = {
    Api.SYNC: Floor.HTTP,
    Api.INIT: Floor.HTTP,
    Api.GRPC_HTTP: Floor.HTTP,
    Api.MESSAGES: Floor.MESSAGES,
    Api.TOKENS: Floor.TOKENS,
    Api.STREAM: Floor.TOKENS,
    Api.ENDPOINT: Floor.PROXY,
}
ON_DISK, IN_MEMORY = "disk", "memory"
_OF_GRPC = 2.0
"""Target for gRPC APIs on all workloads with one: the gRPC loop does not grow with the history, so neither may its multiple."""


class Target(msgspec.Struct, frozen=True):
    """The most CPU of a turn: a multiple of the floor's, or milliseconds."""

    most: float
    unit: str

    def __str__(self) -> str:
        return f"{self.most:g} {'x floor' if self.unit == 'x' else self.unit}"


@dataclass(frozen=True, slots=True)
class Workload:
    """Rollouts of one conversation.

    Args:
        turns: completions of one rollout. Each but the last has one tool call.
        context: average length of a prompt over the turns, in tokens.
        concurrency: rollouts that run at the same time.
        rollouts: rollouts per round on the server; the floor runs `FLOOR_FACTOR` times as many.
        target: of the APIs with the HTTP floor; None: without targets.
        apis: APIs to measure.
        in_memory: APIs to measure without a journal on the disk, too.
        waiting: APIs whose memory of a waiting rollout is measured.
        rounds: number of measured rounds.
        result_bytes: bytes that each tool result has in addition.
    """

    turns: int
    context: int
    concurrency: int
    rollouts: int
    target: Target | None
    apis: tuple[Api, ...] = (Api.SYNC, Api.INIT, Api.TOKENS)
    in_memory: tuple[Api, ...] = ()
    waiting: tuple[Api, ...] = ()
    rounds: int = 3
    result_bytes: int = 0

    @property
    def conversation(self) -> str:
        """Name of the conversation at the trainer."""
        return f"{self.turns}x{self.context}" + (f"+{self.result_bytes}" if self.result_bytes else "")

    @property
    def name(self) -> str:
        """Name on the command line, such as 10x1k/32."""
        return f"{self.turns}x{_thousands(self.context)}/{self.concurrency}"

    def target_of(self, api: Api) -> Target | None:
        """Return the target of an API; None if it has none."""
        if api is Api.ENDPOINT or self.target is None:
            return None
        return self.target if FLOORS[api] is Floor.HTTP or self.target.unit == "ms" else Target(_OF_GRPC, "x")

    def __str__(self) -> str:
        turns = f"{self.turns} turns" if self.turns > 1 else "1 turn"
        return f"{turns}, {_thousands(self.context)}, {self.concurrency} at once"


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole run: the workloads, and how often to start the server to measure its start."""

    workloads: tuple[Workload, ...]
    starts: int

    @property
    def concurrency(self) -> int:
        """Maximum number of concurrent rollouts. Those of the captured endpoint all run before the first call."""
        return max(max(each.concurrency, each.rollouts) for each in self.workloads)

    def only(self, names: list[str], apis: list[Api], rounds: int | None) -> Plan:
        """Return a part of the plan: workloads by name, and APIs; all if empty."""
        found = tuple(
            replace(
                each,
                apis=tuple(api for api in each.apis if not apis or api in apis),
                in_memory=tuple(api for api in each.in_memory if not apis or api in apis),
                waiting=tuple(api for api in each.waiting if not apis or api in apis),
                rounds=rounds or each.rounds,
            )
            for each in self.workloads
            if not names or each.name in names
        )
        return replace(self, workloads=tuple(each for each in found if each.apis))


def _thousands(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


FLOOR_FACTOR = 4
"""The floor is several times faster than the server, and a round must be long enough to measure."""

WARM_UP = 64
"""Maximum number of rollouts of a warm-up, which runs as many as are concurrent."""

_TWICE, _ONCE, _SHORT = Target(2.0, "x"), Target(1.0, "x"), Target(1.0, "ms")
_MOST = (Api.SYNC, Api.INIT, Api.TOKENS, Api.STREAM)
_EVERY = (Api.SYNC, Api.INIT, Api.MESSAGES, Api.TOKENS, Api.STREAM, Api.ENDPOINT)
_USUAL = (Api.SYNC, Api.INIT, Api.TOKENS)

FULL = Plan(
    (
        Workload(10, 1000, 32, 64, _TWICE, apis=_EVERY, in_memory=_USUAL, waiting=_MOST),
        Workload(10, 8000, 16, 32, _TWICE, waiting=(Api.SYNC, Api.TOKENS)),
        Workload(10, 32000, 16, 32, _ONCE, waiting=(Api.SYNC, Api.TOKENS)),
        # For the cost of a turn after the first two: the difference to the rollouts of ten turns.
        Workload(2, 1000, 32, 128, None, apis=(Api.SYNC, Api.TOKENS)),
        Workload(2, 32000, 16, 32, None, apis=(Api.SYNC, Api.TOKENS)),
        Workload(10, 1000, 256, 256, _TWICE),
        Workload(50, 4000, 16, 16, _TWICE),
        # Short rollouts, for what a rollout costs once.
        Workload(1, 500, 32, 256, _SHORT, apis=(*_EVERY, Api.GRPC_HTTP), in_memory=_USUAL, waiting=(Api.SYNC,)),
    ),
    starts=3,
)
QUICK = Plan(
    (
        Workload(10, 1000, 32, 32, _TWICE, apis=(Api.SYNC, Api.TOKENS), rounds=1),
        Workload(1, 500, 32, 64, _SHORT, apis=_MOST, rounds=2),
    ),
    starts=0,
)
