"""Values passed between the renderer's parts can be cached and shared, because they are immutable."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator

import pytest
import rollout_server.edge.tokens


def values() -> Iterator[type]:
    for module in pkgutil.iter_modules(rollout_server.edge.tokens.__path__):
        name = f"{rollout_server.edge.tokens.__name__}.{module.name}"
        for each in vars(importlib.import_module(name)).values():
            if isinstance(each, type) and dataclasses.is_dataclass(each) and each.__module__ == name:
                yield each


@pytest.mark.parametrize("value", list(values()), ids=lambda value: value.__name__)
def test_a_value_is_frozen_and_small(value: type) -> None:
    made = object.__new__(value)
    assert not hasattr(made, "__dict__")
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, None)
