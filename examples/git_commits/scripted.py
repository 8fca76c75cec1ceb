"""Scripted model, to run the agent without a GPU. It has the commits for each question in questions.jsonl."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

COMMITS = {
    "Commit notes.txt with the message 'Add notes'.": ((("notes.txt",), "Add notes"),),
    "Commit a.py as 'Add a', and after it b.py as 'Add b'.": ((("a.py",), "Add a"), (("b.py",), "Add b")),
    "Commit both files in one commit, 'Begin'.": ((("LICENSE", "README"), "Begin"),),
}


class Model:
    """Looks at the status, then adds and commits with one call per turn."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        question, told = [str(message["content"]) for message in messages if message["role"] == "user"]
        path = {"repo_path": told.removeprefix("The repository is ").removesuffix(".")}
        calls = [("git_status", path)]
        for files, message in COMMITS.get(question, ()):
            calls += [("git_add", path | {"files": [*files]}), ("git_commit", path | {"message": message})]
        done = sum(message["role"] == "tool" for message in messages)
        if done < len(calls):
            return ScriptedReply(tool_calls=(tool_call(f"call_{done}", *calls[done]),))
        return ScriptedReply(content="Done.")
