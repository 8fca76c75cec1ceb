"""The read calls of RolloutService over an archive. It refuses all others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from itertools import accumulate, chain
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import grpc
from osmosis.rollout.v1 import event_pb2, group_pb2, rollout_service_pb2_grpc
from osmosis.rollout.v1 import rollout_service_pb2 as pb

from rollout_server.archive.archive import Archive, Recording, Unreadable, basic
from rollout_server.core.error import InvalidRequest, NotFound, NotPossible, Violation
from rollout_server.core.spec import TokenizerName
from rollout_server.edge.rpc.prompts import PromptRenderer
from rollout_server.edge.rpc.service import DEFAULT_PAGE, MAX_PAGE
from rollout_server.edge.rpc.token_window import TokenWindow, token_window
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.wire import request as wire
from rollout_server.runtime.start_request import Caller

READ_ONLY: Final = "read_only"
"""Feature of a server that shows rollouts, and does not start or cancel any."""
SAVED: Final = "saved_rollouts"
"""Feature of a server whose rollouts do not change any more."""

_SECONDS: Final = 1.0
"""How long one call examines rollouts that were not read yet."""
_MOST: Final = 1000
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_T = TypeVar("_T")


class ArchiveService(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Serves an archive. It blocks no other call while it reads: reading takes place in threads.

    Args:
        archive: the rollouts.
        version: that of this program.
        tokenizers: the tokenizers that are installed here.
        tokenizer: that of rollouts which name none; None: their tokens have no texts.
    """

    def __init__(
        self, archive: Archive, version: str, tokenizers: Tokenizers, tokenizer: TokenizerName | None = None
    ) -> None:
        self._archive = archive
        self._version = version
        self._prompts = PromptRenderer(tokenizers)
        self._tokenizer = tokenizer

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: _Context) -> pb.GetServerInfoResponse:
        """Return the version, and that nothing can be changed."""
        return pb.GetServerInfoResponse(
            version=self._version, features=[READ_ONLY, SAVED], finished=len(self._archive.uids)
        )

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: _Context) -> pb.ListRolloutsResponse:
        """Return a page of rollouts. It is short if reading them takes long."""
        if request.page_size > MAX_PAGE:
            raise InvalidRequest(Violation("page_size", f"must be at most {MAX_PAGE}"))
        wire.selection(request.selection, Caller("", admin=True), searches=True)  # its errors are those of a server
        selection, before = request.selection, wire.page_start(request.page_token, request.selection)
        page = await _read(self._archive.page, selection, before, request.page_size or DEFAULT_PAGE, _SECONDS)
        following = [] if page.next_before is None else [page.next_before]
        shown = [rollout for _, rollout in page.rollouts]
        if request.view > pb.ROLLOUT_VIEW_BASIC:
            shown = [(await _read(self._archive.read, each.uid)).rollout for each in shown]
        return pb.ListRolloutsResponse(
            rollouts=shown,
            page_tokens=wire.page_tokens([number + 1 for number, _ in page.rollouts], selection),
            next_page_token="".join(wire.page_tokens(following, selection)),
        )

    async def GetRollout(self, request: pb.GetRolloutRequest, context: _Context) -> pb.GetRolloutResponse:
        """Return one rollout."""
        found = (await _read(self._archive.read, request.uid)).rollout
        return pb.GetRolloutResponse(rollout=found if request.view > pb.ROLLOUT_VIEW_BASIC else basic(found))

    async def WaitRollout(self, request: pb.WaitRolloutRequest, context: _Context) -> pb.WaitRolloutResponse:
        """Return one rollout at once, because it does not change."""
        return pb.WaitRolloutResponse(rollout=(await _read(self._archive.read, request.uid)).rollout)

    async def WatchRollout(
        self, request: pb.WatchRolloutRequest, context: _Context
    ) -> AsyncIterator[pb.WatchRolloutResponse]:
        """Stream the saved events after a sequence number. Those of an unfinished rollout have no end, so the stream has none."""
        found = await _read(self._archive.read, request.uid)
        for event in found.events:
            is_wanted = request.detail != event_pb2.EVENT_DETAIL_OUTCOME or event.HasField("finished")
            if event.sequence > request.after_sequence and is_wanted:
                yield pb.WatchRolloutResponse(event=event)
        if found.rollout.state != pb.ROLLOUT_STATE_FINISHED:
            await asyncio.Event().wait()

    async def ListAgents(self, request: pb.ListAgentsRequest, context: _Context) -> pb.ListAgentsResponse:
        """Return the names of the agents of the newest rollouts."""
        page = await _read(self._archive.page, pb.Selection(), None, _MOST, _SECONDS)
        names = sorted({rollout.spec.agent for _, rollout in page.rollouts} - {""})
        return pb.ListAgentsResponse(agents=[pb.Agent(name=name) for name in names])

    async def GetGroup(self, request: group_pb2.GetGroupRequest, context: _Context) -> group_pb2.GetGroupResponse:
        """Return the members of a group that are here. Its result is not saved."""
        selection = pb.Selection(group_id=request.group_id)
        page = await _read(self._archive.page, selection, None, _MOST, 10 * _SECONDS)
        if not request.group_id or not page.rollouts:
            raise NotFound(
                f"there is no rollout of group {request.group_id!r} among the saved ones", reason="GROUP_NOT_FOUND"
            )
        rollouts = [rollout for _, rollout in page.rollouts]
        members = [
            group_pb2.GroupMember(
                index=each.spec.group_index,
                uid=each.uid,
                rollout_id=each.spec.rollout_id,
                finished=each.state == pb.ROLLOUT_STATE_FINISHED,
            )
            for each in rollouts
        ]
        group = group_pb2.Group(
            group_id=request.group_id, members=sorted(members, key=lambda each: each.index), caller=rollouts[0].caller
        )
        if rollouts[-1].HasField("create_time"):
            group.create_time.CopyFrom(rollouts[-1].create_time)
        return group_pb2.GetGroupResponse(group=group)

    async def DecodeTokens(self, request: pb.DecodeTokensRequest, context: _Context) -> pb.DecodeTokensResponse:
        """Return the texts of tokens of a segment."""
        found = await _read(self._archive.read, request.uid)
        name, prompts = found.rollout.spec.tokenizer, self._prompts
        tokenizer = TokenizerName(name.name, name.revision) if name.name else self._tokenizer
        window = _window(found, request)
        texts = await prompts.run_bounded(prompts.run(tokenizer, window.texts), 4 * len(window.ids))
        return pb.DecodeTokensResponse(texts=texts)

    async def refuse(self, request: object, context: _Context) -> NoReturn:
        """Refuse a call that would change something."""
        raise NotPossible(_REFUSED, reason="READ_ONLY")

    async def refuse_stream(self, request: object, context: _Context) -> AsyncIterator[NoReturn]:
        """Refuse a call with a stream of responses."""
        raise NotPossible(_REFUSED, reason="READ_ONLY")
        yield  # makes this a generator, as gRPC expects

    StartRollout = CancelRollouts = AcknowledgeOutcome = RedeliverOutcomes = refuse
    StartGroup = RenderPrompt = SetPolicy = ListTools = refuse
    RunRollout = WatchGroup = refuse_stream


_REFUSED: Final = "these are saved rollouts: they can be read, but nothing can be started, cancelled or delivered"


def _window(found: Recording, request: pb.DecodeTokensRequest) -> TokenWindow:
    """Return the tokens that are requested of a rollout. Raises `InvalidRequest`, `NotFound` and `OutOfRange`."""
    segment = next((each for each in found.outcome.segments if each.id == request.segment_id), None)
    ids = array("I", chain.from_iterable(span.token_ids for span in segment.spans)) if segment else array("I")
    stops = [*accumulate(len(span.token_ids) for span in segment.spans)] if segment else None
    return token_window(request, stops, lambda start, stop: ids[start:stop])


async def _read(read: Callable[..., _T], *arguments: Any) -> _T:
    """Call a function that reads saved rollouts in a thread. Raises `NotPossible` for those that cannot be read."""
    try:
        return await asyncio.to_thread(read, *arguments)
    except Unreadable as error:
        raise NotPossible(str(error), reason="UNREADABLE") from None
