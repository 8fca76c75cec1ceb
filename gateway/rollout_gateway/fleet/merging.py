"""What several servers answer, as if they were one: pages of rollouts, newest first, agents, and what a server is.

Each server is read from the first rollout that was not taken from it; what has started since is newer, and so not in the page.
"""

import base64
import hashlib
import heapq
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_gateway.fleet.errors import invalid
from rollout_gateway.fleet.members import CallContext, Member
from rollout_gateway.fleet.routing import Routing

_MAX_PAGE: Final = 1000
_DEFAULT_PAGE: Final = 100

#: For which servers a page token is, and the token with which each of them is read on; None: it has no more.
_Token = tuple[str, list[str | None]]


async def merged_page(
    routing: Routing, request: pb.ListRolloutsRequest, context: CallContext
) -> pb.ListRolloutsResponse:
    """One page over all servers.

    Raises AioRpcError: INVALID_ARGUMENT for a wrong size or token, UNAVAILABLE where a server is away, for the page would not be
    whole, or what a server answers.
    """
    if request.page_size > _MAX_PAGE:
        raise invalid("page_size", f"at most {_MAX_PAGE} are allowed")
    size = request.page_size or _DEFAULT_PAGE
    # In an order that does not depend on who listed the servers, so that a page token fits any gateway before them.
    members = sorted(routing.members, key=lambda member: member.address)
    fits = hashlib.sha256("\0".join(member.address for member in members).encode()).hexdigest()[:16]
    following = dict(zip(members, _positions(request.page_token, fits, len(members)), strict=True))
    # The whole page may be one server's.
    requests = {
        member: pb.ListRolloutsRequest(selection=request.selection, view=request.view, page_size=size, page_token=token)
        for member, token in following.items()
        if token is not None
    }
    pages = await routing.call_all("ListRollouts", requests, context, "the list would not be whole")
    following.update((member, page.next_page_token or None) for member, page in pages.items())
    merged = list(heapq.merge(*(_entries(*each) for each in pages.items()), key=_newness, reverse=True))
    # Of each server that has some left over, the token of the first one.
    following.update((member, token) for _, token, member in reversed(merged[size:]))
    positions = list(following.values())
    token = base64.urlsafe_b64encode(msgspec.json.encode((fits, positions))).decode() if any(positions) else ""
    return pb.ListRolloutsResponse(rollouts=[rollout for rollout, _, _ in merged[:size]], next_page_token=token)


_Entry = tuple[pb.Rollout, str, Member]


def _entries(member: Member, page: pb.ListRolloutsResponse) -> Iterable[_Entry]:
    """The rollouts of a server's page, each with the token of the page that begins with it."""
    return ((rollout, token, member) for rollout, token in zip(page.rollouts, page.page_tokens, strict=True))


def _newness(entry: _Entry) -> tuple[int, str]:
    return entry[0].create_time.ToNanoseconds(), entry[0].uid


def _positions(page_token: str, fits: str, count: int) -> list[str | None]:
    if not page_token:
        return [""] * count
    try:
        given = base64.b64decode(page_token.encode(), altchars=b"-_", validate=True)
        token: _Token = msgspec.json.decode(given, type=_Token)
    except (ValueError, msgspec.DecodeError):
        raise invalid("page_token", "is not one of ours") from None
    if token[0] != fits or len(token[1]) != count:
        raise invalid("page_token", "belongs to other servers")
    return token[1]


def summed(servers: Sequence[pb.GetServerInfoResponse]) -> pb.GetServerInfoResponse:
    """One server in the place of all: room and counts are added, of the limits of one request the lowest holds.

    A feature counts if every server has it, since a start may go to any of them. What only one can say, the first one says.
    """
    total = pb.GetServerInfoResponse()
    total.CopyFrom(servers[0])
    total.features[:] = [word for word in servers[0].features if all(word in each.features for each in servers)]
    for name in ("max_running", "max_queued", "running", "queued"):
        setattr(total, name, min(sum(getattr(each, name) for each in servers), 2**32 - 1))
    total.finished = sum(each.finished for each in servers)
    total.max_request_bytes = min(each.max_request_bytes for each in servers)
    total.max_rollout_time.CopyFrom(min((each.max_rollout_time for each in servers), key=Duration.ToNanoseconds))
    total.start_time.CopyFrom(min((each.start_time for each in servers), key=Timestamp.ToNanoseconds))
    total.draining = all(each.draining for each in servers)
    total.keys_required = any(each.keys_required for each in servers)
    return total


def united(servers: Sequence[pb.ListAgentsResponse]) -> pb.ListAgentsResponse:
    """The agents of all by name, each as the first server that has it tells; the first server's default is the default."""
    agents: dict[str, pb.Agent] = {}
    for server in servers:
        for agent in server.agents:
            agent.default = agent.default and server is servers[0]
            agents.setdefault(agent.name, agent)
    return pb.ListAgentsResponse(agents=[agents[name] for name in sorted(agents)])
