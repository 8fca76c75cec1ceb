"""One turn's completion: by messages, by messages with the prompt's ids (SGLang), or by ids and back (vLLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from rollout_server.core.ledger import Tokens
from rollout_server.core.message import Message
from rollout_server.core.spec import Spec
from rollout_server.edge.engine.errors import wants_other_limit
from rollout_server.edge.engine.request import OTHER_LIMIT, ChatWriter, TokenWriter
from rollout_server.edge.engine.response import read_completion, read_sampled
from rollout_server.edge.engine.transport import Access, encode_request, finished_response, post, response_body
from rollout_server.edge.offload import offload_response
from rollout_server.edge.trainer.chat_completion import ChatCompletion
from rollout_server.edge.trainer.retry import Fetched
from rollout_server.runtime.ports import CompletionRequest, Tool

_SCALE_OUT: Final = (
    "token mode needs the routes that vLLM serves with --enable-scale-out, and `completions.model` to be a name it serves; message "
    "mode needs no such routes"
)


_VERSION = "/v1"


@dataclass(frozen=True, slots=True)
class Routes:
    """The URLs of one engine. `base` is what OpenAI's clients call the base URL."""

    base: str

    @classmethod
    def of(cls, url: str) -> Routes:
        """A URL with a path is the base itself; one without gets the path that every engine serves by default."""
        return cls(url if urlsplit(url).path.strip("/") else f"{url}{_VERSION}")

    @property
    def chat(self) -> str:
        """The URL of chat completions, which every OpenAI-compatible engine serves."""
        return f"{self.base}/chat/completions"

    @property
    def generate(self) -> str:
        """vLLM: ids in, ids out. It stands beside the OpenAI routes, not under them."""
        return f"{self.base.removesuffix(_VERSION)}/inference/v1/generate"

    @property
    def derender(self) -> str:
        """vLLM: sampled ids to the message that they are."""
        return f"{self.chat}/derender"


class CompletionClient(Protocol):
    """Completes the conversation of one rollout, which only grows."""

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """The completion of the conversation, and the requests that were sent for it. Raises `RolloutFailed`.

        `prompt` is how the conversation was rendered here, in token mode.
        """


class Chat:
    """Chat completions: the engine reads the answer's calls and thoughts. Given a prompt, SGLang renders nothing."""

    def __init__(self, access: Access, spec: Spec, tools: Sequence[Tool]) -> None:
        self._access = access
        self._target = spec.completions
        self._url = Routes.of(spec.completions.url).chat
        self._writer = ChatWriter(spec, tools)
        self._most_calls = spec.limits.calls_read

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """Requests a chat completion; see `CompletionClient.complete`."""

        async def fetch() -> Fetched:
            return await self._fetch(messages, request, prompt)

        parsed, _, attempts = await finished_response(self._access, request, fetch, self.read)
        return parsed, attempts

    def read(self, body: bytes, turn: int) -> ChatCompletion:
        """An answer. Raises `RolloutFailed`."""
        return read_completion(body, turn, self._most_calls)

    def body(self, messages: Sequence[Message], request: CompletionRequest) -> bytes:
        """The request, for whoever has to read the answer to another one."""
        return self._encode(messages, request, self._access.limits.of(self._target))

    async def _fetch(self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None) -> Fetched:
        """Asks; where the engine speaks of the other name for `max_tokens`, once more with that one."""
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
    """vLLM's token routes: it generates from the ids it is sent, and its own parsers then read the message in what it sampled."""

    def __init__(self, access: Access, spec: Spec, tools: Sequence[Tool]) -> None:
        self._access = access
        self._chat = Chat(access, spec, tools)
        self._routes = Routes.of(spec.completions.url)
        self._writer = TokenWriter(spec.completions.model)

    async def complete(
        self, messages: Sequence[Message], request: CompletionRequest, prompt: Tokens | None = None
    ) -> tuple[ChatCompletion, int]:
        """As `CompletionClient` says; a prompt is needed. Raises ValueError without one."""
        if prompt is None:
            raise ValueError("ids are needed to generate from")
        writer = self._writer
        generation = encode_request(request.asked.turn, lambda: writer.generation(prompt, request.sampling))

        async def fetch() -> Fetched:
            return await self._post(self._routes.generate, generation, request)

        sampled, generated, attempts = await finished_response(self._access, request, fetch, read_sampled)
        body = writer.rendering(prompt, generated, self._chat.body(messages, request))
        fetched = await self._post(self._routes.derender, body, request)
        message = response_body(fetched, request)
        parsed = await offload_response(lambda: self._chat.read(message, request.asked.turn), len(message))
        completion = sampled.completion(parsed.message, parsed.tool_calls, parsed.finish_reason)
        return completion, attempts + fetched.attempts

    async def _post(self, url: str, body: bytes, request: CompletionRequest) -> Fetched:
        fetched = await post(self._access, url, body, request)
        if fetched.response.status in (404, 405):
            response_body(fetched, request, _SCALE_OUT)
        return fetched
