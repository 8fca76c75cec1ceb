# Generated from rollout_client/_async/client.py by gateway/unasync.py. Change that file, then run `make sync-client`.
"""Client for synchronous code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.group_pb2 import Group
from osmosis.rollout.v1.message_pb2 import Tool
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

from rollout_client import requests
from rollout_client._sync.calls import Calls
from rollout_client._sync.events import EventStream, GroupStream, RunStream
from rollout_client.channels import SyncChannel
from rollout_client.chat_messages import RenderedPrompt
from rollout_client.connection import DEFAULT_TIMEOUT, CallMetadata, Settings, Tls
from rollout_client.enums import Detail, View
from rollout_client.event_cursor import ModelAccess, Started, StartedGroup, access_of
from rollout_client.requests import Pages, SelectionFields, WorkResult
from rollout_client.retry import DEFAULT_RETRY, Retry
from rollout_client.spec import StartFields, start_request
from rollout_client.unary_retry import LongPoll

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)


class Client(Calls):
    """Client of a rollout server for synchronous code.

    Threads may share it. It does not survive a fork: make one in each process.

        with Client("localhost:50051", api_key="...") as client:
            started = client.start(messages=[...], completions="http://localhost:9001", tokenizer="Qwen/Qwen3-8B")

    Calls are retried while the server is unreachable or at capacity, as long as `retry` and `timeout` allow. They raise
    `RolloutError` if they fail, TypeError or ValueError for arguments that cannot be sent, and RuntimeError on a closed client.
    Every method takes `timeout`, in seconds for all attempts together, and `call_metadata`, additional gRPC metadata.

    Args:
        address: "host:port", "grpc://host:port", "grpcs://host" (TLS) or "unix:/path"; or a gRPC channel, which the client does
            not close.
        api_key: API key, sent as a bearer token.
        tls: TLS settings. Not needed for a grpcs:// address whose certificate a public authority signed.
        timeout: default timeout of a call in seconds. `run`, `watch` and `wait` have no limit by default.
        retry: retry policy.
        call_metadata: gRPC metadata of every call, such as `traceparent`. A call without `x-request-id` gets a random one.
    """

    def __init__(
        self,
        address: str | grpc.Channel,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        retry: Retry = DEFAULT_RETRY,
        call_metadata: CallMetadata | None = None,
    ) -> None:
        if not isinstance(address, str | grpc.Channel):
            raise TypeError(f"address must be a str or a grpc.Channel, not {type(address).__name__}")
        where, channel = (address, None) if isinstance(address, str) else (None, address)
        self._channel = SyncChannel(Settings(where, api_key, tls, timeout, retry, call_metadata or {}), channel)

    def start(
        self,
        spec: RolloutSpec | None = None,
        /,
        *,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **fields: Unpack[StartFields],
    ) -> Started:
        """Start a rollout, or return the one that the same request id has already started.

        Args:
            spec: the spec; or pass its fields as keywords.
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **fields: fields of the spec, `request_id`, `credentials` and `request_memory`; see `StartFields`.

        Raises:
            InvalidRequest: fields of the spec are invalid.
            NotFound: the agent does not exist.
            NotPossible: this server cannot run the rollout.
            Conflict: the request id was used with a different spec.
            Busy, Unavailable: the server was at capacity or unreachable for longer than `retry` allows.
            DeadlineExceeded: the timeout expired.
        """
        request = start_request(spec, fields)
        return Started.from_response(self._send(self._channel.stub.StartRollout, request, timeout, call_metadata))

    def run(
        self,
        spec: RolloutSpec | None = None,
        /,
        *,
        after_sequence: int = 0,
        detail: Detail = "basic",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **fields: Unpack[StartFields],
    ) -> RunStream:
        """Return a stream that starts a rollout as `start` does and yields its events; the last one is `finished`.

        The client is attached to the rollout while the stream is open. After it closes, the rollout continues, or is cancelled
        after `cancel_after_detach` seconds. A lost connection also detaches the client until the stream has resumed.

        Args:
            spec: the spec; or pass its fields as keywords.
            after_sequence: skip events up to this sequence number, for a rollout that the same request id has already started.
            detail: "basic": counts, names and times; "messages": also messages; "full": also tokens and the whole outcome;
                "outcome": only `finished`, with messages and without tokens.
            timeout: seconds for the whole stream. None: no limit.
            call_metadata: additional gRPC metadata.
            **fields: as for `start`.

        Iterating raises the errors of `start` and `watch`.
        """
        run = requests.run_request(spec, fields, after_sequence, detail)
        cursor = requests.event_cursor(run, timeout, self._channel.settings.retry)
        return RunStream(self._channel, cursor, call_metadata)

    def watch(
        self,
        uid: str,
        *,
        after_sequence: int = 0,
        detail: Detail = "basic",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
    ) -> EventStream:
        """Return a stream of a rollout's events; the last one is `finished`. The client is attached while it is open.

        Args:
            uid: the server's id of the rollout.
            after_sequence: yield the events after this sequence number; 0: all.
            detail: as for `run`.
            timeout: seconds for the whole stream. None: no limit.
            call_metadata: additional gRPC metadata.

        Iterating raises `NotFound` for an unknown rollout, and `EventsGone` if events after `after_sequence` were dropped or
        the number lies beyond the last event.
        """
        watch = requests.watch_request(uid, after_sequence, detail)
        cursor = requests.event_cursor(watch, timeout, self._channel.settings.retry)
        return EventStream(self._channel, cursor, call_metadata)

    def start_group(
        self,
        count: int,
        spec: RolloutSpec | None = None,
        /,
        *,
        min_usable: int = 0,
        refill: int = 0,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **fields: Unpack[StartFields],
    ) -> StartedGroup:
        """Start `count` rollouts of one prompt, all or none, or return the group that the same request id has already started.

        Args:
            count: number of rollouts, up to 1,024.
            spec: the spec of each rollout; or pass its fields as keywords. The server appends "/0", "/1", ... to `rollout_id` and
                sets `group_index`. Without `group_id` it makes one.
            min_usable: cancel the other rollouts once this many are usable: completed, or failed in a class of `train_on`. 0:
                never.
            refill: how many rollouts may be started anew in place of failed ones that are not usable.
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **fields: as for `start`, without `request_memory`.

        Raises the errors of `start`; `Conflict` also if you have another group with this group id.
        """
        request = requests.group_request(count, min_usable, refill, spec, fields)
        response = self._send(self._channel.stub.StartGroup, request, timeout, call_metadata)
        return StartedGroup.from_response(response)

    def watch_group(
        self,
        group_id: str,
        *,
        after_sequence: int = 0,
        view: View = "basic",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
    ) -> GroupStream:
        """Return a stream of a group's outcomes, in the order in which its rollouts end. It ends with the group.

        The client is attached to all rollouts of the group while the stream is open. After the end, `stream.result` has the counts.

        Args:
            group_id: the id of the group.
            after_sequence: skip the items up to this sequence number (`stream.last_sequence`).
            view: how much of each rollout to return, as for `wait`.
            timeout: seconds for the whole stream. None: no limit.
            call_metadata: additional gRPC metadata.

        Iterating raises `NotFound` for an unknown group. The server forgets a group with its rollouts.
        """
        cursor = requests.group_cursor(group_id, after_sequence, view, timeout, self._channel.settings.retry)
        return GroupStream(self._channel, cursor, call_metadata)

    def get_group(
        self, group_id: str, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> Group:
        """Return the current state of a group. `list` and `cancel` select its rollouts by `group_id`. Raises `NotFound`."""
        request = requests.get_group_request(group_id)
        response = self._send(self._channel.stub.GetGroup, request, timeout, call_metadata)
        return response.group

    def render_prompt(
        self,
        spec: RolloutSpec | None = None,
        /,
        *,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **fields: Unpack[StartFields],
    ) -> RenderedPrompt:
        """Return the first prompt that a trainer in token mode would get from a rollout, without starting one.

        Of the agent, only `choose_tools` is called. One that changes its conversation before its first turn has another prompt.

        Args:
            spec: the spec; or pass its fields as keywords.
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **fields: as for `start`. `completions` may be omitted; `credentials` and `request_memory` are not sent.

        Raises the errors of `start`; `InvalidRequest` also if the chat template refuses the messages, and `NotPossible` without a
        tokenizer that the server can load.
        """
        request = requests.prompt_request(spec, fields)
        response = self._send(self._channel.stub.RenderPrompt, request, timeout, call_metadata)
        return RenderedPrompt.from_response(response)

    def wait(
        self,
        uid: str,
        *,
        timeout: float | None = None,
        view: View = "basic",
        call_metadata: CallMetadata | None = None,
    ) -> pb.Rollout:
        """Wait until a rollout has finished and return it.

        The client is attached during each long poll, but not between two polls. For a rollout with `cancel_after_detach=0` use
        `run` instead.

        Args:
            uid: the server's id of the rollout.
            timeout: seconds to wait. None: no limit.
            view: "basic": state, metrics and outcome; "messages": also messages; "samples": also training samples; "full": also
                the ledger's segments.
            call_metadata: additional gRPC metadata.

        Raises:
            NotFinished: the timeout expired first (also a TimeoutError). The rollout continues.
            NotFound: the rollout does not exist.
        """
        poll: LongPoll = requests.long_poll(uid, view, timeout, self._channel.settings.retry)
        response = self._complete(self._channel.stub.WaitRollout, poll, call_metadata)
        return response.rollout

    def get(
        self,
        uid: str,
        *,
        view: View = "basic",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
    ) -> pb.Rollout:
        """Return the current state of a rollout. `view` is as for `wait`. Raises `NotFound` if it does not exist."""
        request = requests.get_request(uid, view)
        response = self._send(self._channel.stub.GetRollout, request, timeout, call_metadata)
        return response.rollout

    def list(
        self,
        *,
        view: View = "basic",
        page_size: int = 100,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **selection: Unpack[SelectionFields],
    ) -> Iterator[pb.Rollout]:
        """Iterate over rollouts, newest first: the selected ones, or all that belong to this API key.

        Args:
            view: as for `wait`.
            page_size: rollouts per request, up to 1,000.
            timeout: seconds for each page. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **selection: conditions, such as `state="running"` or `labels={"experiment": "7"}`; see `SelectionFields`.
        """
        return self._pages(Pages(page_size, view, selection), timeout, call_metadata)

    def cancel(
        self,
        uid: str | None = None,
        /,
        *,
        reason: str = "",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **selection: Unpack[SelectionFields],
    ) -> tuple[str, ...]:
        """Cancel the selected rollouts and return the uids of those that had not finished.

        Cancelling is asynchronous: each of these rollouts then ends with an outcome of its own.

        Args:
            uid: the server's id of one rollout; or select by keyword.
            reason: text for the outcomes, up to 1,000 characters; empty: "cancelled".
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **selection: conditions; see `SelectionFields`. `all=True` selects all rollouts of this API key.

        Raises:
            ValueError: nothing is selected.
            NotFound: a uid does not exist.
        """
        request = requests.cancel_request(uid, selection, reason)
        response = self._send(self._channel.stub.CancelRollouts, request, timeout, call_metadata)
        return tuple(response.uids)

    def acknowledge(self, uid: str, *, timeout: float | None = None, call_metadata: CallMetadata | None = None) -> None:
        """Confirm that an outcome was received, which ends its delivery.

        Raises `NotPossible` if the rollout has not finished, `NotFound` if it does not exist.
        """
        request = requests.acknowledge_request(uid)
        self._send(self._channel.stub.AcknowledgeOutcome, request, timeout, call_metadata)

    def redeliver(
        self,
        uid: str | None = None,
        /,
        *,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **selection: Unpack[SelectionFields],
    ) -> tuple[str, ...]:
        """Send the outcomes of the selected rollouts again, except acknowledged ones, and return the uids of those sent.

        A delivery that waits for its next attempt makes it at once. One that was refused or has expired begins again, with the
        same bytes under the same key. Rollouts are selected as for `cancel`, with the same errors.
        """
        request = requests.redeliver_request(uid, selection)
        response = self._send(self._channel.stub.RedeliverOutcomes, request, timeout, call_metadata)
        return tuple(response.uids)

    def access(
        self, uid: str, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> ModelAccess | None:
        """Return the access to a rollout's model endpoint, as `Started.access` does: for the rollouts of a group.

        Returns None unless the agent runs elsewhere. Raises `NotFound` if the rollout does not exist.
        """
        request = pb.GetRolloutRequest(uid=uid, include_access=True)
        response = self._send(self._channel.stub.GetRollout, request, timeout, call_metadata)
        return access_of(response)

    def finish(
        self,
        uid: str,
        key: str,
        *,
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
        **result: Unpack[WorkResult],
    ) -> bool:
        """End the work of an agent that runs elsewhere. Return True if it had been ended with the same result.

        Args:
            uid: the server's id of the rollout.
            key: the key of its model endpoint, `Started.access.key`.
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.
            **result: such as `reward=1.0` or `failure="out of memory"`; see `WorkResult`.

        Raises:
            Conflict: it was ended with another result.
            NotPossible: the rollout has ended without this result, or the server itself runs its agent.
            PermissionDenied: the key is not that of the rollout.
        """
        request, metadata = requests.finish_request(uid, result), requests.key_metadata(key, call_metadata)
        return (self._send(self._channel.agents.FinishRollout, request, timeout, metadata)).repeated

    def agents(
        self, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> tuple[pb.Agent, ...]:
        """Return the server's agents, sorted by name."""
        request = pb.ListAgentsRequest()
        response = self._send(self._channel.stub.ListAgents, request, timeout, call_metadata)
        return tuple(response.agents)

    def tools(
        self, agent: str = "", *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> tuple[Tool, ...]:
        """Return the tools of an agent in the order in which they are offered to the model.

        An empty name means the default agent. Raises `NotFound` if the agent does not exist.
        """
        request = requests.tools_request(agent)
        response = self._send(self._channel.stub.ListTools, request, timeout, call_metadata)
        return tuple(response.tools)

    def server_info(
        self, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> pb.GetServerInfoResponse:
        """Return version, features, limits and load of the server. Needs no API key."""
        request = pb.GetServerInfoRequest()
        return self._send(self._channel.stub.GetServerInfo, request, timeout, call_metadata)

    def set_policy(
        self,
        *,
        version: str = "",
        step: int | None = None,
        paused: bool = False,
        completions_url: str = "",
        timeout: float | None = None,
        call_metadata: CallMetadata | None = None,
    ) -> tuple[str, ...]:
        """Announce the policy that generates for your rollouts, pause sampling, or let it go on.

        For running and later rollouts, except those of a `Trainer` on a stream, until the server restarts. Returns the uids of the
        rollouts that were cancelled because they are too old for the step (`on_stale`).

        Args:
            version: version of the policy, at most 256 characters; empty: not changed.
            step: step of the policy; it must not decrease while rollouts are unfinished. None: not changed.
            paused: request no further completions until a call without it.
            completions_url: only the rollouts whose `completions` has this URL; empty: all. A URL's own policy takes precedence.
            timeout: seconds for all attempts together. None: the client's timeout.
            call_metadata: additional gRPC metadata.

        Raises `InvalidRequest`, also if the step is below the one announced before.
        """
        request = requests.policy_request(version, step, paused, completions_url)
        response = self._send(self._channel.stub.SetPolicy, request, timeout, call_metadata)
        return tuple(response.cancelled_uids)

    def _pages(self, pages: Pages, timeout: float | None, call_metadata: CallMetadata | None) -> Iterator[pb.Rollout]:
        while pages.more:
            page = self._send(self._channel.stub.ListRollouts, pages.request, timeout, call_metadata)
            for rollout in pages.take(page):
                yield rollout
