# Generated from rollout_client/_async/client.py by gateway/unasync.py. Change that file, then run `make sync-client`.
"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import NoReturn, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from osmosis.rollout.v1 import rollout_service_pb2 as pb
from osmosis.rollout.v1.message_pb2 import Tool
from osmosis.rollout.v1.spec_pb2 import RolloutSpec

from rollout_client import requests
from rollout_client._sync.events import EventStream, RunStream
from rollout_client.channels import SyncChannel, refuse_pickling
from rollout_client.connection import DEFAULT_TIMEOUT, CallMetadata, Settings, Tls
from rollout_client.errors import failure_of
from rollout_client.event_cursor import Started
from rollout_client.requests import Detail, Pages, SelectionFields, View
from rollout_client.retry import DEFAULT_RETRY, Attempts, Retry
from rollout_client.spec import StartFields, start_request
from rollout_client.unary_retry import Exchange, LongPoll

_Q = TypeVar("_Q", bound=Message)
_A = TypeVar("_A", bound=Message)


class Client:
    """A client of a rollout server, for programs without an event loop.

    Threads may share it; forked processes may not.

    Calls are tried again while the server cannot be reached or has no room, for as long as `retry` and the call's `timeout`
    allow. They raise `RolloutError`, and TypeError or ValueError for arguments that cannot be sent.

    Args:
        address: host:port, grpc://host:port, grpcs://host (TLS) or unix:/path; or a channel of your own, which stays yours
            to close.
        api_key: for servers that want one.
        tls: how to trust the server and show who one is; needed where grpcs:// with well-known authorities is not enough.
        timeout: seconds for calls that are given none, retries included. `run`, `watch` and `wait` take until the rollout's end.
        retry: how a server that fails is tried again.
        call_metadata: gRPC metadata for each call, such as `traceparent`; each method takes more. `x-request-id` is made up for
            each call where none is given.
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
        """Starts a rollout, or finds the one that was started with the same request id.

        Takes the spec's fields as keywords (see `StartFields`), or a ready RolloutSpec. Raises `Conflict` where the request id is
        known with another spec, `Busy` and `Unavailable` where the server had no room or was not there for too long.
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
        """Starts a rollout as `start` does and iterates over its events, until after `finished`.

        Leaving the stream detaches from the rollout: it goes on alone, or is cancelled after `cancel_after_detach` seconds, if
        that is given. A cut connection detaches, too, until it was resumed.
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
        """Iterates over the events after a sequence number, until after `finished`. Whoever watches is attached.

        Raises `EventsGone` where those events are not kept or not reached.
        """
        watch = requests.watch_request(uid, after_sequence, detail)
        cursor = requests.event_cursor(watch, timeout, self._channel.settings.retry)
        return EventStream(self._channel, cursor, call_metadata)

    def wait(
        self,
        uid: str,
        *,
        timeout: float | None = None,
        view: View = "basic",
        call_metadata: CallMetadata | None = None,
    ) -> pb.Rollout:
        """Waits until a rollout has finished. Raises `NotFinished`, which is a TimeoutError, where it has not in time.

        One is attached meanwhile, but for a moment between long polls: with a `cancel_after_detach` of 0 use `run`.
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
        """A rollout as it is now."""
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
        """Iterates over the selected rollouts, newest first, or over all that one may see. `timeout` is for each page."""
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
        """Asks the selected rollouts to end. Returns the uids of those that had not finished.

        Raises ValueError where nothing is selected: `all=True` cancels all rollouts of one's own.
        """
        request = requests.cancel_request(uid, selection, reason)
        response = self._send(self._channel.stub.CancelRollouts, request, timeout, call_metadata)
        return tuple(response.uids)

    def acknowledge(self, uid: str, *, timeout: float | None = None, call_metadata: CallMetadata | None = None) -> None:
        """Tells that an outcome was received, which ends its delivery. Raises `NotPossible` where there is none yet."""
        request = requests.acknowledge_request(uid)
        self._send(self._channel.stub.AcknowledgeOutcome, request, timeout, call_metadata)

    def agents(
        self, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> tuple[pb.Agent, ...]:
        """The server's agents, by name."""
        request = pb.ListAgentsRequest()
        response = self._send(self._channel.stub.ListAgents, request, timeout, call_metadata)
        return tuple(response.agents)

    def tools(
        self, agent: str = "", *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> tuple[Tool, ...]:
        """The tools of an agent, in the order in which the model is told; of the default agent where none is named."""
        request = requests.tools_request(agent)
        response = self._send(self._channel.stub.ListTools, request, timeout, call_metadata)
        return tuple(response.tools)

    def server_info(
        self, *, timeout: float | None = None, call_metadata: CallMetadata | None = None
    ) -> pb.GetServerInfoResponse:
        """What the server is and can do. Needs no API key."""
        request = pb.GetServerInfoRequest()
        return self._send(self._channel.stub.GetServerInfo, request, timeout, call_metadata)

    def close(self) -> None:
        """Ends what is under way and closes the connection. Whatever waits for an answer raises RuntimeError."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._channel.settings.address or 'over a channel of its user'}>"

    def __reduce__(self) -> NoReturn:
        refuse_pickling(self)

    def _send(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Q, _A],
        request: _Q,
        timeout: float | None,
        call_metadata: CallMetadata | None,
    ) -> _A:
        settings = self._channel.settings
        exchange: Exchange[_Q, _A] = Exchange(request, Attempts(settings.retry, settings.call_timeout(timeout)))
        return self._complete(method, exchange, call_metadata)

    def _complete(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Q, _A],
        exchange: Exchange[_Q, _A],
        call_metadata: CallMetadata | None,
    ) -> _A:
        """The last response of an exchange, however many attempts it takes. Raises RolloutError."""
        request_id, metadata = self._channel.settings.metadata(call_metadata)
        while True:
            self._channel.check()
            try:
                response = self._channel.unary(method, exchange.request(), exchange.timeout(), metadata)
            except grpc.RpcError as error:
                failure = failure_of(error, request_id)
            else:
                if exchange.is_complete(response):
                    return response
                continue
            self._channel.check()
            self._channel.pause(exchange.on_failure(failure))

    def _pages(self, pages: Pages, timeout: float | None, call_metadata: CallMetadata | None) -> Iterator[pb.Rollout]:
        while pages.more:
            page = self._send(self._channel.stub.ListRollouts, pages.request, timeout, call_metadata)
            for rollout in pages.take(page):
                yield rollout
