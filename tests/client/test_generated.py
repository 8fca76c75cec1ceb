"""The synchronous client is generated from the asynchronous one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import unasync
from rollout_client import AsyncClient, AsyncEventStream, AsyncRunStream, Client, EventStream, RunStream


def test_the_client_for_threads_is_what_the_one_for_event_loops_gives() -> None:
    """If this fails, run `make sync-client`."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in sorted(unasync.TARGET.glob("*.py"))}
    assert committed == unasync.translate(unasync.source_texts())


def test_generated_modules_say_so_in_their_first_line() -> None:
    for path in unasync.TARGET.glob("*.py"):
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
        assert first.startswith("# Generated from rollout_client/_async/")
        assert "async" not in rest.replace("asynchronous", "").lower()
        assert "await" not in rest


def test_a_sentence_that_no_docstring_has_is_an_error() -> None:
    texts = unasync.source_texts()
    with pytest.raises(ValueError, match="Event streams as asynchronous iterators"):
        unasync.translate({name: text for name, text in texts.items() if name != "events.py"})


@pytest.mark.parametrize(
    ("of_a_loop", "of_threads"), [(AsyncClient, Client), (AsyncEventStream, EventStream), (AsyncRunStream, RunStream)]
)
def test_both_offer_the_same(of_a_loop: type[Any], of_threads: type[Any]) -> None:
    def methods(kind: type[Any]) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        own = ((name.replace("aclose", "close"), each) for name, each in found if not name.startswith("_"))
        return {name: list(inspect.signature(each).parameters) for name, each in own}

    assert methods(of_a_loop) == methods(of_threads)
    assert methods(of_a_loop)["close"] == ["self"]
