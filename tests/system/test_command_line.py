"""The command `rollout`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from rollout_server import __version__
from rollout_server.cli.commands import app
from rollout_server.settings import Settings
from typer.testing import CliRunner, Result

from tests.support.processes import command, environment

Invoke = Callable[..., Result]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def invoke(tmp_path: Path) -> Iterator[Invoke]:
    """`invoke(*arguments, **environment)`: run a command that does not serve, in this process, in an empty directory."""
    runner, path, clean = CliRunner(), list(sys.path), environment()

    def invoked(*arguments: str, **env: str) -> Result:
        unset = dict.fromkeys(os.environ.keys() - clean.keys())
        return runner.invoke(app, arguments, env={**unset, **clean, **env})

    with contextlib.chdir(tmp_path):
        yield invoked
    sys.path[:] = path


def told_without_a_traceback(result: Result) -> str:
    """The standard error of a failed command, which must have no traceback."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.stderr
    return result.stderr


NAMES = {
    "MAX_CONCURRENT_ROLLOUTS": ("max_running", "7"),
    "HTTP_CLIENT_TIMEOUT": ("trainer_timeout_seconds", "11.5"),
    "ROLLOUT_TIMEOUT_SECONDS": ("timeout_seconds", "13.0"),
    "ROLLOUT_SERVER_HOST": ("host", "127.0.0.9"),
    "ROLLOUT_SERVER_PORT": ("http_port", "9100"),
    "ROLLOUT_GRPC_PORT": ("grpc_port", "50100"),
    "TOKENIZER_CACHE_SIZE": ("tokenizer_cache_size", "2"),
    "TOKENIZER_TRUST_REMOTE_CODE": ("tokenizer_trust_remote_code", "true"),
    "OSMOSIS_ROLLOUT_CLIENT_MAX_CONNECTIONS": ("trainer_connections", "17"),
    "OSMOSIS_ROLLOUT_SERVER_RECORD_TTL_SECONDS": ("record_ttl_seconds", "19.0"),
    "OSMOSIS_ROLLOUT_SERVER_CLEANUP_INTERVAL_SECONDS": ("cleanup_seconds", "23.0"),
    "OSMOSIS_ROLLOUT_MAX_METADATA_SIZE_BYTES": ("max_metadata_bytes", "29"),
}
OTHER_NAMES = {
    "OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS": ("max_running", "8"),
    "OSMOSIS_ROLLOUT_CLIENT_TIMEOUT_SECONDS": ("trainer_timeout_seconds", "12.5"),
}


@pytest.mark.parametrize("names", [NAMES, OTHER_NAMES], ids=["references", "sdk"])
def test_config_takes_the_names_of_the_references(invoke: Invoke, names: dict[str, tuple[str, str]]) -> None:
    told = invoke("config", "--json", **{name: value for name, (_, value) in names.items()})
    assert (told.exit_code, told.stderr) == (0, "")
    values = json.loads(told.stdout)
    assert {field: json.dumps(values[field]).strip('"') for field, _ in names.values()} == dict(names.values())


async def test_config_reads_dotenv_and_the_environment_wins(tmp_path: Path) -> None:
    """Run in a separate process."""
    dotenv = "ROLLOUT_MAX_RUNNING=5\nROLLOUT_TOKENIZERS=a=/x,b=toy\nROLLOUT_MAX_QUEUED=6\nSOMETHING_ELSE=1\n"
    (tmp_path / ".env").write_text(dotenv)
    told = await command("config", "--json", cwd=tmp_path, env=environment(ROLLOUT_MAX_QUEUED="7"))
    assert (told.code, told.err) == (0, "")
    values = json.loads(told.out)
    assert (values["max_running"], values["max_queued"]) == (5, 7)
    assert values["tokenizers"] == {"a": "/x", "b": "toy"}


def test_config_tells_names_values_and_meanings(invoke: Invoke) -> None:
    told = invoke("config")
    assert told.exit_code == 0
    assert "ROLLOUT_MAX_RUNNING=100\n" in told.stdout
    assert "Also MAX_CONCURRENT_ROLLOUTS, OSMOSIS_ROLLOUT_SERVER_MAX_CONCURRENT_ROLLOUTS." in told.stdout
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert field.description in told.stdout


BAD = {
    "no_number": ("MAX_CONCURRENT_ROLLOUTS", "many"),
    "too_small": ("ROLLOUT_MAX_RUNNING", "0"),
    "no_port": ("ROLLOUT_GRPC_PORT", "99999"),
    "no_word": ("ROLLOUT_LOG_FORMAT", "xml"),
    "no_pairs": ("ROLLOUT_TOKENIZERS", "Qwen/Qwen3-8B"),
}


@pytest.mark.parametrize(("name", "value"), BAD.values(), ids=BAD.keys())
def test_config_says_which_setting_is_wrong(invoke: Invoke, name: str, value: str) -> None:
    assert name in told_without_a_traceback(invoke("config", **{name: value}))


async def test_serve_says_which_setting_is_wrong(tmp_path: Path) -> None:
    told = await command("serve", cwd=tmp_path, env=environment(ROLLOUT_MAX_RUNNING="0", ROLLOUT_LOG_FORMAT="xml"))
    assert told.code == 1
    assert "Traceback" not in told.err
    assert "ROLLOUT_MAX_RUNNING" in told.err
    assert "ROLLOUT_LOG_FORMAT" in told.err


WRONG_AGENTS = {
    "no_colon": ("calculator", "MODULE:OBJECT"),
    "no_module": ("no_such_module:Agent", "no_such_module"),
    "no_file": ("nowhere/agent.py:Agent", "nowhere/agent.py"),
    "no_attribute": ("rollout_server.calculator:Missing", "Missing"),
    "no_agent": ("os:getcwd", "getcwd"),
    "broken_file": ("broken.py:Agent", "broken.py"),
    "broken_class": ("nameless.py:Nameless", "name"),
}


@pytest.mark.parametrize(("agent", "named"), WRONG_AGENTS.values(), ids=WRONG_AGENTS.keys())
def test_serve_says_what_is_wrong_with_an_agent(invoke: Invoke, agent: str, named: str) -> None:
    Path("broken.py").write_text("import no_such_module\n")
    Path("nameless.py").write_text("from rollout_server import Agent\n\n\nclass Nameless(Agent):\n    tools = ()\n")
    assert named in told_without_a_traceback(invoke("serve", agent))


def test_serve_says_what_is_wrong_with_a_flag(invoke: Invoke) -> None:
    assert "'toy' is not NAME=DIRECTORY" in told_without_a_traceback(invoke("serve", "--tokenizer", "toy"))
    twice = ("--tokenizer", "a=toy", "--tokenizer", "a=elsewhere")
    assert "--tokenizer: 'a' is there twice" in told_without_a_traceback(invoke("serve", *twice))


def test_version(invoke: Invoke) -> None:
    told = invoke("version")
    assert (told.exit_code, told.stdout.strip()) == (0, __version__)


def test_help_lists_the_commands(invoke: Invoke) -> None:
    told = invoke("--help")
    assert all(name in told.stdout for name in ("serve", "trainer", "demo", "config", "version"))


async def test_demo_ends_well_and_says_so_also_behind_a_proxy(tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    told = await command(
        "demo", "--svg", "tokens.svg", cwd=tmp_path, env=environment(http_proxy=nobody, HTTP_PROXY=nobody)
    )
    assert told.code == 0, told.err
    assert told.out.count("accepted 3 masks") == 2
    assert "accepted 3 turns and the outcome" in told.out
    assert told.out.count("its sample equals the server's, token for token") == 2
    assert "all tokens match" in told.out
    assert (tmp_path / "tokens.svg").read_text().startswith("<svg ")
    assert "Traceback" not in told.err


def test_trainer_says_that_its_port_is_taken(invoke: Invoke) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert port in told_without_a_traceback(invoke("trainer", "--port", port))


def test_trainer_says_that_a_directory_holds_no_tokenizer(invoke: Invoke, tmp_path: Path) -> None:
    assert str(tmp_path) in told_without_a_traceback(invoke("trainer", "--port", "0", "--tokenizer", str(tmp_path)))


LEAN = """
import sys, rollout_server
from rollout_server import Agent, Limits, Run, serve, tool
heavy = {"grpc", "google", "transformers", "torch", "fastapi", "uvicorn", "aiohttp", "typer", "rich", "jinja2"}
print(sorted(heavy & {name.partition(".")[0] for name in sys.modules}))
"""


async def test_importing_the_package_imports_nothing_heavy(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LEAN, cwd=tmp_path, env=dict(os.environ), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await process.communicate()
    assert (process.returncode, said.decode().strip()) == (0, "[]")


BASE = ("grpcio", "protobuf", "googleapis-common-protos", "typing-extensions", "rollout-server")
NEEDED = 'pip install "rollout-server[server]" (in a clone of it: pip install ".[server]")'


def only(folder: Path, distributions: Iterable[str]) -> dict[str, str]:
    """Link these installed distributions into a folder; return the environment of a Python that finds no others."""
    for distribution in map(metadata.distribution, distributions):
        for top in {file.parts[0] for file in distribution.files or () if not file.parts[0].startswith(("..", "__"))}:
            link = folder / top
            if not link.exists():  # two of them share `google`
                link.symlink_to(str(distribution.locate_file(top)))
    ours = [str(ROOT / name) for name in ("generated", "server", "gateway")]
    return environment(PYTHONPATH=os.pathsep.join([str(folder), *ours]))


async def python(env: dict[str, str], *arguments: str) -> tuple[int | None, str]:
    """Run Python without its own packages (-S); return its exit code and standard error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", *arguments, env=env, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


@pytest.mark.parametrize("arguments", [(), ("serve",), ("--version",), ("config", "--json")], ids=str)
async def test_where_only_the_client_is_installed_the_command_says_what_it_needs(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    code, said = await python(only(tmp_path, BASE), "-m", "rollout_server.cli", *arguments)
    assert (code, said) == (1, f"rollout: the module typer is not installed; run: {NEEDED}\n")


async def test_so_it_does_where_a_part_of_it_comes_with_something_else(tmp_path: Path) -> None:
    """Typer and others are often installed with a trainer."""
    others = ("typer", "click", "rich", "shellingham", "pygments", "annotated-doc", "markdown-it-py", "mdurl")
    code, said = await python(only(tmp_path, (*BASE, *others)), "-m", "rollout_server.cli", "config")
    assert code == 1
    assert said.startswith("rollout: ")
    assert said.endswith(f" is not installed; run: {NEEDED}\n")
    assert said.count("\n") == 1


async def test_where_only_the_client_is_installed_the_package_says_what_it_needs(tmp_path: Path) -> None:
    code = "import rollout_client, rollout_server.cli; from rollout_server import Agent"
    exit_code, said = await python(only(tmp_path, BASE), "-c", code)
    assert exit_code == 1
    last = said.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: ")
    assert last.endswith(f" is not installed: {NEEDED}")
