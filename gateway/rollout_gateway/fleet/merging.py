"""What several servers answer, as if they were one: pages of rollouts, newest first, agents, and what a server is.

Each server is read from the first rollout that was not taken from it; what has started since is newer, and so not in the page.
"""

import base64
import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.fleet.errors import combined, invalid
from rollout_gateway.fleet.members import CallContext, Member
from rollout_gateway.fleet.routing import call_all

_MAX_PAGE: Final = 1000
_DEFAULT_PAGE: Final = 100

#: For which servers a page token is, and where each of them is read on; None: it has no more.
_Token = tuple[str, list[str | None]]


@dataclass
class _Reader:
    """Reads one server's pages. `following` is the token of its next page."""

    following: str | None = ""
    ahead: deque[tuple[pb.Rollout, str]] = field(default_factory=deque)

    @property
    def position(self) -> str | None:
        """The token of what was not taken yet."""
        return self.ahead[0][1] if self.ahead else self.following

    @property
    def newest(self) -> tuple[int, int, str]:
        """Orders servers by their next rollouts."""
        rollout = self.ahead[0][0]
        return rollout.create_time.seconds, rollout.create_time.nanos, rollout.uid


async def merged_page(
    members: Sequence[Member], request: pb.ListRolloutsRequest, context: CallContext
) -> pb.ListRolloutsResponse:
    """One page over all servers.

    Raises AioRpcError: INVALID_ARGUMENT for a wrong size or token, UNAVAILABLE where a server is away, for the page would not be
    whole, or what a server answers.
    """
    if request.page_size > _MAX_PAGE:
        raise invalid("page_size", f"at most {_MAX_PAGE} are allowed")
    size = request.page_size or _DEFAULT_PAGE
    fits = hashlib.sha256("\0".join(member.address for member in members).encode()).hexdigest()[:16]
    readers = dict(zip(members, _readers(request.page_token, fits, len(members)), strict=True))
    rollouts: list[pb.Rollout] = []
    while len(rollouts) < size:
        # Twice its share of each server: most pages need no second look, and little is read in vain.
        await _fill(readers, request, min(size, 2 * size // len(readers) + 1), context)
        ahead = [reader for reader in readers.values() if reader.ahead]
        if not ahead:
            break
        rollouts.append(max(ahead, key=lambda reader: reader.newest).ahead.popleft()[0])
    places = [reader.position for reader in readers.values()]
    token = base64.urlsafe_b64encode(msgspec.json.encode((fits, places))).decode() if any(places) else ""
    return pb.ListRolloutsResponse(rollouts=rollouts, next_page_token=token)


async def _fill(
    readers: dict[Member, _Reader], request: pb.ListRolloutsRequest, size: int, context: CallContext
) -> None:
    """Reads on where no rollout is ahead and there is another page."""
    asked: dict[Member, pb.ListRolloutsRequest] = {}
    for member, reader in readers.items():
        if not reader.ahead and reader.following is not None:
            asked[member] = pb.ListRolloutsRequest(
                selection=request.selection, view=request.view, page_size=size, page_token=reader.following
            )
    found, failures = await call_all("ListRollouts", asked, context)
    if failures:
        raise combined(failures, len(readers), "the list would not be whole", over=context.over)
    for member, page in found.items():
        readers[member].ahead.extend(zip(page.rollouts, page.page_tokens, strict=True))
        readers[member].following = page.next_page_token or None


def _readers(page_token: str, fits: str, count: int) -> list[_Reader]:
    if not page_token:
        return [_Reader() for _ in range(count)]
    try:
        found = msgspec.json.decode(base64.b64decode(page_token.encode(), altchars=b"-_", validate=True), type=_Token)
    except (ValueError, msgspec.DecodeError):
        raise invalid("page_token", "is not one of ours") from None
    if found[0] != fits or len(found[1]) != count:
        raise invalid("page_token", "belongs to other servers")
    return [_Reader(place) for place in found[1]]


def summed(servers: Sequence[pb.GetServerInfoResponse]) -> pb.GetServerInfoResponse:
    """One server in the place of all: room and counts are added, of the limits of one request the lowest holds.

    A feature counts if every server has it, since a start may go to any of them. What only one can say, the first one says.
    """
    total = pb.GetServerInfoResponse()
    total.CopyFrom(servers[0])
    del total.features[:]
    total.features.extend(word for word in servers[0].features if all(word in each.features for each in servers))
    for name in ("max_running", "max_queued", "running", "queued"):
        setattr(total, name, min(sum(getattr(each, name) for each in servers), 2**32 - 1))
    total.finished = sum(each.finished for each in servers)
    total.max_request_bytes = min(each.max_request_bytes for each in servers)
    total.max_rollout_time.CopyFrom(min((each.max_rollout_time for each in servers), key=_moment))
    total.start_time.CopyFrom(min((each.start_time for each in servers), key=_moment))
    total.draining = all(each.draining for each in servers)
    total.keys_required = any(each.keys_required for each in servers)
    return total


def united(servers: Iterable[pb.ListAgentsResponse]) -> pb.ListAgentsResponse:
    """The agents of all by name, each as the first server that has it tells; the first server's default is the default."""
    agents: dict[str, pb.Agent] = {}
    for index, server in enumerate(servers):
        for agent in server.agents:
            if agent.name not in agents:
                agents[agent.name] = pb.Agent()
                agents[agent.name].CopyFrom(agent)
                agents[agent.name].default = agent.default and not index
    return pb.ListAgentsResponse(agents=[agents[name] for name in sorted(agents)])


def _moment(value: Duration | Timestamp) -> tuple[int, int]:
    return value.seconds, value.nanos
