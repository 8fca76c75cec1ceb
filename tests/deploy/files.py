"""Parsers for the deployment files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = ROOT / "Dockerfile"
COMPOSE = DEPLOY / "compose.yaml"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ENVIRONMENTS = sorted((DEPLOY / "systemd").glob("*.env.example"))
KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name != "kustomization.yaml")
WORKLOADS = ("Deployment", "StatefulSet")

Yaml = Any
SECONDS = {"s": 1, "m": 60}
BYTES = {"k": 2**10, "m": 2**20, "g": 2**30, "Mi": 2**20, "Gi": 2**30}


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a tool of the current environment."""
    command = [Path(sys.executable).parent / name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def compose() -> Yaml:
    """The compose file, with merge keys resolved."""
    return yaml.safe_load(COMPOSE.read_text())


def objects(path: Path) -> Sequence[Yaml]:
    """The objects of a manifest."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def of_kind(path: Path, *kinds: str) -> Sequence[Yaml]:
    """The objects of some kinds."""
    return [each for each in objects(path) if each["kind"] in kinds]


def workloads() -> Sequence[tuple[Path, Yaml]]:
    """Every Deployment and StatefulSet, with its file."""
    return [(path, each) for path in MANIFESTS for each in of_kind(path, *WORKLOADS)]


def settings_of(path: Path, workload: Yaml) -> dict[str, str]:
    """The settings in a workload's ConfigMap."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    (source,) = container["envFrom"]
    name = source["configMapRef"]["name"]
    (config,) = [each for each in of_kind(path, "ConfigMap") if each["metadata"]["name"] == name]
    return dict(config["data"])


def unit(path: Path) -> dict[str, list[str]]:
    """The entries of a systemd unit, by key."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, separator, value = line.partition("=")
        if separator and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def environment(path: Path) -> dict[str, str]:
    """The variables of an environment file, including those that are commented out."""
    lines = (line.removeprefix("#") for line in path.read_text().splitlines())
    return dict(line.split("=", 1) for line in lines if re.match(r"[A-Z_]+=", line))


def measured(text: str, units: dict[str, int]) -> int:
    """`60s`, `2Gi` and similar values as a number."""
    found = re.fullmatch(r"([0-9]+)([A-Za-z]+)", text)
    assert found is not None, text
    return int(found[1]) * units[found[2]]
