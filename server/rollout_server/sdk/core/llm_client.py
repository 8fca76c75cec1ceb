"""Protocol of the LLM client that an agent loop uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rollout_server.sdk.client import CompletionsResult
    from rollout_server.sdk.core.schemas import MessageDict, RolloutMetrics


@runtime_checkable
class LLMClientProtocol(Protocol):
    """Generates completions and counts usage. In a rollout the run implements it; in a test it may be any object."""

    async def chat_completions(self, messages: list[MessageDict], **kwargs: Any) -> CompletionsResult:
        """Return the model's completion of the whole conversation."""

    def get_metrics(self) -> RolloutMetrics:
        """Return the usage so far: calls, tokens and milliseconds of completions."""
