"""Where a call's history parts from the closest one that the rollout has."""

from __future__ import annotations

from rollout_server.core.capture.call import ModelCall
from rollout_server.core.capture.history import ASSISTANT, TOOL, CanonicalMessage
from rollout_server.core.capture.history_tree import CallPlan, CapturedConversation, Node
from rollout_server.core.segment import Parting, first_difference

_LONGEST_EXCERPT = 200
_BEFORE = 60


def find_difference(call: ModelCall, plan: CallPlan, latest: CapturedConversation | None) -> Parting:
    """Return where a call parts from the conversations of its rollout.

    Args:
        call: the call.
        plan: where the tree would grow.
        latest: the conversation that got the last completion, for a call whose tools no other call had.
    """
    field, expected, found = _difference(plan, latest)
    expected, found = _excerpts(expected, found)
    return Parting(plan.node.depth, field, expected, found, call.api.value, call.client_agent)


def _difference(plan: CallPlan, latest: CapturedConversation | None) -> tuple[str, str, str]:
    node = plan.node
    known = node.newest_child.message if node.newest_child else None
    if node.parent is None and known is None and latest is not None:
        return "tools", ", ".join(latest.tools), ", ".join(plan.tools)
    sent = plan.messages[0] if plan.messages else None
    if _waits(plan, node):
        return "parallel", _shown(known), _shown(sent)
    if known is None or sent is None:
        return "history", _shown(known), _shown(sent)
    if known.role != sent.role:
        return "role", known.role, sent.role
    return _text_difference(known, sent)


def _waits(plan: CallPlan, node: Node) -> bool:
    """Return whether the conversation that the call would continue waits for a completion, or an equal call does."""
    parent = plan.parent
    if parent is not None and parent.conversation.tip is parent and parent.conversation.pending is not None:
        return True
    return not plan.messages and any(each.turn is None for same in node.attempts.values() for each in same)


def _text_difference(known: CanonicalMessage, sent: CanonicalMessage) -> tuple[str, str, str]:
    if sent.role == TOOL and known.text == sent.text:
        return "tool_calls", f"a result of call {known.result_of}", f"a result of call {sent.result_of}"
    if sent.role != ASSISTANT or known.spoken != sent.spoken:
        return "content", known.text, sent.text
    if known.calls != sent.calls:
        return "tool_calls", _calls_text(known), _calls_text(sent)
    if known.thought == sent.thought and known.text != sent.text:
        return "content", known.text, sent.text
    return "reasoning", known.thought, sent.thought


def _shown(message: CanonicalMessage | None) -> str:
    return "" if message is None else message.text or _calls_text(message)


def _calls_text(message: CanonicalMessage) -> str:
    return ", ".join(f"{call.name}({call.arguments})" for call in message.calls)


def _excerpts(expected: str, found: str) -> tuple[str, str]:
    """Return at most 200 characters of both texts, around the first difference."""
    start = max(0, first_difference(expected, found) - _BEFORE)
    if max(len(expected), len(found)) <= _LONGEST_EXCERPT:
        start = 0
    return _excerpt(expected, start), _excerpt(found, start)


def _excerpt(text: str, start: int) -> str:
    """Lone surrogates, which UTF-8 cannot encode, become question marks."""
    return text[start : start + _LONGEST_EXCERPT].encode("utf-8", "replace").decode("utf-8")
