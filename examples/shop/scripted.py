"""Scripted model, to run the agent without a GPU. It has what to put into the cart for each question in questions.jsonl."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

CARTS = {
    "Two bags of tea and one milk, please.": (("tea", 2), ("milk", 1)),
    "All the bread that you have.": (("bread", 2), ("bread", 1)),
    "Honey for 1200 cents, and milk for the rest of the money.": (("honey", 2),),
    "Four honey. If there are fewer, no honey but one tea.": (("honey", 3), ("honey", 1), ("honey", -3), ("tea", 1)),
}


class Model:
    """Looks at the stock, fills the cart with one call per turn, orders, and repeats the price as the final message."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        question = next(str(message["content"]) for message in messages if message["role"] == "user")
        results = [message["content"] for message in messages if message["role"] == "tool"]
        puts = [("put", {"item": item, "count": count}) for item, count in CARTS.get(question, ())]
        calls = [("look", {}), *puts, ("order", {})]
        if len(results) < len(calls):
            name, arguments = calls[len(results)]
            return ScriptedReply(tool_calls=(tool_call(f"call_{len(results)}", name, arguments),))
        return ScriptedReply(content=str(results[-1]))
