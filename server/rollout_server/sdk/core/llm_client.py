"""What an agent loop needs of whatever completes for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from rollout_server.sdk.client import CompletionsResult
    from rollout_server.sdk.core.schemas import MessageDict, RolloutMetrics


@runtime_checkable
class LLMClientProtocol(Protocol):
    """Completes conversations and counts what it used. In a rollout that is the rollout itself, in a test whatever you like."""

    async def chat_completions(self, messages: list[MessageDict], **kwargs: Any) -> CompletionsResult:
        """The model's answer to the whole conversation."""

    def get_metrics(self) -> RolloutMetrics:
        """What was used so far: calls, tokens and milliseconds of completions."""
