"""Rules of the source tree: allowed imports, purity of the core, and sizes."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from functools import cache
from pathlib import Path

from tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "server", ROOT / "gateway")
STANDARD = "the standard library"
THIRD = "third parties"
ANYTHING = "anything"

_OURS = ("rollout_server", "pytest_rollout", "rollout_gateway", "rollout_client", "osmosis")
_AUTHORS = {f"rollout_server.{name}" for name in ("core", "runtime", "agent", "tool")}

# Allowed imports per package, also inside functions. The longest matching name applies; a module without an entry fails.
ROOMS: dict[str, set[str]] = {
    "rollout_server.core": {"rollout_server.core"},
    "rollout_server.runtime": {"rollout_server.core", "rollout_server.runtime"},
    "rollout_server.edge": {"rollout_server.core", "rollout_server.runtime", "rollout_server.edge", THIRD},
    "rollout_server.edge.wire": {
        "rollout_server.core",
        "rollout_server.runtime",
        "rollout_server.edge",
        "osmosis",
        THIRD,
    },
    "rollout_server.edge.rpc": {
        "rollout_server.core",
        "rollout_server.runtime",
        "rollout_server.edge",
        "osmosis",
        THIRD,
    },
    # The API for agent authors.
    "rollout_server.agent": {*_AUTHORS, THIRD},
    "rollout_server.tool": {*_AUTHORS, THIRD},
    "rollout_server.calculator": _AUTHORS,
    # The earlier SDK's names. Its `create_app` is another composition root; its `testing` is a mock trainer.
    "rollout_server.sdk": {*_AUTHORS, "rollout_server.sdk", THIRD},
    "rollout_server.sdk.server": {
        *_AUTHORS,
        "rollout_server.sdk",
        "rollout_server.app",
        "rollout_server.serving",
        "rollout_server.settings",
        "rollout_gateway",
        THIRD,
    },
    "rollout_server.sdk.testing": {
        "rollout_server.sdk",
        "rollout_server.testing",
        "rollout_server.edge.trainer.http_client",
        THIRD,
    },
    "rollout_server.settings": {"rollout_server.core", "rollout_server.settings", THIRD},
    "rollout_server.logs": {"rollout_server.inspection.escape", THIRD},
    # The strict trainer judges the server independently, so it imports nothing of the server.
    "rollout_server.testing": {"rollout_server.testing", "osmosis", THIRD},
    # A server and a strict trainer for authors' tests, which use it through the pytest plugin.
    "rollout_server.local_stack": {ANYTHING},
    "pytest_rollout": {"rollout_server", "rollout_server.local_stack", "rollout_server.testing", THIRD},
    # It reads rollouts like any other client.
    "rollout_server.inspection": {
        "rollout_server.edge.tokens.token_text",
        "rollout_server.inspection",
        "rollout_client",
        "rollout_gateway.rest.proto_json",
        "osmosis",
        THIRD,
    },
    # It inspects templates with the renderer's code, without a server.
    "rollout_server.tokencheck": {
        "rollout_server.core",
        "rollout_server.runtime.errors",
        "rollout_server.edge.tokens",
        "rollout_server.inspection.escape",
        "rollout_server.tokencheck",
        THIRD,
    },
    # It checks anybody's samples in files, without a server.
    "rollout_server.verification": {
        "rollout_server.core",
        "rollout_server.runtime.errors",
        "rollout_server.edge.tokens",
        "rollout_server.inspection.escape",
        "rollout_server.verification",
        "rollout_client",
        THIRD,
    },
    # The implementation of the authors' commands. It starts rollouts through the client library.
    "rollout_server.authoring": {
        *_AUTHORS,
        "rollout_server.authoring",
        # Agents may be loops of the earlier SDK.
        "rollout_server.sdk.adapter",
        "rollout_server.sdk.core.base",
        "rollout_server.inspection",
        "rollout_server.testing",
        "rollout_client",
        "osmosis",
        THIRD,
    },
    # Tools for other programs, over gRPC and MCP. It is an edge of its own: no rollout runs in it.
    "rollout_server.tool_server": {
        "rollout_server.core",
        "rollout_server.runtime",
        "rollout_server.edge",
        "rollout_server.authoring.tool_loader",
        "rollout_server.network_exposure",
        "rollout_server.tool_server",
        "rollout_gateway.http",
        "osmosis",
        THIRD,
    },
    # Rollouts of an agent on a dataset, their results and statistics. The report is the gateway's page over them.
    "rollout_server.evaluation": {
        "rollout_server.authoring",
        "rollout_server.evaluation",
        "rollout_server.inspection.escape",
        "rollout_client",
        "rollout_gateway.page.standalone",
        "rollout_gateway.rest.proto_json",
        "osmosis",
        THIRD,
    },
    # Saved rollouts behind the gateway: it reads what the journal and the evaluation wrote, and runs no rollout.
    "rollout_server.archive": {
        "rollout_server.core",
        "rollout_server.runtime",
        "rollout_server.edge",
        "rollout_server.evaluation",
        "rollout_server.inspection",
        "rollout_server.archive",
        "rollout_client",
        "rollout_gateway",
        "osmosis",
        THIRD,
    },
    # Several processes that serve as one: the parent, and how a worker's server reaches the others.
    "rollout_server.workers": {
        "rollout_server.edge",
        "rollout_server.logs",
        "rollout_server.settings",
        "rollout_server.workers",
        "rollout_gateway",
        "osmosis",
        THIRD,
    },
    # The composition root and the commands.
    "rollout_server.app": {ANYTHING},
    "rollout_server.assembly": {ANYTHING},
    "rollout_server.serving": {ANYTHING},
    "rollout_server.network_exposure": {"rollout_server.edge.api_keys", "rollout_server.settings"},
    "rollout_server.embedded_gateway": {ANYTHING},
    "rollout_server.standalone_gateway": {ANYTHING},
    "rollout_server.cli": {ANYTHING},
    # The public names, and `serve`, which imports the composition root.
    "rollout_server": {*_AUTHORS, "rollout_server.serving"},
    # The gateway only translates.
    "rollout_gateway": {
        "rollout_gateway",
        "rollout_client.enums",
        "rollout_client.errors",
        "rollout_client.error_details",
        "osmosis",
        THIRD,
    },
    "rollout_client": {"rollout_client", "osmosis", THIRD},
    # The generator of the synchronous client.
    "unasync": set(),
}

# Generated messages outside edge/rpc, where wire converts them to core values. A client needs its stub; a journal has its
# own package.
STUBS_ALSO_IN = ("rollout_server.edge.",)
JOURNAL = "rollout_server.edge.journal"

# No clock, randomness, tasks, logging or I/O. Add further modules of the standard library here deliberately.
PURE = "__future__ array bisect collections dataclasses enum functools hashlib itertools json math re types typing urllib.parse"
IMPURE_CALLS = {"open", "print", "input", "eval", "exec", "__import__"}

LINES = 400
LARGER: dict[str, tuple[int, str]] = {}
FUNCTION_LINES = 70
PARAMETERS = 6

LIGHT = (
    "rollout_server.core",
    "rollout_server.runtime",
    "rollout_server.agent",
    "rollout_server.tool",
    "rollout_server.calculator",
)
HEAVY = ("transformers", "torch", "grpc")


def modules() -> dict[str, Path]:
    """The project's modules by name."""
    found = {}
    for root in SOURCES:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
CORE = [name for name in MODULES if name.startswith("rollout_server.core")]


def offenders(found: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """All modules with findings, for a test's message."""
    return {name: sorted(each) for name, each in found.items() if each}


def tree(name: str) -> ast.Module:
    return syntax_tree(MODULES[name])


@cache
def imports(name: str) -> frozenset[str]:
    """The imports of a module, anywhere in it; `from a import b` as "a.b"."""
    found: set[str] = set()
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(found)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def room(name: str) -> str | None:
    if name == "rollout_server":
        return name
    return max((r for r in ROOMS if r != "rollout_server" and within(name, r)), key=len, default=None)


def origin(imported: str) -> str:
    """The origin of an imported name: the standard library, third parties, or a project module (then itself)."""
    top = imported.split(".", maxsplit=1)[0]
    if top in _OURS:
        return imported
    return STANDARD if top in sys.stdlib_module_names else THIRD


def is_allowed(imported: str, allowed: set[str]) -> bool:
    source = origin(imported)
    return ANYTHING in allowed or source == STANDARD or any(within(source, each) for each in allowed)


def is_stub(name: str, imported: str) -> bool:
    """A client in the edge may import the stub that it calls; the journal its own records."""
    stub = any(part.endswith("_pb2_grpc") for part in imported.split("."))
    in_edge = name.startswith(STUBS_ALSO_IN)
    return (in_edge and stub) or (within(name, JOURNAL) and within(imported, "osmosis.journal"))


def test_every_module_has_a_room_and_imports_what_its_room_may() -> None:
    homeless = [name for name in MODULES if room(name) is None]
    assert homeless == []
    wrong = {
        name: {i for i in imports(name) if not is_allowed(i, ROOMS[str(room(name))]) and not is_stub(name, i)}
        for name in MODULES
    }
    assert offenders(wrong) == {}


def test_the_rules_can_be_broken() -> None:
    """The checks above detect violations."""
    assert room("rollout_server.nowhere") is None
    assert room("rollout_server.edge.wire.event") == "rollout_server.edge.wire"
    assert not is_allowed("rollout_server.runtime.log.Log", ROOMS["rollout_server.core"])
    assert not is_allowed("grpc", ROOMS["rollout_server.runtime"])
    assert not is_allowed("google.protobuf.message", ROOMS["rollout_server.runtime"])
    assert not is_allowed("osmosis.rollout.v1.spec_pb2", ROOMS["rollout_server.edge"])
    assert not is_allowed("rollout_server.agent", ROOMS["rollout_server.edge.rpc"])
    assert not is_allowed("rollout_server.core.message", ROOMS["rollout_gateway"])
    assert not is_allowed("rollout_server.core.ledger", ROOMS["rollout_server.testing"])
    assert not is_allowed("rollout_server.core_of_another", ROOMS["rollout_server.core"])
    assert is_allowed("json", ROOMS["rollout_server.core"])
    assert is_stub("rollout_server.edge.tools.remote", "osmosis.rollout.v1.tool_service_pb2_grpc")
    assert not is_stub("rollout_server.edge.tools.remote", "osmosis.rollout.v1.tool_service_pb2")
    assert "asyncio" in imports("rollout_server.runtime.log")


def impurities(name: str) -> set[str]:
    """Imports, calls and awaits of a module that are forbidden in the core."""
    standard = {i for i in imports(name) if origin(i) == STANDARD}
    found = {i for i in standard if not any(within(i, pure) for pure in PURE.split())}
    nodes = list(ast.walk(tree(name)))
    calls = {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    effects = {type(n).__name__ for n in nodes if isinstance(n, ast.AsyncFunctionDef | ast.Await | ast.Global)}
    return found | (calls & IMPURE_CALLS) | effects


def test_the_core_is_pure() -> None:
    assert offenders({name: impurities(name) for name in CORE}) == {}


def test_the_core_keeps_nothing_that_changes_in_its_modules() -> None:
    mutable = (MutableSequence, MutableMapping, MutableSet, array)
    kept = {
        name: {
            key
            for key, value in vars(importlib.import_module(name)).items()
            if isinstance(value, mutable) and not key.startswith("__")
        }
        for name in CORE
    }
    assert offenders(kept) == {}


def test_nothing_rebinds_a_global() -> None:
    assert [name for name in MODULES if any(isinstance(node, ast.Global) for node in ast.walk(tree(name)))] == []


def lines(name: str) -> int:
    """Number of non-blank lines of a module."""
    return sum(bool(line.strip()) for line in MODULES[name].read_text(encoding="utf-8").splitlines())


def test_a_module_can_be_read_in_one_sitting() -> None:
    most = {name: LARGER.get(name, (LINES, ""))[0] for name in MODULES}
    assert {name: lines(name) for name in MODULES if lines(name) > most[name]} == {}


def test_exceptions_are_still_needed() -> None:
    """Remove a module from the list once it is small enough."""
    assert [name for name in LARGER if lines(name) <= LINES] == []


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(tree(name)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Names of all parameters except `self` and `cls`."""
    given = function.args
    named = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return [n for n in named if n not in ("self", "cls")]


def test_functions_are_short() -> None:
    long = {
        name: {f.name for f in functions(name) if (f.end_lineno or f.lineno) - f.lineno >= FUNCTION_LINES}
        for name in MODULES
    }
    assert offenders(long) == {}


def test_functions_take_few_parameters() -> None:
    many = {name: {f.name for f in functions(name) if len(parameters(f)) > PARAMETERS} for name in MODULES}
    assert offenders(many) == {}


def test_importing_what_authors_use_is_light() -> None:
    light = ["rollout_server", *(name for name in MODULES if any(within(name, each) for each in LIGHT))]
    program = f"import sys, {', '.join(light)}; print(*sorted({set(HEAVY)!r} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


def imports_at_top(name: str) -> set[str]:
    """Imports at the top level of a module."""
    at_top = {alias.name for node in tree(name).body if isinstance(node, ast.Import) for alias in node.names}
    return at_top | {str(node.module) for node in tree(name).body if isinstance(node, ast.ImportFrom)}


def test_model_libraries_are_imported_where_they_are_used() -> None:
    """They take seconds to load, so no module imports them at the top level, except the adapters that need them anyway."""
    heavy = {
        name: {i for i in imports_at_top(name) if i.split(".")[0] in ("transformers", "torch")} for name in MODULES
    }
    assert all(name.startswith("rollout_client.adapters.") for name in offenders(heavy))


def test_the_rooms_are_the_ones_there_are() -> None:
    """Every package of the build is among the checked ones."""
    tops = {m.name for root in SOURCES for m in pkgutil.iter_modules([str(root)])}
    assert tops <= {name.split(".")[0] for name in MODULES} | {"rollout_client"}
    assert {"rollout_server", "rollout_gateway"} <= tops
