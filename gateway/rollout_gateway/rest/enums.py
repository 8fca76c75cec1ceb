"""Enums of the contract as the plain API's words: the name of a value without its prefix, in small letters."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal

#: For a value without a word where a reader needs one: one that is unset, or that a later version of the contract adds.
OTHER: Final = "unspecified"

# Written out for the OpenAPI description; a test compares them with the contract.
Dialect = Literal["grpc", "http_masked", "http_plain", "openai", "vllm", "sglang", "stream"]
TokenMode = Literal["messages", "tokens"]
DriftPolicy = Literal["warn", "fail"]
InterruptPolicy = Literal["resume", "fail"]
State = Literal["queued", "running", "finished"]
DeliveryState = Literal["pending", "acknowledged", "refused", "expired"]
View = Literal["basic", "messages", "samples", "full"]
Detail = Literal["basic", "messages", "full", "outcome"]


# Any: the generated code has a type of its own for each enum and none for its values; descriptors of two implementations differ.
@cache
def names(enum: Any) -> Mapping[int, str]:
    """The words of an enum's values, by its descriptor; the unset value has none."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return MappingProxyType(
        {each.number: each.name.removeprefix(prefix).lower() for each in enum.values if each.number}
    )


@cache
def value_of(enum: Any, word: str) -> Any:
    """The value with that word."""
    return next(value for value, known in names(enum).items() if known == word)
