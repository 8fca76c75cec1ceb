"""Scripted model, to run the agent without a GPU. It has a module, and a program that tries it, for each question."""

from collections.abc import Mapping, Sequence

from rollout_server.testing.script import ScriptedReply, tool_call

FIBONACCI = """def fibonacci(n):
    numbers = [0, 1]
    while len(numbers) < n:
        numbers.append(numbers[-1] + numbers[-2])
    return numbers[:n]
"""
BALANCED = """def balanced(text):
    pairs, opened = {")": "(", "]": "[", "}": "{"}, []
    for character in text:
        if character in pairs.values():
            opened.append(character)
        elif character in pairs and (not opened or opened.pop() != pairs[character]):
            return False
    return not opened
"""
ROMAN = """def roman(n):
    text = ""
    for value, letters in zip(
        (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1),
        ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"),
    ):
        text, n = text + letters * (n // value), n % value
    return text
"""
MODULES = {
    "fibonacci": (FIBONACCI, "print(fibonacci(5))"),
    "balanced": (BALANCED, "print(balanced('(]'))"),
    "roman": (ROMAN, "print(roman(49))"),
}


class Model:
    """Writes the module, tries it, and repeats what its program printed as the final message."""

    def reply(self, messages: Sequence[Mapping[str, object]]) -> ScriptedReply:
        """Return the model's next message."""
        question = next(str(message["content"]) for message in messages if message["role"] == "user")
        results = [message["content"] for message in messages if message["role"] == "tool"]
        name = next((name for name in MODULES if f"Write {name}(" in question), "fibonacci")
        module, program = MODULES[name]
        calls = [
            tool_call("write", "write_solution", {"code": module}),
            tool_call("try", "run_python", {"code": f"from solution import {name}\n{program}"}),
        ]
        if len(results) < len(calls):
            return ScriptedReply(tool_calls=(calls[len(results)],))
        return ScriptedReply(content=f"It printed {str(results[-1]).strip()}.")
