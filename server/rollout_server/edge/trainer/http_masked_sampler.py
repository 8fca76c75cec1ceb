"""The sampler for trainers that verify a response mask: `http(s)://` targets of the synchronous HTTP API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.ledger import LedgerView, SegmentKind
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Spec
from rollout_server.edge.tokens.cache import Tokenizers, open_renderer
from rollout_server.edge.tokens.drift_excerpt import drift_excerpt
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.rendering_form import RenderingForm
from rollout_server.edge.tokens.resumed_turns import ResumedTurns
from rollout_server.edge.trainer.chat_completion import (
    ChatCompletion,
    ReportedPrompts,
    RequestWriter,
    read_chat_completion,
)
from rollout_server.edge.trainer.completion_record import completion_record, completion_warnings
from rollout_server.edge.trainer.form_cache import FormCache, likeliest_form, refuses_mask
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, turn_headers
from rollout_server.edge.trainer.http_errors import different_tools, response_failure
from rollout_server.edge.trainer.retry import CompletionFetch, Fetched, fetch_once
from rollout_server.edge.trainer.sampling_parameters import masked_parameters
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Tool


@dataclass(frozen=True, slots=True)
class MaskedTrainers:
    """The shared resources of all samplers of the synchronous HTTP API. `form` is the default for unknown trainers."""

    client: HttpClient
    tokenizers: Tokenizers
    form: RenderingForm | None = None
    forms: FormCache = field(default_factory=FormCache)

    def open(self, spec: Spec, tools: Sequence[Tool]) -> MaskedSampler:
        """Return the sampler of one rollout."""
        return MaskedSampler(self, spec, tools)


@dataclass(slots=True)
class _TrainerConversation:
    """The trainer's message list of a rollout. Conversations that replace each other before a request is sent share it.

    Attributes:
        begun: a request was sent.
        end: the conversation whose latest completion ends the list. None: none, or a request is under way.
        unsent: the latest request failed before it was sent.
    """

    begun: bool = False
    end: LedgerView | None = None
    unsent: bool = False


class MaskedSampler:
    """Request the completions of one rollout. Each request has a mask over the tokens since the previous completion."""

    def __init__(
        self,
        trainers: MaskedTrainers,
        spec: Spec,
        tools: Sequence[Tool],
        at_trainer: _TrainerConversation | None = None,
    ) -> None:
        self._trainers = trainers
        self._spec = spec
        self._tools = tools
        self._url = f"{spec.completions.url}/v1/chat/completions"
        self._writer = RequestWriter(spec.rollout_id)
        self._prompts = ReportedPrompts()
        self._renderer: Renderer | None = None
        self._form = trainers.forms.of(spec) or trainers.form
        self._at_trainer = at_trainer or _TrainerConversation()
        self._resumed = ResumedTurns(masks=True)
        self._ledger: LedgerView | None = None

    async def sample(self, request: CompletionRequest) -> Answered:
        """Render, post and check one turn. Raises `RolloutFailed`."""
        self._ledger = request.ledger
        renderer, rendered = await self._rendered(request)
        started = time.monotonic()
        fetched, mask_length = await self._fetch(request, renderer, rendered)
        elapsed = 1000 * (time.monotonic() - started)
        most = self._spec.limits.calls_read
        completion = await read_chat_completion(
            fetched.response.body, request, self._prompts, ids_needed=True, most_calls=most
        )
        predicted = rendered.predicted
        if completion.reported is not None:
            predicted = await renderer.learn(predicted, completion.reported)
        if renderer.form != self._form:
            self._form = renderer.form
            self._trainers.forms.remember(self._spec, self._form)
        around = await drift_excerpt(renderer.loaded, request.ledger, predicted, completion.reported)
        warnings = _warnings(request, completion, renderer, rendered)
        record = completion_record(request, completion, fetched.attempts, elapsed, warnings)
        self._at_trainer.end = request.ledger
        length, by = mask_length or None, renderer.loaded.digest
        return replace(record, predicted=predicted, mask_length=length, around=around, rendered_by=by)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""
        self._at_trainer.begun = True
        self._resumed.add(asked, answered)

    def fork(self, fork: Fork) -> MaskedSampler:
        """Raise `RolloutFailed`: such a trainer keeps one message list per rollout, and masks count from the end of that list.

        A conversation can still be replaced before its first turn, and by a branch at its end if its latest turn was not sent.
        """
        replaces = fork.origin.kind in (SegmentKind.COMPACTION, SegmentKind.MAIN, SegmentKind.DRIFT)
        if fork.tools is None and (self._ends_list(fork) or (replaces and not self._at_trainer.begun)):
            return MaskedSampler(self._trainers, self._spec, self._tools, self._at_trainer)
        if fork.tools is not None:
            raise different_tools()
        text = (
            "the agent forked its conversation, but this rollout's trainer counts response_mask over a single one (POST /rollout). "
            "For several conversations use a gRPC trainer, or one that derives masks itself (POST /v1/rollout/init)"
        )
        raise RolloutFailed(Failure(Category.VALIDATION, text, source=FailureClass.ENVIRONMENT))

    def _ends_list(self, fork: Fork) -> bool:
        """Return whether a branch begins where the trainer's list ends, and replaces a turn that was not sent."""
        end = self._at_trainer.end
        branches = fork.origin.kind is SegmentKind.BRANCH and self._at_trainer.unsent
        return branches and end is not None and end is self._ledger and end.tokens == fork.origin.parent_tokens

    async def _rendered(self, request: CompletionRequest) -> tuple[Renderer, Rendered]:
        """Render a turn. From here on no other conversation may begin, unless the rendering fails: then nothing was sent."""
        before = replace(self._at_trainer)
        self._at_trainer.begun, self._at_trainer.end, self._at_trainer.unsent = True, None, False
        try:
            renderer = await self._open(request)
            return renderer, await _predict(request, renderer)
        except BaseException:
            self._at_trainer.begun, self._at_trainer.end, self._at_trainer.unsent = before.begun, before.end, True
            raise

    async def _fetch(
        self, request: CompletionRequest, renderer: Renderer, rendered: Rendered
    ) -> tuple[Fetched, int | None]:
        """Return the response, and the length of the mask that was sent for it.

        A trainer that refuses a mask has generated nothing, so one retry with another count is safe (R6a, D8).
        """
        fetched = await self._post(request, rendered.mask_length)
        if fetched.response.status == 200:
            return fetched, rendered.mask_length
        if request.last is None or rendered.mask_length is None or not refuses_mask(fetched.response):
            raise RolloutFailed(_failure(fetched, request))
        counts = await renderer.counts(request.messages[: request.asked.messages], request.last, request.last_messages)
        form = likeliest_form(counts, fetched.response)
        if form is None:
            raise RolloutFailed(_failure(fetched, request))
        again = await self._post(request, counts[form])
        again = replace(again, attempts=fetched.attempts + again.attempts)
        if again.response.status != 200:
            raise RolloutFailed(_mask_failure(_failure(again, request), rendered.mask_length, counts))
        renderer.adopt(form)
        return again, counts[form]

    async def _post(self, request: CompletionRequest, mask_length: int | None) -> Fetched:
        parameters = masked_parameters(request.sampling)
        body = self._writer.masked(request.messages[: request.asked.messages], parameters, mask_length)
        post = HttpRequest(self._url, body, turn_headers(request), is_known=request.last is not None)
        fetch = CompletionFetch(post, request.asked.turn, request.deadline, gate=request.gate)
        return await fetch_once(self._trainers.client, fetch)

    async def _open(self, request: CompletionRequest) -> Renderer:
        if self._renderer is None:
            tokenizers, name = self._trainers.tokenizers, self._spec.tokenizer
            earlier = self._resumed.rendered_by
            renderer = await open_renderer(tokenizers, name, self._tools, self._form, request.date, rendered_by=earlier)
            self._form = renderer.form
            await self._resumed.teach(renderer, tuple(request.messages[: request.asked.messages]))
            self._renderer = renderer
        return self._renderer


def _warnings(
    request: CompletionRequest, completion: ChatCompletion, renderer: Renderer, rendered: Rendered
) -> tuple[tuple[str, str], ...]:
    turn = request.asked.turn
    warnings = list(completion_warnings(request, completion, renderer, rendered))
    if completion.reported is None:
        text = f"turn {turn}: the trainer sent no prompt_token_ids; prompt and environment tokens are this server's rendering"
        warnings.append(("unverified", text))
    return tuple(warnings)


async def _predict(request: CompletionRequest, renderer: Renderer) -> Rendered:
    """Render the turn, counted in the form that the trainer is believed to use.

    Tool calls can be much longer in one form of arguments than in the other, and the count of the other form may then be
    negative. A negative count has no mask, so the form with a valid count is used.
    """
    messages = request.messages[: request.asked.messages]
    rendered = await renderer.predict(messages, request.last, request.last_messages)
    if request.last is None or rendered.mask_length is None or rendered.mask_length >= 0:
        return rendered
    form = renderer.form.with_other_arguments()
    length = (await renderer.counts(messages, request.last, request.last_messages)).get(form)
    if length is None:
        raise RolloutFailed(_negative_mask_failure(request.asked.turn, rendered.mask_length))
    renderer.adopt(form)
    return replace(rendered, mask_length=length)


def _failure(fetched: Fetched, request: CompletionRequest) -> Failure:
    return response_failure(fetched.response, request.asked.turn, request.credentials.secrets())


def _mask_failure(failure: Failure, sent: int | None, counts: Mapping[RenderingForm, int]) -> Failure:
    lengths = ", ".join(str(length) for length in (sent, *counts.values()))
    text = f"{failure.message}. Masks of two lengths were refused; the known ways of counting give {lengths}"
    return replace(failure, message=text)


def _negative_mask_failure(turn: int, length: int) -> Failure:
    text = (
        f"turn {turn}: the conversation renders to {-length} tokens fewer than the trainer counted after its last completion. The "
        "trainer's tokenizer or template is not the one of tokenizer_name, or the template rewrites earlier messages; the trainer "
        "would accept no mask, so nothing was sent"
    )
    return Failure(Category.TOKEN_DRIFT, text, turn, source=FailureClass.TRAINER)
