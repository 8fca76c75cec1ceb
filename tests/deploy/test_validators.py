"""Linters and validators find no errors in the files, and find planted ones."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.files import COMPOSE, DOCKERFILE, KUBERNETES, MANIFESTS, ROOT, UNITS, compose, tool

EXPOSURE = "20"
"""In tenths: `systemd-analyze security` reports OK up to 4.9."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def planted(path: Path, good: str, bad: str, directory: Path) -> Path:
    """A copy with a mistake in it."""
    text = path.read_text()
    assert good in text
    copy = directory / path.name
    copy.write_text(text.replace(good, bad))
    return copy


def test_hadolint_likes_the_dockerfile() -> None:
    found = tool("hadolint", DOCKERFILE)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("good", "bad", "rule"),
    [
        ("python:3.11.14-slim-bookworm@sha256:", "python:latest AS other\nFROM python@sha256:", "DL3007"),
        ("WORKDIR /build", "RUN cd /build", "DL3003"),
        ('ENTRYPOINT ["rollout"]', "ENTRYPOINT rollout", "DL3025"),
    ],
)
def test_hadolint_finds_a_planted_mistake(good: str, bad: str, rule: str, tmp_path: Path) -> None:
    found = tool("hadolint", planted(DOCKERFILE, good, bad, tmp_path))
    assert found.returncode != 0
    assert rule in found.stdout


def test_the_compose_file_is_valid() -> None:
    found = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    ("good", "bad"), [("condition: service_healthy", "condition: service_fine"), ("mem_limit:", "memory_limit:")]
)
def test_a_mistake_in_a_compose_file_is_found(good: str, bad: str, tmp_path: Path) -> None:
    copy = planted(COMPOSE, good, bad, tmp_path)
    found = tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", copy)
    assert found.returncode == 1
    assert bad.rsplit(": ", maxsplit=1)[-1].rstrip(":") in found.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_a_manifest_is_valid(path: Path) -> None:
    found = tool("kubernetes-validate", "--strict", path)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ("readOnlyRootFilesystem: true", "readOnlyRootFileSystem: true"),
        ("terminationGracePeriodSeconds: ", "terminationGracePeriodSeconds: about "),
        ("replicas: 1", "replicas: one"),
    ],
)
def test_a_mistake_in_a_manifest_is_found(good: str, bad: str, tmp_path: Path) -> None:
    copy = planted(KUBERNETES / "single" / "server.yaml", good, bad, tmp_path)
    found = tool("kubernetes-validate", "--strict", copy)
    assert found.returncode != 0
    assert "deployment/rollout-server" in found.stdout + found.stderr


@needs_kubectl
@pytest.mark.parametrize("name", ["single", "fleet"])
def test_kustomize_puts_the_manifests_together(name: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / name)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    sources = [path for path in MANIFESTS if path.parent.name == name]
    wanted = sum(len(re.findall(r"^kind:", path.read_text(), re.MULTILINE)) for path in sources)
    assert len(re.findall(r"^kind:", found.stdout, re.MULTILINE)) == wanted


def installed(path: Path, directory: Path) -> Path:
    """A copy of a unit whose program exists; the real one is installed by the user of the unit."""
    return planted(path, "/opt/rollout-server/bin/rollout", str(Path(sys.executable).parent / "rollout"), directory)


def analyzed(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["systemd-analyze", "--no-pager", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_valid(path: Path, tmp_path: Path) -> None:
    found = analyzed("verify", installed(path, tmp_path))
    assert found.returncode == 0, found.stderr
    assert path.name not in found.stderr


@needs_systemd
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_hardened(path: Path) -> None:
    found = analyzed("security", "--offline=true", f"--threshold={EXPOSURE}", path)
    assert found.returncode == 0, found.stdout


@needs_systemd
@pytest.mark.parametrize(
    ("good", "bad"),
    [("Type=", "Typ="), ("TimeoutStopSec=60", "TimeoutStopSec=long"), ("@system-service", "@no-such-set")],
)
def test_a_mistake_in_a_unit_is_found(good: str, bad: str, tmp_path: Path) -> None:
    copy = planted(installed(UNITS[0], tmp_path), good, bad, tmp_path)
    (said,) = [line for line in analyzed("verify", copy).stderr.splitlines() if copy.name in line]
    assert bad.rstrip("=").split("=")[-1] in said


@needs_systemd
def test_a_unit_without_hardening_is_found(tmp_path: Path) -> None:
    lines = UNITS[0].read_text().splitlines(keepends=True)
    soft = tmp_path / UNITS[0].name
    soft.write_text("".join(line for line in lines if not re.match(r"Protect|Private|Restrict|System|Dynamic", line)))
    assert analyzed("security", "--offline=true", f"--threshold={EXPOSURE}", soft).returncode != 0


def test_every_file_is_looked_at() -> None:
    assert [path.name for path in UNITS] == ["rollout-gateway.service", "rollout-server.service"]
    assert [str(path.relative_to(KUBERNETES)) for path in MANIFESTS] == [
        "fleet/gateway.yaml",
        "fleet/servers.yaml",
        "secret.example.yaml",
        "single/server.yaml",
    ]
    assert set(compose()["services"]) == {"server", "gateway", "trainer"}
