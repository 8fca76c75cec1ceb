"""Texts of trainers and authors, as protobuf takes them."""

from __future__ import annotations


def utf8(text: str) -> str:
    """The text with halves of surrogate pairs, which UTF-8 does not have, replaced by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
