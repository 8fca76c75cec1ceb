"""Properties of every value class of the core (frozen, slotted, separately importable), and the errors of refused calls."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest
from rollout_server import core
from rollout_server.core import error as errors
from rollout_server.core.error import (
    Busy,
    Conflict,
    Draining,
    Forbidden,
    Gone,
    InvalidRequest,
    NotFound,
    NotPossible,
    RolloutError,
    Unauthenticated,
    Violation,
)

MODULES = sorted(m.name for m in pkgutil.iter_modules(core.__path__, "rollout_server.core."))


def values() -> list[type]:
    """All dataclasses of the core."""
    found = [v for name in MODULES for v in vars(importlib.import_module(name)).values()]
    return sorted({v for v in found if isinstance(v, type) and is_dataclass(v)}, key=lambda v: v.__qualname__)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("value", values(), ids=lambda v: v.__name__)
def test_values_are_frozen_and_slotted(value: type) -> None:
    bare: object = object.__new__(value)
    assert not hasattr(bare, "__dict__")
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(bare, field.name, None)
        with pytest.raises(FrozenInstanceError):
            delattr(bare, field.name)


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (RolloutError("text"), "INTERNAL"),
            (NotFound("text"), "NOT_FOUND"),
            (Unauthenticated("text"), "KEY_NEEDED"),
            (Forbidden("text"), "ADMIN_KEY_NEEDED"),
            (Conflict("text"), "REQUEST_ID_TAKEN"),
            (NotPossible("text"), "NOT_POSSIBLE"),
            (Gone("text", oldest=3, newest=9), "EVENTS_GONE"),
            (Busy("text", retry_after=1.5), "TOO_MANY_ROLLOUTS"),
            (Draining("text", retry_after=2.5), "DRAINING"),
        ],
    )
    def test_each_has_its_text_and_a_stable_word(self, error: RolloutError, reason: str) -> None:
        assert (str(error), error.message, error.reason) == ("text", "text", reason)

    def test_one_may_have_a_word_of_its_own(self) -> None:
        assert NotFound("text", reason="AGENT_UNKNOWN").reason == "AGENT_UNKNOWN"
        assert NotFound("text").reason == "NOT_FOUND"

    def test_an_invalid_request_names_every_field(self) -> None:
        violations = (Violation("spec.messages", "is empty"), Violation("spec.agent", "is unknown"))
        error = InvalidRequest(*violations)
        assert error.violations == violations
        assert str(error) == "spec.messages: is empty; spec.agent: is unknown"
        assert error.reason == "INVALID_REQUEST"

    def test_some_say_when_or_where_to_go_on(self) -> None:
        gone = Gone("text", oldest=3, newest=9)
        assert (gone.oldest, gone.newest) == (3, 9)
        assert (Busy("t", retry_after=1.5).retry_after, Draining("t", retry_after=2.5).retry_after) == (1.5, 2.5)

    def test_reasons_are_told_apart(self) -> None:
        kinds = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, RolloutError)]
        assert len({kind.reason for kind in kinds}) == len(kinds) == 16
