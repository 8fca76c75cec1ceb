"""Tables between core enums and proto enums."""

from __future__ import annotations

from osmosis.rollout.v1 import event_pb2, outcome_pb2, rollout_service_pb2, spec_pb2, token_pb2

from rollout_server.core.ledger import Author, DriftKind, MaskReason, SegmentKind
from rollout_server.core.outcome import Category, FailureClass, RewardRule
from rollout_server.core.spec import Dialect, DriftPolicy, StaleAction
from rollout_server.runtime.outcome_delivery import DeliveryState
from rollout_server.runtime.rollout import RolloutState

DIALECTS = {
    Dialect.GRPC: spec_pb2.DIALECT_GRPC,
    Dialect.HTTP_MASKED: spec_pb2.DIALECT_HTTP_MASKED,
    Dialect.HTTP_PLAIN: spec_pb2.DIALECT_HTTP_PLAIN,
    Dialect.OPENAI: spec_pb2.DIALECT_OPENAI,
    Dialect.VLLM: spec_pb2.DIALECT_VLLM,
    Dialect.SGLANG: spec_pb2.DIALECT_SGLANG,
    Dialect.STREAM: spec_pb2.DIALECT_STREAM,
    Dialect.MCP: spec_pb2.DIALECT_MCP,
}
DRIFT_POLICIES = {
    DriftPolicy.WARN: spec_pb2.DRIFT_POLICY_WARN,
    DriftPolicy.FAIL: spec_pb2.DRIFT_POLICY_FAIL,
}
STALE_ACTIONS = {
    StaleAction.CANCEL: spec_pb2.STALE_ACTION_CANCEL,
    StaleAction.MASK: spec_pb2.STALE_ACTION_MASK,
    StaleAction.SPLIT: spec_pb2.STALE_ACTION_SPLIT,
    StaleAction.KEEP: spec_pb2.STALE_ACTION_KEEP,
}
STATES = {
    RolloutState.QUEUED: rollout_service_pb2.ROLLOUT_STATE_QUEUED,
    RolloutState.RUNNING: rollout_service_pb2.ROLLOUT_STATE_RUNNING,
    RolloutState.FINISHED: rollout_service_pb2.ROLLOUT_STATE_FINISHED,
}
DELIVERY_STATES = {
    DeliveryState.PENDING: rollout_service_pb2.DELIVERY_STATE_PENDING,
    DeliveryState.ACKNOWLEDGED: rollout_service_pb2.DELIVERY_STATE_ACKNOWLEDGED,
    DeliveryState.REFUSED: rollout_service_pb2.DELIVERY_STATE_REFUSED,
    DeliveryState.EXPIRED: rollout_service_pb2.DELIVERY_STATE_EXPIRED,
}
REWARD_RULES = {
    RewardRule.COPY: outcome_pb2.REWARD_RULE_COPY,
    RewardRule.SPLIT: outcome_pb2.REWARD_RULE_SPLIT,
    RewardRule.OWN: outcome_pb2.REWARD_RULE_OWN,
}
AUTHORS = {Author.MODEL: token_pb2.AUTHOR_MODEL, Author.OTHER: token_pb2.AUTHOR_OTHER}
MASK_REASONS = {
    None: token_pb2.MASK_REASON_UNSPECIFIED,
    MaskReason.PROMPT: token_pb2.MASK_REASON_PROMPT,
    MaskReason.ENVIRONMENT: token_pb2.MASK_REASON_ENVIRONMENT,
    MaskReason.CLOSING: token_pb2.MASK_REASON_CLOSING,
    MaskReason.AUTHOR: token_pb2.MASK_REASON_AUTHOR,
    MaskReason.STALE: token_pb2.MASK_REASON_STALE,
}
SEGMENT_KINDS = {
    SegmentKind.MAIN: token_pb2.SEGMENT_KIND_MAIN,
    SegmentKind.DRIFT: token_pb2.SEGMENT_KIND_DRIFT,
    SegmentKind.COMPACTION: token_pb2.SEGMENT_KIND_COMPACTION,
    SegmentKind.SUBAGENT: token_pb2.SEGMENT_KIND_SUBAGENT,
    SegmentKind.BRANCH: token_pb2.SEGMENT_KIND_BRANCH,
    SegmentKind.GAP: token_pb2.SEGMENT_KIND_GAP,
}
DRIFT_KINDS = {
    DriftKind.HISTORY_REWRITTEN: event_pb2.DRIFT_KIND_HISTORY_REWRITTEN,
    DriftKind.RETOKENISED: event_pb2.DRIFT_KIND_RETOKENISED,
    DriftKind.ENVIRONMENT: event_pb2.DRIFT_KIND_ENVIRONMENT,
    DriftKind.TRUNCATED: event_pb2.DRIFT_KIND_TRUNCATED,
    DriftKind.PROMPT: event_pb2.DRIFT_KIND_PROMPT,
}
CATEGORIES = {category: outcome_pb2.FailureCategory.Value(f"FAILURE_CATEGORY_{category.name}") for category in Category}
FAILURE_CLASSES = {each: outcome_pb2.FailureClass.Value(f"FAILURE_CLASS_{each.name}") for each in FailureClass}
FAILURE_CLASSES_BY_NUMBER = {number: each for each, number in FAILURE_CLASSES.items()}
