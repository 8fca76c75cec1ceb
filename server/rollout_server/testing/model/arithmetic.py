"""Parser for arithmetic in English sentences: ``5 plus 3, and then multiply the result by 2`` is two operations.

The text is split into clauses at "then" and at sentence ends, and a clause into phrases before its verbs. A phrase is a
verb with its operands ("add 5 and 3", "subtract 2 from 10", "multiply it by 4") or a chain of infix operators ("5 plus 3
minus 1"). Operations are read from left to right. "The result" and a missing operand mean the result of the previous operation.
"""

import math
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

Number: TypeAlias = int | float


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of `add`, `subtract`, `multiply` or `divide`. An operand None means the result of the previous operation."""

    name: str
    a: Number | None
    b: Number | None


@dataclass(frozen=True, slots=True)
class _Lexeme:
    kind: str
    name: str = ""
    number: Number | None = None


_INFIX: Final = {
    "plus": "add",
    "+": "add",
    "minus": "subtract",
    "-": "subtract",
    "times": "multiply",
    "multiplied": "multiply",
    "*": "multiply",
    "×": "multiply",
    "x": "multiply",
    "divided": "divide",
    "over": "divide",
    "/": "divide",
    "÷": "divide",
}
_VERBS: Final = {
    "add": "add",
    "sum": "add",
    "subtract": "subtract",
    "difference": "subtract",
    "multiply": "multiply",
    "product": "multiply",
    "divide": "divide",
    "quotient": "divide",
}
_COMMUTE: Final = frozenset({"add", "multiply"})
_PREVIOUS: Final = frozenset({"result", "it", "that"})
_CLAUSE: Final = re.compile(r"\bthen\b|[.;?!](?:\s|$)|\n", re.IGNORECASE)
_TOKEN_PATTERN: Final = re.compile(r"(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)|(?P<word>[a-z]+|[-+*/×÷])", re.IGNORECASE)
_JOINED: Final = re.compile(r"(?<=\d),(?=\d{3}\b)")


def operations(text: str) -> tuple[Operation, ...]:
    """Return the operations of `text` in order; empty if there is nothing to calculate."""
    found: list[Operation] = []
    for clause in _CLAUSE.split(_JOINED.sub("", text)):
        for phrase in _phrases(_lexemes(clause)):
            read = _with_verb(phrase) if phrase[0].kind == "verb" else _infix(phrase)
            startable = bool(read) and read[0].a is not None and read[0].b is not None
            if found or startable:
                found.extend(read)
    return tuple(found)


def number(text: str) -> Number | None:
    """Return `text` as an int if it is written as one, else as a float; None if it is not a finite number."""
    for kind in (int, float):
        try:
            read = kind(text)
        except ValueError:
            continue
        return read if math.isfinite(read) else None
    return None


def _lexemes(clause: str) -> list[_Lexeme]:
    lexemes: list[_Lexeme] = []
    sign, follows_operand = "", False
    for match in _TOKEN_PATTERN.finditer(clause):
        text, rest = match[0].lower(), clause[match.end() :]
        sign_of_next = "-" if text == "-" and not follows_operand and rest[:1].isdigit() else ""
        lexeme = None if sign_of_next else _lexeme(text, sign, rest)
        sign, follows_operand = sign_of_next, lexeme is not None and lexeme.kind == "operand"
        if lexeme:
            lexemes.append(lexeme)
    return lexemes


def _lexeme(text: str, sign: str, rest: str) -> _Lexeme | None:
    if text[0].isdigit():
        return _Lexeme("operand", number=number(sign + text))
    if text in _PREVIOUS and not rest.lstrip().lower().startswith("of "):
        return _Lexeme("operand")
    if text in _VERBS:
        return _Lexeme("verb", _VERBS[text])
    if text in _INFIX:
        return _Lexeme("infix", _INFIX[text])
    return _Lexeme("from") if text == "from" else None


def _phrases(lexemes: list[_Lexeme]) -> list[list[_Lexeme]]:
    """Split the lexemes before each verb. No phrase is empty."""
    phrases: list[list[_Lexeme]] = []
    for lexeme in lexemes:
        if lexeme.kind == "verb" or not phrases:
            phrases.append([])
        phrases[-1].append(lexeme)
    return phrases


def _with_verb(phrase: list[_Lexeme]) -> list[Operation]:
    verb = phrase[0].name
    end = next((index for index, lexeme in enumerate(phrase) if lexeme.kind == "infix"), len(phrase))
    operands = [lexeme.number for lexeme in phrase[:end] if lexeme.kind == "operand"]
    if len(operands) == 1:
        operands.insert(0, None)
    elif any(lexeme.kind == "from" for lexeme in phrase) or (verb in _COMMUTE and operands[1:] == [None]):
        operands.reverse()
    if len(operands) < 2 or (len(operands) > 2 and verb not in _COMMUTE):
        return []
    chain = [Operation(verb, operands[0], operands[1])]
    chain.extend(Operation(verb, None, operand) for operand in operands[2:])
    return chain + _infix(phrase[end:])


def _infix(phrase: list[_Lexeme]) -> list[Operation]:
    chain: list[Operation] = []
    last = -1
    for index, lexeme in enumerate(phrase):
        if lexeme.kind != "infix" or index + 1 == len(phrase) or phrase[index + 1].kind != "operand":
            continue
        if chain and last != index - 1:
            break  # a second expression, not a continuation of the first
        left = phrase[index - 1].number if index and not chain and phrase[index - 1].kind == "operand" else None
        last = index + 1
        chain.append(Operation(lexeme.name, left, phrase[last].number))
    return chain
