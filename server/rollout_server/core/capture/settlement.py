"""What the end of a capture decides: which conversation is the main one, and which completions do not train."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from rollout_server.core.capture.decision import Settlement
from rollout_server.core.capture.history_tree import CapturedConversation, CapturedTurn, Node
from rollout_server.core.capture.report import CaptureReport
from rollout_server.core.capture.rules import CaptureOptions

AUXILIARY = "auxiliary"
ABANDONED = "abandoned"


def settle(
    conversations: Sequence[CapturedConversation],
    turns: Collection[CapturedTurn],
    options: CaptureOptions,
    counts: Mapping[str, int],
    *,
    resumed: bool = False,
) -> Settlement:
    """Return the settlement of a capture. `counts` are the counts of calls so far, by their names in `CaptureReport`.

    Of the lineage of the first conversation of the task, the main conversation is the one that got the last completion.
    If some conversations offer tools, one without tools is not the main one. `resumed`: the rollout had a main conversation before
    a restart of the server; then only one of its lineage can be the main one.
    """
    beside = {each.id for each in conversations if each.auxiliary}
    if options.guess_auxiliary:
        beside |= _single_calls(conversations, beside)
    reasons = {turn: AUXILIARY for turn in turns if turn.conversation.id in beside}
    reasons |= {turn: ABANDONED for turn in _led_nowhere(turns) if turn not in reasons}
    masked = {turn: reason for turn, reason in reasons.items() if reason == AUXILIARY or options.abandoned == "mask"}
    values = list(reasons.values())
    return Settlement(
        _main([each for each in conversations if each.id not in beside and (not resumed or _is_main(each))], reasons),
        tuple(sorted((turn.number, reason) for turn, reason in masked.items())),
        CaptureReport(**counts, abandoned=values.count(ABANDONED), auxiliary=values.count(AUXILIARY)),
    )


def _single_calls(conversations: Sequence[CapturedConversation], beside: set[int]) -> set[int]:
    """Return the conversations of one call without tools, if another conversation of the task has tools."""
    if not any(each.tools and each.id not in beside for each in conversations):
        return set()
    return {
        each.id for each in conversations if not each.tools and each.turns == 1 and each.tip and not each.tip.continued
    }


def _led_nowhere(turns: Iterable[CapturedTurn]) -> set[CapturedTurn]:
    """Return completions that the agent never used: it continued another answer to the same messages, or nobody got them.

    The lineage has the client's id of the agent: sub-agents may be given the same messages, and each uses its own answer.
    """
    siblings = defaultdict[tuple[Node, tuple[bytes, bytes]], list[CapturedTurn]](list)
    for turn in turns:
        siblings[turn.pending.node, turn.pending.plan.lineage_keys].append(turn)
    return {
        turn
        for same in siblings.values()
        for turn in same
        if not turn.continued and (any(other.continued for other in same) or _was_lost(turn))
    }


def _was_lost(turn: CapturedTurn) -> bool:
    return not turn.pending.listeners and not turn.pending.repeats and not turn.delivered


def _is_main(conversation: CapturedConversation) -> bool:
    return conversation.lineage is not None and conversation.lineage.main


def _main(conversations: Sequence[CapturedConversation], reasons: dict[CapturedTurn, str]) -> int | None:
    with_turns = [each for each in conversations if each.tip is not None]
    candidates = [each for each in with_turns if each.tools] or with_turns
    if not candidates:
        return None
    same = [each for each in candidates if each.lineage is candidates[0].lineage]
    return max(same, key=lambda each: (each.tip not in reasons, each.tip.order if each.tip else -1)).id
