"""Remembered JSON of tools: always the text that the filter itself writes."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rollout_server.edge.tokens import sandbox
from rollout_server.edge.tokens.sandbox import ToolJson


def tool(name: str = "add") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"é<": {"type": "number", "default": None}}}
    return {"type": "function", "function": {"name": name, "description": "Adds.", "parameters": parameters}}


class Filter:
    """`tojson` of transformers. Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: object, ensure_ascii: object = False, indent: Any = None, separators: Any = None) -> str:
        self.calls += 1
        return json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators)


def parts(one: dict[str, Any]) -> Sequence[Any]:
    return one, one["function"], one["function"]["parameters"]


def test_a_tool_and_its_parts_are_written_once() -> None:
    plain, one = Filter(), tool()
    tojson = ToolJson(plain)
    tojson.add([one])
    for _ in range(3):
        assert [tojson(part) for part in parts(one)] == [json.dumps(part, ensure_ascii=False) for part in parts(one)]
    assert plain.calls == 3


@pytest.mark.parametrize("indent", [None, 0, 1, 4, True, False, "\t"])
def test_each_way_to_write_it_has_its_own_text(indent: Any) -> None:
    plain, one = Filter(), tool()
    tojson = ToolJson(plain)
    tojson.add([one])
    for options in ({}, {"ensure_ascii": True}, {"indent": 1}, {"indent": indent}, {"separators": [",", ":"]}) * 2:
        assert tojson(one, **options) == Filter()(one, **options)
    assert tojson(one, True, 2) == Filter()(one, True, 2)


def test_an_equal_object_is_not_the_tool() -> None:
    """It may be a value of the conversation, which differs in the next turn."""
    plain, one, other = Filter(), tool(), tool()
    tojson = ToolJson(plain)
    tojson.add([one])
    tojson(one)
    other["function"]["name"] = "sub"
    assert json.loads(tojson(other))["function"]["name"] == "sub"
    arguments = {"a": 1}
    assert tojson(arguments) == '{"a": 1}'
    arguments["a"] = 2
    assert tojson(arguments) == '{"a": 2}'


def test_what_is_refused_is_refused_each_time() -> None:
    tojson, one = ToolJson(Filter()), {"function": {"parameters": {"x": object()}}}
    tojson.add([one, "no tool", {"function": None}])
    for _ in range(2):
        with pytest.raises(TypeError, match="not JSON serializable"):
            tojson(one)
        with pytest.raises(TypeError):
            tojson(tool(), indent=0.5)


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_MOST_TOOLS", 30)
    tojson = ToolJson(Filter())
    for number in range(200):
        one = tool(f"tool_{number}")
        tojson.add([one])
        assert [tojson(one, indent=indent) for indent in range(20)] == [
            Filter()(one, indent=each) for each in range(20)
        ]
        assert len(tojson._known) < 40
        assert all(len(texts) <= 8 for _, texts in tojson._known.values())


def test_threads_with_short_lived_tools_never_see_a_text_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects that are gone leave their `id` to new ones."""
    monkeypatch.setattr(sandbox, "_MOST_TOOLS", 9)
    tojson = ToolJson(Filter())

    def work(start: int) -> None:
        for number in range(start, start + 3000):
            one = tool(f"tool_{number}")
            tojson.add([one])
            for part in parts(one):
                assert tojson(part) == json.dumps(part, ensure_ascii=False)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(0, 80_000, 10_000)))
