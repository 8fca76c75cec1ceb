"""RolloutService: one short method per rpc. The interceptor converts their exceptions to statuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from osmosis.rollout.v1 import event_pb2, group_pb2, rollout_service_pb2_grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_server.core.error import InvalidRequest, NotPossible, Violation
from rollout_server.edge.offload import offload_request
from rollout_server.edge.rpc.caller import caller
from rollout_server.edge.rpc.prompts import PromptRenderer
from rollout_server.edge.rpc.token_window import rollout_window
from rollout_server.edge.tokens.cache import Tokenizers, as_function
from rollout_server.edge.wire import request as wire
from rollout_server.edge.wire.event import event, timestamp
from rollout_server.edge.wire.message import messages_to_proto, tool_to_proto
from rollout_server.edge.wire.rollout import agent_to_proto, group_item, group_to_proto, rollout_to_proto, started
from rollout_server.edge.wire.spec import duration, seconds
from rollout_server.runtime.aio.slices import in_slices
from rollout_server.runtime.groups.registry import GroupRegistry
from rollout_server.runtime.groups.state import GroupPlan
from rollout_server.runtime.journal import KeyMinted
from rollout_server.runtime.registry.registry import RolloutRegistry
from rollout_server.runtime.rollout import Rollout
from rollout_server.runtime.start_request import AdmittedStart, StartRequest

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
LONGEST_WAIT = 3600.0
DEFAULT_WAIT = 30.0
"""Timeouts of WaitRollout in seconds: the maximum, and the default for a call without a deadline."""
MAX_PAGE = 1000
DEFAULT_PAGE = 100


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What GetServerInfo returns besides the registry's values.

    `violations` returns which parts of a start request this server does not allow. It raises `NotPossible` for a request that
    the server cannot run at all.
    """

    version: str
    features: Sequence[str]
    max_request_bytes: int
    start_time: float
    violations: Callable[[StartRequest], Sequence[Violation]]
    keys_required: Callable[[], bool] = lambda: False


class RolloutService(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Serves a registry of rollouts and its groups."""

    def __init__(
        self, registry: RolloutRegistry, groups: GroupRegistry, facts: ServerFacts, tokenizers: Tokenizers
    ) -> None:
        self._registry = registry
        self._prompts = PromptRenderer(tokenizers)
        self._groups = groups
        self._facts = facts

    async def StartRollout(self, request: pb.StartRolloutRequest, context: _Context) -> pb.StartRolloutResponse:
        """Start a rollout or find it."""
        rollout, attached = await self._take(request)
        await self._registry.accept([rollout])
        function_tools = request.include_function_tools
        return started(rollout, await self._access(rollout), attached=attached, function_tools=function_tools)

    async def RunRollout(
        self, request: pb.RunRolloutRequest, context: _Context
    ) -> AsyncIterator[pb.RunRolloutResponse]:
        """Start a rollout or find it, and stream its events."""
        detail = wire.valid_enum_value(request.detail, event_pb2.EventDetail, "detail")
        if not request.HasField("start"):
            raise InvalidRequest(Violation("start", "is missing: request_id, spec and credentials belong in it"))
        rollout, attached = await self._take(request.start)
        with rollout.attached():  # also while its acceptance is stored: `cancel_after_detach` may be shorter
            await self._registry.accept([rollout])
            yield pb.RunRolloutResponse(started=started(rollout, await self._access(rollout), attached=attached))
            async for shown in _events(rollout, request.after_sequence, detail):
                yield pb.RunRolloutResponse(event=shown)

    async def WatchRollout(
        self, request: pb.WatchRolloutRequest, context: _Context
    ) -> AsyncIterator[pb.WatchRolloutResponse]:
        """Stream the events after a sequence number."""
        detail = wire.valid_enum_value(request.detail, event_pb2.EventDetail, "detail")
        rollout = self._registry.get(request.uid, caller())
        with rollout.attached():
            async for shown in _events(rollout, request.after_sequence, detail):
                yield pb.WatchRolloutResponse(event=shown)

    async def WaitRollout(self, request: pb.WaitRolloutRequest, context: _Context) -> pb.WaitRolloutResponse:
        """Wait for the outcome."""
        view = wire.valid_enum_value(request.view, pb.RolloutView, "view")
        rollout = self._registry.get(request.uid, caller())
        timeout = _wait_seconds(request, context)
        with rollout.attached():
            with suppress(TimeoutError):
                await asyncio.wait_for(rollout.log.final_entry(), timeout)
            return pb.WaitRolloutResponse(rollout=rollout_to_proto(rollout, view))

    async def GetRollout(self, request: pb.GetRolloutRequest, context: _Context) -> pb.GetRolloutResponse:
        """Return one rollout."""
        view = wire.valid_enum_value(request.view, pb.RolloutView, "view")
        rollout = self._registry.get(request.uid, caller())
        access = await self._access(rollout) if request.include_access else None
        return pb.GetRolloutResponse(rollout=rollout_to_proto(rollout, view), access=access)

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: _Context) -> pb.ListRolloutsResponse:
        """Return a page of rollouts."""
        if request.page_size > MAX_PAGE:
            raise InvalidRequest(Violation("page_size", f"must be at most {MAX_PAGE}"))
        size = request.page_size or DEFAULT_PAGE
        view = wire.valid_enum_value(request.view, pb.RolloutView, "view")
        before = wire.page_start(request.page_token, request.selection)
        selected = wire.selection(request.selection, caller(), searches=True)
        page = await self._registry.pages.page(selected, before, size)
        tokens = wire.page_tokens([number + 1 for number, _ in page.rollouts], request.selection)
        following = wire.page_tokens([] if page.next_before is None else [page.next_before], request.selection)
        shown = await in_slices(rollout_to_proto(rollout, view) for _, rollout in page.rollouts)
        return pb.ListRolloutsResponse(rollouts=shown, page_tokens=tokens, next_page_token="".join(following))

    async def CancelRollouts(self, request: pb.CancelRolloutsRequest, context: _Context) -> pb.CancelRolloutsResponse:
        """Request the end of rollouts."""
        selection, reason = wire.cancel_request(request, caller())
        for uid in selection.uids:
            self._registry.get(uid, caller())
        uids = self._registry.cancel(selection, reason)
        if uids:
            await self._registry.accept(())  # a restart must not continue what a caller knows to be cancelled
        return pb.CancelRolloutsResponse(uids=uids)

    async def AcknowledgeOutcome(
        self, request: pb.AcknowledgeOutcomeRequest, context: _Context
    ) -> pb.AcknowledgeOutcomeResponse:
        """Record that an outcome was received."""
        self._registry.acknowledge(request.uid, caller())
        await self._registry.accept(())  # a restart must not send it again, nor find it under its freed request id
        return pb.AcknowledgeOutcomeResponse()

    async def RedeliverOutcomes(
        self, request: pb.RedeliverOutcomesRequest, context: _Context
    ) -> pb.RedeliverOutcomesResponse:
        """Send outcomes again that were not acknowledged."""
        if wire.is_empty(request.selection):
            raise InvalidRequest(Violation("selection", "is empty; set `all` to select all of your rollouts"))
        selection = wire.selection(request.selection, caller())
        for uid in selection.uids:
            self._registry.get(uid, caller())
        uids = self._registry.redeliver(selection)
        if uids:
            await self._registry.accept(())  # after a restart, nothing else would send them
        return pb.RedeliverOutcomesResponse(uids=uids)

    async def StartGroup(self, request: group_pb2.StartGroupRequest, context: _Context) -> group_pb2.StartGroupResponse:
        """Start the rollouts of a group, or find it. A large request is converted in a thread, as in `_take`."""
        who = caller()

        def admitted() -> tuple[AdmittedStart, GroupPlan]:
            start, plan = wire.group_request(request, who)
            return self._groups.admit(start, plan, self._facts.violations(start)), plan

        group, attached = self._groups.start(*await offload_request(admitted, request.ByteSize()))
        await self._groups.accept(group)
        return group_pb2.StartGroupResponse(group=group_to_proto(group), attached=attached)

    async def WatchGroup(
        self, request: pb.WatchGroupRequest, context: _Context
    ) -> AsyncIterator[pb.WatchGroupResponse]:
        """Stream the outcomes of a group and its result."""
        view = wire.valid_enum_value(request.view, pb.RolloutView, "view")
        group = self._groups.get(request.group_id, caller())
        with group.attached():
            async for sequence, item in group.follow(request.after_sequence):
                yield group_item(sequence, item, view)

    async def GetGroup(self, request: group_pb2.GetGroupRequest, context: _Context) -> group_pb2.GetGroupResponse:
        """Return one group."""
        return group_pb2.GetGroupResponse(group=group_to_proto(self._groups.get(request.group_id, caller())))

    async def RenderPrompt(self, request: pb.RenderPromptRequest, context: _Context) -> pb.RenderPromptResponse:
        """Render the first prompt of a rollout that is not started."""
        return await self._prompts.run_bounded(self._render(request), request.ByteSize())

    async def DecodeTokens(self, request: pb.DecodeTokensRequest, context: _Context) -> pb.DecodeTokensResponse:
        """Return the texts of tokens of a segment."""
        rollout = self._registry.get(request.uid, caller())
        window, prompts = rollout_window(rollout, request), self._prompts
        texts = await prompts.run_bounded(prompts.run(rollout.spec.tokenizer, window.texts), 4 * len(window.ids))
        return pb.DecodeTokensResponse(texts=texts)

    async def SetPolicy(self, request: pb.SetPolicyRequest, context: _Context) -> pb.SetPolicyResponse:
        """Announce the policy of the caller's rollouts that are not on a stream."""
        url, update = wire.announced_url(request), wire.policy_update(request.policy)
        return pb.SetPolicyResponse(cancelled_uids=self._registry.policies.announce(caller().name, update, url))

    async def ListTools(self, request: pb.ListToolsRequest, context: _Context) -> pb.ListToolsResponse:
        """Return the tools of an agent."""
        agent = self._registry.admission.agent(request.agent)
        return pb.ListToolsResponse(tools=[tool_to_proto(tool) for tool in agent.offered_tools])

    async def ListAgents(self, request: pb.ListAgentsRequest, context: _Context) -> pb.ListAgentsResponse:
        """Return the agents of this server."""
        registry = self._registry
        agents = sorted(registry.agents.items())
        return pb.ListAgentsResponse(
            agents=[agent_to_proto(agent, default=name == registry.default_agent) for name, agent in agents]
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        """Return the server's version, features and limits."""
        registry, facts, totals = self._registry, self._facts, self._registry.totals
        return pb.GetServerInfoResponse(
            version=facts.version,
            features=facts.features,
            max_running=registry.capacity.running,
            max_queued=registry.capacity.queued,
            max_request_bytes=facts.max_request_bytes,
            max_rollout_time=duration(registry.bounds.seconds),
            start_time=timestamp(facts.start_time),
            running=registry.running,
            queued=registry.queued,
            finished=totals.finished,
            failed=totals.failed,
            turns=totals.turns,
            generated_tokens=totals.generated_tokens,
            draining=registry.draining,
            default_agent=registry.default_agent,
            keys_required=facts.keys_required(),
        )

    async def _access(self, rollout: Rollout) -> pb.ModelAccess | None:
        """Return the access to the model endpoint of a rollout whose agent runs elsewhere, once later processes accept its key."""
        if not rollout.agent.external:
            return None
        access = self._registry.model_access(rollout.uid)
        if access.key and rollout.outcome is None:
            if rollout.capture.add_key(access.key):
                self._registry.journal.write(KeyMinted(rollout.uid, rollout.capture.key_digests))
            await self._registry.accept([rollout])  # another caller's request for the key may not be stored yet
        return pb.ModelAccess(base_url=access.base_url, key=access.key)

    async def _render(self, request: pb.RenderPromptRequest) -> pb.RenderPromptResponse:
        who = caller()
        admitted = await self._admit(lambda: wire.prompt_request(request, who), request.ByteSize())
        spec, tools = admitted.request.spec, admitted.tools()
        if spec.tools is not None:
            text = "the tools of `spec.tools` are listed only when a rollout runs, so no prompt has them before; leave it unset"
            raise NotPossible(text, reason="TOOLS_NOT_LISTED")
        ids = await self._prompts.token_ids(spec.tokenizer, tools, spec.messages, "spec.messages")
        return pb.RenderPromptResponse(
            token_ids=ids,
            messages=messages_to_proto(spec.messages, typed=spec.typed),
            tools_json=[json.dumps(as_function(tool)) for tool in tools],
        )

    async def _take(self, request: pb.StartRolloutRequest) -> tuple[Rollout, bool]:
        """Start a rollout, or find it. A large request is converted in a thread, so that it does not block other calls."""
        who = caller()
        admitted = await self._admit(lambda: wire.start_request(request, who), request.ByteSize())
        return self._registry.start(admitted)

    async def _admit(self, convert: Callable[[], StartRequest], size: int) -> AdmittedStart:
        """Convert a request of `size` bytes and validate it."""

        def admit() -> AdmittedStart:
            start = convert()
            return self._registry.admission.admit(start, self._facts.violations(start))

        return await offload_request(admit, size)


async def _events(rollout: Rollout, after: int, detail: int) -> AsyncIterator[event_pb2.RolloutEvent]:
    """Yield the events after a sequence number in the requested detail."""
    if detail == event_pb2.EVENT_DETAIL_OUTCOME:
        rollout.log.check(after)
        entry = await rollout.log.final_entry()
        if entry.sequence > after:
            yield event(rollout, entry, detail)
        return
    async for entry in rollout.log.follow(after):
        yield event(rollout, entry, detail)


def _wait_seconds(request: pb.WaitRolloutRequest, context: _Context) -> float:
    """Return how long to wait, in seconds: less than the call's deadline, so that the response arrives before it."""
    remaining = context.time_remaining()
    wait = seconds(request.timeout) if request.HasField("timeout") else None
    if wait is not None and wait < 0:
        raise InvalidRequest(Violation("timeout", "must not be negative"))
    if wait is None:
        wait = DEFAULT_WAIT if remaining is None else remaining
    if remaining is not None:
        wait = min(wait, remaining - min(0.5, 0.1 * remaining))
    return max(0.0, min(wait, LONGEST_WAIT))
