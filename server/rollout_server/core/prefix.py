"""How far two sequences of tokens, or two texts, agree."""

from __future__ import annotations

from array import array
from typing import TypeVar

_Sequence = TypeVar("_Sequence", "array[int]", str)


def first_difference(a: _Sequence, b: _Sequence) -> int:
    """The first index at which `a` and `b` differ; the shorter length where one is a prefix of the other."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a[:low] == b[:low] always holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
