"""Settings whose errors show only at startup: one line names them, without a traceback, and no resources are left behind."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import trustme
from rollout_server.app import Server
from rollout_server.edge.api_keys import entry_of
from rollout_server.settings import WrongSettings

from tests.support.agents import Idle
from tests.support.processes import command, environment
from tests.support.start_requests import settings

TLS = "ROLLOUT_TLS_CERT, ROLLOUT_TLS_KEY or ROLLOUT_TLS_CLIENT_CA"
SECRET = "marker-0123456789"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a certificate, its key, the key of another one, and unusable files."""
    directory = tmp_path_factory.mktemp("files")
    ca = trustme.CA()
    for name in ("server", "another"):
        issued = ca.issue_cert("localhost")
        (directory / f"{name}.pem").write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        (directory / f"{name}.key").write_bytes(issued.private_key_pem.bytes())
    (directory / "nonsense").write_text(f"alice {SECRET}\n")
    (directory / "binary").write_bytes(bytes(range(256)))
    return directory


PAIRS = {
    "half a pair": ({"tls_cert": "server.pem"}, "ROLLOUT_TLS_CERT and ROLLOUT_TLS_KEY"),
    "the other half": ({"tls_key": "server.key"}, "ROLLOUT_TLS_CERT and ROLLOUT_TLS_KEY"),
    "a CA alone": ({"tls_client_ca": "server.pem"}, "ROLLOUT_TLS_CERT and ROLLOUT_TLS_KEY"),
    "no certificate": ({"tls_cert": "missing", "tls_key": "server.key"}, TLS),
    "no key": ({"tls_cert": "server.pem", "tls_key": "missing"}, TLS),
    "a key of another": ({"tls_cert": "server.pem", "tls_key": "another.key"}, TLS),
    "no PEM": ({"tls_cert": "binary", "tls_key": "server.key"}, TLS),
    "a directory": ({"tls_cert": ".", "tls_key": "server.key"}, TLS),
    "no client CA": ({"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "nonsense"}, TLS),
    "no target CA": ({"target_ca": "missing"}, "ROLLOUT_TARGET_CA"),
    "a target CA that is none": ({"target_ca": "server.key"}, "ROLLOUT_TARGET_CA"),
    "no file of keys": ({"api_keys_file": "missing"}, "ROLLOUT_API_KEYS_FILE"),
    "a directory of keys": ({"api_keys_file": "."}, "ROLLOUT_API_KEYS_FILE"),
    "a file of plain keys": ({"api_keys_file": "nonsense"}, "ROLLOUT_API_KEYS_FILE"),
    "a binary file of keys": ({"api_keys_file": "binary"}, "ROLLOUT_API_KEYS_FILE"),
}
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "plain keys": ({"api_keys": f"alice {SECRET}"}, "ROLLOUT_API_KEYS"),
    "a comment for keys": ({"api_keys": "# none"}, "ROLLOUT_API_KEYS"),
    "a name that is taken": ({"api_keys": entry_of("a", "k").replace("a ", "anonymous ", 1)}, "ROLLOUT_API_KEYS"),
    "an empty key": ({"api_key": ""}, "ROLLOUT_API_KEY"),
    "a key with spaces": ({"api_key": f" {SECRET}"}, "ROLLOUT_API_KEY"),
    "a key beyond ASCII": ({"admin_key": f"{SECRET}ü"}, "ROLLOUT_ADMIN_KEY"),
    "no rule": ({"targets": "a:b:c"}, "ROLLOUT_TARGETS"),
    "no port": ({"targets": "a.example:99999"}, "ROLLOUT_TARGETS"),
    "no network": ({"targets": "10.0.0.1/8"}, "ROLLOUT_TARGETS"),
    "a URL": ({"targets": "http://a.example"}, "ROLLOUT_TARGETS"),
    "no scheme": ({"target_schemes": "http,ftp"}, "ROLLOUT_TARGET_SCHEMES"),
    "no schemes": ({"target_schemes": ""}, "ROLLOUT_TARGET_SCHEMES"),
}


async def complaint(**changes: Any) -> str:
    """The error with which a server refuses to start."""
    with pytest.raises(WrongSettings) as caught:
        async with Server([Idle()], settings(**changes)):
            raise AssertionError("the server started")
    return str(caught.value)


def check(said: str, variable: str) -> None:
    """Assert that the error is one line that begins with the variable's name and contains no key."""
    assert said.startswith(variable)
    assert len(said) > len(variable) + 10
    assert said.isprintable()
    assert SECRET not in said


@pytest.mark.parametrize(("changes", "variable"), PAIRS.values(), ids=PAIRS.keys())
async def test_a_file_that_is_of_no_use_is_named(files: Path, changes: dict[str, str], variable: str) -> None:
    said = await complaint(**{name: files / value for name, value in changes.items()})
    check(said, variable)
    if "needed together" not in said:
        assert str(files) in said


@pytest.mark.parametrize(("changes", "variable"), VALUES.values(), ids=VALUES.keys())
async def test_a_value_that_is_of_no_use_is_named(changes: dict[str, Any], variable: str) -> None:
    check(await complaint(**changes), variable)


async def test_a_server_that_does_not_start_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    await complaint(targets="a:b:c")
    assert caplog.records == []


SERVED = {
    "half a pair": {"ROLLOUT_TLS_CERT": "server.pem"},
    "a file of plain keys": {"ROLLOUT_API_KEYS_FILE": "nonsense"},
    "commas": {"ROLLOUT_TARGETS": ","},
    "no rule": {"ROLLOUT_TARGETS": "a:b:c"},
}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("env", SERVED.values(), ids=SERVED.keys())
async def test_serve_says_it_in_one_line_ends_and_leaves_nothing_behind(
    files: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    own = environment(**env, TMPDIR=str(tmp_path))
    told = await command("serve", "--http-port", "0", "--grpc-port", "0", cwd=files, env=own)
    assert told.code == 1
    assert left_in(tmp_path) == []
    assert told.out == ""
    (line,) = told.err.splitlines()
    check(line.removeprefix("rollout serve: "), next(iter(env)))
