"""Loading of agents named on a command line: MODULE, MODULE:OBJECT, FILE.py or FILE.py:OBJECT.

Importing runs the author's code, so any exception may occur. Errors report the file and line of the author's code.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout_server.agent import Agent
from rollout_server.authoring.author_traceback import AuthorError, author_error, short_path

_FORMS = "MODULE, MODULE:OBJECT, FILE.py or FILE.py:OBJECT"


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference. `source` is a module name or a file; without `name`, the module must contain exactly one match."""

    source: str
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse a reference. Raises `AuthorError`."""
        source, colon, name = text, "", ""
        if not text.endswith(".py"):
            before, colon, after = text.rpartition(":")
            source, name = (before, after) if colon else (text, "")
        if not source or (colon and not name.isidentifier()):
            raise AuthorError(f"{text!r} is not {_FORMS}")
        return cls(source, name)

    @property
    def is_file(self) -> bool:
        """Whether the reference names a file instead of a module."""
        return self.source.endswith(".py")

    @property
    def folder(self) -> Path:
        """The folder of the code, as far as it is known without importing: that of the file, or the working directory."""
        return Path(self.source).resolve().parent if self.is_file else Path.cwd()

    def load(self) -> ModuleType:
        """Import the module. Raises `AuthorError`."""
        return _load_file(Path(self.source)) if self.is_file else _load_module(self.source)

    def of(self, name: str) -> Reference:
        """Return a reference to another object of the same module."""
        return Reference(self.source, name)

    def __str__(self) -> str:
        return f"{self.source}:{self.name}" if self.name else self.source


def find_agents(texts: Sequence[str]) -> list[Agent]:
    """Return one agent for each reference. Raises `AuthorError`, also if two agents have the same name."""
    agents = [_single_agent(Reference.parse(text)) for text in texts]
    names = [agent.name for agent in agents]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise AuthorError(
            f"more than one agent is called {', '.join(map(repr, doubled))}: requests choose agents by name, so rename one"
        )
    return agents


def all_agents(text: str) -> list[Agent]:
    """Return the agent that a reference names, or all agents of its module; at least one. Raises `AuthorError`."""
    reference = Reference.parse(text)
    module = reference.load()
    if reference.name:
        return [load_agent(module, reference)]
    return [load_agent(module, reference.of(name)) for name in _agents_in(module, reference)]


def code_digest(text: str) -> str:
    """Return a hash of the file that a reference names, to tell whether it changed; empty if there is no such file."""
    reference = Reference.parse(text)
    spec = None if reference.is_file else importlib.util.find_spec(reference.source)
    file = Path(reference.source if reference.is_file else (spec and spec.origin) or "")
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else ""


def get_object(module: ModuleType, reference: Reference) -> object:
    """Return the object of a reference. Raises `AuthorError`."""
    try:
        found: object = getattr(module, reference.name)
    except AttributeError:
        raise AuthorError(f"it defines no {reference.name}", reference.source) from None
    return found


def instantiate(found: object, kinds: tuple[type[Any], ...] | None, reference: Reference) -> object:
    """Return an object unchanged; call a class without arguments and return the instance. Raises `AuthorError`.

    `kinds` restricts which classes are called; None calls any class.
    """
    if not isinstance(found, type) or not issubclass(found, kinds or object):
        return found
    try:
        return found()
    except (Exception, SystemExit) as error:
        mistake = author_error(error, str(reference))
        if mistake.file:
            raise mistake from None
        raise AuthorError(mistake.text.removeprefix(f"{reference}: "), *_source_line(found)) from None


def _single_agent(reference: Reference) -> Agent:
    module = reference.load()
    if reference.name:
        return load_agent(module, reference)
    names = _agents_in(module, reference)
    if len(names) > 1:
        one = reference.of(names[0])
        raise AuthorError(
            f"contains {len(names)} agents ({', '.join(names)}); name one, such as {one}", reference.source
        )
    return load_agent(module, reference.of(names[0]))


def load_agent(module: ModuleType, reference: Reference) -> Agent:
    """Return the agent of a reference. Raises `AuthorError`."""
    found = instantiate(get_object(module, reference), _agent_types(), reference)
    if isinstance(found, Agent):
        return found
    if not isinstance(found, _agent_types()):
        raise AuthorError(f"{reference.name!r} in {reference.source} is not an Agent")
    from rollout_server.sdk.adapter import as_agent

    try:
        return as_agent(found)
    except (TypeError, ValueError) as error:
        raise AuthorError(str(error), *_source_line(type(found))) from None


def _agent_types() -> tuple[type[Any], ...]:
    """Return the base classes of agents. `RolloutAgentLoop` of the earlier SDK is included only if the author imported it."""
    if "rollout_server.sdk.core.base" not in sys.modules:
        return (Agent,)
    from rollout_server.sdk.core.base import RolloutAgentLoop

    return Agent, RolloutAgentLoop


def agent_names(module: ModuleType) -> list[str]:
    """Return the names of a module's agents: instances, then classes defined there that have no subclass and no instance."""
    kinds = _agent_types()
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    objects = {name: value for name, value in public.items() if isinstance(value, kinds)}
    classes = {
        name: value
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, kinds) and value.__module__ == module.__name__
    }
    bases = {base for kind in [*classes.values(), *map(type, objects.values())] for base in kind.__mro__[1:]}
    represented = bases | {type(value) for value in objects.values()}
    ready = {name: kind for name, kind in classes.items() if not inspect.isabstract(kind)}
    return [*objects, *(name for name, kind in ready.items() if kind not in represented)]


def _agents_in(module: ModuleType, reference: Reference) -> list[str]:
    found = agent_names(module)
    if not found:
        raise AuthorError("contains no agent: define a subclass of Agent in it", reference.source)
    return found


def _load_module(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    with _translate_import_errors(name):
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError as error:
            spec = None
            if not f"{name}.".startswith(f"{error.name}."):  # a parent package imports a module that is missing
                raise
        if spec is None:
            raise AuthorError(f"there is no module {name}; an agent is named as {_FORMS}")
        if spec.origin and spec.origin.endswith(".py"):
            _check_source(Path(spec.origin))
        return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AuthorError(f"there is no file {path}")
    parts, folder = [path.stem], path.resolve().parent
    while (folder / "__init__.py").exists():  # the file belongs to a package; import it under its full name
        parts, folder = [folder.name, *parts], folder.parent
    _add_to_path(folder)
    with _translate_import_errors(str(path)):
        _check_source(path)
        if len(parts) > 1 and all(part.isidentifier() for part in parts):
            return importlib.import_module(".".join(parts))
        return _execute_file(path)


def _execute_file(path: Path) -> ModuleType:
    """Execute a file as a module named like the file, or with a number appended if that name is taken."""
    name, number = path.stem, 1
    while name in sys.modules or name in sys.stdlib_module_names:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file and Path(file).resolve() == path.resolve():
            return sys.modules[name]
        number += 1
        name = f"{path.stem}_{number}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AuthorError("cannot be read as Python", str(path))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # a module that failed to import must not be found by the next import
        raise
    return module


def _check_source(path: Path) -> None:
    """Refuse a file that calls `serve` at its top level: importing it would start a server and never return.

    The earlier SDK's name of the function is `serve_agent_loop`.
    """
    tree = ast.parse(path.read_bytes(), str(path))
    names = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("rollout_server.")
        for alias in node.names
        if alias.name in ("serve", "serve_agent_loop")
    }
    for node in tree.body:
        call = node.value if isinstance(node, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {*names, "rollout_server.serve"}:
            called = ast.unparse(call.func).rpartition(".")[2]
            text = f'importing the file calls {called}(); put the call under `if __name__ == "__main__":`'
            raise AuthorError(text, str(path), node.lineno)


def _add_to_path(folder: Path) -> None:
    """Make the modules of a folder importable, as Python does for the folder of a script."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@contextmanager
def _translate_import_errors(source: str) -> Iterator[None]:
    try:
        yield
    except AuthorError:
        raise
    except (Exception, SystemExit) as error:
        mistake = author_error(error, source)
        raise AuthorError(f"{source} cannot be imported: {mistake.text}", mistake.file, mistake.line) from None


def _source_line(kind: Callable[..., object]) -> tuple[str, int]:
    try:
        return short_path(inspect.getsourcefile(kind) or ""), inspect.getsourcelines(kind)[1]
    except (OSError, TypeError):
        return "", 0
