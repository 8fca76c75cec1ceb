"""Mock models: a script from a file, an object of the author's, or the built-in one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import cast

from rollout_server.authoring.agent_loader import Reference, get_object, instantiate
from rollout_server.authoring.author_traceback import AuthorError
from rollout_server.authoring.mock_model import MockModel
from rollout_server.testing.model.calculator import Model
from rollout_server.testing.model.script_json import script_from_json
from rollout_server.testing.script import Script

MOCK = "built-in"
_LONGEST_SCRIPT = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelStub:
    """A mock model: each rollout gets the lines of `script`, then the replies of `model`.

    `further` are mock models by name, for agents that call `run.model(name)`.
    """

    name: str
    model: Model = field(default_factory=MockModel)
    script: Script = field(default_factory=lambda: Script(then_model=True))
    further: Mapping[str, Model] = field(default_factory=dict)


def load_stub(text: str) -> ModelStub:
    """Load a mock model: FILE.json in the format of the strict trainer's `PUT /script`, or an object with `reply(messages)`.

    An empty text is the built-in mock model. A dictionary MODELS in the object's module has further models by name. Raises
    `AuthorError`, and OSError for a file that cannot be read.
    """
    if not text:
        return ModelStub(MOCK)
    if text.endswith(".json"):
        return ModelStub(text, script=_script(Path(text)))
    reference = Reference.parse(text)
    module = reference.load()
    further = _further_models(module, reference)
    if not reference.name:
        others = {type(model) for model in further.values()}
        own = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and value.__module__ == module.__name__
            and callable(getattr(value, "reply", None))
            and value not in others
        ]
        if len(own) != 1:
            what = f"{len(own)} classes" if own else "no class"
            raise AuthorError(
                f"contains {what} with a method reply(messages); name one: {reference.of('NAME')}", reference.source
            )
        reference = reference.of(own[0])
    model = instantiate(get_object(module, reference), None, reference)
    if not callable(getattr(model, "reply", None)):
        raise AuthorError(
            f"{reference.name} in {reference.source} is not a scripted model: it has no method reply(messages)"
        )
    return ModelStub(text, model=cast("Model", model), further=further)


def _further_models(module: ModuleType, reference: Reference) -> Mapping[str, Model]:
    found = getattr(module, "MODELS", {})
    if not isinstance(found, Mapping) or not all(callable(getattr(model, "reply", None)) for model in found.values()):
        raise AuthorError(
            "MODELS must be a dictionary of scripted models, objects with reply(messages)", reference.source
        )
    return dict(found)


def _script(path: Path) -> Script:
    if path.stat().st_size > _LONGEST_SCRIPT:
        raise AuthorError(f"a script has at most {_LONGEST_SCRIPT} bytes", str(path))
    try:
        return script_from_json(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise AuthorError(f"this is not a script: {error}", str(path)) from None
