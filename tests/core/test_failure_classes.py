"""Failure classes: each end has exactly one, and it decides whether the samples of the rollout train."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
import rollout_server
from rollout_server.core.outcome import (
    POSSIBLE_CLASSES,
    TRAIN_BY_DEFAULT,
    Cancellation,
    Category,
    End,
    Failure,
    FailureClass,
    Stop,
    failure_class_of,
    training_verdict,
)
from rollout_server.core.record import Ended
from rollout_server.core.segment import SamplePart
from rollout_server.core.spec import ENGINES, Dialect, Target

from tests.support.machine_records import fresh, takes_turn
from tests.support.syntax import syntax_tree

# Written out a second time: the table in core is the contract's, and a change of it must be meant.
CLASSES = """
    TOKENIZER       SERVER
    NETWORK         TRAINER ENGINE
    RATE_LIMITED    TRAINER ENGINE
    TRAINER_SERVER  TRAINER
    TRAINER_CLIENT  TRAINER
    TOOL            TOOL
    VALIDATION      TRAINER ENGINE ENVIRONMENT POLICY
    INTERNAL        ENVIRONMENT SERVER
    TIMEOUT         DEADLINE TRAINER ENGINE
    INTERRUPTED     SERVER
    TOKEN_DRIFT     TRAINER ENGINE
    NOT_REPLAYABLE  ENVIRONMENT
    ENGINE_SERVER   ENGINE
    ENGINE_CLIENT   ENGINE
"""
TABLE = {category: classes for category, *classes in map(str.split, CLASSES.strip().splitlines())}
EXAMPLES = [
    Failure(category, "it failed", source=each if len(possible) > 1 else None)
    for category, possible in POSSIBLE_CLASSES.items()
    for each in possible
]


def test_the_table_covers_every_category() -> None:
    assert {key.name: [each.name for each in value] for key, value in POSSIBLE_CLASSES.items()} == TABLE
    assert set(POSSIBLE_CLASSES) == set(Category)


@pytest.mark.parametrize(
    "failure", EXAMPLES, ids=lambda failure: f"{failure.category.name}-{failure.failure_class.name}"
)
def test_a_failure_has_the_class_of_its_source_or_its_category(failure: Failure) -> None:
    possible = POSSIBLE_CLASSES[failure.category]
    assert failure_class_of(failure) is (failure.source or possible[0])
    assert failure_class_of(failure) in possible


def test_the_other_ends() -> None:
    assert failure_class_of(Stop("max_turns")) is None
    assert failure_class_of(Cancellation("enough")) is FailureClass.CANCELLED


@pytest.mark.parametrize("category", [key for key, value in POSSIBLE_CLASSES.items() if len(value) > 1])
def test_a_failure_that_forgets_its_source_is_a_bug_of_this_server(category: Category) -> None:
    assert Failure(category, "?").failure_class is FailureClass.SERVER


@pytest.mark.parametrize("dialect", Dialect)
def test_the_endpoint_that_generates_is_either_engine_or_trainer(dialect: Dialect) -> None:
    expected = FailureClass.ENGINE if dialect in ENGINES else FailureClass.TRAINER
    assert Target("http://t", dialect).failure_class is expected


ENDS: Mapping[FailureClass, End] = {
    **{each.failure_class: each for each in EXAMPLES},
    FailureClass.CANCELLED: Cancellation("enough"),
}


def test_every_class_has_an_end() -> None:
    assert set(ENDS) == set(FailureClass)
    assert {FailureClass.POLICY, FailureClass.DEADLINE} == TRAIN_BY_DEFAULT


@pytest.mark.parametrize(("of", "wanted"), list(product(FailureClass, [None, *FailureClass])))
def test_a_sample_trains_if_the_request_or_the_default_says_so(of: FailureClass, wanted: FailureClass | None) -> None:
    machine = fresh()
    takes_turn(machine, 5)
    machine.accept(Ended(ENDS[of]))
    assert machine.outcome is not None
    [segment] = machine.outcome.segments
    whole = SamplePart.whole(segment)
    trains, reason = training_verdict(machine.outcome, whole, None if wanted is None else {wanted})
    assert trains is (of in TRAIN_BY_DEFAULT if wanted is None else of is wanted)
    assert reason == ("" if trains else "cancelled" if of is FailureClass.CANCELLED else f"failure_{of.value}")
    assert training_verdict(machine.outcome, whole, frozenset())[0] is False


@pytest.mark.parametrize("train_on", [None, frozenset(), frozenset(FailureClass)])
def test_samples_of_a_completed_rollout_always_train(train_on: frozenset[FailureClass] | None) -> None:
    machine = fresh()
    takes_turn(machine, 5)
    machine.accept(Ended(Stop("max_tokens", truncated=True)))
    assert machine.outcome is not None
    assert training_verdict(machine.outcome, SamplePart.whole(machine.outcome.segments[0]), train_on) == (True, "")


def _failures() -> Iterator[tuple[str, str, bool]]:
    """Yield each place in the server that creates a `Failure`: its location, its category and whether it names a source."""
    root = Path(rollout_server.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(syntax_tree(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Failure"
                and node.args
            ):
                category = node.args[0]
                name = category.attr if isinstance(category, ast.Attribute) else ""
                said = len(node.args) > 4 or any(keyword.arg == "source" for keyword in node.keywords)
                yield f"{path.relative_to(root)}:{node.lineno}", name, said


def test_every_place_that_leaves_the_class_open_names_it() -> None:
    places = list(_failures())
    assert len(places) > 20  # the search finds them
    silent = [where for where, name, said in places if not said and len(TABLE.get(name, "??")) > 1]
    assert silent == []
