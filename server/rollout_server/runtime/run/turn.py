"""One turn of a conversation: its request is recorded and sent, and its completion recorded. In a replay both come from the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollout_server.core.machine import LimitReached
from rollout_server.core.record import RESAMPLED, Answered, Asked, Record
from rollout_server.core.spec import DriftPolicy, Sampling, Target
from rollout_server.runtime.errors import RolloutFailed
from rollout_server.runtime.policy import SamplingGate
from rollout_server.runtime.ports import CompletionRequest
from rollout_server.runtime.replay_steps import ReplayStep
from rollout_server.runtime.run.arguments import SamplingOptions, turn_sampling
from rollout_server.runtime.run.messages import Reply, drift_failure
from rollout_server.runtime.run.opening import RunParts


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """How a turn is requested.

    Args:
        sampling: the agent's options for this turn.
        abandon: called with the turn if the agent stops waiting for the completion.
        note: appends a note (turn, code, text) to the log.
        fits_context: see `CompletionRequest`.
    """

    sampling: SamplingOptions
    abandon: Callable[[int], None]
    note: Callable[[int, str, str], None]
    fits_context: bool = False


async def take_turn(parts: RunParts, options: TurnOptions) -> Reply:
    """Request a completion of a conversation. Raise `RolloutFailed`, and what `Run.sample` raises."""
    context, conversation, model = parts.context, parts.conversation, parts.model
    rollout, spec = context.rollout, context.rollout.spec
    defaults, target = (spec.sampling, spec.completions) if model is None else (Sampling(), model.target)
    sampling = turn_sampling(defaults, options.sampling, target.dialect) if options.sampling else defaults
    gate = rollout.gate if model is None else SamplingGate()
    await _ready(parts, gate)
    asked = context.machine.request_completion(conversation, None if sampling == spec.sampling else sampling)
    if isinstance(asked, LimitReached):
        context.end(asked.stop)
    # Read these before `asked` is recorded, which updates `turn_messages` for the new turn.
    last = conversation.last_completion, conversation.turn_messages
    step = context.claim(asked)
    if step is not None and isinstance(step.record, Asked):
        asked = step.record
    else:
        context.record(asked)
    warnings: Sequence[tuple[str, str]] = ()
    try:
        with context.waiting():
            logged = () if step is None else await _replayed(parts, asked, step)
            if not logged:
                if step is None:
                    await rollout.stored()
                else:  # an earlier process has stored the request, and may have sent it
                    warnings = _warn_of_repetition(parts, asked, target, options)
                request = CompletionRequest(
                    asked,
                    conversation.messages,
                    *last,
                    conversation.line,
                    deadline=rollout.deadline,
                    credentials=rollout.credentials,
                    note=lambda code, text: options.note(asked.turn, code, text),
                    sampling=sampling,
                    fits_context=options.fits_context,
                    gate=gate,
                    created=rollout.created,
                )
                logged = await _sampled(parts, request, target, warnings)
    except asyncio.CancelledError:
        options.abandon(asked.turn)
        raise
    return _reply(logged, target, drift_fails=spec.on_drift is DriftPolicy.FAIL)


async def _ready(parts: RunParts, gate: SamplingGate) -> None:
    """Wait until the next turn of a conversation may be requested. Raise what `Run.sample` raises."""
    context, conversation, model = parts.context, parts.conversation, parts.model

    def ends() -> bool:
        if model is not None:
            model.check_limits()
        return isinstance(context.machine.request_completion(conversation), LimitReached)

    replayed = await context.ready(conversation, ends=ends)
    if not (replayed or gate.is_open):
        with context.waiting():
            await gate.wait()
        await context.check(conversation)
    if model is not None:
        model.check_limits()


async def _sampled(
    parts: RunParts, request: CompletionRequest, target: Target, warnings: Sequence[tuple[str, str]]
) -> Sequence[Record]:
    """Request a completion and record it, with further warnings. Return all records that were logged."""
    context = parts.context
    with context.tracer.completion(context.rollout, request, target) as report:
        answered = await parts.sampler.sample(request)
        logged = context.record(replace(answered, notes=(*warnings, *answered.notes)) if warnings else answered)
        report(logged)
    return logged


def _reply(logged: Sequence[Record], target: Target, *, drift_fails: bool) -> Reply:
    drift = drift_failure(logged, target.failure_class) if drift_fails else None
    if drift is not None:
        raise RolloutFailed(drift)
    answered = logged[-1]
    if not isinstance(answered, Answered):
        raise TypeError(f"{answered!r} is no completion")
    return Reply.of(answered, target.failure_class)


async def _replayed(parts: RunParts, asked: Asked, step: ReplayStep) -> Sequence[Record]:
    """Return the recorded completion of a turn and what followed from it; nothing if the log ends before it."""
    replay = parts.context.rollout.replay
    result = step.result if replay is None else await replay.result_of(step)
    if result is None or not isinstance(result.record, Answered):
        return ()
    parts.sampler.resume(asked, result.record)
    return (*result.follows, result.record)


def _warn_of_repetition(
    parts: RunParts, asked: Asked, target: Target, options: TurnOptions
) -> Sequence[tuple[str, str]]:
    """Note that a turn is requested again after a restart. Return the warnings for its completion (D8)."""
    earlier = parts.conversation.resampled
    warnings = [] if earlier is None else [(earlier.code, earlier.text)]
    if not target.replays_turn_keys:
        text = (
            f"turn {asked.turn}: the server was restarted while the turn was generated; it is requested again, so it may be "
            "generated twice"
        )
        options.note(asked.turn, RESAMPLED, text)
        warnings.append((RESAMPLED, text))
    return warnings
