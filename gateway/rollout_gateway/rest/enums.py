"""Enums of the contract as the plain API's words: the name of a value without its prefix, in small letters."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, Protocol

from osmosis.rollout.v1 import event_pb2, outcome_pb2, spec_pb2, token_pb2
from osmosis.rollout.v1 import rollout_service_pb2 as pb


class _Enum(Protocol):
    """An enum of the generated code."""

    def items(self) -> Iterable[tuple[str, int]]:
        """Names and values."""


Words = Mapping[int, str]


def _words(enum: _Enum) -> Words:
    items = list(enum.items())
    prefix = next(name for name, value in items if value == 0).removesuffix("UNSPECIFIED")
    return MappingProxyType({value: name.removeprefix(prefix).lower() for name, value in items if value})


# What is unset, and what a later version of the contract adds, has no word here.
AUTHORS: Final = _words(token_pb2.Author)
CATEGORIES: Final = _words(outcome_pb2.FailureCategory)
DELIVERIES: Final = _words(pb.DeliveryState)
DETAILS: Final = _words(event_pb2.EventDetail)
DIALECTS: Final = _words(spec_pb2.Dialect)
DRIFT_KINDS: Final = _words(event_pb2.DriftKind)
DRIFT_POLICIES: Final = _words(spec_pb2.DriftPolicy)
INTERRUPT_POLICIES: Final = _words(spec_pb2.InterruptPolicy)
MASK_REASONS: Final = _words(token_pb2.MaskReason)
SEGMENT_KINDS: Final = _words(token_pb2.SegmentKind)
STATES: Final = _words(pb.RolloutState)
TOKEN_MODES: Final = _words(spec_pb2.TokenMode)
VIEWS: Final = _words(pb.RolloutView)

#: For a value without a word where a reader needs one.
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


# Any: the generated code has a type of its own for each enum, and none of their values.
def value_of(words: Words, word: str | None) -> Any:
    """The value with that word; 0, unset, for None."""
    return 0 if word is None else next(value for value, known in words.items() if known == word)


def values_of(words: Words, chosen: Iterable[str]) -> list[Any]:
    """The values with these words."""
    return [value_of(words, word) for word in chosen]
