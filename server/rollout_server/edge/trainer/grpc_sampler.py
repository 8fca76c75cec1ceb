"""The sampler for gRPC trainers: `grpc(s)://` targets, which serve CompletionService.

Only what is new travels, on a base that both sides hold. In token mode this side renders: it sends the ids that follow the last
answer, the trainer generates from them, and each turn both sides compare digests over all tokens and their authors, so a
difference shows in the turn in which it happens. In message mode the trainer renders, and the prompt that it sends back is
the truth.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.checkpoint import Checkpoint
from rollout_server.core.ledger import MAX_TOKEN_ID, SegmentKind, Tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.core.spec import Spec
from rollout_server.edge.grpc_channels import Channels
from rollout_server.edge.tokens.cache import Tokenizers
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.trainer.grpc_client import (
    BaseUnknown,
    GrpcTrainerClient,
    LedgerMismatch,
    ToolsUnknown,
    TrainerClient,
    TurnCall,
)
from rollout_server.edge.trainer.http_errors import redacted
from rollout_server.edge.trainer.rendering import open_renderer
from rollout_server.edge.trainer.response_warnings import notes_on, notes_on_rendering
from rollout_server.edge.trainer.retry import RetryPolicy
from rollout_server.edge.trainer.trainer_ledger import PromptDelta, TrainerLedger, agree, parted
from rollout_server.edge.wire.completion import (
    Completion,
    MalformedCompletion,
    PromptUpdate,
    RequestBuilder,
    Response,
    completion_aside,
    in_token_mode,
)
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Tool


@dataclass(frozen=True, slots=True)
class CompletionTrainers:
    """What all samplers of gRPC trainers share. `timeout` in seconds, for one attempt."""

    channels: Channels
    tokenizers: Tokenizers
    retries: RetryPolicy
    timeout: float

    def open(self, uid: str, spec: Spec, tools: Sequence[Tool]) -> CompletionSampler:
        """The sampler of one rollout."""
        target = spec.completions
        caller = GrpcTrainerClient(self.channels, target.url, self.retries, self.timeout, target.replays_turn_keys)
        return CompletionSampler(caller, self.tokenizers, uid, spec, tools)


class CompletionSampler:
    """Asks one trainer for the completions of one conversation."""

    def __init__(
        self, caller: TrainerClient, tokenizers: Tokenizers, uid: str, spec: Spec, tools: Sequence[Tool]
    ) -> None:
        self._caller = caller
        self._tokenizers = tokenizers
        self._spec = spec
        self._asking = RequestBuilder(uid, spec.rollout_id, spec.typed, tools)
        self._book = TrainerLedger()
        self._begun = ""
        self._whole = True
        self._renderer: Renderer | None = None
        self._policies: list[str] = []

    async def sample(self, ask: CompletionRequest) -> Answered:
        """Asks and checks. Raises `RolloutFailed`."""
        messages = tuple(ask.messages[: ask.asked.messages])
        if self._book.segment_id != ask.asked.segment_id:
            self._book.segment_id = ask.asked.segment_id  # the one that the last prompt opened, or the first
        rendered = await self._render(ask, messages) if in_token_mode(self._spec) else None
        page = None if rendered is None else self._book.page(rendered.predicted, ask.asked.turn, len(messages))
        call = TurnCall(ask.asked.turn, ask.deadline, ask.credentials)
        started = time.monotonic()
        completion = await self._complete(ask, messages, page, call)
        answered = Answered(
            turn=ask.asked.turn,
            message=completion.message,
            finish_reason=completion.finish_reason,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            attempts=call.attempts,
            elapsed_ms=1000 * (time.monotonic() - started),
            usage=completion.usage,
            policy_version=completion.policy_version,
            notes=(*call.remarks, *self._notes(completion, ask, rendered)),
            tool_calls=completion.tool_calls,
            planes=completion.planes,
            extra_json=completion.extra_json,
        )
        if page is not None:
            return await self._sent(ask, page, completion, answered)
        return await self._reported(ask, messages, completion, answered)

    def fork(self, fork: Fork) -> CompletionSampler:
        """A branch goes on from the ids that are held; any other conversation begins with nothing."""
        asking = self._asking
        tools = asking.tools if fork.tools is None else fork.tools
        other = CompletionSampler(self._caller, self._tokenizers, asking.uid, self._spec, tools)
        other._policies = self._policies
        if fork.origin.kind is SegmentKind.BRANCH:
            other._book, other._renderer = self._book.branch(fork.origin), self._renderer and self._renderer.fork()
        else:
            other._book = TrainerLedger(origin=fork.origin)
        return other

    async def _render(self, ask: CompletionRequest, messages: tuple[Message, ...]) -> Rendered:
        """What the trainer is to generate from."""
        if self._renderer is None:
            self._renderer = await open_renderer(self._tokenizers, self._spec.tokenizer, self._asking.tools)
        return await self._renderer.append(messages, ask.last, ask.last_messages)

    async def _complete(
        self, ask: CompletionRequest, messages: Sequence[Message], page: PromptDelta | None, call: TurnCall
    ) -> Completion:
        turn = ask.asked.turn
        try:
            response = await self._ask(ask, messages, page, call)
            return await completion_aside(response, self._spec.limits.calls_read)
        except (BaseUnknown, ToolsUnknown) as unknown:
            what = "the whole history" if isinstance(unknown, BaseUnknown) else "the list of tools"
            text = f"turn {turn}: the trainer asks for {what}, which it was sent under this turn key already"
            raise RolloutFailed(Failure(Category.TRAINER_CLIENT, text, turn)) from None
        except LedgerMismatch as mismatch:
            raise RolloutFailed(await self._parted(ask, mismatch.checkpoints)) from None
        except MalformedCompletion as error:
            text = f"turn {turn}: the trainer's answer is malformed: {error}"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn)) from None

    async def _ask(
        self, ask: CompletionRequest, messages: Sequence[Message], page: PromptDelta | None, call: TurnCall
    ) -> Response:
        """Asks on the base, and once with what the trainer says that it does not hold."""
        base = self._book.base
        listed = base is None
        while True:
            self._whole = base is None
            try:
                news = self._news(ask, messages, page, base)
                request = self._asking.request(ask.asked, ask.sampling, news, list_tools=listed)
                return await self._caller.complete(request, call)
            except BaseUnknown:
                if base is None:
                    raise
                base, listed = None, True
            except ToolsUnknown:
                if listed:
                    raise
                listed = True

    def _news(
        self, ask: CompletionRequest, messages: Sequence[Message], page: PromptDelta | None, base: Checkpoint | None
    ) -> PromptUpdate:
        book = self._book
        history = () if base is not None or page is None else book.spans
        return PromptUpdate(
            base=base,
            messages=messages[base.messages if base is not None else 0 :],
            spans=(*history, *page.spans) if page is not None else (),
            prompt=page.prompt if page is not None else None,
            origin=book.origin if ask.asked.segment_id != self._begun else None,
        )

    async def _sent(
        self, ask: CompletionRequest, page: PromptDelta, completion: Completion, answered: Answered
    ) -> Answered:
        """Token mode: the prompt is what was sent, if the trainer's digests say so."""
        turn, ids = ask.asked.turn, completion.token_ids
        if ids is None:
            text = f"turn {turn}: `token_ids` is missing; a trainer in token mode returns the ids it sampled"
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn))
        if not completion.shows_prompt and completion.after is None:
            text = (
                f"turn {turn}: `prompt_checkpoint` and `after` are missing, so nothing proves what the trainer generated from; "
                "in token mode it sends both"
            )
            raise RolloutFailed(Failure(Category.VALIDATION, text, turn))
        held = self._book.tokens
        same = completion.reported is None or completion.reported == self._book.prompt(page)
        after = self._book.answered(page, turn, ids)
        self._begun = ask.asked.segment_id
        if not (same and agree(page.prompt, completion.prompt) and agree(after, completion.after)):
            raise RolloutFailed(await self._parted(ask, None))
        predicted = page.predicted
        if not completion.shows_prompt:
            return replace(answered, predicted=predicted)
        return replace(answered, predicted=predicted, reported=predicted.closing + predicted.environment, shared=held)

    async def _reported(
        self, ask: CompletionRequest, messages: Sequence[Message], completion: Completion, answered: Answered
    ) -> Answered:
        """Message mode: the prompt is what the trainer says it was."""
        turn, ids, prompt = ask.asked.turn, completion.token_ids, completion.reported
        self._begun = ask.asked.segment_id
        if ids is None or prompt is None:
            self._book.skip()
            return replace(answered, reported=prompt)
        self._book, page = self._book.reported(prompt, turn, len(messages))
        if not self._book.confirmed(page, turn, ids, completion.after, whole=self._whole):
            if self._book.repeats is not None:
                text = f"turn {turn}: the trainer sent prompt and answer of turn {self._book.repeats} once more"
                raise RolloutFailed(Failure(Category.TOKEN_DRIFT, text, turn))
            raise RolloutFailed(await self._parted(ask, None))
        if not self._book.unsure:
            return replace(answered, reported=prompt)
        text = f"turn {turn}: an earlier turn came without tokens, so the trainer's digest cannot be held against ours"
        return replace(answered, reported=prompt, notes=(*answered.notes, ("unverified", text)))

    async def _parted(self, ask: CompletionRequest, theirs: Sequence[Checkpoint] | None) -> Failure:
        """Names the turn and the token at which both sides part."""
        turn, book = ask.asked.turn, self._book
        said = f"turn {turn}: the trainer holds other tokens than this side"
        ledger = await self._caller.read_ledger(self._asking.uid, ask.asked.segment_id, ask.credentials.completions)
        if ledger is None:
            since = book.first_parted(theirs) if theirs is not None else None
            where = f", since turn {since}" if since is not None else ""
            return Failure(Category.TOKEN_DRIFT, f"{said}{where}; it does not show its ledger (ReadLedger)", turn)
        ids, authors = ledger
        place = await asyncio.to_thread(parted, book.spans, ids, authors)
        if place is None:
            text = f"{said}, says its digest, but its ledger holds the same: it reckons digests in another way"
            return Failure(Category.TOKEN_DRIFT, text, turn)
        index, since = place
        secrets = ask.credentials.secrets()
        ours, other = [
            redacted((await self._text(tokens[max(0, index - 4) : index + 8])).encode("utf-8", "replace"), secrets)
            for tokens in (book.ids(), ids)
        ]
        text = f"{said}, since turn {since}, from token {index} on: here {ours}, there {other}"
        return Failure(Category.TOKEN_DRIFT, text, turn)

    async def _text(self, ids: Tokens) -> str:
        """Tokens as a person reads them. A trainer may show ids that no tokenizer has: those stay numbers."""
        if self._renderer is None or any(token > MAX_TOKEN_ID for token in ids):
            return str(list(ids))
        loaded = self._renderer.loaded
        try:
            return repr(await loaded.run(loaded.decode, ids))
        except (IndexError, KeyError, TypeError, ValueError, OverflowError):
            return str(list(ids))

    def _notes(
        self, completion: Completion, ask: CompletionRequest, rendered: Rendered | None
    ) -> Iterator[tuple[str, str]]:
        turn, secrets = ask.asked.turn, ask.credentials.secrets()
        vocabulary = None if self._renderer is None else self._renderer.loaded.vocabulary
        yield from notes_on(completion.token_ids, completion.logprobs, ask.sampling, turn, vocabulary)
        if rendered is not None:
            yield from notes_on_rendering(rendered, turn)
        if rendered is not None and not (completion.shows_prompt and completion.after is not None):
            missing = "after" if completion.shows_prompt else "prompt_checkpoint"
            yield (
                "unverified",
                f"turn {turn}: the trainer sent no {missing}, so nobody knows whether it holds the same tokens",
            )
        version = completion.policy_version
        if version in self._policies[:-1]:
            latest = self._policies[-1]
            text = f"turn {turn}: policy {version!r} answered, although {latest!r} had answered before it"
            yield "policy_stale", redacted(text.encode("utf-8", "replace"), secrets)
        elif version and version not in self._policies:
            self._policies.append(version)
