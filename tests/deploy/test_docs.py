"""The pages on deployment, troubleshooting, migrating and masks are run, or compared with the sources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from osmosis.rollout.v1 import outcome_pb2
from rollout_gateway.app import create_app
from rollout_gateway.channel import open_channel
from rollout_gateway.osmosis_http.outcome import rollout_response
from rollout_gateway.settings import GatewaySettings
from rollout_server.edge.metrics.families import WARNINGS
from rollout_server.settings import Settings, names_of
from rollout_server.settings.standalone_gateway import GatewayOptions, name_of

from tests.deploy.files import DEPLOY, ROOT
from tests.deploy.pages import said
from tests.support.processes import command, environment

DOCS = ROOT / "docs"
PAGES = ("deployment.md", "troubleshooting.md", "migrating.md", "masks.md")
SETTINGS = {name for field in Settings.model_fields for name in names_of(field)}
SETTINGS |= {name_of(field) for field in GatewayOptions.model_fields} | {"MOCK_TRAINER_PORT"}
UNREAD = {"ROLLOUT_DEBUG_DIR", "OSMOSIS_ROLLOUT_CLIENT_MAX_KEEPALIVE_CONNECTIONS"}
"""Settings of the reference servers that, according to docs/migrating.md, are not read."""


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_tables_of_settings_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, DEPLOY / "settings_tables.py", "--check"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_table_that_is_not_fresh_is_found(tmp_path: Path) -> None:
    for name in ("deployment.md", "migrating.md"):
        (tmp_path / name).write_text(page(name).replace("`9000`", "`9999`").replace("| `300` |", "| `301` |"))
    code = f"import settings_tables as t, pathlib, sys; t.DOCS = pathlib.Path({str(tmp_path)!r}); sys.exit(t.main(['--check']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=DEPLOY, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "not fresh: deployment.md, migrating.md; run `make docs`\n")


@pytest.mark.parametrize("name", PAGES)
def test_every_setting_that_is_named_is_one(name: str) -> None:
    named = set(
        re.findall(r"\b(?:ROLLOUT|OSMOSIS|TOKENIZER|HTTP_CLIENT|MAX_CONCURRENT|MOCK_TRAINER)_[A-Z_]+\b", page(name))
    )
    assert named - SETTINGS - UNREAD == set()


def test_settings_that_are_not_read_are_not() -> None:
    assert SETTINGS.isdisjoint(UNREAD)


@pytest.mark.parametrize("name", PAGES)
async def test_every_path_that_is_named_is_served(name: str) -> None:
    app = create_app([open_channel("127.0.0.1:1", None)], GatewaySettings())
    served = {*app.openapi()["paths"], "/docs", "/openapi.json"}
    named = set(re.findall(r"(?:GET|POST) (/[a-z0-9/{}_]+)", page(name))) | set(
        re.findall(r"`(/(?:healthz|readyz|metrics|docs|health))`", page(name))
    )
    assert named - served == set()
    for path, query in re.findall(r"GET (/[a-z0-9/]+)\?([a-z_=&]+)", page(name)):
        known = {each["name"]: each["schema"] for each in app.openapi()["paths"][path]["get"]["parameters"]}
        for pair in query.split("&"):
            key, _, value = pair.partition("=")
            assert value in known[key]["items"]["enum"]


@pytest.mark.parametrize("name", PAGES)
def test_every_file_that_is_named_is_there(name: str) -> None:
    text = page(name)
    named = set(re.findall(r"\b(?:deploy|docs|tests|bench)/[\w./-]*\w", text))
    named |= {f"docs/{link}" for link in re.findall(r"\]\((\w+\.md)\)", text)}
    assert {each for each in named if not (ROOT / each).exists()} == set()
    targets = set(re.findall(r"`make ([a-z-]+)", text))
    assert targets <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


QUOTES = {re.sub(r"\s+", " ", quote) for quote in re.findall(r"`([^`]+)`", page("troubleshooting.md"))}
SENTENCES = sorted(quote for quote in QUOTES if quote.count(" ") >= 2)


@pytest.mark.parametrize("quote", [*SENTENCES, "Not found"])
def test_an_error_is_quoted_as_the_server_says_it(quote: str) -> None:
    # The status is an inserted value.
    words = re.sub(r"(?<=answered )\d+$", "…", quote).removeprefix("Error: ")
    assert said(words) or quote.startswith(("rollout keys ", "rollout tools "))


def test_a_quote_that_nobody_says_is_found() -> None:
    assert not said("there is no roll-out …; finished ones are forgotten after a while")
    assert not said("… of nothing that … was ever written")


def test_every_category_and_every_warning_is_explained() -> None:
    told = page("troubleshooting.md")
    numbers = [number for number in outcome_pb2.FailureCategory.values() if number]
    failures = [outcome_pb2.Outcome(failure=outcome_pb2.Failure(category=number)) for number in numbers]
    words = {json.loads(rollout_response("any", each))["extra_fields"]["error_category"] for each in failures}
    assert len(words) > 5
    assert {word for word in words if f"`{word}`" not in told} == set()
    assert {code for code in WARNINGS if f"| `{code}` |" not in page("masks.md")} == set()


async def test_the_example_of_masks_is_what_the_demo_shows(tmp_path: Path) -> None:
    done = await command("demo", cwd=tmp_path)
    assert done.code == 0, done.err
    shown = re.sub(r"^\s*\d+ ", "", done.out, flags=re.MULTILINE)
    events, ledger = re.findall(r"```\n(.*?)```", page("masks.md"), flags=re.DOTALL)
    assert [line for line in events.splitlines() if line not in shown] == []
    assert ledger.strip() in done.out
    (last,) = re.findall(r"^`(trainer: .*)`,", page("masks.md"), flags=re.MULTILINE)
    assert last in done.out


def test_the_snippet_about_lengths_prints_what_the_page_says(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", page("masks.md"), flags=re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"prints `{done.stdout.strip()}`" in page("masks.md")
