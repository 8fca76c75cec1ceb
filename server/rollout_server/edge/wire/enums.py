"""Tables from core enums to proto enums, whose values have the same names behind a prefix."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from osmosis.rollout.v1 import event_pb2, outcome_pb2, rollout_service_pb2, spec_pb2, token_pb2

from rollout_server.core.ledger import Author, DriftKind, MaskReason, SegmentKind
from rollout_server.core.outcome import Category, FailureClass, RewardRule
from rollout_server.core.spec import Dialect, DriftPolicy, StaleAction
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.rollout import RolloutState

_E = TypeVar("_E", bound=Enum)
_V = TypeVar("_V")


def _table(kind: type[_E], prefix: str, value: Callable[[str], _V]) -> dict[_E, _V]:
    return {each: value(f"{prefix}_{each.name}") for each in kind}


DIALECTS = _table(Dialect, "DIALECT", spec_pb2.Dialect.Value)
DRIFT_POLICIES = _table(DriftPolicy, "DRIFT_POLICY", spec_pb2.DriftPolicy.Value)
STALE_ACTIONS = _table(StaleAction, "STALE_ACTION", spec_pb2.StaleAction.Value)
STATES = _table(RolloutState, "ROLLOUT_STATE", rollout_service_pb2.RolloutState.Value)
DELIVERY_STATES = _table(DeliveryState, "DELIVERY_STATE", rollout_service_pb2.DeliveryState.Value)
REWARD_RULES = _table(RewardRule, "REWARD_RULE", outcome_pb2.RewardRule.Value)
AUTHORS = _table(Author, "AUTHOR", token_pb2.Author.Value)
MASK_REASONS = {None: token_pb2.MASK_REASON_UNSPECIFIED} | _table(MaskReason, "MASK_REASON", token_pb2.MaskReason.Value)
SEGMENT_KINDS = _table(SegmentKind, "SEGMENT_KIND", token_pb2.SegmentKind.Value)
DRIFT_KINDS = _table(DriftKind, "DRIFT_KIND", event_pb2.DriftKind.Value)
CATEGORIES = _table(Category, "FAILURE_CATEGORY", outcome_pb2.FailureCategory.Value)
FAILURE_CLASSES = _table(FailureClass, "FAILURE_CLASS", outcome_pb2.FailureClass.Value)
FAILURE_CLASSES_BY_NUMBER = {number: each for each, number in FAILURE_CLASSES.items()}
