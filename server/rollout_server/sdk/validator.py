"""Validation of an agent loop before it is served."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError as PydanticError

from rollout_server.core.spec_validation import ID_LENGTH
from rollout_server.sdk.core.base import RolloutAgentLoop
from rollout_server.sdk.core.schemas import OpenAIFunctionToolSchema, RolloutRequest
from rollout_server.sdk.request_view import sample_request

__all__ = ["AgentLoopValidationError", "ValidationError", "ValidationResult", "validate_agent_loop"]


@dataclass
class ValidationError:
    """One error or warning.

    Args:
        code: stable identifier.
        message: what is wrong.
        field: the field that is wrong, if there is one.
        details: further facts, such as the type of an exception.
    """

    code: str
    message: str
    field: str | None = None
    details: dict[str, Any] | None = None

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        return f"[{self.code}] {where}{self.message}"


class AgentLoopValidationError(Exception):
    """The loop cannot be served; `errors` lists the reasons."""

    def __init__(self, message: str, errors: list[ValidationError] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or []


@dataclass
class ValidationResult:
    """Result of a validation. It is true if the loop can be served; `warnings` do not prevent that."""

    valid: bool
    errors: list[ValidationError] = field(default_factory=list)
    warnings: list[ValidationError] = field(default_factory=list)
    agent_name: str | None = None
    tool_count: int = 0

    def __bool__(self) -> bool:
        return self.valid

    def raise_if_invalid(self) -> None:
        """Raise `AgentLoopValidationError` with all errors if the loop cannot be served."""
        if not self.valid:
            name = self.agent_name or "without a name"
            found = "; ".join(map(str, self.errors))
            raise AgentLoopValidationError(f"agent loop {name} cannot be served: {found}", self.errors)


def validate_agent_loop(agent_loop: RolloutAgentLoop, *, request: RolloutRequest | None = None) -> ValidationResult:
    """Check the name, the tools for a request and the method `run`. Errors are returned, not raised.

    Args:
        agent_loop: the loop.
        request: passed to `get_tools`; by default a sample request.
    """
    tools, errors = _tools(agent_loop, request or sample_request())
    checked = [_check_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    schemas = [tool for tool in checked if isinstance(tool, OpenAIFunctionToolSchema)]
    errors = [
        *_name(agent_loop),
        *errors,
        *(each for each in checked if isinstance(each, ValidationError)),
        *_duplicate_names(schemas),
        *_run(agent_loop),
    ]
    name = getattr(agent_loop, "name", None)
    return ValidationResult(
        valid=not errors,
        errors=errors,
        warnings=list(_warnings(schemas)),
        agent_name=name if isinstance(name, str) else None,
        tool_count=len(tools),
    )


def _name(agent_loop: object) -> Iterator[ValidationError]:
    name = getattr(agent_loop, "name", None)
    if name is None:
        yield ValidationError("MISSING_NAME", 'the loop has no name; give its class one: name = "my_agent"', "name")
    elif not isinstance(name, str):
        yield ValidationError("INVALID_NAME_TYPE", f"the name is {name!r}; it must be a string", "name")
    elif not name.strip():
        yield ValidationError("EMPTY_NAME", "the name is blank", "name")
    elif len(name) > ID_LENGTH:
        yield ValidationError("NAME_TOO_LONG", f"the name has {len(name)} characters; the limit is {ID_LENGTH}", "name")


def _run(agent_loop: object) -> Iterator[ValidationError]:
    run = getattr(agent_loop, "run", None)
    if run is None:
        yield ValidationError("MISSING_RUN_METHOD", "the loop has no method run", "run")
    elif not callable(run):
        yield ValidationError("RUN_NOT_CALLABLE", f"run is {type(run).__name__}; it must be a method", "run")
    elif not inspect.iscoroutinefunction(run):
        yield ValidationError("RUN_NOT_ASYNC", "run must be `async def`", "run")


def _tools(agent_loop: object, request: RolloutRequest) -> tuple[list[Any], list[ValidationError]]:
    get_tools = getattr(agent_loop, "get_tools", None)
    if not callable(get_tools):
        return [], [ValidationError("MISSING_GET_TOOLS", "the loop has no method get_tools", "get_tools")]
    try:
        tools = get_tools(request)
    except Exception as error:  # boundary to an author's code
        text = f"get_tools raised {type(error).__name__}: {error}"
        details = {"exception_type": type(error).__name__, "exception_message": str(error)}
        return [], [ValidationError("GET_TOOLS_EXCEPTION", text, "get_tools", details)]
    if tools is None:
        return [], [
            ValidationError("GET_TOOLS_RETURNS_NONE", "get_tools returned None; return [] for no tools", "get_tools")
        ]
    if inspect.iscoroutine(tools):
        tools.close()
    if not isinstance(tools, list | tuple):
        text = f"get_tools returned {type(tools).__name__}; it must return a list"
        return [], [ValidationError("GET_TOOLS_INVALID_TYPE", text, "get_tools")]
    return list(tools), []


def _check_tool(tool: Any, where: str) -> OpenAIFunctionToolSchema | ValidationError:
    """Return the tool's schema, or the error in it."""
    if isinstance(tool, OpenAIFunctionToolSchema):
        tool = tool.model_dump()
    if not isinstance(tool, Mapping):
        return ValidationError(
            "INVALID_TOOL_TYPE", f"the tool is {type(tool).__name__}; it must be a tool schema", where
        )
    missing = _missing_field(tool, where)
    if missing is not None:
        return missing
    try:
        return OpenAIFunctionToolSchema.model_validate(tool)
    except PydanticError as error:
        first = error.errors(include_url=False)[0]
        return ValidationError("INVALID_TOOL_SCHEMA", first["msg"], ".".join((where, *map(str, first["loc"]))))


def _missing_field(tool: Mapping[str, Any], where: str) -> ValidationError | None:
    """Return the error for a missing or wrong field that has its own error code."""
    kind, function = tool.get("type"), tool.get("function")
    if not kind:
        return ValidationError("MISSING_TOOL_TYPE", 'the tool has no type; set it to "function"', f"{where}.type")
    if kind != "function":
        return ValidationError("UNKNOWN_TOOL_TYPE", f'the type is {kind!r}; it must be "function"', f"{where}.type")
    return _missing_function_field(function, f"{where}.function")


def _missing_function_field(function: object, where: str) -> ValidationError | None:
    if function is None:
        return ValidationError("MISSING_FUNCTION", "the tool has no function", where)
    if not isinstance(function, Mapping):
        text = f"the function is {type(function).__name__}; it must be an object"
        return ValidationError("INVALID_FUNCTION_TYPE", text, where)
    name = function.get("name")
    if name is None:
        return ValidationError("MISSING_FUNCTION_NAME", "the function has no name", f"{where}.name")
    if not isinstance(name, str) or not name.strip():
        text = f"the function's name is {name!r}; it must be a non-blank string"
        return ValidationError("INVALID_FUNCTION_NAME", text, f"{where}.name")
    return None


def _duplicate_names(tools: list[OpenAIFunctionToolSchema]) -> Iterator[ValidationError]:
    names = [tool.function.name for tool in tools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ValidationError("DUPLICATE_TOOL_NAME", f"several tools have the name {name!r}", "tools")


def _warnings(tools: list[OpenAIFunctionToolSchema]) -> Iterator[ValidationError]:
    for index, tool in enumerate(tools):
        function, where = tool.function, f"tools[{index}].function"
        if not function.description.strip():
            yield ValidationError(
                "MISSING_FUNCTION_DESCRIPTION", f"{function.name!r} has no description; the model needs one", where
            )
        unknown = [name for name in function.parameters.required if name not in function.parameters.properties]
        if unknown:
            text = f"{function.name!r} requires undefined parameters: {', '.join(unknown)}"
            yield ValidationError("UNKNOWN_REQUIRED", text, f"{where}.parameters.required")
