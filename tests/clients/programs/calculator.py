"""The conversation of all programs: one system prompt, two tools, one question, and a word of thanks."""

import sys

SYSTEM = "You are a careful calculator."
QUESTION = "What is 6 times 7, and 5 plus 3?"
THANKS = "  Thank you.\n"
MODEL = "rollout"
STREAM = "--stream" in sys.argv


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


TOOLS = {"multiply": multiply, "add": add}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
