"""Conversion of the calls of agents that own their loop (AgentService).

All violations of a request are raised in one `InvalidRequest`. The fields of a prompt are named as the core
names them: `messages[3]`, without `prompt.`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from osmosis.rollout.v1 import agent_service_pb2 as pb
from osmosis.rollout.v1 import message_pb2, outcome_pb2

from rollout_server.core.capture.call import Completed, HistoryMessage, ModelApi, ModelCall, OfferedTool
from rollout_server.core.error import InvalidRequest, Violation
from rollout_server.core.message import (
    ARGUMENTS,
    JSON,
    MAX_VALUES,
    MalformedMessage,
    ToolCall,
    first_too_many,
    parse_object,
)
from rollout_server.core.outcome import Category, Failure, FailureClass, RewardResult
from rollout_server.core.spec import Dialect
from rollout_server.core.spec_validation import (
    ID_LENGTH,
    json_object_violations,
    length_violations,
    sampling_violations,
)
from rollout_server.edge.wire.message import MAX_VIOLATIONS, part_to_proto, tool_to_proto, utf8
from rollout_server.edge.wire.spec import sampling_from_proto
from rollout_server.runtime.capture.endpoint import EndpointCall, FinishedWork, RolloutTools
from rollout_server.runtime.ports import Content
from rollout_server.runtime.tools.executor import ToolResult

_APIS = {
    pb.MODEL_API_UNSPECIFIED: ModelApi.GRPC,
    pb.MODEL_API_CHAT: ModelApi.CHAT,
    pb.MODEL_API_RESPONSES: ModelApi.RESPONSES,
    pb.MODEL_API_MESSAGES: ModelApi.MESSAGES,
}
_NO_PARAMETERS: Final = '{"type": "object", "properties": {}}'
MOST_ARGUMENTS: Final = 4 * 1024 * 1024
"""Characters of the arguments of one call of a tool."""
_MOST_SCORES: Final = 256
_LONGEST_EXTRA: Final = 1024 * 1024
_LONGEST_REASON: Final = 4000
# The classes of failures that an agent can know, each with the category of the outcome.
_FAILURES: Final[Mapping[int, tuple[Category, FailureClass]]] = MappingProxyType(
    {
        outcome_pb2.FAILURE_CLASS_UNSPECIFIED: (Category.INTERNAL, FailureClass.ENVIRONMENT),
        outcome_pb2.FAILURE_CLASS_ENVIRONMENT: (Category.INTERNAL, FailureClass.ENVIRONMENT),
        outcome_pb2.FAILURE_CLASS_POLICY: (Category.VALIDATION, FailureClass.POLICY),
        outcome_pb2.FAILURE_CLASS_TOOL: (Category.TOOL, FailureClass.TOOL),
        outcome_pb2.FAILURE_CLASS_DEADLINE: (Category.TIMEOUT, FailureClass.DEADLINE),
    }
)


def counted_call(prompt: pb.ModelPrompt) -> ModelCall:
    """Return the call of a prompt whose tokens are counted. Raises `InvalidRequest`."""
    if prompt.previous_completion_id:
        raise InvalidRequest(Violation("previous", "must be empty: send the whole conversation"))
    return model_call(pb.CallModelRequest(prompt=prompt))


def model_call(request: pb.CallModelRequest) -> ModelCall:
    """Return the core value of a call. Raises `InvalidRequest`."""
    sampling = sampling_from_proto(request.sampling)
    wrong = [*_identity(request), *_too_many_values(request.prompt, sampling.extra_json)]
    if not wrong:
        # The largest `max_tokens` of any protocol: a client's value beyond the trainer's is lowered, not refused.
        found = sampling_violations(sampling, Dialect.OPENAI)
        wrong += [Violation(each.field.removeprefix("spec."), each.description) for each in found]
    if wrong:
        raise InvalidRequest(*wrong)
    messages, tools = _prompt(request.prompt)
    return ModelCall(
        messages=messages,
        instructions=tuple(request.prompt.instructions),
        tools=tools,
        previous=request.prompt.previous_completion_id,
        hosted_tools=tuple(request.prompt.hosted_tools),
        api=_APIS[request.api],
        sampling=sampling,
        repeat_key=request.repeat_key,
        repeated=request.repeated,
        auxiliary=request.auxiliary,
        model=request.model,
        client_agent=request.client_agent,
    )


def _prompt(given: pb.ModelPrompt) -> tuple[tuple[HistoryMessage, ...], tuple[OfferedTool, ...]]:
    """Return messages and tools of a prompt. Raises `InvalidRequest`."""
    wrong: list[Violation] = []
    messages: list[HistoryMessage] = []
    for index, message in enumerate(given.messages):
        text = message.json
        try:
            messages.append(HistoryMessage(parse_object(text), message.completion_id, text))
        except MalformedMessage as error:
            wrong.append(Violation(f"messages[{index}]", str(error)))
    wrong += [] if wrong else _tool_violations(given)
    if wrong:
        raise InvalidRequest(*wrong[:MAX_VIOLATIONS])
    tools = tuple(
        OfferedTool(tool.name, tool.description, tool.parameters_json_schema or _NO_PARAMETERS, tool.strict)
        for tool in given.tools
    )
    return tuple(messages), tools


def completion_to_proto(completed: Completed) -> pb.ModelCompletion:
    """Return the proto of a completion."""
    return pb.ModelCompletion(
        id=completed.id,
        message_json=utf8(completed.message_json),
        finish_reason=utf8(completed.finish_reason),
        prompt_tokens=completed.prompt_tokens,
        generated_tokens=completed.generated_tokens,
        replayed=completed.replayed,
        turn=completed.turn,
    )


def finished_work(request: pb.FinishRolloutRequest) -> FinishedWork:
    """Return the core value of a finished work. Raises `InvalidRequest`. A longer failure message is cut."""
    wrong = list(_result_violations(request))
    if wrong:
        raise InvalidRequest(*wrong)
    reward = RewardResult(
        request.reward if request.HasField("reward") else None, dict(request.scores) or None, request.extra_json
    )
    if not request.HasField("failure"):
        return FinishedWork(reward)
    category, source = _FAILURES[request.failure.failure_class]
    reason = request.failure.message[:_LONGEST_REASON] or "the agent failed and gave no reason"
    return FinishedWork(reward, Failure(category, reason, source=source))


def _result_violations(request: pb.FinishRolloutRequest) -> Iterator[Violation]:
    if not math.isfinite(request.reward):
        yield Violation("reward", "must be a finite number")
    if len(request.scores) > _MOST_SCORES:
        yield Violation("scores", f"has {len(request.scores)} entries, at most {_MOST_SCORES} are allowed")
    elif not all(len(name) <= ID_LENGTH and math.isfinite(value) for name, value in request.scores.items()):
        yield Violation("scores", f"must be finite numbers with names of at most {ID_LENGTH} characters")
    too_long = [*length_violations(request.extra_json, "extra_json", _LONGEST_EXTRA)]
    yield from too_long or json_object_violations(request.extra_json, "extra_json")
    if request.failure.failure_class not in _FAILURES:
        known = ", ".join(sorted(source.name for _, source in set(_FAILURES.values())))
        yield Violation("failure.failure_class", f"must be one of {known}: an agent can report no other")


def _identity(request: pb.CallModelRequest) -> Iterator[Violation]:
    for name in ("repeat_key", "model", "client_agent"):
        yield from length_violations(getattr(request, name), name)
    if request.api not in _APIS:
        yield Violation("api", f"{request.api} is unknown to this server")


def _too_many_values(given: pb.ModelPrompt, *more: str) -> Iterator[Violation]:
    """Check the number of JSON values before any of them is parsed."""
    texts = [message.json for message in given.messages]
    if first_too_many([*texts, *(tool.parameters_json_schema for tool in given.tools), *more]) is not None:
        yield Violation("messages", f"messages, tools and sampling have more than {MAX_VALUES} JSON values in total")


def _tool_violations(given: pb.ModelPrompt) -> Iterator[Violation]:
    for index, tool in enumerate(given.tools):
        if not 0 < len(tool.name) <= ID_LENGTH:
            yield Violation(f"tools[{index}].name", f"must have 1 to {ID_LENGTH} characters")


def tools_to_proto(tools: RolloutTools) -> pb.ListRolloutToolsResponse:
    """Return the proto of a rollout's tools."""
    return pb.ListRolloutToolsResponse(
        tools=[tool_to_proto(tool) for tool in tools.tools], idempotent_tools=list(tools.idempotent)
    )


def tool_call(request: pb.CallRolloutToolRequest) -> EndpointCall:
    """Return the call of a tool. Raises `InvalidRequest`."""
    wrong = list(_tool_call_violations(request))
    if wrong:
        raise InvalidRequest(*wrong)
    text = request.arguments_json or "{}"
    try:
        arguments = parse_object(text, ARGUMENTS)
    except MalformedMessage as error:
        raise InvalidRequest(Violation("arguments_json", str(error))) from None
    digest = hashlib.sha256(f"{len(request.name)} {request.name} {text}".encode()).digest()
    return EndpointCall(ToolCall("", request.name, arguments), request.repeat_key, digest, len(text))


def _tool_call_violations(request: pb.CallRolloutToolRequest) -> Iterator[Violation]:
    yield from length_violations(request.repeat_key, "repeat_key")
    if too_long := [*length_violations(request.arguments_json, "arguments_json", MOST_ARGUMENTS)]:
        yield from too_long
    elif first_too_many([request.arguments_json]) is not None:
        yield Violation("arguments_json", f"has more than {MAX_VALUES} JSON values")


def tool_result_to_proto(result: ToolResult) -> pb.CallRolloutToolResponse:
    """Return the proto of a result."""
    return pb.CallRolloutToolResponse(parts=list(_parts(result.content)), failed=result.failed)


def _parts(content: Content) -> Iterator[message_pb2.ContentPart]:
    if isinstance(content, str):
        yield message_pb2.ContentPart(text=utf8(content))
        return
    for part in content:
        yield _part(part)


def _part(part: Mapping[str, JSON]) -> message_pb2.ContentPart:
    text = part.get("text")
    if part.get("type") == "text" and isinstance(text, str):
        return message_pb2.ContentPart(text=utf8(text))
    return part_to_proto(part)
