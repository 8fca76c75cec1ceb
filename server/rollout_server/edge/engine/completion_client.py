"""Request one turn's completion: from messages, from messages with prompt ids (SGLang), or from ids (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol
from urllib.parse import urlsplit

from msgspec import structs

from rollout_server.core.ledger import Tokens, pack_tokens
from rollout_server.core.message import Message
from rollout_server.core.outcome import FailureClass
from rollout_server.core.spec import Spec
from rollout_server.edge.engine.errors import wants_other_limit
from rollout_server.edge.engine.request import OTHER_LIMIT, ChatWriter, TokenWriter
from rollout_server.edge.engine.response import (
    Sampled,
    joined_response,
    malformed_response,
    read_completion,
    read_sampled,
)
from rollout_server.edge.engine.transport import Access, encode_request, finished_response, post, response_body
from rollout_server.edge.offload import offload_response
from rollout_server.edge.trainer.aborted_parts import ABORTED, CUT, AbortedParts, CompletionPart
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.trainer.retry import Fetched
from rollout_server.runtime.errors import LimitTooLarge, PromptTooLong
from rollout_server.runtime.ports import CompletionRequest, Tool

_SCALE_OUT: Final = (
    "token mode needs the routes that vLLM serves with --enable-scale-out, and a `completions.model` that vLLM serves; "
    "message mode does not need these routes"
)


_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class Routes:
    """The URLs of one engine. `base` is the base URL in the sense of OpenAI's clients."""

    base: str

    @classmethod
    def of(cls, url: str) -> Routes:
        """Return the routes for a target URL. A URL with a path is the base URL; otherwise the default path `/v1` is added."""
        return cls(url if urlsplit(url).path.strip("/") else f"{url}{_VERSION}")

    @property
    def chat(self) -> str:
        """Chat completions; every OpenAI-compatible engine serves this route."""
        return f"{self.base}/chat/completions"

    @property
    def generate(self) -> str:
        """vLLM: generate ids from ids. This route is next to the OpenAI routes, not under `/v1`."""
        return f"{self.base.removesuffix(_VERSION)}/inference/v1/generate"

    @property
    def derender(self) -> str:
        """vLLM: parse sampled ids to a message."""
        return f"{self.chat}/derender"


class CompletionClient(Protocol):
    """Request the completions of one rollout, whose conversation only grows."""

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """Return the completion and the number of requests sent for it. Raises `RolloutFailed`.

        `prompt`: the token ids of the conversation, in token mode.
        """


async def complete_in_context(
    client: CompletionClient, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
) -> tuple[ChatCompletion, int]:
    """Return a completion as `client` does; with `request.fits_context` also if the engine refuses `max_tokens` as too large.

    Then `max_tokens` is lowered to what the prompt leaves of the context. Where the engine does not say how much that is, or
    refuses it too, `max_tokens` is left out: what is left is less than it, and no engine generates more. A note says it.
    """
    asked, attempts = request.sampling.max_tokens, 0
    while True:
        try:
            completion, sent = await client.complete(messages, request, prompt)
        except (PromptTooLong, LimitTooLarge) as error:
            limit = request.sampling.max_tokens
            if not request.fits_context or limit is None:
                raise
            left = _left(error, prompt)
            if left is not None and left < 1:
                raise
            lower = left if limit == asked and left is not None and left < limit else None
        else:
            return completion, attempts + sent
        attempts += 1
        how = "without max_tokens" if lower is None else f"with max_tokens {lower:,}"
        text = (
            f"turn {request.asked.turn}: the engine refused max_tokens {limit:,} as too large and was asked again {how}"
        )
        request.note("max_tokens_lowered", text)
        request = replace(request, sampling=replace(request.sampling, max_tokens=lower))


def _left(error: PromptTooLong | LimitTooLarge, prompt: Tokens | None) -> int | None:
    """Return how many tokens of the context the prompt leaves; None if it is unknown."""
    if isinstance(error, LimitTooLarge) or error.maximum is None:
        return None
    tokens = error.tokens if prompt is None else len(prompt)
    return None if tokens is None else error.maximum - tokens


class Chat:
    """Chat completions: the engine parses tool calls and reasoning. Given `prompt`, SGLang does not render the messages."""

    def __init__(self, access: Access, spec: Spec, tools: Sequence[Tool]) -> None:
        self._access = access
        self._target = spec.completions
        self._url = Routes.of(spec.completions.url).chat
        self._writer = ChatWriter(spec, tools)
        self._most_calls = spec.limits.calls_read

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """Request a chat completion; see `CompletionClient.complete`."""

        async def fetch() -> Fetched:
            return await self._fetch(messages, request, prompt)

        parsed, _, attempts = await finished_response(self._access, request, fetch, self.read)
        return parsed, attempts

    def read(self, body: bytes, turn: int) -> ChatCompletion:
        """Parse a response. Raises `RolloutFailed`."""
        return read_completion(body, turn, self._most_calls)

    def body(self, messages: Sequence[Message], request: CompletionRequest) -> bytes:
        """Return the request body. vLLM's derender route needs it to parse a completion that was generated from ids."""
        return self._encode(messages, request, self._access.limits.of(self._target))

    async def _fetch(self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None) -> Fetched:
        """Post; if the engine rejects `max_tokens` and names the other parameter, post once more with that one."""
        limit = self._access.limits.of(self._target)
        first = await post(self._access, self._url, self._encode(messages, request, limit, prompt), request)
        if limit == OTHER_LIMIT or request.sampling.max_tokens is None:
            return first
        if not wants_other_limit(first.response, OTHER_LIMIT):
            return first
        again = await post(self._access, self._url, self._encode(messages, request, OTHER_LIMIT, prompt), request)
        if again.response.status == 200:
            self._access.limits.remember_other(self._target)
        return Fetched(again.response, first.attempts + again.attempts)

    def _encode(
        self, messages: Sequence[Message], request: CompletionRequest, limit: str, prompt: Tokens | None = None
    ) -> bytes:
        return encode_request(request.asked.turn, lambda: self._writer.body(messages, request.sampling, limit, prompt))


class Generation:
    """vLLM's token routes: generate from ids, then let vLLM's own parsers convert the sampled ids to a message."""

    def __init__(self, access: Access, spec: Spec, tools: Sequence[Tool]) -> None:
        self._access = access
        self._chat = Chat(access, spec, tools)
        self._routes = Routes.of(spec.completions.url)
        self._writer = TokenWriter(spec.completions.model)

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """See `CompletionClient.complete`. Raises ValueError if `prompt` is None."""
        if prompt is None:
            raise ValueError("prompt must not be None: vLLM's generate route takes token ids")
        parts = AbortedParts(request.asked.turn, request.sampling, FailureClass.ENGINE)
        sampled, generated, attempts = await self._generate(prompt, request, parts)
        asked = _without_logprobs(request) if parts.held else request
        body = self._writer.rendering(prompt, generated, self._chat.body(messages, asked))
        fetched = await self._post(self._routes.derender, body, request)
        message = response_body(fetched, request)
        parsed = await offload_response(lambda: self._chat.read(message, request.asked.turn), len(message))
        completion = sampled.completion(parsed.message, parsed.tool_calls, parsed.finish_reason)
        return completion, attempts + fetched.attempts

    async def _generate(
        self, prompt: Tokens, request: CompletionRequest, parts: AbortedParts
    ) -> tuple[Sampled, bytes, int]:
        """Return what the engine samples after the prompt, as a response, and the number of requests sent for it.

        A completion that was aborted is continued from its tokens; `parts` receives them.
        """
        turn, attempts = request.asked.turn, 0
        while True:
            given = prompt + parts.ids
            body = encode_request(turn, partial(self._writer.generation, given, parts.sampling))
            fetch = partial(self._post, self._routes.generate, body, request)
            sampled, generated, sent = await finished_response(self._access, request, fetch, read_sampled, resumes=True)
            attempts += sent
            if parts.held and sampled.reported not in (None, given):
                raise malformed_response(turn, "`prompt_token_ids` are not the prompt and the tokens that were aborted")
            if sampled.finish_reason != ABORTED:
                break
            parts.add(_part(sampled))
            if parts.full:
                sampled = structs.replace(sampled, finish_reason=CUT, token_ids=pack_tokens(), logprobs=None)
                break
            await parts.pause()
        if not parts.held:
            return sampled, generated, attempts
        sampled = _joined(parts, sampled, len(prompt))
        size = len(generated) + 8 * len(parts.ids)
        return sampled, await offload_response(partial(joined_response, generated, sampled), size), attempts

    async def _post(self, url: str, body: bytes, request: CompletionRequest) -> Fetched:
        fetched = await post(self._access, url, body, request)
        if fetched.response.status in (404, 405):
            response_body(fetched, request, _SCALE_OUT)
        return fetched


def _without_logprobs(request: CompletionRequest) -> CompletionRequest:
    """Return the request for the parsers of messages: they need no logprobs, and those of several parts are not joined for them."""
    return replace(request, sampling=replace(request.sampling, logprobs=False))


def _part(sampled: Sampled) -> CompletionPart:
    """Return the tokens of a response; those of an aborted one may be null, which are none."""
    ids = pack_tokens() if sampled.token_ids is None else sampled.token_ids
    return CompletionPart(ids, sampled.logprobs, (), sampled.policy_version, sampled.policy_step)


def _joined(parts: AbortedParts, last: Sampled, prompt: int) -> Sampled:
    """Return the whole completion of a prompt with `prompt` tokens. The engine repeats the prompt with the parts after it."""
    joined = parts.join(_part(last))
    return structs.replace(
        last,
        token_ids=joined.token_ids,
        logprobs=joined.logprobs,
        reported=last.reported[:prompt] if last.reported is not None else None,
        policy_version=joined.policy_version,
        runs=joined.runs,
    )
