"""The sampler for trainers that count masks: `http(s)://` targets of the synchronous dialect."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.ledger import SegmentKind
from rollout_server.core.outcome import Category, Failure
from rollout_server.core.record import Answered
from rollout_server.core.spec import Spec
from rollout_server.edge.tokens.cache import Tokenizers, open_renderer
from rollout_server.edge.tokens.drift_excerpt import drift_excerpt
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.rendering_form import RenderingForm
from rollout_server.edge.trainer.chat_completion import ChatCompletion, RequestWriter, read_answer_aside
from rollout_server.edge.trainer.completion_record import completion_record, completion_warnings, rendering_warnings
from rollout_server.edge.trainer.form_cache import FormCache, likeliest, refuses_mask
from rollout_server.edge.trainer.http_client import HttpClient, HttpRequest, turn_headers
from rollout_server.edge.trainer.http_errors import refused
from rollout_server.edge.trainer.retry import CompletionFetch, Fetched, fetch_once
from rollout_server.edge.trainer.sampling_parameters import masked_parameters
from rollout_server.runtime.ports import CompletionRequest, Fork, RolloutFailed, Tool


@dataclass(frozen=True, slots=True)
class MaskedTrainers:
    """What all samplers of the synchronous dialect share. `form` is assumed of trainers of which nothing is known."""

    client: HttpClient
    tokenizers: Tokenizers
    form: RenderingForm | None = None
    forms: FormCache = field(default_factory=FormCache)

    def open(self, spec: Spec, tools: Sequence[Tool]) -> MaskedSampler:
        """The sampler of one rollout."""
        return MaskedSampler(self, spec, tools)


class MaskedSampler:
    """Asks one trainer for the completions of one rollout, with a mask over what is new since its last answer."""

    def __init__(self, trainers: MaskedTrainers, spec: Spec, tools: Sequence[Tool]) -> None:
        self._trainers = trainers
        self._spec = spec
        self._tools = tools
        self._url = f"{spec.completions.url}/v1/chat/completions"
        self._writer = RequestWriter(spec.rollout_id)
        self._renderer: Renderer | None = None
        self._form = trainers.forms.of(spec) or trainers.form
        self._asked = False

    async def sample(self, ask: CompletionRequest) -> Answered:
        """Renders, posts, checks. Raises `RolloutFailed`."""
        self._asked, turn = True, ask.asked.turn
        renderer = await self._open()
        rendered = await _rendered(ask, renderer)
        started = time.monotonic()
        fetched, mask_length = await self._fetch(ask, renderer, rendered)
        elapsed = 1000 * (time.monotonic() - started)
        most = self._spec.limits.calls_read
        answer = await read_answer_aside(fetched.answer.body, turn, ids_needed=True, most_calls=most)
        predicted = rendered.predicted
        if answer.reported is not None:
            predicted = await renderer.learn(predicted, answer.reported)
        if renderer.form != self._form:
            self._form = renderer.form
            self._trainers.forms.remember(self._spec, self._form)
        around = await drift_excerpt(renderer.loaded, ask.ledger, predicted, answer.reported)
        notes = _notes(answer, rendered, ask, renderer.loaded.vocabulary)
        record = completion_record(ask, answer, fetched.attempts, elapsed, notes)
        return replace(record, predicted=predicted, mask_length=mask_length or None, around=around)

    def fork(self, fork: Fork) -> MaskedSampler:
        """Raises `RolloutFailed`: such a trainer keeps one list of messages and tokens for a rollout, and masks count from its end.

        Before the first turn it keeps none yet, so a conversation may take the place of the one that it has not seen.
        """
        if fork.origin.kind is SegmentKind.COMPACTION and fork.tools is None and not self._asked:
            return MaskedSampler(self._trainers, self._spec, self._tools)
        text = (
            "the agent forked its conversation, but this rollout's trainer counts response_mask over a single one (POST /rollout). "
            "Several conversations need a trainer that speaks gRPC, or one that derives masks itself (POST /v1/rollout/init)"
        )
        raise RolloutFailed(Failure(Category.VALIDATION, text))

    async def _fetch(
        self, ask: CompletionRequest, renderer: Renderer, rendered: Rendered
    ) -> tuple[Fetched, int | None]:
        """The answer, and the length of the mask it was given for.

        A trainer that refuses a mask has generated nothing, so it is asked once more with another count (R6a, D8).
        """
        fetched = await self._post(ask, rendered.mask_length)
        if fetched.answer.status == 200:
            return fetched, rendered.mask_length
        if ask.last is None or rendered.mask_length is None or not refuses_mask(fetched.answer):
            raise RolloutFailed(_refused(fetched, ask))
        counts = await renderer.counts(ask.messages[: ask.asked.messages], ask.last, ask.last_messages)
        form = likeliest(counts, fetched.answer)
        if form is None:
            raise RolloutFailed(_refused(fetched, ask))
        again = await self._post(ask, counts[form])
        again = replace(again, attempts=fetched.attempts + again.attempts)
        if again.answer.status != 200:
            raise RolloutFailed(_miscounted(_refused(again, ask), rendered.mask_length, counts))
        renderer.adopt(form)
        return again, counts[form]

    async def _post(self, ask: CompletionRequest, mask_length: int | None) -> Fetched:
        parameters = masked_parameters(ask.sampling)
        body = self._writer.masked(ask.messages[: ask.asked.messages], parameters, mask_length)
        request = HttpRequest(self._url, body, turn_headers(ask), is_known=ask.last is not None)
        return await fetch_once(self._trainers.client, CompletionFetch(request, ask.asked.turn, ask.deadline))

    async def _open(self) -> Renderer:
        if self._renderer is None:
            tokenizers, name = self._trainers.tokenizers, self._spec.tokenizer
            self._renderer = await open_renderer(tokenizers, name, self._tools, self._form)
            self._form = self._renderer.form
        return self._renderer


def _notes(
    answer: ChatCompletion, rendered: Rendered, ask: CompletionRequest, vocabulary: int
) -> tuple[tuple[str, str], ...]:
    turn = ask.asked.turn
    notes = list(completion_warnings(answer.token_ids, answer.logprobs, ask.sampling, turn, vocabulary))
    notes += rendering_warnings(rendered, turn)
    if answer.reported is None:
        text = f"turn {turn}: the trainer sent no prompt_token_ids; prompt and environment tokens are our rendering"
        notes.append(("unverified", text))
    return tuple(notes)


async def _rendered(ask: CompletionRequest, renderer: Renderer) -> Rendered:
    """The turn, counted as the trainer is taken to count.

    Calls can be so much longer with their arguments as objects, or as they came, that only one of the two leaves room for a
    mask. Then it is that one.
    """
    messages = ask.messages[: ask.asked.messages]
    rendered = await renderer.predict(messages, ask.last, ask.last_messages)
    if ask.last is None or rendered.mask_length is None or rendered.mask_length >= 0:
        return rendered
    form = renderer.form.with_other_arguments()
    length = (await renderer.counts(messages, ask.last, ask.last_messages)).get(form)
    if length is None:
        raise RolloutFailed(_negative(ask.asked.turn, rendered.mask_length))
    renderer.adopt(form)
    return replace(rendered, mask_length=length)


def _refused(fetched: Fetched, ask: CompletionRequest) -> Failure:
    return refused(fetched.answer, ask.asked.turn, ask.credentials.secrets())


def _miscounted(failure: Failure, sent: int | None, counts: Mapping[RenderingForm, int]) -> Failure:
    lengths = ", ".join(str(length) for length in (sent, *counts.values()))
    text = f"{failure.message}. Masks of two lengths were refused; the ways of counting known here give {lengths}"
    return replace(failure, message=text)


def _negative(turn: int, length: int) -> Failure:
    text = (
        f"turn {turn}: the conversation renders to {-length} tokens fewer than the trainer counted after its last answer. Its "
        "tokenizer or template is another one than tokenizer_name says, or its template rewrites earlier messages; no mask "
        "that such a trainer accepts exists, so nothing was sent"
    )
    return Failure(Category.TOKEN_DRIFT, text, turn)
