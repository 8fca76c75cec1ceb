"""What several servers are together."""

from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from osmosis.rollout.v1 import rollout_service_pb2 as pb


def summed(servers: Sequence[pb.GetServerInfoResponse]) -> pb.GetServerInfoResponse:
    """One server in the place of all: room and counts are added, of the limits of one request the lowest holds.

    A feature counts if every server has it, since a start may go to any of them. What only one can say, the first one says.
    """
    total = pb.GetServerInfoResponse()
    total.CopyFrom(servers[0])
    del total.features[:]
    total.features.extend(word for word in servers[0].features if all(word in each.features for each in servers))
    total.max_running = _sum32(each.max_running for each in servers)
    total.max_queued = _sum32(each.max_queued for each in servers)
    total.running = _sum32(each.running for each in servers)
    total.queued = _sum32(each.queued for each in servers)
    total.finished = sum(each.finished for each in servers)
    total.max_request_bytes = min(each.max_request_bytes for each in servers)
    total.max_rollout_time.CopyFrom(min((each.max_rollout_time for each in servers), key=_moment))
    total.start_time.CopyFrom(min((each.start_time for each in servers), key=_moment))
    total.draining = all(each.draining for each in servers)
    total.keys_required = any(each.keys_required for each in servers)
    return total


def united(servers: Sequence[pb.ListAgentsResponse]) -> pb.ListAgentsResponse:
    """The agents of all by name, each as the first server that has it tells; the first server's default is the default."""
    agents: dict[str, pb.Agent] = {}
    for index, server in enumerate(servers):
        for agent in server.agents:
            if agent.name not in agents:
                agents[agent.name] = told = pb.Agent()
                told.CopyFrom(agent)
                told.default = agent.default and not index
    return pb.ListAgentsResponse(agents=[agents[name] for name in sorted(agents)])


def _sum32(counts: Iterable[int]) -> int:
    return min(sum(counts), 2**32 - 1)


def _moment(value: Duration | Timestamp) -> tuple[int, int]:
    return value.seconds, value.nanos
