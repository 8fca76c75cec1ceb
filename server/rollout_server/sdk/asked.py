"""A rollout's spec in the words of the earlier SDK."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rollout_server.core.message import parse_object
from rollout_server.core.spec import Sampling, Spec
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema, RolloutRequest, SamplingParamsDict, copied
from rollout_server.sdk.utils import normalize_stop

_TURNS, _TOKENS = 10, 8192
_SAMPLED = ("temperature", "top_p", "max_tokens", "stop")


def request_of(spec: Spec) -> RolloutRequest:
    """The request, with the limits in force; where there is none, the dialect's default stands in. Not validated again."""
    return RolloutRequest.model_construct(
        rollout_id=spec.rollout_id,
        server_url=spec.completions.url,
        messages=[copied(message.fields()) for message in spec.messages],
        completion_params=_parameters(spec.sampling),
        tool_server_url=spec.tools.url if spec.tools is not None else None,
        max_turns=_TURNS if spec.limits.turns is None else spec.limits.turns,
        max_tokens_total=_TOKENS if spec.limits.generated_tokens is None else spec.limits.generated_tokens,
        metadata=dict(parse_object(spec.metadata_json)) if spec.metadata_json else {},
        api_key=None,
        idempotency_key=None,
    )


def sample_request() -> RolloutRequest:
    """A request such as a trainer sends, for asking a loop about its tools before there is one."""
    return RolloutRequest(
        rollout_id="sample",
        server_url="http://trainer.invalid",
        messages=[{"role": "user", "content": "Hello"}],
        completion_params={},
    )


def differing_parameters(asked: SamplingParamsDict, wanted: Mapping[str, Any]) -> str:
    """The sampling parameters of a call that are not the request's, as `name=value`; empty where there are none.

    None leaves a parameter as it is, and parameters that the earlier SDK ignores are ignored.
    """
    differing = []
    for name in _SAMPLED:
        value, known = wanted.get(name), asked.get(name)
        if name == "stop":
            value, known = normalize_stop(value) or None, normalize_stop(known) or None
        if value is not None and value != known:
            differing.append(f"{name}={value!r} instead of {asked.get(name)!r}")
    return ", ".join(differing)


def _parameters(sampling: Sampling) -> SamplingParamsDict:
    named = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_tokens", "logprobs")}
    extra = dict(parse_object(sampling.extra_json)) if sampling.extra_json else {}
    stop = {"stop": list(sampling.stop)} if sampling.stop else {}
    return extra | {name: value for name, value in named.items() if value is not None} | stop


def told_tools(tools: object, where: str) -> list[OpenAIFunctionToolSchema]:
    """What `get_tools` gave, checked. Raises TypeError or ValueError naming the loop and the tool."""
    if not isinstance(tools, list | tuple):
        raise TypeError(
            f"{where} returned {_shown(tools)}; a list of OpenAIFunctionToolSchema is needed, [] for no tools"
        )
    checked = [_told_tool(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]
    names = [tool.function.name for tool in checked]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"{where} returned more than one tool with the name {', '.join(map(repr, doubled))}")
    return checked


def _told_tool(tool: object, where: str) -> OpenAIFunctionToolSchema:
    if isinstance(tool, Mapping):
        try:
            tool = OpenAIFunctionToolSchema.model_validate(tool)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where}.{place}: {first['msg']}") from None
    if not isinstance(tool, OpenAIFunctionToolSchema):
        raise TypeError(f"{where} is {_shown(tool)}; an OpenAIFunctionToolSchema is needed")
    if tool.type != "function":
        raise ValueError(f'{where}: type is {tool.type!r}, "function" is needed')
    if not tool.function.name.strip():
        raise ValueError(f"{where}: the function has no name")
    return tool


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."
