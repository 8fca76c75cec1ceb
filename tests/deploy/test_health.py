"""The image's health check, run as the image runs it, and the probes of the manifests, against real servers."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.files import DEPLOY, DOCKERFILE, KUBERNETES, ROOT, Yaml, compose, of_kind, settings_of, workloads
from tests.support.certificates import Authority
from tests.support.forking import forker
from tests.support.gateway_process import Alone
from tests.support.processes import Finished, Serving, environment, serve

PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
SERVING = health_pb2.HealthCheckResponse.SERVING


async def checked(*arguments: str, **env: str) -> Finished:
    """The command of HEALTHCHECK, with the path of the script in this repository."""
    (line,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE.read_text(), re.MULTILINE)
    python, script = json.loads(line)
    assert (python, Path(script).name) == ("python", "healthcheck.py")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        DEPLOY / "healthcheck.py",
        *arguments,
        env=environment(http_proxy="http://127.0.0.1:1", **env),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Finished(process.returncode, out.decode(), err.decode())


async def test_a_server_is_healthy_until_it_is_away(tmp_path: Path) -> None:
    async with serve(cwd=tmp_path) as serving:
        port = str(serving.http_port)
        assert (await checked(ROLLOUT_SERVER_PORT=port)).code == 0
        async with httpx.AsyncClient(trust_env=False) as client:
            metrics = (await client.get(f"{serving.url}/metrics")).text
        told = re.findall(r"rollout_[a-z_]+(?=`|\{)", (ROOT / "docs" / "deployment.md").read_text())
        assert {name for name in told if name not in metrics} == set()
        assert (await checked(f"{serving.url}/nowhere")).err.startswith(f"{serving.url}/nowhere returned 404")
        serving.send(signal.SIGTERM)
        await serving.ended()
    gone = await checked(ROLLOUT_SERVER_PORT=port)
    assert gone.code == 1
    assert "refused" in gone.err


async def test_a_server_with_tls_is_healthy_also_where_clients_need_certificates(tmp_path: Path) -> None:
    authority = Authority()
    pair = authority.put(tmp_path)
    tls = {"ROLLOUT_TLS_CERT": str(pair.cert), "ROLLOUT_TLS_KEY": str(pair.key)}
    async with serve(cwd=tmp_path, **tls) as serving:
        assert (await checked(ROLLOUT_SERVER_PORT=str(serving.http_port), **tls)).code == 0
        assert (await checked(ROLLOUT_SERVER_PORT=str(serving.http_port))).code == 1
    tls["ROLLOUT_TLS_CLIENT_CA"] = str(authority.put_ca(tmp_path))
    async with serve(cwd=tmp_path, **tls) as serving:
        assert (await checked(ROLLOUT_SERVER_PORT=str(serving.http_port), **tls)).code == 0


async def test_a_gateway_is_healthy_and_answers_its_probes_while_its_server_is_there(tmp_path: Path) -> None:
    async with serve(cwd=tmp_path) as serving:
        gateway = await alone(serving, tmp_path)
        values = {"ROLLOUT_SERVERS": f"127.0.0.1:{serving.grpc_port}", "ROLLOUT_GATEWAY_PORT": str(gateway.port)}
        assert (await checked(**values)).code == 0
        (manifest,) = of_kind(KUBERNETES / "fleet" / "gateway.yaml", "Deployment")
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", trust_env=False) as client:
            for probe in PROBES:
                assert (await client.get(container[probe]["httpGet"]["path"])).status_code == 200
        serving.send(signal.SIGTERM)
        await serving.ended()
        away = await checked(**values)
        gateway.send(signal.SIGTERM)
        await gateway.ended()
    assert away.code == 1
    assert "returned 503" in away.err


async def alone(serving: Serving, directory: Path) -> Alone:
    flags = ("--host", "127.0.0.1", "--port", "0", "--server", f"127.0.0.1:{serving.grpc_port}")
    process = await forker().fork("gateway", *flags, cwd=directory, env=environment())
    gateway = Alone(process)
    await gateway.start()
    return gateway


async def test_the_trainer_is_healthy_by_the_check_of_the_compose_file(tmp_path: Path) -> None:
    test = compose()["services"]["trainer"]["healthcheck"]["test"]
    assert test[:3] == ["CMD", "python", "/opt/rollout/healthcheck.py"]
    process = await forker().fork("trainer", "--port", "0", "--tools-from", "", cwd=tmp_path, env=environment())
    said = ""
    while not (found := re.search(r"strict trainer on (http://127\.0\.0\.1:\d+)", said)):
        line = await process.stderr.readline()
        assert line, said
        said += line.decode()
    url = test[3].replace("http://127.0.0.1:9001", found[1])
    assert url != test[3]
    try:
        assert (await checked(url)).code == 0
    finally:
        process.terminate()
        await process.wait()


@pytest.mark.parametrize(
    ("path", "workload"),
    [each for each in workloads() if each[1]["metadata"]["name"] == "rollout-server"],
    ids=["fleet", "single"],
)
async def test_a_server_with_the_settings_of_its_manifest_answers_its_probes(
    path: Path, workload: Yaml, tmp_path: Path
) -> None:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    (secret,) = of_kind(KUBERNETES / "secret.example.yaml", "Secret")
    keys = tmp_path / "keys"
    keys.write_text(secret["stringData"]["keys"])
    settings = settings_of(path, workload)
    # Metrics also use port 0, and the journal is the test's own, because tests run in parallel.
    own = {"ROLLOUT_METRICS_PORT": "0", "ROLLOUT_JOURNAL": str(tmp_path / "journal")}
    settings |= {"ROLLOUT_API_KEYS_FILE": str(keys), **own}
    async with serve(cwd=tmp_path, **settings) as serving:
        for probe in PROBES:
            if "grpc" in container[probe]:
                assert await grpc_health(serving.grpc_port) == SERVING
            else:
                async with httpx.AsyncClient(trust_env=False) as client:
                    answer = await client.get(serving.url + container[probe]["httpGet"]["path"])
                assert answer.status_code == 200
        where = {"ROLLOUT_SERVER_PORT": str(serving.http_port), "ROLLOUT_GRPC_PORT": str(serving.grpc_port)}
        assert (await checked(**settings, **where)).code == 0
        # The example Secret holds no key, so every call is refused.
        assert await refused(serving.grpc_port)
    assert (await checked(**settings, **where)).code == 1


async def grpc_health(port: int) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return int(answer.status)


async def refused(port: int) -> bool:
    from osmosis.rollout.v1 import rollout_service_pb2 as pb
    from osmosis.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await RolloutServiceStub(channel).ListAgents(pb.ListAgentsRequest())
    return caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
