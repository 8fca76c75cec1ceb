"""Deployment files agree with the server: settings, ports, times, memory, names, and the contents of the image."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rollout_server.settings import Settings, names_of
from rollout_server.settings.standalone_gateway import GatewayOptions, name_of

from tests.deploy.files import (
    BYTES,
    COMPOSE,
    DEPLOY,
    DOCKERFILE,
    ENVIRONMENTS,
    KUBERNETES,
    MANIFESTS,
    ROOT,
    SECONDS,
    UNITS,
    Yaml,
    compose,
    environment,
    measured,
    of_kind,
    settings_of,
    unit,
    workloads,
)
from tests.support.processes import environment as clean

HTTP = Settings.model_fields["http_port"].default
GRPC = Settings.model_fields["grpc_port"].default
TRAINER = 9001
METRICS = 9100
DRAIN = Settings.model_fields["drain_seconds"].default
RECORDS = Settings.model_fields["max_record_bytes"].default
AFTER_DRAIN = 30
"""Seconds after the drain: slow agents (5) and their cleanup (10), last deliveries (5), HTTP (5), gRPC (1), and a reserve."""
BESIDE_RECORDS = 2**30
"""Memory that a server needs besides finished rollouts; docs/deployment.md has the measurements."""
SERVER_NAMES = {name for field in Settings.model_fields for name in names_of(field)}
GATEWAY_NAMES = {name_of(field) for field in GatewayOptions.model_fields}
TRAINER_NAMES = {"MOCK_TRAINER_PORT", "MOCK_TRAINER_API_KEY"}
OURS = re.compile(r"\b(?:ROLLOUT|OSMOSIS|TOKENIZER|HTTP_CLIENT|MAX_CONCURRENT|MOCK_TRAINER)_[A-Z_]+\b")
FILES = [DOCKERFILE, COMPOSE, *MANIFESTS, *UNITS, *ENVIRONMENTS, DEPLOY / "healthcheck.py", DEPLOY / "local.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_setting_that_is_named_is_one(path: Path) -> None:
    named = set(OURS.findall(path.read_text()))
    assert named - SERVER_NAMES - GATEWAY_NAMES - TRAINER_NAMES == set()


def accepted(command: str, values: Mapping[str, str]) -> None:
    """Whether `rollout config`, or the gateway's settings, accepts these values."""
    gateway = "from rollout_server.settings.standalone_gateway import load_options; load_options()"
    arguments = ["-c", gateway] if command == "gateway" else ["-m", "rollout_server.cli", "config"]
    done = subprocess.run(
        [sys.executable, *arguments], cwd=DEPLOY, env=clean(**values), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["server", "gateway"])
def test_settings_of_environment_files_are_accepted(name: str) -> None:
    values = environment(DEPLOY / "systemd" / f"{name}.env.example")
    assert values.keys() <= (GATEWAY_NAMES if name == "gateway" else SERVER_NAMES)
    accepted(name, values)


@pytest.mark.parametrize(("path", "workload"), workloads(), ids=lambda each: getattr(each, "name", ""))
def test_settings_of_config_maps_are_accepted(path: Path, workload: Yaml) -> None:
    values = settings_of(path, workload)
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert values.keys() <= (GATEWAY_NAMES if container["args"] == ["gateway"] else SERVER_NAMES)
    accepted(container["args"][0], values)


@pytest.mark.parametrize("name", ["server", "gateway"])
def test_settings_of_compose_are_accepted(name: str) -> None:
    text = json.dumps(compose()["services"][name]["environment"])
    values = json.loads(re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", text))
    assert values.keys() <= (GATEWAY_NAMES if name == "gateway" else SERVER_NAMES)
    accepted(name, values)


def test_what_is_deployed_listens_on_all_its_addresses() -> None:
    """By default both listen on loopback, which is not reachable from outside a container."""
    assert Settings.model_fields["host"].default == GatewayOptions.model_fields["host"].default == "127.0.0.1"
    hosts = {"server": "ROLLOUT_SERVER_HOST", "gateway": "ROLLOUT_GATEWAY_HOST"}
    for name, variable in hosts.items():
        assert f"{variable}=0.0.0.0" in DOCKERFILE.read_text()
        assert compose()["services"][name]["environment"][variable] == "0.0.0.0"
        entries = unit(DEPLOY / "systemd" / f"rollout-{name}.service")
        assert f"{variable}=0.0.0.0" in entries["Environment"]
    for path, workload in workloads():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        name = "gateway" if container["args"] == ["gateway"] else "server"
        assert settings_of(path, workload)[hosts[name]] == "0.0.0.0"


def test_ports_are_the_defaults() -> None:
    assert re.findall(r"^EXPOSE (.*)$", DOCKERFILE.read_text(), re.MULTILINE) == [f"{HTTP} {GRPC}"]
    published = {
        name: {each.rpartition(":")[2] for each in service["ports"]} for name, service in compose()["services"].items()
    }
    assert published == {"server": {str(HTTP), str(GRPC)}, "gateway": {str(HTTP)}, "trainer": {str(TRAINER)}}
    makefile = (ROOT / "Makefile").read_text()
    for name, port in (("HTTP_PORT", HTTP), ("GRPC_PORT", GRPC), ("TRAINER_PORT", TRAINER)):
        assert f"{name} ?= {port}\n" in makefile


@pytest.mark.parametrize(("path", "workload"), workloads(), ids=lambda each: getattr(each, "name", ""))
def test_ports_of_pods_are_served_and_probed(path: Path, workload: Yaml) -> None:
    values = settings_of(path, workload)
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    known = {"http": HTTP, "grpc": GRPC, "metrics": int(values.get("ROLLOUT_METRICS_PORT", 0))}
    assert {name: known[name] for name in ports} == ports
    assert ("http" in ports) is (values.get("ROLLOUT_HTTP") != "false")
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = container[probe]
        assert asked.get("grpc", {}).get("port", asked.get("httpGet", {}).get("port")) in {*ports, *ports.values()}
    for service in of_kind(path, "Service"):
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports.keys()
        assert {each["port"] for each in service["spec"]["ports"]} <= set(ports.values())
    scraped = workload["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert int(scraped) == ports.get("metrics", ports.get("http"))


@pytest.mark.parametrize(("path", "workload"), workloads(), ids=lambda each: getattr(each, "name", ""))
def test_pods_have_time_to_drain(path: Path, workload: Yaml) -> None:
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (_, before) = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
    drain = float(settings_of(path, workload).get("ROLLOUT_DRAIN_SECONDS", DRAIN))
    assert pod["terminationGracePeriodSeconds"] >= int(before) + drain + AFTER_DRAIN


def test_containers_have_time_to_drain() -> None:
    for name in ("server", "gateway"):
        service = compose()["services"][name]
        drain = float(service["environment"]["ROLLOUT_DRAIN_SECONDS"])
        assert measured(service["stop_grace_period"], SECONDS) >= drain + AFTER_DRAIN


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_have_time_to_drain_and_files_for_every_connection(path: Path) -> None:
    entries = unit(path)
    name = path.stem.removeprefix("rollout-")
    drain = float(environment(DEPLOY / "systemd" / f"{name}.env.example")["ROLLOUT_DRAIN_SECONDS"])
    assert int(entries["TimeoutStopSec"][0]) >= max(drain, DRAIN) + AFTER_DRAIN
    # Connections of HTTP callers, and as many to trainers.
    connections = (
        Settings.model_fields["max_connections"].default + Settings.model_fields["trainer_connections"].default
    )
    assert int(entries["LimitNOFILE"][0]) > connections


def test_patience_of_make_down_is_longer_than_the_drain() -> None:
    found = re.search(r'"--patience", type=float, default=(\d+)', (DEPLOY / "local.py").read_text())
    assert found is not None
    assert float(found[1]) >= DRAIN + AFTER_DRAIN


def test_memory_is_enough_for_the_records_that_are_kept() -> None:
    limits = {COMPOSE.name: (measured(compose()["services"]["server"]["mem_limit"], BYTES), RECORDS)}
    limits[UNITS[1].name] = (measured(unit(UNITS[1])["MemoryMax"][0].lower(), BYTES), RECORDS)
    for path, workload in workloads():
        (container,) = workload["spec"]["template"]["spec"]["containers"]
        if container["args"] == ["serve"]:
            records = int(settings_of(path, workload).get("ROLLOUT_MAX_RECORD_BYTES", RECORDS))
            limits[str(path)] = (measured(container["resources"]["limits"]["memory"], BYTES), records)
    assert len(limits) == 4
    assert {name for name, (limit, records) in limits.items() if limit < records + BESIDE_RECORDS} == set()


@pytest.mark.parametrize(("path", "workload"), workloads(), ids=lambda each: getattr(each, "name", ""))
def test_pods_are_hardened(path: Path, workload: Yaml) -> None:
    pod = workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE.read_text(), re.MULTILINE)
    context = pod["securityContext"]
    assert [(str(context["runAsUser"]), str(context["runAsGroup"]))] == user
    assert context["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # For a Service, Kubernetes sets NAME_PORT in capitals, which collides with the server's settings.
    assert pod["enableServiceLinks"] is False
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    assert "/tmp" in mounts
    claims = workload["spec"].get("volumeClaimTemplates", [])
    volumes = [*(each["name"] for each in pod["volumes"]), *(each["metadata"]["name"] for each in claims)]
    assert sorted(mounts.values()) == sorted(volumes)
    if container["args"] == ["serve"]:
        assert re.findall(r"HF_HOME=(\S+)", DOCKERFILE.read_text())[0] in mounts
        keys = Path(settings_of(path, workload)["ROLLOUT_API_KEYS_FILE"])
        assert str(keys.parent) in mounts
        (secret,) = of_kind(KUBERNETES / "secret.example.yaml", "Secret")
        assert keys.name in secret["stringData"]
        assert secret["metadata"]["name"] in [each.get("secret", {}).get("secretName") for each in pod["volumes"]]


def mount_of(path: str, mounts: Mapping[str, str]) -> str:
    """The volume on which a path lies."""
    (found,) = [volume for place, volume in mounts.items() if Path(path).is_relative_to(place)]
    return found


@pytest.mark.parametrize(("path", "workload"), workloads(), ids=lambda each: getattr(each, "name", ""))
def test_each_server_has_a_volume_for_its_journal(path: Path, workload: Yaml) -> None:
    spec, pod = workload["spec"], workload["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    if container["args"] != ["serve"]:
        return
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volume = mount_of(settings_of(path, workload)["ROLLOUT_JOURNAL"], mounts)
    if workload["kind"] == "StatefulSet":
        assert [each["metadata"]["name"] for each in spec["volumeClaimTemplates"]] == [volume]
    else:  # its pods would share the volume
        assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
        (claimed,) = [each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"] if each["name"] == volume]
        assert claimed in [each["metadata"]["name"] for each in of_kind(path, "PersistentVolumeClaim")]
    assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_the_image_has_a_place_for_the_journal_that_its_user_may_write() -> None:
    text = DOCKERFILE.read_text()
    (journal,) = re.findall(r"ROLLOUT_JOURNAL=(\S+)", text)
    (volumes,) = re.findall(r"^VOLUME (.*)$", text, re.MULTILINE)
    (place,) = [each for each in volumes.split() if Path(journal).is_relative_to(each)]
    assert re.search(rf"install --directory --owner rollout --group rollout --mode 0700 {place}\n", text)
    server = compose()["services"]["server"]
    mounts = {each.partition(":")[2]: each.partition(":")[0] for each in server["volumes"]}
    assert mount_of(server["environment"]["ROLLOUT_JOURNAL"], mounts) in compose()["volumes"]


def test_the_unit_keeps_the_journal_in_its_state_directory() -> None:
    entries = unit(DEPLOY / "systemd" / "rollout-server.service")
    (state,) = entries["StateDirectory"]
    assert any(each.startswith(f"ROLLOUT_JOURNAL=%S/{state}/") for each in entries["Environment"])
    assert entries["StateDirectoryMode"] == ["0700"]


def test_the_gateway_of_the_fleet_knows_every_server() -> None:
    (servers,) = of_kind(KUBERNETES / "fleet" / "servers.yaml", "StatefulSet")
    (service,) = of_kind(KUBERNETES / "fleet" / "servers.yaml", "Service")
    (config,) = of_kind(KUBERNETES / "fleet" / "gateway.yaml", "ConfigMap")
    assert service["spec"]["clusterIP"] == "None"
    assert service["metadata"]["name"] == servers["spec"]["serviceName"]
    assert service["spec"]["selector"] == servers["spec"]["template"]["metadata"]["labels"]
    name, domain = servers["metadata"]["name"], servers["spec"]["serviceName"]
    wanted = [f"{name}-{number}.{domain}:{GRPC}" for number in range(servers["spec"]["replicas"])]
    assert re.split(r",\s*", config["data"]["ROLLOUT_SERVERS"]) == wanted


def test_a_server_by_itself_is_one() -> None:
    (server,) = of_kind(KUBERNETES / "single" / "server.yaml", "Deployment")
    assert server["spec"]["replicas"] == 1


def test_images_are_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = {each["spec"]["template"]["spec"]["containers"][0]["image"] for _, each in workloads()}
    assert images == {f"rollout-server:{version}"}
    for path in KUBERNETES.rglob("kustomization.yaml"):
        assert f"newTag: {version}\n" in path.read_text()


def test_what_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    copied = [line.split()[1:-1] for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY ")]
    sources = {each for line in copied for each in line if not line[0].startswith("--from")}
    kept = {
        line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")
    }
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert kept - {"deploy"} == sources


def test_one_image_is_the_base_of_all_stages_and_its_python_is_one_we_support() -> None:
    stages = re.findall(r"^FROM (\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert stages[1:] == ["base", "base"]
    found = re.fullmatch(r"python:(3\.\d+)\.\d+-slim-\w+@sha256:[0-9a-f]{64}", stages[0])
    assert found is not None
    assert found[1] == tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["python_version"]


def pins(path: Path) -> dict[str, str]:
    """Each pin of a lock with its hashes."""
    blocks = re.split(r"\n(?=\S)", path.read_text().strip())
    return {block.split(" ")[0].strip(): block for block in blocks if not block.startswith("#")}


@pytest.mark.parametrize("name", ["server", "build"])
def test_the_image_is_made_of_what_was_tested(name: str) -> None:
    """`make lock` writes these locks within the large one, so no pin may differ."""
    tested, ours = pins(ROOT / "requirements" / "dev.lock"), pins(DEPLOY / f"{name}.lock")
    hashes = {pin: set(re.findall(r"sha256:[0-9a-f]{64}", block)) for pin, block in tested.items()}
    for pin, block in ours.items():
        assert pin in tested
        assert set(re.findall(r"sha256:[0-9a-f]{64}", block)) == hashes[pin]


def test_the_lock_of_the_server_has_all_that_it_needs() -> None:
    locked = {canonicalize_name(pin.partition("==")[0]) for pin in pins(DEPLOY / "server.lock")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    missing, seen, todo = set(), set(), [Requirement(each) for each in wanted]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen:
            continue
        seen.add((name, *requirement.extras))
        if name not in locked:
            missing.add(name)
            continue
        for text in distribution(name).requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needed)
    assert missing == set()
