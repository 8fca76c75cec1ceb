"""Small helpers: tool and message functions, schemas, registry, errors, keys, and their import paths."""

from __future__ import annotations

import asyncio
import importlib
import math
from typing import Any

import pytest
from pydantic import ValidationError
from rollout_server import sdk
from rollout_server.sdk import (
    DEFAULT_MAX_METADATA_SIZE_BYTES,
    AgentLoopNotFoundError,
    AgentLoopRegistry,
    CompletionsResult,
    OpenAIFunctionCallSchema,
    OpenAIFunctionParsedSchema,
    OpenAIFunctionSchema,
    OsmosisRolloutError,
    OsmosisServerError,
    OsmosisValidationError,
    RolloutRequest,
    RolloutStatus,
    ToolArgumentError,
    ToolExecutionError,
    ToolResponse,
    count_messages_by_role,
    create_tool_error_result,
    create_tool_result,
    execute_tool_calls,
    get_agent_loop,
    get_max_metadata_size_bytes,
    get_message_content,
    get_message_role,
    get_tool_call_info,
    is_assistant_message,
    is_tool_message,
    is_user_message,
    list_agent_loops,
    normalize_stop,
    parse_tool_arguments,
    parse_tool_calls,
    register_agent_loop,
    serialize_tool_result,
    set_max_metadata_size_bytes,
    unregister_agent_loop,
)
from rollout_server.sdk.server import generate_api_key, validate_api_key
from rollout_server.sdk.testing import fake_prompt_token_ids, fake_token_ids

from tests.sdk.calculator_agent import CalculatorAgentLoop
from tests.sdk.loops import user

MODULES = {
    "client": ("CompletionsResult", "OsmosisLLMClient"),
    "config": ("RolloutSettings", "configure", "get_settings", "reset_settings"),
    "core.base": ("RolloutAgentLoop", "RolloutContext", "RolloutResult"),
    "core.exceptions": ("OsmosisRolloutError", "ToolArgumentError", "AgentLoopNotFoundError"),
    "core.llm_client": ("LLMClientProtocol",),
    "core.schemas": ("RolloutRequest", "OpenAIFunctionToolSchema", "MessageDict", "SamplingParamsDict"),
    "registry": ("AgentLoopRegistry", "register_agent_loop", "get_agent_loop"),
    "server": ("create_app", "serve_agent_loop", "validate_and_report", "generate_api_key"),
    "server.app": ("create_app",),
    "server.serve": ("DEFAULT_HOST", "DEFAULT_PORT", "ServeError", "serve_agent_loop"),
    "testing": ("create_mock_trainer_app", "RolloutCompletionTracker", "patch_httpx_for_mock_trainer"),
    "tools": ("create_tool_result", "execute_tool_calls"),
    "utils": ("parse_tool_calls", "normalize_stop"),
    "validator": ("validate_agent_loop", "ValidationResult", "AgentLoopValidationError"),
}


@pytest.mark.parametrize("module", MODULES)
def test_names_are_where_they_were(module: str) -> None:
    found = importlib.import_module(f"rollout_server.sdk.{module}")
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []


def test_all_public_names_are_there() -> None:
    assert [name for name in sdk.__all__ if not hasattr(sdk, name)] == []


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (8, "8"),
        (2.5, "2.5"),
        (8.0, "8.0"),
        ("as it is", "as it is"),
        (True, "true"),
        (None, "null"),
        ({"a": "ü"}, '{"a": "ü"}'),
        ([1, 2], "[1, 2]"),
    ],
)
def test_results_are_written_plainly(result: Any, text: str) -> None:
    assert serialize_tool_result(result) == text


@pytest.mark.parametrize("result", [math.inf, math.nan, [math.inf], object()])
def test_what_cannot_be_written_is_an_error(result: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        serialize_tool_result(result)


def test_tool_messages() -> None:
    assert create_tool_result("c", "8") == {"role": "tool", "content": "8", "tool_call_id": "c"}
    assert create_tool_error_result("c", "no")["content"] == "Error: no"


def test_calls_are_read() -> None:
    function = {"name": "add", "arguments": '{"a": 5}'}
    assert get_tool_call_info({"id": "c", "function": function}) == ("c", "add", {"a": 5})
    assert get_tool_call_info({"id": "c", "function": function | {"arguments": {"a": 5}}}) == ("c", "add", {"a": 5})
    assert get_tool_call_info({"id": "c", "function": {"name": "now"}}) == ("c", "now", {})
    assert get_tool_call_info({"function": {"name": "now"}}) == ("unknown", "now", {})
    assert parse_tool_arguments("{}") == {}
    assert parse_tool_arguments('{"text": "a\n\tb"}') == {"text": "a\n\tb"}


@pytest.mark.parametrize(
    ("call", "call_id", "name"),
    [
        ({"id": "c", "function": {"name": "add", "arguments": "{"}}, "c", "add"),
        ({"id": "c", "function": {"name": "add", "arguments": "[1]"}}, "c", "add"),
        ({"id": "c", "function": {"name": "add", "arguments": 5}}, "c", "add"),
        ({"id": "c", "function": {"arguments": "{}"}}, "c", ""),
        ({"id": "c"}, "c", ""),
        ({"function": {"name": "add", "arguments": "{"}}, "unknown", "add"),
        ("add", "", ""),
    ],
)
def test_calls_that_cannot_be_read_are_named(call: Any, call_id: str, name: str) -> None:
    with pytest.raises(ToolArgumentError) as wrong:
        get_tool_call_info(call)
    assert (wrong.value.tool_call_id, wrong.value.tool_name) == (call_id, name)
    assert isinstance(wrong.value, ToolExecutionError)


async def test_calls_run_together_and_keep_their_order() -> None:
    both = asyncio.Barrier(2)

    async def execute(call: dict[str, Any]) -> dict[str, str]:
        await both.wait()
        return create_tool_result(call["id"], "done")

    results = await execute_tool_calls([{"id": "a"}, {"id": "b"}], execute)
    assert [result["tool_call_id"] for result in results] == ["a", "b"]
    assert await execute_tool_calls([], execute) == []


async def test_one_that_fails_ends_the_others() -> None:
    ended: list[str] = []

    async def execute(call: dict[str, Any]) -> dict[str, str]:
        if call["id"] == "bad":
            raise ToolExecutionError("broken", tool_call_id="bad")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(call["id"])
        raise AssertionError

    with pytest.raises(ToolExecutionError, match="broken"):
        await execute_tool_calls([{"id": "slow"}, {"id": "bad"}], execute)
    await asyncio.sleep(0)
    assert ended == ["slow"]


def test_messages_are_asked_about() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert [get_message_content(each) for each in (user("hi"), parts, {"content": None}, {})] == ["hi", "ab", "", ""]
    assert [get_message_role(each) for each in (user("hi"), {}, {"role": 5})] == ["user", "unknown", "unknown"]
    assert is_user_message(user("hi"))
    assert is_assistant_message({"role": "assistant"})
    assert is_tool_message({"role": "tool"})
    assert not is_tool_message({})
    assert count_messages_by_role([user("a"), {"role": "tool"}, user("b")]) == {"user": 2, "tool": 1}
    assert parse_tool_calls({"tool_calls": [{"id": "c"}]}) == [{"id": "c"}]
    assert (
        parse_tool_calls({"tool_calls": None}) == parse_tool_calls({"tool_calls": "no"}) == parse_tool_calls({}) == []
    )


def test_stop_sequences() -> None:
    assert [normalize_stop(each) for each in (None, "a", ["a", "b"], ("a",), [], 5)] == [
        None,
        ["a"],
        ["a", "b"],
        ["a"],
        [],
        None,
    ]


def test_results_of_completions() -> None:
    def result(**message: Any) -> CompletionsResult:
        return CompletionsResult({"role": "assistant", **message}, [], [], {}, "stop")

    assert (result(content="hi").content, result().content, result(content=None).content) == ("hi", None, None)
    assert result(tool_calls=[{"id": "c"}]).has_tool_calls
    assert not result(tool_calls=None).has_tool_calls


def asked(**changes: Any) -> RolloutRequest:
    fields: dict[str, Any] = {"rollout_id": "r", "server_url": "http://t", "messages": [], "completion_params": {}}
    return RolloutRequest(**fields | changes)


def test_requests_have_the_protocols_defaults() -> None:
    request = asked(server_url="https://t:8080/")
    assert (request.max_turns, request.max_tokens_total, request.metadata) == (10, 8192, {})
    assert request.server_url == "https://t:8080"
    assert "secret" not in repr(asked(api_key="secret"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rollout_id": ""},
        {"rollout_id": "  "},
        {"rollout_id": "x" * 257},
        {"server_url": "trainer"},
        {"server_url": "ftp://t"},
        {"server_url": "http://"},
        {"server_url": "http://[::1"},
        {"messages": [5]},
        {"metadata": {"a": "x" * DEFAULT_MAX_METADATA_SIZE_BYTES}},
    ],
)
def test_requests_that_are_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        asked(**wrong)


def test_the_largest_metadata_can_be_set() -> None:
    set_max_metadata_size_bytes(20)
    try:
        assert get_max_metadata_size_bytes() == 20
        with pytest.raises(ValidationError, match="the limit is 20"):
            asked(metadata={"a": "x" * 20})
    finally:
        set_max_metadata_size_bytes(DEFAULT_MAX_METADATA_SIZE_BYTES)
    with pytest.raises(ValueError, match="at least 1 byte"):
        set_max_metadata_size_bytes(0)


def test_schemas() -> None:
    assert OpenAIFunctionSchema(name="now", description="The time").model_dump() == {
        "name": "now",
        "description": "The time",
        "parameters": {"type": "object", "properties": {}, "required": []},
        "strict": False,
    }
    read = OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    assert read(OpenAIFunctionParsedSchema(name="add", arguments='{"a": 1}'))[0].arguments == {"a": 1}
    for wrong in ("{", "[1]", ""):
        call, has_error = read(OpenAIFunctionParsedSchema(name="add", arguments=wrong))
        assert (call.arguments, has_error) == ({}, True)
    assert ToolResponse(text="a").is_text_only()
    assert ToolResponse().is_empty()
    assert not ToolResponse(image=[1]).is_text_only()
    with pytest.raises(ValidationError, match="must be a list"):
        ToolResponse.model_validate({"image": "one"})
    assert RolloutStatus("COMPLETED") == "COMPLETED"


def test_the_registry() -> None:
    loop = CalculatorAgentLoop()
    register_agent_loop(loop)
    try:
        assert get_agent_loop("calculator") is loop
        assert "calculator" in list_agent_loops()
        with pytest.raises(ValueError, match="is already registered"):
            register_agent_loop(loop)
        with pytest.raises(AgentLoopNotFoundError, match="'other' is registered") as missing:
            get_agent_loop("other")
        assert (missing.value.name, missing.value.available) == ("other", ["calculator"])
    finally:
        assert unregister_agent_loop("calculator")
    assert not unregister_agent_loop("calculator")
    own = AgentLoopRegistry()
    own.register(loop)
    assert own.get("calculator") is loop
    own.clear()
    assert own.list_names() == []


def test_errors_are_one_family() -> None:
    assert OsmosisServerError("down", 503).status_code == 503
    assert OsmosisValidationError("wrong", 422).status_code == 422
    assert all(issubclass(each, OsmosisRolloutError) for each in (OsmosisServerError, ToolArgumentError))


def test_keys() -> None:
    key = generate_api_key()
    assert key.startswith("osm_rollout_")
    assert key != generate_api_key()
    assert validate_api_key(key, key)
    assert not any(validate_api_key(wrong, key) for wrong in (None, "", "schlüssel", key + "x", "\ud800"))


def test_fake_tokens_are_as_long_as_what_they_stand_for() -> None:
    assert fake_token_ids("abc") == [0, 1, 2]
    one = fake_prompt_token_ids([user("a")])
    assert len(fake_prompt_token_ids([user("a"), user("b")])) == 2 * len(one)
    assert fake_prompt_token_ids([]) == one
