"""Escaping of untrusted text, so that it is safe to print and hides nothing."""

from __future__ import annotations

import unicodedata

BREAK = "⏎"
"""Shown for a line feed."""

EMPTY = "⟨empty⟩"
"""Shown for a message without text."""

# Unicode categories whose effect on a terminal is unpredictable: controls, formats (including bidirectional overrides), surrogates,
# private and unassigned characters, line and paragraph separators.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def visible(text: str) -> str:
    """Return the text with each invisible or control character replaced by a printable one.

    C0 controls become their control pictures (U+2400 and following), a line feed becomes `BREAK`, others become ⟨U+202E⟩.
    """
    return text if text.isascii() and text.isprintable() else "".join(map(_visible_character, text))


def visible_lines(text: str) -> str:
    """Escape a text of several lines. All lines but the first are indented, so that none looks like a separate message."""
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
