"""The sampling parameters and tools of a model call: what applies, what has no effect, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from osmosis.rollout.v1 import spec_pb2
from rollout_server import tool
from rollout_server.core.capture.call import OfferedTool
from rollout_server.core.error import CallRefused
from rollout_server.core.spec import Dialect, Sampling, Target
from rollout_server.runtime.capture.call_sampling import TOKEN_MODE, call_sampling
from rollout_server.runtime.capture.offered_tools import MOST_TOOLS, conversation_tools
from rollout_server.runtime.errors import ToolError

from tests.support.runtime_harness import a_spec

ENGINE = Target("http://engine:8000", Dialect.VLLM, model="m")
MASKED = Target("http://trainer:9001", Dialect.HTTP_MASKED)
CHOICE = json.dumps({"tool_choice": "required"})


@tool
async def look(place: str) -> str:
    """Looks somewhere."""
    return place


@pytest.mark.parametrize(
    ("own", "asked", "client", "options", "unused"),
    [
        ({}, {}, False, {}, []),
        ({}, {"temperature": 0.5, "top_p": 0.9}, False, {"temperature": 0.5, "top_p": 0.9}, []),
        ({"temperature": 1.0}, {"temperature": 0.5}, False, {}, ["temperature"]),
        ({"temperature": 1.0}, {"temperature": 1.0}, False, {}, []),
        ({"temperature": 1.0}, {"temperature": 0.5}, True, {"temperature": 0.5}, []),
        ({"temperature": 1.0, "top_p": 0.5}, {"top_p": 0.9}, True, {"top_p": 0.9}, []),
        ({"max_tokens": 100}, {"max_tokens": 32_000}, False, {}, []),
        ({"max_tokens": 100}, {"max_tokens": 32_000}, True, {}, []),
        ({"max_tokens": 100}, {"max_tokens": 10}, False, {"max_tokens": 10}, []),
        ({}, {"max_tokens": 32_000}, False, {"max_tokens": 32_000}, []),
        ({"stop": ("A",)}, {"stop": ("B", "A")}, False, {"stop": ("A", "B")}, []),
        ({"stop": ("A",)}, {"stop": ("B",)}, True, {"stop": ("B",)}, []),
        ({"stop": ("A",)}, {}, True, {}, []),
        ({"logprobs": True}, {"logprobs": False}, True, {}, []),
        ({"temperature": 1.0}, {"temperature": 99.0}, False, {}, ["temperature"]),
    ],
)
def test_what_applies(
    own: dict[str, Any], asked: dict[str, Any], client: bool, options: dict[str, Any], unused: list[str]
) -> None:
    spec = a_spec(sampling=Sampling(**own))
    assert call_sampling(Sampling(**asked), spec, client=client) == (options, tuple(unused))


def test_no_client_asks_for_more_than_the_synchronous_api_allows() -> None:
    options, _ = call_sampling(Sampling(max_tokens=64_000), a_spec(completions=MASKED), client=False)
    assert options == {"max_tokens": 32_768}


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"}},
        {"tool_choice": None, "response_format": None},
    ],
)
def test_what_every_trainer_does_anyway_is_no_parameter(extra: dict[str, Any]) -> None:
    assert call_sampling(Sampling(extra_json=json.dumps(extra)), a_spec(), client=False) == ({}, ())


def test_a_call_without_tools_may_say_that_no_tool_is_to_be_called() -> None:
    asked = Sampling(extra_json='{"tool_choice": "none", "parallel_tool_calls": false}')
    assert call_sampling(asked, a_spec(), client=False, has_tools=False) == ({}, ())
    with pytest.raises(CallRefused) as refused:
        call_sampling(asked, a_spec(), client=False)
    assert refused.value.field == "sampling.extra_json.tool_choice"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "look"}}),
        ("parallel_tool_calls", False),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_an_engine_that_renders_can_do_it_and_others_refuse(name: str, value: Any) -> None:
    asked = Sampling(extra_json=json.dumps({name: value}))
    assert call_sampling(asked, a_spec(completions=ENGINE), client=False) == ({"extra": {name: value}}, ())
    for spec in (a_spec(), a_spec(completions=MASKED), a_spec(completions=ENGINE, token_mode=TOKEN_MODE)):
        with pytest.raises(CallRefused) as refused:
            call_sampling(asked, spec, client=True)
        assert (refused.value.reason, refused.value.field) == ("UNSUPPORTED", f"sampling.extra_json.{name}")
        assert refused.value.message.startswith("is not supported")  # the gateway puts the name in front


def test_the_rollouts_own_extra_parameter_wins() -> None:
    spec = a_spec(completions=ENGINE, sampling=Sampling(extra_json='{"tool_choice": "none", "seed": 1}'))
    assert call_sampling(Sampling(extra_json=CHOICE), spec, client=False) == ({}, ("tool_choice",))
    assert call_sampling(Sampling(extra_json=CHOICE), spec, client=True) == ({"extra": {"tool_choice": "required"}}, ())


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"temperature": 3.0}, "sampling.temperature"),
        ({"top_p": -1.0}, "sampling.top_p"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"stop": tuple(map(str, range(65)))}, "sampling.stop"),
        ({"extra_json": "[]"}, "sampling.extra_json"),
        ({"extra_json": '{"n": 2}'}, "sampling.extra_json.n"),
    ],
)
def test_what_is_invalid_is_named(asked: dict[str, Any], field: str) -> None:
    with pytest.raises(CallRefused) as refused:
        call_sampling(Sampling(**asked), a_spec(), client=False)
    assert (refused.value.reason, refused.value.field) == ("INVALID_CALL", field)


def test_token_mode_is_the_number_of_the_contract() -> None:
    assert TOKEN_MODE == spec_pb2.TOKEN_MODE_TOKENS


def offered(**changed: Any) -> OfferedTool:
    fields = {
        "name": look.name,
        "description": look.description,
        "parameters_json_schema": look.parameters_json_schema,
    }
    return OfferedTool(**{**fields, **changed})


def test_tools_that_the_agent_class_declares_are_no_other_ones() -> None:
    schema = json.loads(look.parameters_json_schema)
    reordered = json.dumps(dict(reversed(schema.items())), indent=2)
    assert conversation_tools([offered()], [look]) is None
    assert conversation_tools([offered(parameters_json_schema=reordered, strict=True)], [look]) is None
    assert conversation_tools([], []) is None


@pytest.mark.parametrize("changed", [{"name": "seek"}, {"description": "x"}, {"parameters_json_schema": "{}"}])
async def test_other_tools_run_in_the_agent(changed: dict[str, Any]) -> None:
    tools = conversation_tools([offered(**changed)], [look])
    assert tools is not None
    assert (tools[0].name, tools[0].description) == (
        changed.get("name", "look"),
        changed.get("description", look.description),
    )
    assert json.loads(tools[0].parameters_json_schema) in ({}, json.loads(look.parameters_json_schema))
    with pytest.raises(ToolError, match="runs in the agent"):
        await tools[0].run({})
    assert conversation_tools([], [look]) == ()


@pytest.mark.parametrize(
    ("tools", "field"),
    [
        ([offered(), offered()], "tools[1].name"),
        ([offered(name="")], "tools[0].name"),
        ([offered(name=str(number)) for number in range(MOST_TOOLS + 1)], "tools"),
    ],
)
def test_invalid_tools_are_named(tools: list[OfferedTool], field: str) -> None:
    with pytest.raises(CallRefused) as refused:
        conversation_tools(tools, [])
    assert refused.value.field == field
