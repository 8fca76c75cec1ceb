"""Merging the responses of several servers into one: pages of rollouts (newest first), agents, and server info.

A page token holds, for each server, the first rollout that was not returned yet. Rollouts that start later are newer and so
not on later pages.
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

#: Fingerprint of the servers, and the page token for each of them. None: the server has no more rollouts.
_Token = tuple[str, list[str | None]]


async def merged_page(
    routing: Routing, request: pb.ListRolloutsRequest, context: CallContext
) -> pb.ListRolloutsResponse:
    """Return one page over all servers.

    Raises AioRpcError: INVALID_ARGUMENT for a wrong size or token, UNAVAILABLE if a server cannot be reached (the page would be
    incomplete), or the error of a server.
    """
    if request.page_size > _MAX_PAGE:
        raise invalid("page_size", f"at most {_MAX_PAGE} are allowed")
    size = request.page_size or _DEFAULT_PAGE
    # Sorted by address, so that a page token works at every gateway, whatever the order in its settings.
    members = sorted(routing.members, key=lambda member: member.address)
    fits = hashlib.sha256("\0".join(member.address for member in members).encode()).hexdigest()[:16]
    following = dict(zip(members, _positions(request.page_token, fits, len(members)), strict=True))
    # Ask each server for a full page: all its rollouts may be on one server.
    requests = {
        member: pb.ListRolloutsRequest(selection=request.selection, view=request.view, page_size=size, page_token=token)
        for member, token in following.items()
        if token is not None
    }
    pages = await routing.call_all("ListRollouts", requests, context, "the list would be incomplete")
    following.update((member, page.next_page_token or None) for member, page in pages.items())
    merged = list(heapq.merge(*(_entries(*each) for each in pages.items()), key=_newness, reverse=True))
    count = min(size, *(_certain(merged, *each, size) for each in pages.items()))
    # If a server has rollouts left over, its next page starts at the first of them. Reversed, so that the first one wins.
    following.update((member, token) for _, token, member in reversed(merged[count:]))
    positions = list(following.values())
    token = base64.urlsafe_b64encode(msgspec.json.encode((fits, positions))).decode() if any(positions) else ""
    return pb.ListRolloutsResponse(rollouts=[rollout for rollout, _, _ in merged[:count]], next_page_token=token)


_Entry = tuple[pb.Rollout, str, Member]


def _entries(member: Member, page: pb.ListRolloutsResponse) -> Iterable[_Entry]:
    """Return the rollouts of a server's page, each with the token of a page that starts at this rollout."""
    return ((rollout, token, member) for rollout, token in zip(page.rollouts, page.page_tokens, strict=True))


def _certain(merged: Sequence[_Entry], member: Member, page: pb.ListRolloutsResponse, size: int) -> int:
    """Return how many of the first rollouts stay the first, whatever is on the next page of this server.

    A server ends a page early if its selection takes long. Its next rollouts may be newer than those of other servers.
    """
    if not page.next_page_token or len(page.rollouts) >= size:
        return size
    return max((index + 1 for index, entry in enumerate(merged) if entry[2] is member), default=0)


def _newness(entry: _Entry) -> tuple[int, str]:
    return entry[0].create_time.ToNanoseconds(), entry[0].uid


def _positions(page_token: str, fits: str, count: int) -> list[str | None]:
    if not page_token:
        return [""] * count
    try:
        given = base64.b64decode(page_token.encode(), altchars=b"-_", validate=True)
        token: _Token = msgspec.json.decode(given, type=_Token)
    except (ValueError, msgspec.DecodeError):
        raise invalid("page_token", "is not a page token of this API") from None
    if token[0] != fits or len(token[1]) != count:
        raise invalid("page_token", "is from a gateway with other servers; start again at the first page")
    return token[1]


def summed(servers: Sequence[pb.GetServerInfoResponse]) -> pb.GetServerInfoResponse:
    """Combine server info. Capacities and counts are added up; of the limits of a single request, the lowest applies.

    A feature is included if every server has it, because a start may go to any of them. The first server provides the others.
    """
    total = pb.GetServerInfoResponse()
    total.CopyFrom(servers[0])
    total.features[:] = [word for word in servers[0].features if all(word in each.features for each in servers)]
    for name in ("max_running", "max_queued", "running", "queued"):
        setattr(total, name, min(sum(getattr(each, name) for each in servers), 2**32 - 1))
    for name in ("finished", "failed", "turns", "generated_tokens"):
        setattr(total, name, sum(getattr(each, name) for each in servers))
    total.max_request_bytes = min(each.max_request_bytes for each in servers)
    total.max_rollout_time.CopyFrom(min((each.max_rollout_time for each in servers), key=Duration.ToNanoseconds))
    total.start_time.CopyFrom(min((each.start_time for each in servers), key=Timestamp.ToNanoseconds))
    total.draining = all(each.draining for each in servers)
    total.keys_required = any(each.keys_required for each in servers)
    return total


def united(servers: Sequence[pb.ListAgentsResponse]) -> pb.ListAgentsResponse:
    """Merge agents by name; the first server that has an agent describes it. The first server defines the default."""
    agents: dict[str, pb.Agent] = {}
    for server in servers:
        for agent in server.agents:
            agent.default = agent.default and server is servers[0]
            agents.setdefault(agent.name, agent)
    return pb.ListAgentsResponse(agents=[agents[name] for name in sorted(agents)])
