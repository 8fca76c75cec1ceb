"""The size of a JSON text is counted exactly near a limit, whatever its strings contain."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_gateway.http import request_body
from rollout_gateway.http.request_body import demand_bounded
from rollout_gateway.json_body import InvalidBody

TEXTS = st.text(alphabet='[]{}",\\:ab\n', max_size=12)
JSON = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def counted(value: Any) -> int:
    """Count containers, and the members after the first of each."""
    if not isinstance(value, list | dict):
        return 0
    members = list(value.values()) if isinstance(value, dict) else value
    return 1 + max(0, len(members) - 1) + sum(map(counted, members))


def deepest(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    members = value.values() if isinstance(value, dict) else value
    return 1 + max(map(deepest, members), default=0)


def passes(content: bytes, **bounds: int) -> bool:
    try:
        demand_bounded(content, **bounds)
    except InvalidBody:
        return False
    return True


@given(value=JSON, ascii_only=st.booleans(), piece=st.integers(1, 9))
def test_values_and_depth_are_counted_exactly(value: Any, ascii_only: bool, piece: int) -> None:
    content = json.dumps(value, ensure_ascii=ascii_only).encode()
    values, depth = 1 + counted(value), deepest(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_body, "_PIECE", piece)
        assert passes(content, max_values=values, max_depth=depth)
        assert not passes(content, max_values=values - 1, max_depth=depth)
        assert depth == 0 or not passes(content, max_values=values, max_depth=depth - 1)


def test_counting_stops_at_the_piece_where_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    whole = request_body.most_values
    monkeypatch.setattr(request_body, "most_values", lambda content: looked.append(len(content)) or whole(content))
    assert not passes(b"[" + b"1," * 4_000_000 + b"1]", max_values=1000)
    assert len(looked) == 2  # one pass over the whole text, and one over a part of it


def test_what_is_no_json_is_the_parsers_to_refuse() -> None:
    for content in (b"", b"]]]]", b'"', b'\\"[', b"\xff[", b'{"a":"\\'):
        assert passes(content, max_values=3, max_depth=2)
