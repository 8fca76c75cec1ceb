"""Conversion of a rollout's spec to a request of the earlier SDK, and checks of what a loop passes back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import ValidationError

from rollout_server.core.message import parse_object
from rollout_server.core.spec import Sampling
from rollout_server.runtime.agent_protocol import Request
from rollout_server.runtime.errors import AgentMistake
from rollout_server.runtime.run.arguments import SamplingOptions, turn_sampling
from rollout_server.sdk.core.exceptions import OsmosisValidationError
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema, RolloutRequest, SamplingParamsDict, copy_message
from rollout_server.sdk.utils import normalize_stop

_TURNS, _TOKENS = 10, 8192
SAMPLING_PARAMETERS = ("temperature", "top_p", "max_tokens", "stop", "logprobs")


def request_of(request: Request) -> RolloutRequest:
    """Return the request without validating it again.

    Limits are the effective ones; a missing limit becomes the default of the asynchronous HTTP API. If the source request is known,
    `completion_params` are exactly what the caller sent, without defaults.
    """
    spec, source = request.spec, request.source
    tools = spec.tools.url if spec.tools is not None else None
    parameters = source.get("completion_params")
    return RolloutRequest.model_construct(
        rollout_id=spec.rollout_id,
        server_url=spec.completions.url,
        messages=[copy_message(message) for message in request.messages],
        completion_params=dict(parameters) if isinstance(parameters, Mapping) else _parameters(spec.sampling),
        tool_server_url=source.get("tool_server_url", tools),
        max_turns=_TURNS if spec.limits.turns is None else spec.limits.turns,
        max_tokens_total=_TOKENS if spec.limits.generated_tokens is None else spec.limits.generated_tokens,
        metadata=dict(request.metadata),
        api_key=None,
        idempotency_key=source.get("idempotency_key"),
    )


def sample_request() -> RolloutRequest:
    """Return a sample request, to get the tools of a loop when there is no real request."""
    return RolloutRequest(
        rollout_id="sample",
        server_url="http://trainer.invalid",
        messages=[{"role": "user", "content": "Hello"}],
        completion_params={},
    )


def own_sampling(request: Request, parameters: SamplingParamsDict, wanted: Mapping[str, Any]) -> SamplingOptions:
    """Return the sampling parameters of a call that differ from the request's.

    Args:
        request: the rollout's request.
        parameters: sampling parameters of the request, as the loop sees them.
        wanted: keyword arguments of the call. None keeps a parameter; unknown names are ignored, as in the earlier SDK.

    Raises `OsmosisValidationError` for a value out of range.
    """
    sent, known = _with_stops(wanted), _with_stops(parameters)
    own = {name: sent[name] for name in SAMPLING_PARAMETERS if name in sent and sent[name] != known.get(name)}
    try:
        turn_sampling(request.sampling, own, request.spec.completions.dialect)
    except AgentMistake as mistake:
        raise OsmosisValidationError(str(mistake), 400) from None
    return cast("SamplingOptions", own)


def _with_stops(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**parameters, "stop": normalize_stop(parameters["stop"])} if "stop" in parameters else parameters


def _parameters(sampling: Sampling) -> SamplingParamsDict:
    sent = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "logprobs")}
    extra = dict(parse_object(sampling.extra_json)) if sampling.extra_json else {}
    stop = {"stop": list(sampling.stop)} if sampling.stop else {}
    return extra | {name: value for name, value in sent.items() if value is not None} | stop


def validate_tools(tools: object, where: str) -> list[OpenAIFunctionToolSchema]:
    """Check what `get_tools` returned. Raises TypeError or ValueError naming the loop and the tool."""
    if not isinstance(tools, list | tuple):
        raise TypeError(
            f"{where} returned {_excerpt(tools)}; return a list of OpenAIFunctionToolSchema, [] for no tools"
        )
    checked = [_validate_tool(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]
    names = [tool.function.name for tool in checked]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"{where} returned more than one tool with the name {', '.join(map(repr, doubled))}")
    return checked


def _validate_tool(tool: object, where: str) -> OpenAIFunctionToolSchema:
    if isinstance(tool, Mapping):
        try:
            tool = OpenAIFunctionToolSchema.model_validate(tool)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}.{field}: {first['msg']}") from None
    if not isinstance(tool, OpenAIFunctionToolSchema):
        raise TypeError(f"{where} is {_excerpt(tool)}; it must be an OpenAIFunctionToolSchema")
    if tool.type != "function":
        raise ValueError(f'{where}: type is {tool.type!r}; it must be "function"')
    if not tool.function.name.strip():
        raise ValueError(f"{where}: the function has no name")
    return tool


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
