"""The contract's location, and a runner for `buf` from the current environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"
GENERATED = ROOT / "generated"
RELEASED = PROTOS / "released.binpb"

_BUF = Path(sys.executable).with_name("buf")

needs_buf = pytest.mark.skipif(
    not _BUF.exists(), reason=f"no buf beside {Path(sys.executable).name}: this is not a development environment"
)


def buf(where: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run buf in the folder that holds buf.yaml."""
    return subprocess.run([_BUF, *arguments], cwd=where, capture_output=True, check=False, timeout=60)
