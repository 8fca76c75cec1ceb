"""Scripted model, to run the agent without a GPU. It has a program for each question in questions.jsonl."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

PROGRAMS = {
    "What is the 1000th prime number?": (
        "primes = [n for n in range(2, 8000) if all(n % d for d in range(2, int(n**0.5) + 1))]\nprint(primes[999])"
    ),
    "How many of the numbers from 1 to 9999 are palindromes?": (
        "print(sum(str(n) == str(n)[::-1] for n in range(1, 10000)))"
    ),
    "What are the last four digits of 7 ** 7777?": "print(f'{pow(7, 7777, 10000):04}')",
}


class Model:
    """Runs the program, and repeats its output as the final message."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        last = messages[-1]
        if last["role"] == "tool":
            return ScriptedReply(content=f"#### {str(last['content']).strip()}")
        code = PROGRAMS.get(str(last["content"]), "print('I do not know.')")
        return ScriptedReply(tool_calls=(tool_call("call_1", "run_python", {"code": code}),))
