"""The sampler for gRPC trainers: `grpc(s)://` targets that serve CompletionService.

Each request carries only what is new since a base checkpoint that both sides hold.

- Token mode: this server renders and sends the ids that follow the last completion; the trainer generates from them. In each
  turn both sides compare digests over all tokens and their authors, so a difference is found in the turn in which it occurs.
- Message mode: the trainer renders. The prompt ids that it returns are the truth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.core.ledger import MAX_TOKEN_ID, Prediction, SegmentKind, Tokens, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Spec
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.tokens.cache import Tokenizers, open_renderer
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tracing.propagation import trace_headers
from rollout_server.edge.trainer.aborted_parts import ABORTED, AbortedParts, planes_warning
from rollout_server.edge.trainer.completion_record import completion_record, completion_warnings
from rollout_server.edge.trainer.grpc_client import (
    BaseUnknown,
    GrpcTrainerClient,
    LedgerMismatch,
    ToolsUnknown,
    TrainerClient,
    TurnCall,
)
from rollout_server.edge.trainer.http_errors import redact
from rollout_server.edge.trainer.response_limits import class_of_response_error
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.edge.trainer.trainer_digest import (
    PromptDelta,
    TrainerDigest,
    agree,
    first_other_token,
    held_spans,
)
from rollout_server.edge.wire.completion import (
    Completion,
    MalformedCompletion,
    NewSpan,
    PromptUpdate,
    RequestBuilder,
    Response,
    in_token_mode,
    read_completion,
    read_cut,
    read_part,
    tool_set,
)
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Tool


@dataclass(frozen=True, slots=True)
class CompletionTrainers:
    """The shared resources of all samplers of gRPC trainers. `timeout` is in seconds, per attempt."""

    channels: Channels
    tokenizers: Tokenizers
    retries: RetryPolicy
    timeout: float

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> CompletionSampler:
        """Return the sampler of one rollout."""
        target = spec.completions
        trainer = GrpcTrainerClient(self.channels, target.url, self.retries, self.timeout, target.replays_turn_keys)
        return CompletionSampler(trainer, self.tokenizers, uid, spec, tools)


class CompletionSampler:
    """Request the completions of one conversation from one trainer."""

    def __init__(
        self, trainer: TrainerClient, tokenizers: Tokenizers, uid: str, spec: Spec, tools: Sequence[Tool]
    ) -> None:
        self._trainer = trainer
        self._tokenizers = tokenizers
        self._spec = spec
        self._tools = tools
        self._builder = RequestBuilder(uid, spec.rollout_id, spec.typed, tool_set(tools))
        self._digest = TrainerDigest()
        self._segment_id = ""
        self._whole = True
        self._begins_earlier = False
        self._renderer: Renderer | None = None
        self._rendered_by = ""
        self._policies: list[str] = []

    async def sample(self, request: CompletionRequest) -> Answered:
        """Request a completion and check it. Raises `RolloutFailed`."""
        messages = tuple(request.messages[: request.asked.messages])
        if self._begins_earlier:
            self._digest.rebuild(request.ledger)
            self._begins_earlier = False
        rendered = await self._render(request, messages) if in_token_mode(self._spec) else None
        delta = None if rendered is None else self._digest.predicted(request, rendered.predicted)
        call = TurnCall(request.asked.turn, request.deadline, request.credentials, gate=request.gate)
        started = time.monotonic()
        completion = await self._complete(request, messages, delta, call)
        elapsed = 1000 * (time.monotonic() - started)
        warnings = (*call.warnings, *self._warnings(completion, request, rendered))
        answered = completion_record(request, completion, call.attempts, elapsed, warnings)
        if rendered is not None and delta is not None:
            checked = await self._check_rendered(request, rendered.predicted, delta, completion, answered)
        else:
            checked = await self._check_reported(request, completion, answered)
        self._segment_id = request.asked.segment_id
        return checked

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`. The tokens are added from the ledger of the next request.

        After a turn without tokens, the trainer's digest is not known any more: it gets the whole history.
        """
        self._begins_earlier, self._segment_id = True, asked.segment_id
        self._rendered_by = answered.rendered_by
        if answered.token_ids is None or (answered.reported is None and answered.predicted is None):
            self._digest.unsure = self._digest.ever_unsure = True
        for version in [run.version for run in answered.runs] or [answered.policy_version]:
            if version and version not in self._policies:
                self._policies.append(version)

    def fork(self, fork: Fork) -> CompletionSampler:
        """Return the sampler of a forked conversation. A branch continues from the tokens so far; any other fork starts empty.

        The tokens after an earlier turn are known from the branch's ledger, with its first request. Trainers keep a checkpoint per
        turn, so its base is the one of that turn.
        """
        tools = self._tools if fork.tools is None else fork.tools
        other = CompletionSampler(self._trainer, self._tokenizers, self._builder.uid, self._spec, tools)
        other._policies, other._rendered_by = self._policies, self._rendered_by
        if fork.origin.kind is SegmentKind.BRANCH:
            earlier = other._begins_earlier = fork.earlier or self._begins_earlier
            other._digest = self._digest.fork_earlier() if earlier else self._digest.fork()
            other._renderer = self._renderer and self._renderer.fork(earlier=earlier)
        return other

    async def _render(self, request: CompletionRequest, messages: tuple[Message, ...]) -> Rendered:
        """Render the environment tokens that the trainer continues from."""
        if self._renderer is None:
            tokenizer = self._spec.tokenizer
            self._renderer = await open_renderer(
                self._tokenizers, tokenizer, self._tools, date=request.date, rendered_by=self._rendered_by
            )
            self._rendered_by = self._renderer.loaded.digest
        return await self._renderer.append(messages, request.last, request.last_messages)

    async def _complete(
        self, request: CompletionRequest, messages: Sequence[Message], delta: PromptDelta | None, call: TurnCall
    ) -> Completion:
        turn = request.asked.turn
        try:
            return await self._send(request, messages, delta, call)
        except (BaseUnknown, ToolsUnknown) as unknown:
            what = "the whole history" if isinstance(unknown, BaseUnknown) else "the list of tools"
            text = f"turn {turn}: the trainer requests {what}, which was already sent under this turn key"
            raise RolloutFailed(Failure(Category.TRAINER_CLIENT, text, turn)) from None
        except LedgerMismatch as mismatch:
            spans = held_spans(request.ledger)
            raise RolloutFailed(await self._mismatch(request, spans, mismatch.checkpoints)) from None
        except MalformedCompletion as error:
            text = f"turn {turn}: the trainer's completion is malformed: {error}"
            source = class_of_response_error(error.__cause__, FailureClass.TRAINER)
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=source)) from None

    async def _send(
        self, request: CompletionRequest, messages: Sequence[Message], delta: PromptDelta | None, call: TurnCall
    ) -> Completion:
        """Send what is new since the base; send the whole history or the list of tools once if the trainer does not hold them.

        While the completion is aborted, request the rest of it.
        """
        base = self._digest.base(request)
        listed = base is None
        parts = AbortedParts(request.asked.turn, request.sampling, FailureClass.TRAINER)
        while True:
            self._whole = base is None
            try:
                update = self._update(request, messages, delta, base)
                wire = self._builder.request(request.asked, parts, update, list_tools=listed)
                wire.traceparent = trace_headers().get("traceparent", "")
                response = await self._trainer.complete(wire, call)
            except BaseUnknown:
                if base is None:
                    raise
                base, listed = None, True
                continue
            except ToolsUnknown:
                if listed:
                    raise
                listed = True
                continue
            if response.finish_reason != ABORTED:
                most_calls, resumed = self._spec.limits.calls_read, bool(parts.held)
                return _joined(parts, await read_completion(response, most_calls, resumed=resumed), call)
            parts.add(await read_part(response))
            if parts.full:
                return await self._cut(parts, response, call)
            await parts.pause()
            call.resume()

    async def _cut(self, parts: AbortedParts, response: Response, call: TurnCall) -> Completion:
        """Return the completion whose aborted parts have `max_tokens` tokens, so that there is no rest to request."""
        text = None
        if self._renderer is not None:
            loaded = self._renderer.loaded
            text = await loaded.run(loaded.decode, parts.ids)
        return _joined(parts, await read_cut(response, self._spec.limits.calls_read, text), call)

    def _update(
        self,
        request: CompletionRequest,
        messages: Sequence[Message],
        delta: PromptDelta | None,
        base: Checkpoint | None,
    ) -> PromptUpdate:
        history = () if base is not None or delta is None else held_spans(request.ledger)
        return PromptUpdate(
            base=base,
            messages=messages[base.messages if base is not None else 0 :],
            spans=(*history, *delta.spans) if delta is not None else (),
            prompt=delta.prompt if delta is not None else None,
            origin=request.ledger.origin if request.asked.segment_id != self._segment_id else None,
        )

    async def _check_rendered(
        self,
        request: CompletionRequest,
        predicted: Prediction,
        delta: PromptDelta,
        completion: Completion,
        answered: Answered,
    ) -> Answered:
        """Token mode: the prompt is what this server sent, confirmed by the trainer's digests."""
        turn, ids = request.asked.turn, completion.token_ids
        if ids is None:
            text = f"turn {turn}: `token_ids` is missing; a trainer in token mode must return the sampled token ids"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=FailureClass.TRAINER))
        if not completion.shows_prompt and completion.after is None and not completion.cut:
            text = (
                f"turn {turn}: `prompt_checkpoint` and `after` are missing, so the trainer's prompt cannot be verified; "
                "a trainer in token mode must send both"
            )
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn, source=FailureClass.TRAINER))
        same = completion.reported is None or completion.reported == delta.tokens
        after = self._digest.add(delta, turn, ids)
        if not (same and agree(delta.prompt, completion.prompt) and agree(after, completion.after)):
            raise RolloutFailed(await self._mismatch(request, delta.segment(request, ids)))
        answered = replace(answered, predicted=predicted, rendered_by=self._rendered_by)
        if not completion.shows_prompt:
            return answered
        prompt = predicted.closing + predicted.environment
        return replace(answered, reported=prompt, shared=request.ledger.tokens)

    async def _check_reported(self, request: CompletionRequest, completion: Completion, answered: Answered) -> Answered:
        """Message mode: the prompt is what the trainer reports."""
        turn, ids, prompt = request.asked.turn, completion.token_ids, completion.reported
        if ids is None or prompt is None:
            return answered
        delta = self._digest.reported(request, prompt)
        if not self._digest.confirms(delta, turn, ids, completion.after, whole=self._whole):
            if self._digest.repeats is not None:
                text = f"turn {turn}: the trainer repeated the prompt and completion of turn {self._digest.repeats}"
                raise RolloutFailed(_drift_failure(text, turn))
            raise RolloutFailed(await self._mismatch(request, delta.segment(request, ids)))
        if not self._digest.unsure:
            return answered
        text = f"turn {turn}: an earlier turn came without tokens, so the trainer's digest cannot be verified"
        return replace(answered, notes=(*answered.notes, ("unverified", text)))

    async def _mismatch(
        self, request: CompletionRequest, spans: Sequence[NewSpan], checkpoints: Sequence[Checkpoint] | None = None
    ) -> Failure:
        """Return the failure that names the turn and the first token at which the trainer's tokens differ from `spans`."""
        turn, segment_id = request.asked.turn, request.asked.segment_id
        message = f"turn {turn}: the trainer holds other tokens than this server"
        ledger = await self._trainer.read_ledger(self._builder.uid, segment_id, request.credentials.completions)
        if ledger is None:
            since = self._digest.first_mismatch(checkpoints) if checkpoints is not None else None
            where = f", since turn {since}" if since is not None else ""
            return _drift_failure(f"{message}{where}; its ledger is not available (ReadLedger)", turn)
        ids, authors = ledger
        difference = await asyncio.to_thread(first_other_token, spans, ids, authors)
        if difference is None:
            text = f"{message} according to its digest, but its ledger holds the same tokens: it computes digests differently"
            return _drift_failure(text, turn)
        index, since = difference
        secrets = request.credentials.secrets()
        expected = pack_tokens(token for span in spans for token in span.ids)
        expected_text, trainer_text = [
            redact((await self._text(tokens[max(0, index - 4) : index + 8])).encode("utf-8", "replace"), secrets)
            for tokens in (expected, ids)
        ]
        where = f"since turn {since}, from token {index} on"
        text = f"{message}, {where}: this server has {expected_text}, the trainer has {trainer_text}"
        return _drift_failure(text, turn)

    async def _text(self, ids: Tokens) -> str:
        """Return tokens as readable text. A trainer may report ids that no tokenizer has; these are shown as numbers."""
        if self._renderer is None or any(token > MAX_TOKEN_ID for token in ids):
            return str(list(ids))
        loaded = self._renderer.loaded
        try:
            return repr(await loaded.run(loaded.decode, ids))
        except (IndexError, KeyError, TypeError, ValueError, OverflowError):
            return str(list(ids))

    def _warnings(
        self, completion: Completion, request: CompletionRequest, rendered: Rendered | None
    ) -> Iterator[tuple[str, str]]:
        turn, secrets = request.asked.turn, request.credentials.secrets()
        yield from completion_warnings(request, completion, self._renderer, rendered)
        if rendered is not None and not (completion.shows_prompt and completion.after is not None):
            missing = "after" if completion.shows_prompt else "prompt_checkpoint"
            yield (
                "unverified",
                f"turn {turn}: the trainer sent no {missing}, so it is unverified whether it holds the same tokens",
            )
        for version in [run.version for run in completion.runs] or [completion.policy_version]:
            if version in self._policies[:-1]:
                latest = self._policies[-1]
                text = f"turn {turn}: policy {version!r} generated this turn after {latest!r} had replaced it"
                yield "policy_stale", redact(text.encode("utf-8", "replace"), secrets)
            elif version and version not in self._policies:
                self._policies.append(version)


def _joined(parts: AbortedParts, last: Completion, call: TurnCall) -> Completion:
    """Return the whole completion, given its last response. Adds a warning to the call if its planes are dropped."""
    if not parts.held:
        return last
    joined = parts.join(last.part)
    if joined.planes_dropped:
        call.warnings.append(planes_warning(call.turn))
    return replace(
        last,
        token_ids=joined.token_ids,
        logprobs=joined.logprobs,
        planes=joined.planes,
        policy_version=joined.policy_version,
        policy_step=joined.policy_step,
        runs=joined.runs,
    )


def _drift_failure(text: str, turn: int) -> Failure:
    return Failure(Category.TOKEN_DRIFT, text, turn, source=FailureClass.TRAINER)
