"""Scripted models, to run the agent without a GPU: the one that summarizes, and the judge."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply

SUMMARIES = {
    "council": "The council will rebuild the bridge from May on.",
    "Bees": "Bees brought so many apple blossoms to fruit that the owner gave most away.",
}


class Model:
    """Has a summary of each text in questions.jsonl."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the summary whose word is in the text."""
        text = str(messages[-1]["content"])
        return ScriptedReply(content=next((each for word, each in SUMMARIES.items() if word in text), "I cannot."))


class Critic:
    """Counts the words of the reference that the summary has."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return a rating."""
        lines = dict(line.split(": ", 1) for line in str(messages[0]["content"]).splitlines() if ": " in line)
        words = lines["Reference"].lower().split()
        found = sum(word in lines["Summary"].lower() for word in words)
        return ScriptedReply(content=f"It has {found} of {len(words)} points.\nScore: {10 * found // len(words)}")


MODELS = {"judge": Critic()}
