"""The sampler for trainers that derive masks themselves: `http(s)://` targets of the asynchronous HTTP API.

This sampler renders nothing. The ledger is built from the ids that the trainer reports; missing ids stay unknown.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollout_server.core.ledger import SegmentKind
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Spec
from rollout_server.edge.trainer.chat_completion import (
    ChatCompletion,
    ReportedPrompts,
    RequestWriter,
    read_chat_completion,
)
from rollout_server.edge.trainer.completion_record import completion_record, completion_warnings
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, turn_headers
from rollout_server.edge.trainer.http_errors import different_tools, response_failure
from rollout_server.edge.trainer.retry import CompletionFetch, Fetched, RetryPolicy, fetch_with_retries
from rollout_server.edge.trainer.sampling_parameters import WrongParameter, plain_parameters
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork


@dataclass(frozen=True, slots=True)
class PlainTrainers:
    """The shared resources of all samplers of the asynchronous HTTP API."""

    client: HttpClient
    retries: RetryPolicy

    def open(self, spec: Spec) -> PlainSampler:
        """Return the sampler of one rollout."""
        return PlainSampler(self, spec)


class PlainSampler:
    """Request the completions of one conversation from one trainer."""

    def __init__(self, trainers: PlainTrainers, spec: Spec) -> None:
        self._trainers = trainers
        self._spec = spec
        self._url = f"{spec.completions.url}/v1/chat/completions"
        self._writer = RequestWriter(spec.rollout_id)
        self._prompts = ReportedPrompts()
        self._unnamed = False
        self._requested = False

    async def sample(self, request: CompletionRequest) -> Answered:
        """Post one turn and check the completion. Raises `RolloutFailed`."""
        self._requested, turn = True, request.asked.turn
        body = self._body(request)
        post = HttpRequest(self._url, body, turn_headers(request), is_known=request.last is not None)
        fetch = CompletionFetch(post, turn, request.deadline, gate=request.gate)
        started = time.monotonic()
        # If the trainer declares that it replays turn keys, a retry cannot generate a second completion (D8).
        warn = None if self._spec.completions.replays_turn_keys else request.note
        fetched = await fetch_with_retries(self._trainers.client, fetch, self._trainers.retries, warn)
        elapsed = 1000 * (time.monotonic() - started)
        if fetched.response.status != 200:
            raise RolloutFailed(response_failure(fetched.response, turn, request.credentials.secrets()))
        most = self._spec.limits.calls_read
        completion = await read_chat_completion(
            fetched.response.body, request, self._prompts, ids_needed=False, most_calls=most
        )
        return completion_record(
            request, completion, fetched.attempts, elapsed, self._warnings(completion, fetched, request)
        )

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""
        self._requested, self._unnamed = True, False

    def fork(self, fork: Fork) -> PlainSampler:
        """Return the sampler of a forked conversation.

        The trainer derives masks from the messages it receives, so any conversation is possible, but only with the agent's own
        tools.
        """
        if fork.tools is not None:
            raise different_tools()
        other = PlainSampler(self._trainers, self._spec)
        # What replaces a conversation before the first request is the first for the trainer, which never saw that conversation.
        replaces = fork.origin.kind in (SegmentKind.COMPACTION, SegmentKind.MAIN)
        other._unnamed = self._requested or self._unnamed or not replaces
        return other

    def _body(self, request: CompletionRequest) -> bytes:
        turn = request.asked.turn
        try:
            parameters = plain_parameters(request.sampling)
        except WrongParameter as error:
            text = f"turn {turn}: {error}; nothing was sent"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=FailureClass.ENVIRONMENT)) from None
        return self._writer.plain(request.messages[: request.asked.messages], parameters)

    def _warnings(
        self, completion: ChatCompletion, fetched: Fetched, request: CompletionRequest
    ) -> tuple[tuple[str, str], ...]:
        turn, key = request.asked.turn, request.asked.turn_key
        warnings = list(completion_warnings(request, completion))
        if self._unnamed:
            self._unnamed = False
            text = (
                f"turn {turn}: the agent's second conversation uses the same rollout_id, because this protocol cannot name it; "
                "a trainer that derives masks from one growing history computes wrong masks for it"
            )
            warnings.append(("conversation_unnamed", text))
        # A trainer that echoes the key replays the stored completion, so there is no second generation (docs/design.md, B).
        replays = self._spec.completions.replays_turn_keys or fetched.response.replayed_key == key
        if fetched.siblings and not replays:
            text = (
                f"turn {turn}: requested {fetched.attempts} times; the trainer may have generated it "
                f"{fetched.siblings + 1} times, and the last completion counts"
            )
            warnings.append(("resampled", text))
        return tuple(warnings)
