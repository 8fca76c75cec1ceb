"""Tool and parameter descriptions from docstrings in the styles of Google, NumPy and Sphinx."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Optional

import pytest
from pydantic import Field
from rollout_server import tool


def described(function: Callable[..., object]) -> tuple[str, dict[str, Any]]:
    made = tool(function)
    properties = json.loads(made.parameters_json_schema)["properties"]
    return made.description, {name: shape.get("description") for name, shape in properties.items()}


def google(a: int, b: int, c: int = 0) -> int:
    """Add numbers.

    All of them.

    Args:
        a: First number,
            which may be negative.
        b (int): Second: the one behind.

    Returns:
        The sum.

    Raises:
        ValueError: never.
    """
    return a + b + c


def numpy(a: int, b: int, c: int = 0) -> int:
    """Add numbers.

    All of them.

    Parameters
    ----------
    a : int
        First number,
        which may be negative.
    b
        Second: the one behind.

    Returns
    -------
    int
        The sum.
    """
    return a + b + c


def sphinx(a: int, b: int, c: int = 0) -> int:
    """Add numbers.

    All of them.

    :param a: First number,
        which may be negative.
    :param int b: Second: the one behind.
    :returns: The sum.
    :raises ValueError: never.
    """
    return a + b + c


@pytest.mark.parametrize("function", [google, numpy, sphinx])
def test_parameters_are_described_by_the_docstring_in_each_style(function: Callable[..., object]) -> None:
    text, parameters = described(function)
    assert text == "Add numbers.\n\nAll of them.\n\nReturns: The sum."
    assert parameters == {"a": "First number, which may be negative.", "b": "Second: the one behind.", "c": None}


def test_an_annotation_says_more_than_the_docstring() -> None:
    def f(a: Annotated[int, "By text"], b: int = Field(1, description="By field"), c: int = 0) -> None:
        """Does it.

        Args:
            a: not this.
            b: nor this.
            c: By docstring
        """

    assert described(f) == ("Does it.", {"a": "By text", "b": "By field", "c": "By docstring"})


def test_a_text_inside_of_a_type_describes_that_part() -> None:
    def f(
        a: Annotated[int, "By text"] | None = None,
        b: Optional[Annotated[Annotated[int, Field(ge=1)], "Around"]] = None,  # noqa: UP045 - authors write it, too
        c: Annotated[int, "A number"] | Annotated[str, "A name"] = 1,
        d: list[Annotated[str, "An item"]] | None = None,
        e: Annotated[Annotated[int, "Inside"] | None, "Outside"] = None,
        f: Annotated[int, Field(description="By field")] | None = None,
    ) -> None:
        """Does it.

        Args:
            a: not this.
            c: By docstring
            d: By docstring
        """

    shapes = json.loads(tool(f).parameters_json_schema)["properties"]
    assert {name: shape.get("description") for name, shape in shapes.items()} == {
        "a": "By text",
        "b": "Around",
        "c": "By docstring",
        "d": "By docstring",
        "e": "Outside",
        "f": "By field",
    }
    assert [each["description"] for each in shapes["c"]["anyOf"]] == ["A number", "A name"]
    assert shapes["d"]["items"] == {"type": "string", "description": "An item"}
    assert shapes["b"]["minimum"] == 1


def test_a_docstring_without_parameters_stays_as_it_is() -> None:
    def f(a: int) -> None:
        """Looks it up.

        Note: case matters.

            indented: example

        Returns:
            what it found
        """

    assert described(f) == (
        "Looks it up.\n\nNote: case matters.\n\n    indented: example\n\nReturns:\n    what it found",
        {"a": None},
    )


def test_what_is_said_beside_parameters_is_kept() -> None:
    def f(query: str) -> None:
        """Searches.

        Args:
            query: Words.
            unknown: no such parameter.

        Note:
            Case matters.

        Example:
            search("tea")
        """

    text, parameters = described(f)
    assert parameters == {"query": "Words."}
    assert text.startswith("Searches.\n\nNote: Case matters.")
    assert 'search("tea")' in text
    assert "no such parameter" not in text


def test_a_method_is_described_without_its_object() -> None:
    class Shop:
        def price(self, of: str) -> int:
            """Looks up a price.

            Args:
                of: What to buy.
            """
            return len(of)

    assert described(Shop().price) == ("Looks up a price.", {"of": "What to buy."})


def test_a_function_without_docstring_has_no_description() -> None:
    def f(a: int) -> None: ...

    assert described(f) == ("", {"a": None})
