"""Scripted model, to run the agent without a GPU. It searches for the question, reads all results, and repeats them."""

import json
from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call


class Model:
    """Handles every question in the same way."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        results = [str(message["content"]) for message in messages if message["role"] == "tool"]
        if not results:
            return ScriptedReply(tool_calls=(tool_call("search", "search", {"query": messages[-1]["content"]}),))
        if len(results) == 1:
            titles = [page["title"] for page in json.loads(results[0])]
            return ScriptedReply(tool_calls=tuple(tool_call(title, "read", {"title": title}) for title in titles))
        return ScriptedReply(content=" ".join(results[1:]))
