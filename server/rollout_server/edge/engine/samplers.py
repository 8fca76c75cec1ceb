"""Samplers of rollouts whose completions come from an inference engine.

- Message mode: the engine renders, and the prompt ids that it reports are the truth, as with any trainer. If the engine
  tokenizes the history differently from what it sampled, that is drift.
- Token mode: this server renders and sends ids, so sampled tokens are never tokenized again.

In both modes the engine's own parsers produce the messages.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollout_server.core.ledger import SegmentKind
from rollout_server.core.message import Message
from rollout_server.core.outcome import Category, Failure, FailureClass
from rollout_server.core.record import Answered, Asked
from rollout_server.core.spec import Dialect, Spec
from rollout_server.edge.engine.completion_client import Chat, CompletionClient, Generation, complete_in_context
from rollout_server.edge.engine.transport import Access
from rollout_server.edge.tokens.cache import Tokenizers, open_renderer
from rollout_server.edge.tokens.drift_excerpt import drift_excerpt
from rollout_server.edge.tokens.renderer import Rendered, Renderer
from rollout_server.edge.tokens.resumed_turns import ResumedTurns
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.trainer.completion_record import completion_record, completion_warnings
from rollout_server.edge.trainer.form_cache import FormCache
from rollout_server.runtime.errors import PromptRefused, RolloutFailed
from rollout_server.runtime.ports import CompletionRequest, Fork, Sampler, Tool

_REPORTS = {
    Dialect.VLLM: "vLLM sends them from version 0.10.2 on (return_token_ids)",
    Dialect.SGLANG: "SGLang sends them from version 0.5.13 on (return_prompt_token_ids and return_meta_info)",
}


@dataclass(frozen=True, slots=True)
class Engines:
    """The shared resources of all samplers of inference engines."""

    access: Access
    tokenizers: Tokenizers
    forms: FormCache = field(default_factory=FormCache)

    def open(self, spec: Spec, tools: Sequence[Tool], *, tokens: bool) -> Sampler:
        """Return the sampler of one rollout. `tokens`: use token mode."""
        if not tokens:
            return MessageSampler(self, spec, tools)
        return TokenSampler(self, spec, tools)


class MessageSampler:
    """Message mode. If the rollout names a tokenizer, prompts are predicted here and compared with the reported ones."""

    def __init__(self, engines: Engines, spec: Spec, tools: Sequence[Tool]) -> None:
        self._engines = engines
        self._spec = spec
        self._tools = tools
        self._chat = Chat(engines.access, spec, tools)
        self._renderer: Renderer | None = None
        self._missed = False
        self._resumed = ResumedTurns()

    async def sample(self, request: CompletionRequest) -> Answered:
        """Request a completion and check it. Raises `RolloutFailed`."""
        messages = request.messages[: request.asked.messages]
        renderer = await self._open(request)
        rendered = None if renderer is None else await _predict(renderer, messages, request)
        started = time.monotonic()
        completion, attempts = await complete_in_context(self._chat, messages, request)
        elapsed = 1000 * (time.monotonic() - started)
        answered = completion_record(
            request, completion, attempts, elapsed, self._warnings(completion, request, rendered)
        )
        if renderer is None or rendered is None:
            return answered
        predicted, reported = rendered.predicted, answered.reported
        if reported is not None:
            predicted = await renderer.learn(predicted, reported)
            self._engines.forms.remember(self._spec, renderer.form)
        around = await drift_excerpt(renderer.loaded, request.ledger, predicted, reported)
        return replace(answered, predicted=predicted, around=around, rendered_by=renderer.loaded.digest)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`."""
        self._resumed.add(asked, answered)
        self._missed = self._missed or any(code == "tokens_unknown" for code, _ in answered.notes)

    def fork(self, fork: Fork) -> MessageSampler:
        """Return the sampler of a forked conversation. Engines keep no state, so its tools may differ."""
        other = MessageSampler(self._engines, self._spec, self._tools if fork.tools is None else fork.tools)
        other._missed = self._missed
        if fork.origin.kind is SegmentKind.BRANCH:
            other._resumed = self._resumed.fork()
            other._renderer = self._renderer and self._renderer.fork(earlier=fork.earlier)
        return other

    async def _open(self, request: CompletionRequest) -> Renderer | None:
        name = self._spec.tokenizer
        if self._renderer is None and name is not None:
            known = self._engines.forms.of(self._spec)
            tokenizers, earlier = self._engines.tokenizers, self._resumed.rendered_by
            renderer = await open_renderer(tokenizers, name, self._tools, known, request.date, rendered_by=earlier)
            await self._resumed.teach(renderer, tuple(request.messages[: request.asked.messages]))
            self._renderer = renderer
        return self._renderer

    def _warnings(
        self, completion: ChatCompletion, request: CompletionRequest, rendered: Rendered | None
    ) -> Iterator[tuple[str, str]]:
        turn, since = request.asked.turn, _REPORTS.get(self._spec.completions.dialect)
        yield from completion_warnings(request, completion, self._renderer, rendered)
        if completion.token_ids is not None and (completion.reported is not None or self._renderer is not None):
            if completion.reported is None:
                text = "the engine sent no prompt_token_ids; prompt and environment tokens are this server's rendering"
                yield "unverified", f"turn {turn}: {text}"
        elif since is not None and not self._missed:
            self._missed = True
            missing = "token_ids" if completion.token_ids is None else "prompt_token_ids"
            yield "tokens_unknown", f"turn {turn}: the engine sent no {missing}, although they were requested; {since}"


class TokenSampler:
    """Token mode: the prompt is the ids of the ledger plus the environment's ids, which this server renders."""

    def __init__(self, engines: Engines, spec: Spec, tools: Sequence[Tool]) -> None:
        self._engines = engines
        self._spec = spec
        self._tools = tools
        by_ids = Generation if spec.completions.dialect is Dialect.VLLM else Chat
        self._by_ids: CompletionClient = by_ids(engines.access, spec, tools)
        self._renderer: Renderer | None = None
        self._rendered_by = ""

    async def sample(self, request: CompletionRequest) -> Answered:
        """Render, request a completion and check it. Raises `RolloutFailed`."""
        messages = request.messages[: request.asked.messages]
        if self._renderer is None:
            tokenizers, name, earlier = self._engines.tokenizers, self._spec.tokenizer, self._rendered_by
            self._renderer = await open_renderer(tokenizers, name, self._tools, date=request.date, rendered_by=earlier)
        rendered = await self._renderer.append(messages, request.last, request.last_messages)
        predicted = rendered.predicted
        prompt = request.ledger.prefix() + predicted.closing + predicted.environment
        started = time.monotonic()
        completion, attempts = await complete_in_context(self._by_ids, messages, request, prompt)
        elapsed = 1000 * (time.monotonic() - started)
        if completion.token_ids is None:
            raise RolloutFailed(_missing_ids(request.asked.turn, self._spec.completions.dialect))
        warnings = _warnings(request, completion, self._renderer, rendered)
        answered = completion_record(request, completion, attempts, elapsed, warnings)
        return replace(answered, predicted=predicted, rendered_by=self._renderer.loaded.digest)

    def resume(self, asked: Asked, answered: Answered) -> None:
        """See `Sampler.resume`. The tokens are in the ledger of the next request."""
        self._rendered_by = answered.rendered_by

    def fork(self, fork: Fork) -> TokenSampler:
        """Return the sampler of a forked conversation. A branch continues from the tokens so far; any other fork starts empty."""
        other = TokenSampler(self._engines, self._spec, self._tools if fork.tools is None else fork.tools)
        other._rendered_by = self._rendered_by
        if fork.origin.kind is SegmentKind.BRANCH:
            other._renderer = self._renderer and self._renderer.fork(earlier=fork.earlier)
        return other


def _warnings(
    request: CompletionRequest, completion: ChatCompletion, renderer: Renderer, rendered: Rendered
) -> Iterator[tuple[str, str]]:
    yield from completion_warnings(request, completion, renderer, rendered)
    if completion.reported is None:
        text = "the engine does not return the prompt ids that it was sent, so the prompt cannot be verified"
        yield "unverified", f"turn {request.asked.turn}: {text}"


async def _predict(renderer: Renderer, messages: Sequence[Message], request: CompletionRequest) -> Rendered:
    """Render the expected prompt. If this server cannot render it, the turn fails, even if the engine could render it."""
    try:
        return await renderer.predict(messages, request.last, request.last_messages)
    except PromptRefused as refused:
        text = f"{refused.failure.message}; without `tokenizer` the engine's own rendering is used unchecked"
        raise PromptRefused(replace(refused.failure, message=text)) from None


def _missing_ids(turn: int, dialect: Dialect) -> Failure:
    since = _REPORTS.get(dialect, "")
    text = (
        f"turn {turn}: the engine sent no ids of its completion, and token mode cannot continue without them; {since}"
    )
    return Failure(Category.VALIDATION, text, turn, source=FailureClass.ENGINE)
