"""Scripted model, to run the agent without a GPU. It has the calculations for each question in questions.jsonl."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

CALCULATIONS = {
    "What is (5 + 3) * 2?": (("+", 5, 3), ("*", 8, 2)),
    "What is 144 / 12 - 7?": (("/", 144, 12), ("-", 12, 7)),
    "A box holds 12 eggs. How many eggs are in 17 boxes?": (("*", 12, 17),),
}


class Model:
    """Makes one tool call after the other, and repeats the last result as the final message."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        question = next(str(message["content"]) for message in messages if message["role"] == "user")
        results = [message["content"] for message in messages if message["role"] == "tool"]
        calls = CALCULATIONS.get(question, ())
        if len(results) < len(calls):
            operation, left, right = calls[len(results)]
            arguments = {"operation": operation, "left": left, "right": right}
            return ScriptedReply(tool_calls=(tool_call(f"call_{len(results)}", "calculate", arguments),))
        return ScriptedReply(content=f"#### {results[-1]}" if results else "I do not know.")
