"""Names of spans, attributes, events and metrics, in one place.

`gen_ai.*` are those of OpenTelemetry's conventions for generative AI at the revision of `SCHEMA_URL`
(github.com/open-telemetry/semantic-conventions-genai, October 2026). All of them have the status "Development", so they may be
renamed: a newer revision is taken over by changing this module. `rollout.*` are this server's own.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "rollout_server"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/gen-ai-dev/1.42.0-dev"
CAPTURE_CONTENT: Final = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
"""The variable that lets messages, arguments and results be exported, with one of these values."""
CAPTURES: Final = frozenset({"true", "1", "span_only", "span_and_event"})

INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
EXECUTE_TOOL: Final = "execute_tool"
DELIVER: Final = "deliver_outcome"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
AGENT_NAME: Final = "gen_ai.agent.name"
AGENT_VERSION: Final = "gen_ai.agent.version"
CONVERSATION: Final = "gen_ai.conversation.id"
MODEL: Final = "gen_ai.request.model"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL: Final = "gen_ai.tool.call.id"
TOOL_TYPE: Final = "gen_ai.tool.type"
TOKEN_TYPE: Final = "gen_ai.token.type"  # noqa: S105 - a name, not a password
EVALUATION: Final = "gen_ai.evaluation.result"
EVALUATION_NAME: Final = "gen_ai.evaluation.name"
EVALUATION_SCORE: Final = "gen_ai.evaluation.score.value"
INPUT_MESSAGES: Final = "gen_ai.input.messages"
OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
TOOL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
TOOL_RESULT: Final = "gen_ai.tool.call.result"

ERROR: Final = "error.type"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

UID: Final = "rollout.uid"
ROLLOUT_ID: Final = "rollout.id"
GROUP_ID: Final = "rollout.group_id"
SEGMENT: Final = "rollout.segment"
TURN: Final = "rollout.turn"
TURNS: Final = "rollout.turns"
FURTHER_MODEL: Final = "rollout.model"
ATTEMPT: Final = "rollout.attempt"
ATTEMPTS: Final = "rollout.attempts"
POLICY_VERSION: Final = "rollout.policy_version"
TRAINED_TOKENS: Final = "rollout.tokens.trained"
MASKED_TOKENS: Final = "rollout.tokens.masked"
DRIFT_INDEX: Final = "rollout.drift.index"
DRIFT_KIND: Final = "rollout.drift.kind"
END: Final = "rollout.end"
END_REASON: Final = "rollout.end.reason"
FAILURE_CLASS: Final = "rollout.failure.class"
QUEUE_MS: Final = "rollout.queue_ms"
LINK: Final = "rollout.link"
ATTEMPT_FAILED: Final = "rollout.attempt.failed"

OPERATION_DURATION: Final = "gen_ai.client.operation.duration"
TOKEN_USAGE: Final = "gen_ai.client.token.usage"  # noqa: S105 - a name, not a password
TOOL_DURATION: Final = "gen_ai.execute_tool.duration"
ROLLOUTS: Final = "rollout.finished"
ROLLOUT_DURATION: Final = "rollout.duration"
RUNNING: Final = "rollout.running"
QUEUED: Final = "rollout.queued"
DURATION_BUCKETS: Final = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
ROLLOUT_BUCKETS: Final = (0, 5, 10, 25, 50, 75, 100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000)
