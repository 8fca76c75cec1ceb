"""Scripted model, to run the agent without a GPU. It halves the range of the numbers that are left."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply


class Model:
    """Finds every number from 1 to 100 with at most seven guesses."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        low, high = 1, 100
        for message in messages:
            middle = (low + high) // 2
            if message["content"] == "Higher.":
                low = middle + 1
            elif message["content"] == "Lower.":
                high = middle - 1
        return ScriptedReply(content=f"Is it {(low + high) // 2}?")
