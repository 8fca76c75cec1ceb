"""The committed code in generated/ equals the output of `make protos`, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from .project import GENERATED, PROTOS, ROOT

ENVIRONMENT = ROOT / ".venv-protos"


def written(root: Path) -> dict[str, bytes]:
    """The generated files by path, without py.typed, which is maintained by hand."""
    found = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in found if path.name != "py.typed"}


@pytest.mark.skipif(not (ENVIRONMENT / "bin/python").exists(), reason="no .venv-protos: `make test` makes it")
@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_generated_code_is_what_make_protos_writes(tmp_path: Path) -> None:
    shutil.copytree(PROTOS, tmp_path / "protos")
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / ENVIRONMENT.name).symlink_to(ENVIRONMENT)
    (tmp_path / "generated").mkdir()
    # -o: use the existing environment and install nothing. The settings of an outer make are removed.
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-o", f"{ENVIRONMENT.name}/.ready", "protos"]
    run = subprocess.run(command, cwd=tmp_path, env=outside, capture_output=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr.decode()
    fresh, committed = written(tmp_path / "generated"), written(GENERATED)
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []


def test_every_generated_package_is_typed() -> None:
    packages = {path.parent for path in GENERATED.rglob("*_pb2.py")}
    assert packages
    assert all((package / "py.typed").exists() for package in packages)
