"""A transcript in words: what stands above its tokens, and the whole of it as JSON."""

from __future__ import annotations

from typing import Any

from osmosis.rollout.v1 import outcome_pb2, rollout_service_pb2
from rollout_client.samples import category_of

from rollout_server.inspection.token_text import Decode, TokenText, pieces, text_of
from rollout_server.inspection.transcript import Stretch, TokenRun, Transcript, TranscriptDrift


def pieces_of(stretch: Stretch, decode: Decode | None) -> list[TokenText]:
    """The pieces of a segment; none reaches over the end of a run or a drift."""
    cuts = [run.start for run in stretch.runs] + [run.stop for run in stretch.runs]
    return pieces(stretch.ids, decode, [*cuts, *(drift.index for drift in stretch.drifts)])


def ending(outcome: outcome_pb2.Outcome) -> str:
    """How a rollout ended, on one line once it is made visible."""
    match outcome.WhichOneof("end"):
        case "stop":
            return (
                f"stopped: {outcome.stop.reason}{', the last answer cut by length' if outcome.stop.truncated else ''}"
            )
        case "failure":
            failure = outcome.failure
            status = f", HTTP {failure.http_status}" if failure.HasField("http_status") else ""
            return f"failed in turn {failure.turn} ({category_of(failure)}{status}): {failure.message}"
        case "cancellation":
            return f"cancelled: {outcome.cancellation.reason}"
        case _:
            return "ended in a way that is not known here"


def as_json(transcript: Transcript, decode: Decode | None) -> dict[str, Any]:
    """The transcript as an object that JSON knows: texts as they are, null where they cannot be told."""
    rollout, outcome = transcript.rollout, transcript.outcome
    return {
        "uid": rollout.uid,
        "rollout_id": rollout.spec.rollout_id,
        "group_id": rollout.spec.group_id,
        "tokenizer": rollout.spec.tokenizer.name,
        "end": outcome.WhichOneof("end"),
        "ending": ending(outcome),
        "reward": outcome.reward if outcome.HasField("reward") else None,
        "warnings": [_warning(warning) for warning in outcome.warnings],
        "segments": [_segment(stretch, decode) for stretch in transcript.stretches],
    }


def _warning(warning: outcome_pb2.Warning) -> dict[str, Any]:
    index = warning.index if warning.HasField("index") else None
    return {"code": warning.code, "message": warning.message, "turn": warning.turn, "index": index}


def _segment(stretch: Stretch, decode: Decode | None) -> dict[str, Any]:
    made = pieces_of(stretch, decode)
    return {
        "id": stretch.id,
        "kind": stretch.kind,
        "parent_id": stretch.parent_id,
        "parent_tokens": stretch.parent_tokens,
        "verified": stretch.verified,
        "runs": [_run(run, made) for run in stretch.runs],
        "drifts": [_drift(drift, decode) for drift in stretch.drifts],
    }


def _run(run: TokenRun, made: list[TokenText]) -> dict[str, Any]:
    texts = [piece.text for piece in made if run.start <= piece.start < run.stop]
    return {
        "letter": run.letter,
        "author": run.author,
        "mask_reason": run.reason,
        "turn": run.turn,
        "start": run.start,
        "stop": run.stop,
        "policy_version": run.policy_version,
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
        "was_text": None if drift.was is None else text_of(drift.was, decode),
        "here_ids": list(drift.here),
        "here_text": text_of(drift.here, decode),
    }


def headline(rollout: rollout_service_pb2.Rollout) -> str:
    """Which rollout it is, and what it brought."""
    spec, outcome = rollout.spec, rollout.outcome
    names = [f"rollout {rollout.uid}" if rollout.uid else "a rollout without its name"]
    names += [f"{word} {value}" for word, value in (("id", spec.rollout_id), ("group", spec.group_id)) if value]
    names += [f"tokenizer {spec.tokenizer.name}"] if spec.tokenizer.name else []
    names += [f"reward {outcome.reward:g}"] if outcome.HasField("reward") else []
    return ", ".join(names)
