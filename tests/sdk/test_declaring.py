"""Invalid loops are refused when they are defined or passed, with file and line."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_server.sdk import (
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    RolloutAgentLoop,
    RolloutContext,
    RolloutRequest,
    RolloutResult,
    as_agent,
)

from tests.sdk.calculator_agent import CalculatorAgentLoop


def tool(**changes: Any) -> OpenAIFunctionToolSchema:
    function = OpenAIFunctionSchema(name=changes.pop("name", "look"), description="Looks")
    return OpenAIFunctionToolSchema(type=changes.pop("type", "function"), function=function)


@pytest.mark.parametrize(
    ("tools", "said"),
    [
        (None, "returned None; return a list of OpenAIFunctionToolSchema"),
        ("add", "returned 'add'"),
        ([5], r"\[0\] is 5"),
        ([tool(), tool()], "returned more than one tool with the name 'look'"),
        ([tool(type="retrieval")], "type is 'retrieval'; it must be \"function\""),
        ([tool(name=" ")], "the function has no name"),
        ([{"type": "function"}], r"\[0\]\.function: Field required"),
    ],
)
def test_tools_that_are_none_are_refused_with_file_and_line(tools: Any, said: str) -> None:
    class Rubbish(RolloutAgentLoop):
        name = "rubbish"

        def get_tools(self, request: RolloutRequest) -> Any:
            return tools

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            raise AssertionError

    with pytest.raises((TypeError, ValueError), match=said) as refused:
        as_agent(Rubbish())
    assert "test_declaring.py:" in str(refused.value)


def test_a_class_without_a_name_is_refused_where_it_is_written() -> None:
    with pytest.raises(TypeError, match="agent loop class Nameless has no name"):

        class Nameless(RolloutAgentLoop):
            def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
                return []

            async def run(self, ctx: RolloutContext) -> RolloutResult:
                raise AssertionError

    with pytest.raises(TypeError, match="Blank has the name '  '"):

        class Blank(CalculatorAgentLoop):
            name = "  "


def test_a_class_in_between_needs_no_name() -> None:
    class Base(RolloutAgentLoop):
        def get_tools(self, request: RolloutRequest) -> list[OpenAIFunctionToolSchema]:
            return []

    class Named(Base):
        name = "named"

        async def run(self, ctx: RolloutContext) -> RolloutResult:
            raise AssertionError

    assert as_agent(Named()).name == "named"
    with pytest.raises(TypeError, match="abstract"):
        Base()  # type: ignore[abstract]


def test_a_loop_that_cannot_be_served_is_refused() -> None:
    class Plain(CalculatorAgentLoop):
        def run(self, ctx: RolloutContext) -> Any:  # type: ignore[override]
            raise AssertionError

    with pytest.raises(TypeError, match=r"Plain\.run \(.*test_declaring\.py:\d+\): run must be `async def`"):
        as_agent(Plain())
    with pytest.raises(TypeError, match=r"create an instance: create_app\(MyAgent\(\)\)"):
        as_agent(CalculatorAgentLoop)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an instance of RolloutAgentLoop is needed"):
        as_agent("calculator")  # type: ignore[arg-type]
