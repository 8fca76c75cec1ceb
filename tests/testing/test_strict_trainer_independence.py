"""D20: the strict trainer judges the server, so it imports nothing of the server."""

import ast
from pathlib import Path

import rollout_server.testing

TESTING = Path(rollout_server.testing.__file__).parent
ROOTS = ("trainer", "model.script_json", "tokenizer.build")
PACKAGE = "rollout_server.testing"
OURS = ("rollout_server", "rollout_gateway", "rollout_client")


def path_of(module: str) -> Path | None:
    """The file of a module of `rollout_server.testing`; None for any other name."""
    parts = module.split(".")[2:]
    plain = TESTING.joinpath(*parts).with_suffix(".py") if parts else TESTING / "__init__.py"
    package = TESTING.joinpath(*parts) / "__init__.py"
    return next((path for path in (plain, package) if path.is_file()), None)


def imported(path: Path) -> set[str]:
    """All imported names, also inside functions; ``from a import b`` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} uses a relative import"
            assert node.module is not None
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            assert called not in ("__import__", "import_module"), f"{path.name} imports by name"
    return names


def closure() -> dict[str, set[str]]:
    """All modules of the strict trainer, with their imports."""
    found: dict[str, set[str]] = {}
    waiting = [f"{PACKAGE}.{root}" for root in ROOTS]
    while waiting:
        module = waiting.pop()
        path = path_of(module) if module == PACKAGE or module.startswith(f"{PACKAGE}.") else None
        if module in found or path is None:
            continue
        found[module] = imported(path)
        parents = [module.rsplit(".", depth)[0] for depth in range(1, module.count("."))]
        waiting += [*found[module], *parents]
    return found


def test_the_strict_trainer_imports_nothing_of_the_server() -> None:
    for module, names in closure().items():
        for name in names:
            if name.split(".")[0] in OURS:
                assert name == PACKAGE or name.startswith(f"{PACKAGE}."), f"{module} imports {name}"


def test_the_search_sees_all_of_it() -> None:
    modules = closure()
    assert {
        f"{PACKAGE}.{name}"
        for name in ("checks.judge", "checks.renderer", "tokenizer", "http.app", "http.server", "grpc.service")
    } <= set(modules)
    assert PACKAGE in modules
    assert len(modules) > 15
