"""Enum values as words of the REST API: the name of a proto enum value in lower case, without its prefix."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal

#: Word for a value that is unset, or that a later version of the contract added.
OTHER: Final = "unspecified"

# Written out for the OpenAPI description; a test compares them with the contract.
Dialect = Literal["grpc", "http_masked", "http_plain", "openai", "vllm", "sglang", "stream", "mcp"]
TokenMode = Literal["messages", "tokens"]
DriftPolicy = Literal["warn", "fail"]
InterruptPolicy = Literal["resume", "fail"]
StaleAction = Literal["cancel", "mask", "split", "keep"]
FailureClass = Literal["policy", "environment", "tool", "engine", "trainer", "server", "deadline", "cancelled"]
State = Literal["queued", "running", "finished"]
DeliveryState = Literal["pending", "acknowledged", "refused", "expired"]
View = Literal["basic", "messages", "samples", "full"]
Detail = Literal["basic", "messages", "full", "outcome"]


# Any: generated code has no common type for enum values, and protobuf's two implementations have none for descriptors.
@cache
def names(enum: Any) -> Mapping[int, str]:
    """Return the words of an enum's values by number, given its descriptor. The unset value has no word."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return MappingProxyType(
        {each.number: each.name.removeprefix(prefix).lower() for each in enum.values if each.number}
    )


@cache
def value_of(enum: Any, word: str) -> Any:
    """Return the enum value for a word."""
    return next(value for value, known in names(enum).items() if known == word)
