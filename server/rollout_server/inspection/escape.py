"""Foreign text, made safe to print and honest to look at."""

from __future__ import annotations

import unicodedata

BREAK = "⏎"
"""Stands for a line feed."""

EMPTY = "⟨empty⟩"
"""Stands for a message without any text."""

# Controls, formats (also those that turn the direction of writing), surrogates, private and unassigned characters, and
# separators of lines and paragraphs. A terminal may do anything with them.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """The text with each character that shows nothing, or does something, replaced by one that shows what it is.

    C0 controls become their pictures (U+2400 and after), a line feed `BREAK`, others their number: ⟨U+202E⟩.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_visible_character, text))


def visible_lines(text: str) -> str:
    """The same of a text of several lines. What stands below the first is set apart: it cannot pass for a line of its own."""
    first, *more = text.split("\n")
    return "\n".join([visible(first), *(f"    {visible(line)}" for line in more)])


def _visible_character(character: str) -> str:
    if character == "\n":
        return BREAK
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    category = unicodedata.category(character)
    if category in _HIDDEN or (category == "Zs" and character != " "):
        return f"⟨U+{code:04X}⟩"
    return character
