"""Result of a completion, and a client that calls a trainer outside of rollouts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from rollout_server.sdk.config.settings import RolloutClientSettings, get_settings
from rollout_server.sdk.core.exceptions import OsmosisRolloutError
from rollout_server.sdk.core.schemas import MessageDict, RolloutMetrics
from rollout_server.sdk.http import Post, PostResult, read_completion
from rollout_server.sdk.utils import check_options, normalize_stop, parse_tool_calls

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True)
class CompletionsResult:
    """A completion.

    Args:
        message: the assistant message as received; a copy that you may append to your messages.
        token_ids: generated token ids; empty if the trainer sends none.
        logprobs: one float per token id; empty if the trainer sends none.
        usage: `prompt_tokens`, `completion_tokens` and `total_tokens`.
        finish_reason: why the generation ended, as the trainer reports it.
    """

    message: MessageDict
    token_ids: list[int]
    logprobs: list[float]
    usage: dict[str, int]
    finish_reason: str

    @property
    def has_tool_calls(self) -> bool:
        """Return whether the message calls tools."""
        return bool(self.tool_calls)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """Return the tool calls as received; an empty list if there are none."""
        return parse_tool_calls(self.message)

    @property
    def content(self) -> str | None:
        """Return the content of the message, or None."""
        return self.message.get("content")


class ClientOptions(TypedDict, total=False):
    """Keyword-only arguments of the client.

    settings: defaults for arguments that are not given; by default those of `get_settings`.
    """

    settings: RolloutClientSettings | None


class OsmosisLLMClient:
    """Client for a trainer of the asynchronous HTTP API: `async with OsmosisLLMClient(url, rollout_id) as client: ...`.

    Agent loops do not need it: in a rollout they use `ctx.llm`, and the server delivers the outcome. Use it in programs that call a
    trainer directly; no ledger records their completions. The client retries 5xx, timeouts and transport errors. All attempts
    carry the same `Idempotency-Key` (docs/design.md, B).
    """

    def __init__(
        self,
        server_url: str,
        rollout_id: str,
        api_key: str | None = None,
        timeout_seconds: float | None = None,
        max_retries: int | None = None,
        complete_rollout_retries: int | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        check_options("OsmosisLLMClient", options, ClientOptions)
        settings = options.get("settings") or get_settings().client
        final = complete_rollout_retries
        self.server_url = server_url.rstrip("/")
        self.rollout_id = rollout_id
        self.api_key = api_key
        self.timeout_seconds = settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        self.max_retries = settings.max_retries if max_retries is None else max_retries
        self.complete_rollout_retries = settings.complete_rollout_retries if final is None else final
        self._settings = settings
        self._http: httpx.AsyncClient | None = None
        self._metrics = RolloutMetrics()
        self._turn = 0

    async def chat_completions(
        self,
        messages: list[MessageDict],
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        stop: Any = None,
        logprobs: bool = True,
        **kwargs: Any,
    ) -> CompletionsResult:
        """Request a completion of the whole conversation. Unknown parameters are ignored.

        Raises `OsmosisTransportError`, `OsmosisTimeoutError`, `OsmosisServerError` or `OsmosisValidationError`.
        """
        self._turn += 1
        body = {
            "model": "default",
            "rollout_id": self.rollout_id,
            "messages": messages,
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
        }
        texts = normalize_stop(stop)
        key = f"{self.rollout_id}/0/{self._turn}"
        result = await self._post("/v1/chat/completions", body if texts is None else body | {"stop": texts}, key)
        completion = read_completion(result.body)
        usage = completion.usage.model_dump(exclude_unset=True) if completion.usage is not None else {}
        prompt = usage.get("prompt_tokens") or len(completion.prompt_token_ids or ())
        generated = usage.get("completion_tokens") or len(completion.token_ids or ())
        self._count(result, prompt, generated)
        choice = completion.choices[0]
        return CompletionsResult(
            message=choice.message,
            token_ids=completion.token_ids or [],
            logprobs=completion.logprobs or [],
            usage=usage,
            finish_reason=choice.finish_reason or "stop",
        )

    async def complete_rollout(
        self,
        status: str,
        final_messages: list[MessageDict],
        finish_reason: str = "stop",
        error_message: str | None = None,
        metrics: RolloutMetrics | None = None,
        reward: float | None = None,
    ) -> None:
        """Deliver the outcome to the trainer. Any 2xx acknowledges it. Raises the same errors as `chat_completions`."""
        body = {
            "rollout_id": self.rollout_id,
            "status": status,
            "final_messages": final_messages,
            "finish_reason": finish_reason,
            "error_message": error_message,
            "metrics": (metrics or self.get_metrics()).model_dump(),
            "reward": reward,
            "extra_fields": {},
        }
        fields = {name: value for name, value in body.items() if value is not None}
        await self._post("/v1/rollout/completed", fields, f"{self.rollout_id}/outcome", final=True)

    def get_metrics(self) -> RolloutMetrics:
        """Return the usage of this client so far."""
        return self._metrics.model_copy()

    async def close(self) -> None:
        """Close all connections. The client opens new ones if it is used again."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _post(self, path: str, body: dict[str, Any], key: str, *, final: bool = False) -> PostResult:
        retries = self.complete_rollout_retries if final else self.max_retries
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        post = Post(f"{self.server_url}{path}", body, {**headers, "idempotency-key": key})
        for attempt in range(retries):
            try:
                return await post.send(self._open())
            except OsmosisRolloutError as error:
                if not post.may_repeat(error):
                    raise
            wait = self._settings.retry_base_delay * 2**attempt
            await asyncio.sleep(min(wait, self._settings.retry_max_delay))
        return await post.send(self._open())

    def _open(self) -> httpx.AsyncClient:
        if self._http is None:
            import httpx

            settings = self._settings
            limits = httpx.Limits(
                max_connections=settings.max_connections,
                max_keepalive_connections=settings.max_keepalive_connections,
            )
            self._http = httpx.AsyncClient(timeout=self.timeout_seconds, limits=limits, trust_env=False)
        return self._http

    def _count(self, result: PostResult, prompt: int, generated: int) -> None:
        used = self._metrics
        self._metrics = used.model_copy(
            update={
                "llm_latency_ms": used.llm_latency_ms + result.elapsed_ms,
                "num_llm_calls": used.num_llm_calls + 1,
                "prompt_tokens": used.prompt_tokens + prompt,
                "response_tokens": used.response_tokens + generated,
                "max_context_tokens": max(used.max_context_tokens, prompt + generated),
            }
        )
