"""Scripted models, to run the agent without a GPU: the assistant, and the guest."""

import re
from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

Messages = Sequence[Mapping[str, object]]
QUESTIONS = ("For which day?", "For how many guests?")


class Model:
    """Asks its questions in order, then books."""

    def reply(self, messages: Messages) -> ScriptedReply:
        """Return the assistant's next message."""
        asked = sum(message["role"] == "assistant" for message in messages)
        if asked < len(QUESTIONS):
            return ScriptedReply(content=QUESTIONS[asked])
        if messages[-1]["role"] == "tool":
            return ScriptedReply(content=str(messages[-1]["content"]))
        _, day, guests = (str(message["content"]) for message in messages if message["role"] == "user")
        return ScriptedReply(tool_calls=(tool_call("call_1", "book", {"day": day, "guests": int(guests)}),))


class Guest:
    """Answers with the facts of its wish."""

    def reply(self, messages: Messages) -> ScriptedReply:
        """Return the guest's next message."""
        wish = re.search(r"a table for (\d) on (\w+)", str(messages[0]["content"]))
        guests, day = wish.groups() if wish else ("1", "Monday")
        answers = {QUESTIONS[0]: day, QUESTIONS[1]: guests}
        return ScriptedReply(content=answers.get(str(messages[-1]["content"]), "Thank you. GOODBYE"))


MODELS = {"user": Guest()}
