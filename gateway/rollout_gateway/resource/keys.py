"""Keys that a body does not know: where they belong."""

from collections.abc import Mapping
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel


def message(error: Mapping[str, Any], model: type[BaseModel]) -> str:
    """What is wrong; of an unknown key also where it belongs, or where the keys in it do."""
    if error["type"] != "extra_forbidden":
        return str(error["msg"])
    value = error["input"]
    parts = (value, *value.values()) if isinstance(value, dict) else ()
    if error["loc"][-1] in (places := _places(model)):
        return f"is not known here; it belongs {places[error['loc'][-1]]}"
    if any(isinstance(part, dict) and not part.keys().isdisjoint(model.model_fields) for part in parts):
        return "is not known here; the keys of a request belong at the top of the body"
    return "is not known here"


@cache
def _places(model: type[BaseModel]) -> Mapping[str, str]:
    """Where the keys of a body belong."""
    owners: dict[str, list[str]] = {}
    for name, field in model.model_fields.items():
        for kind in get_args(field.annotation) or (field.annotation,):
            for inner in getattr(kind, "model_fields", ()):
                owners.setdefault(inner, []).append(name)
    nested = {name: f"in {' or '.join(owner)}" for name, owner in owners.items()}
    return nested | dict.fromkeys(model.model_fields, "at the top of the body")
