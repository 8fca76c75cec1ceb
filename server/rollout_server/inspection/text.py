"""A transcript as JSON, and the headings that both views share."""

from __future__ import annotations

from typing import Any

from osmosis.rollout.v1 import outcome_pb2, rollout_service_pb2
from rollout_client.samples import category_of

from rollout_server.edge.tokens.token_text import Decode, TokenText, decoded_text, split_token_texts
from rollout_server.inspection.transcript import TokenRun, Transcript, TranscriptDrift, TranscriptSegment

_UNFINISHED = {
    rollout_service_pb2.ROLLOUT_STATE_QUEUED: "waits in the queue",
    rollout_service_pb2.ROLLOUT_STATE_RUNNING: "still runs",
}


def segment_token_texts(segment: TranscriptSegment, decode: Decode | None) -> list[TokenText]:
    """Return the token texts of a segment. None crosses the boundary of a run or a drift index."""
    cuts = [run.start for run in segment.runs] + [run.stop for run in segment.runs]
    return split_token_texts(segment.ids, decode, [*cuts, *(drift.index for drift in segment.drifts)])


def ending(rollout: rollout_service_pb2.Rollout) -> str:
    """Return how a rollout ended, or that it has not. The text is not escaped."""
    outcome = rollout.outcome
    if rollout.state in _UNFINISHED:
        used = f"turns so far: {rollout.metrics.turns}, generated tokens: {rollout.metrics.generated_tokens}"
        return f"{_UNFINISHED[rollout.state]} ({used}); `rollout watch {rollout.uid}` follows it"
    match outcome.WhichOneof("end"):
        case "stop":
            return (
                f"stopped: {outcome.stop.reason}{', last completion cut by length' if outcome.stop.truncated else ''}"
            )
        case "failure":
            failure = outcome.failure
            status = f", HTTP {failure.http_status}" if failure.HasField("http_status") else ""
            return f"failed in turn {failure.turn} ({category_of(failure)}{status}): {failure.message}"
        case "cancellation":
            return f"cancelled: {outcome.cancellation.reason}"
        case _:
            return "ended in a way that this version does not know"


def calls_line(report: outcome_pb2.CaptureReport) -> str:
    """Return what the calls of an agent that owns its loop were, on one line."""
    counts = {name: count for name, count in _counts(report).items() if count and name != "longest_share"}
    named = ", ".join(f"{count} {name}" for name, count in counts.items()) or "none after the first"
    share = f"; {report.longest_share:.0%} of the trained tokens are in the longest segment"
    return f"calls of the agent: {named}{share if report.longest_share else ''}"


def _counts(report: outcome_pb2.CaptureReport) -> dict[str, Any]:
    return {field.name: getattr(report, field.name) for field in report.DESCRIPTOR.fields}


def as_json(transcript: Transcript, decode: Decode | None) -> dict[str, Any]:
    """Return the transcript as a JSON object. Texts are not escaped; they are null if tokens cannot be decoded."""
    rollout, outcome = transcript.rollout, transcript.outcome
    return {
        "uid": rollout.uid,
        "rollout_id": rollout.spec.rollout_id,
        "group_id": rollout.spec.group_id,
        "tokenizer": rollout.spec.tokenizer.name,
        "end": outcome.WhichOneof("end"),
        "ending": ending(rollout),
        "reward": outcome.reward if outcome.HasField("reward") else None,
        "warnings": [_warning(warning) for warning in outcome.warnings],
        "capture": _counts(outcome.capture) if outcome.HasField("capture") else None,
        "segments": [_segment(segment, decode) for segment in transcript.segments],
    }


def _warning(warning: outcome_pb2.Warning) -> dict[str, Any]:
    index = warning.index if warning.HasField("index") else None
    return {"code": warning.code, "message": warning.message, "turn": warning.turn, "index": index}


def _segment(segment: TranscriptSegment, decode: Decode | None) -> dict[str, Any]:
    tokens = segment_token_texts(segment, decode)
    return {
        "id": segment.id,
        "kind": segment.kind,
        "parent_id": segment.parent_id,
        "parent_tokens": segment.parent_tokens,
        "parting": segment.parting,
        "verified": segment.verified,
        "runs": [_run(run, tokens) for run in segment.runs],
        "drifts": [_drift(drift, decode) for drift in segment.drifts],
    }


def _run(run: TokenRun, tokens: list[TokenText]) -> dict[str, Any]:
    texts = [token.text for token in tokens if run.start <= token.start < run.stop]
    return {
        "letter": run.letter,
        "author": run.author,
        "mask_reason": run.reason,
        "turn": run.turn,
        "start": run.start,
        "stop": run.stop,
        "policy_version": run.policy_version,
        "policy_step": run.policy_step,
        "text": None if None in texts else "".join(text or "" for text in texts),
        "token_ids": list(run.ids),
        "planes": [{"name": name, "dtype": dtype} for name, dtype in run.planes],
        "logprobs": None if run.logprobs is None else list(run.logprobs),
    }


def _drift(drift: TranscriptDrift, decode: Decode | None) -> dict[str, Any]:
    return {
        "index": drift.index,
        "turn": drift.turn,
        "message": drift.message,
        "was_ids": None if drift.was is None else list(drift.was),
        "was_text": None if drift.was is None else decoded_text(drift.was, decode),
        "here_ids": list(drift.here),
        "here_text": decoded_text(drift.here, decode),
    }


def headline(rollout: rollout_service_pb2.Rollout) -> str:
    """Return the rollout's ids, tokenizer and reward on one line. The text is not escaped."""
    spec, outcome = rollout.spec, rollout.outcome
    names = [f"rollout {rollout.uid}" if rollout.uid else "rollout without a uid"]
    names += [f"{word} {value}" for word, value in (("id", spec.rollout_id), ("group", spec.group_id)) if value]
    names += [f"tokenizer {spec.tokenizer.name}"] if spec.tokenizer.name else []
    names += [f"reward {outcome.reward:g}"] if outcome.HasField("reward") else []
    return ", ".join(names)
