"""The contract passes lint, format and breaking-change checks, and these checks can fail."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .project import PROTOS, RELEASED, ROOT, buf, needs_buf

pytestmark = needs_buf

LINT = ("lint",)
FORMAT = ("format", "--diff", "--exit-code")
BREAKING = ("breaking", "--against", "protos/released.binpb")


@pytest.mark.parametrize("check", [LINT, FORMAT, BREAKING], ids=lambda check: check[0])
def test_the_contract_is_clean(check: tuple[str, ...]) -> None:
    assert RELEASED.exists()
    run = buf(ROOT, *check)
    assert run.returncode == 0, (run.stdout + run.stderr).decode()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the contract that tests may break."""
    shutil.copytree(PROTOS, tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    return tmp_path


def edit(copy: Path, name: str, old: str, new: str) -> None:
    path = copy / "protos/osmosis/rollout/v1" / name
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{name} must contain {old!r} exactly once"
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("message.proto", "string media_type = 1;", "string mime_type = 1;"),
        ("message.proto", "bytes sha256 = 2;", "string sha256 = 2;"),
        ("message.proto", "bytes sha256 = 2;", "bytes sha256 = 9;"),
        ("message.proto", "bytes sha256 = 2;", "repeated bytes sha256 = 2;"),
        ("spec.proto", "DRIFT_POLICY_FAIL = 2;", "DRIFT_POLICY_STOP = 2;"),
        ("rollout_service.proto", "rpc GetServerInfo(", "rpc DescribeServer("),
        ("rollout_service.proto", "returns (stream WatchRolloutResponse)", "returns (WatchRolloutResponse)"),
    ],
    ids=["renamed", "retyped", "renumbered", "repeated", "enum value renamed", "rpc renamed", "no stream any more"],
)
def test_a_breaking_change_is_seen(copy: Path, name: str, old: str, new: str) -> None:
    edit(copy, name, old, new)
    run = buf(copy, *BREAKING)
    assert run.returncode != 0
    assert name.encode() in run.stdout, run.stderr.decode()


def test_an_addition_breaks_nothing(copy: Path) -> None:
    assert buf(copy, *BREAKING).returncode == 0
    edit(copy, "message.proto", "bytes sha256 = 2;", "bytes sha256 = 2;\n  // Bytes.\n  uint64 size = 9;")
    for check in (LINT, FORMAT, BREAKING):
        run = buf(copy, *check)
        assert run.returncode == 0, (run.stdout + run.stderr).decode()


@pytest.mark.parametrize(
    ("check", "new"),
    [
        (LINT, "bytes sha256 = 2;\n  uint64 size = 9;"),
        (LINT, "bytes sha256 = 2;\n  // Bytes.\n  uint64 SizeOf = 9;"),
        (FORMAT, "bytes   sha256 = 2;"),
    ],
    ids=["no comment", "not in snake case", "spaces"],
)
def test_lint_and_format_can_fail(copy: Path, check: tuple[str, ...], new: str) -> None:
    edit(copy, "message.proto", "bytes sha256 = 2;", new)
    assert buf(copy, *check).returncode != 0
