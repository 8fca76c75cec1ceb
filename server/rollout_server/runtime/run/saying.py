"""What an agent may say: reasons and remarks, which others are sent as texts, and so much of everything."""

from __future__ import annotations

from rollout_server.core.conversation import Conversation
from rollout_server.core.machine import Machine
from rollout_server.runtime.run.context import AgentMistake

LONGEST_REASON = 1000
LONGEST_REMARK = 65_536
"""Characters."""
MOST_MESSAGES = 100_000
"""Of one conversation, where its agent adds to it."""
MOST_CONVERSATIONS = 10_000
MOST_BYTES = 256 * 1024 * 1024
"""Of a rollout, as `Machine.size` counts them."""


def reason(value: object, of: str) -> str:
    """A text that says something. Raises `AgentMistake`, which begins with `of`, the name of the method."""
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_REASON:
        raise AgentMistake(
            f"{of}: a reason is a text of 1 to {LONGEST_REASON} characters, not blank; this is {value!r:.100}"
        )
    return value


def remark(code: object, text: object) -> tuple[str, str]:
    """The code of a remark and its text, which are cut where they are too long for one. Raises `AgentMistake`."""
    if not isinstance(code, str) or not isinstance(text, str):
        raise AgentMistake(f"note: code and text are texts, not {code!r:.100} and {text!r:.100}")
    return code[:LONGEST_REASON], text[:LONGEST_REMARK]


def check_room(machine: Machine, conversation: Conversation, of: str) -> None:
    """Raises `AgentMistake` where the rollout holds as much as any may: a loop that never samples would fill the memory."""
    messages, opened = len(conversation.messages), len(machine.ledger.segments)
    if messages < MOST_MESSAGES and opened < MOST_CONVERSATIONS and machine.size < MOST_BYTES:
        return
    held = f"{messages:,} messages in {opened:,} conversations, {machine.size // 2**20:,} MiB"
    most = f"{MOST_MESSAGES:,} in {MOST_CONVERSATIONS:,}, {MOST_BYTES // 2**20:,} MiB"
    raise AgentMistake(
        f"{of}: turn {conversation.turn} holds {held}; at most {most} may be. Is this a loop that never samples?"
    )
