"""The errors that `validate_agent_loop` finds and `serve_agent_loop` refuses."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_server.sdk import (
    AgentLoopValidationError,
    RolloutRequest,
    ServeError,
    serve_agent_loop,
    validate_agent_loop,
    validate_and_report,
)

from tests.sdk.calculator_agent import SCHEMAS, CalculatorAgentLoop


class Odd:
    """A partial loop."""

    name: Any = "odd"

    def __init__(self, tools: Any = ()) -> None:
        self.tools = tools

    def get_tools(self, request: RolloutRequest) -> Any:
        if isinstance(self.tools, Exception):
            raise self.tools
        return self.tools

    async def run(self, ctx: Any) -> Any:
        raise AssertionError


def codes(loop: Any) -> list[str]:
    return [error.code for error in validate_agent_loop(loop).errors]


def test_a_good_loop_is_valid() -> None:
    result = validate_agent_loop(CalculatorAgentLoop())
    assert result
    assert (result.agent_name, result.tool_count, result.errors, result.warnings) == ("calculator", 4, [], [])
    result.raise_if_invalid()


FUNCTION = {"name": "look", "description": "Looks"}


@pytest.mark.parametrize(
    ("tools", "code"),
    [
        (None, "GET_TOOLS_RETURNS_NONE"),
        ("add", "GET_TOOLS_INVALID_TYPE"),
        (RuntimeError("no"), "GET_TOOLS_EXCEPTION"),
        ([5], "INVALID_TOOL_TYPE"),
        ([{"function": FUNCTION}], "MISSING_TOOL_TYPE"),
        ([{"type": "retrieval", "function": FUNCTION}], "UNKNOWN_TOOL_TYPE"),
        ([{"type": "function"}], "MISSING_FUNCTION"),
        ([{"type": "function", "function": "look"}], "INVALID_FUNCTION_TYPE"),
        ([{"type": "function", "function": {"description": "x"}}], "MISSING_FUNCTION_NAME"),
        ([{"type": "function", "function": FUNCTION | {"name": " "}}], "INVALID_FUNCTION_NAME"),
        ([{"type": "function", "function": {"name": "x"}}], "INVALID_TOOL_SCHEMA"),
        ([SCHEMAS[0], SCHEMAS[0]], "DUPLICATE_TOOL_NAME"),
    ],
)
def test_wrong_tools_have_codes(tools: Any, code: str) -> None:
    assert codes(Odd(tools)) == [code]


@pytest.mark.parametrize(
    ("name", "code"),
    [(None, "MISSING_NAME"), (5, "INVALID_NAME_TYPE"), (" ", "EMPTY_NAME"), ("x" * 257, "NAME_TOO_LONG")],
)
def test_wrong_names_have_codes(name: Any, code: str) -> None:
    loop = Odd([])
    loop.name = name
    assert codes(loop) == [code]


def test_a_run_that_is_not_async_and_no_methods_at_all() -> None:
    class Blocking(Odd):
        def run(self, ctx: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    class AsyncTools(Odd):
        async def get_tools(self, request: RolloutRequest) -> Any:
            return []

    class NoMethod(Odd):
        run = 5

    assert codes(NoMethod([])) == ["RUN_NOT_CALLABLE"]
    assert codes(Blocking([])) == ["RUN_NOT_ASYNC"]
    assert codes(AsyncTools()) == ["GET_TOOLS_INVALID_TYPE"]
    assert codes(object()) == ["MISSING_NAME", "MISSING_GET_TOOLS", "MISSING_RUN_METHOD"]


def test_all_errors_are_told_together() -> None:
    result = validate_agent_loop(Odd([5, {"type": "function"}]))  # type: ignore[arg-type]
    assert not result
    with pytest.raises(AgentLoopValidationError, match=r"MISSING_FUNCTION.*tools\[1\]\.function") as wrong:
        result.raise_if_invalid()
    assert wrong.value.errors == result.errors


def test_warnings_do_not_stop_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"type": "object", "properties": {}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "look", "description": " ", "parameters": parameters}}
    result = validate_and_report(Odd([tool]), verbose=True)  # type: ignore[arg-type]
    assert result
    assert [warning.code for warning in result.warnings] == ["MISSING_FUNCTION_DESCRIPTION", "UNKNOWN_REQUIRED"]
    assert "UNKNOWN_REQUIRED" in caplog.text


def test_tools_are_asked_for_a_request_of_ones_own() -> None:
    class Choosing(Odd):
        def get_tools(self, request: RolloutRequest) -> Any:
            return SCHEMAS[: request.metadata["tools"]]

    request = RolloutRequest(
        rollout_id="r", server_url="http://t", messages=[], completion_params={}, metadata={"tools": 2}
    )
    assert validate_agent_loop(Choosing(), request=request).tool_count == 2  # type: ignore[arg-type]
    assert codes(Choosing()) == ["GET_TOOLS_EXCEPTION"]


def test_serving_refuses_what_it_cannot_do() -> None:
    with pytest.raises(AgentLoopValidationError):
        serve_agent_loop(Odd(None))  # type: ignore[arg-type]
    with pytest.raises(ServeError, match="rollout serve"):
        serve_agent_loop(CalculatorAgentLoop(), reload=True)
    with pytest.raises(TypeError, match="takes no api_keys"):
        serve_agent_loop(CalculatorAgentLoop(), api_keys="k")  # type: ignore[call-arg]
