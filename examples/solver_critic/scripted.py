"""Scripted model, to run the agent without a GPU. Its first answer to each question is wrong, and its critic notices."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply

ANSWERS = {
    "How many days have a leap year's first two months?": ("59", "60"),
    "What is 17 * 24?": ("398", "408"),
    "How many edges does a cube have?": ("8", "12"),
}


class Model:
    """Plays both roles: a review begins with the question whether an answer is right."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        texts = [str(message["content"]) for message in messages if message["role"] == "user"]
        wrong, right = next((pair for question, pair in ANSWERS.items() if question in texts[0]), ("0", "0"))
        if texts[0].startswith("Is this answer right?"):
            return ScriptedReply(content="I agree: RIGHT" if texts[0].endswith(f"#### {right}") else "I do not: WRONG")
        return ScriptedReply(content=f"#### {wrong if len(texts) == 1 else right}")
