"""Enum values as words: the name of a proto enum value in lower case, without its prefix. ROLLOUT_VIEW_FULL is "full"."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from google.protobuf.descriptor import EnumDescriptor

OTHER: Final = "unspecified"
"""Word for a value that is unset, or that a later version of the contract added."""

# Written out for type checkers and the OpenAPI description; a test compares them with the contract.
Dialect: TypeAlias = Literal["grpc", "http_masked", "http_plain", "openai", "vllm", "sglang", "stream", "mcp"]
TokenMode: TypeAlias = Literal["messages", "tokens"]
DriftPolicy: TypeAlias = Literal["warn", "fail"]
InterruptPolicy: TypeAlias = Literal["resume", "fail"]
StaleAction: TypeAlias = Literal["cancel", "mask", "split", "keep"]
FailureClass: TypeAlias = Literal[
    "policy", "environment", "tool", "engine", "trainer", "server", "deadline", "cancelled"
]
State: TypeAlias = Literal["queued", "running", "finished"]
DeliveryState: TypeAlias = Literal["pending", "acknowledged", "refused", "expired"]
View: TypeAlias = Literal["basic", "messages", "samples", "full"]
Detail: TypeAlias = Literal["basic", "messages", "full", "outcome"]


@cache  # protobuf builds the list of values anew for each call
def enum_values(kind: EnumDescriptor) -> Mapping[str, Any]:
    """Return the numbers of an enum's values by word. The unset value has no word.

    Any: generated code has no common type for enum values.
    """
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    words = {value.name.removeprefix(prefix).lower(): value.number for value in kind.values if value.number != 0}
    return MappingProxyType(words)


@cache
def enum_names(kind: EnumDescriptor) -> Mapping[int, str]:
    """Return the words of an enum's values by number. The unset value has no word."""
    return MappingProxyType({number: word for word, number in enum_values(kind).items()})
