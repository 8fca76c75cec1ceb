"""Each setting is read from the environment under each of its names, and an error for an invalid value names it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from rollout_server.cli.commands import app
from rollout_server.edge.api_keys import entry_of
from rollout_server.settings import Settings, WrongSettings, load, names_of
from typer.testing import CliRunner, Result

from tests.support.processes import command, environment

FIELDS = Settings.model_fields
ENTRIES = {
    "api_keys": entry_of("a", "k"),
    "models": "judge=http://localhost:1|m,user=https://u|n|vllm",
    "targets": "10.0.0.0/8,*.example:80",
    "target_schemes": "https,grpcs",
}
KEYS = {"journal_key": "c2VjcmV0LW9mLXRoZS1qb3VybmFsLTMyLWJ5dGVzISE="}
Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path) -> Iterator[Invoke]:
    """`invoke(*flags, **environment)`: run `rollout config` in this process, in an empty directory."""
    clean = environment()

    def invoked(*flags: str, **env: str) -> Result:
        unset = dict.fromkeys(os.environ.keys() - clean.keys())
        return CliRunner().invoke(app, ["config", *flags], env={**unset, **clean, **env})

    with contextlib.chdir(tmp_path):
        yield invoked


def kind(field: FieldInfo) -> Any:
    """The type of a setting's value, without None."""
    if not isinstance(field.annotation, types.UnionType):
        return field.annotation
    return next(each for each in get_args(field.annotation) if each is not types.NoneType)


def other(name: str, field: FieldInfo) -> tuple[str, Any]:
    """A non-default value: as written in the environment, and as shown by `config --json`."""
    found = kind(field)
    shown: Any = f"/other/{name}"
    text = shown
    if name in ENTRIES:
        text, shown = ENTRIES[name], ENTRIES[name].split(",")
    elif name == "public_url":
        text = shown = "https://other.example/base"
    elif found is bool:
        text, shown = str(not field.default).lower(), not field.default
    elif found in (int, float):
        shown = found((field.default or 8) + 1)
        text = str(shown)
    elif found is SecretStr:
        text, shown = KEYS.get(name, f"secret-{name}"), "(hidden)"
    elif get_origin(found) is Literal:
        text = shown = next(each for each in get_args(found) if each != field.default)
    elif get_origin(found) is dict:
        text, shown = "a/b=/x, c=toy", {"a/b": "/x", "c": "toy"}
    return text, shown


OTHERS = {name: other(name, field) for name, field in FIELDS.items()}


def names(place: int) -> Mapping[str, str]:
    """One environment name per setting that has this many: the first, the second, ..."""
    return {name: names_of(name)[place] for name in FIELDS if len(names_of(name)) > place}


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_each_setting_is_read_from_the_environment(tmp_path: Path, place: int) -> None:
    chosen = names(place)
    assert chosen
    env = {variable: OTHERS[name][0] for name, variable in chosen.items()}
    told = await command("config", "--json", cwd=tmp_path, env=environment(**env))
    assert (told.code, told.err) == (0, "")
    values = json.loads(told.out)
    assert values.keys() == FIELDS.keys()
    assert {name: values[name] for name in chosen} == {name: OTHERS[name][1] for name in chosen}
    assert "secret-" not in told.out
    assert not any(key in told.out for key in KEYS.values())


async def test_each_is_read_from_dotenv(tmp_path: Path) -> None:
    lines = [f'{variable}="{OTHERS[name][0]}"' for name, variable in names(0).items()]
    (tmp_path / ".env").write_text("\n".join(lines), encoding="utf-8")
    told = await command("config", "--json", cwd=tmp_path, env=environment())
    values = json.loads(told.out)
    assert values == {name: shown for name, (_, shown) in OTHERS.items()}


def test_names_are_unique_and_ours_comes_first() -> None:
    every = [variable for name in FIELDS for variable in names_of(name)]
    assert len(every) == len(set(every))
    references = {"HTTP_CLIENT_TIMEOUT", "TOKENIZER_CACHE_SIZE", "TOKENIZER_TRUST_REMOTE_CODE"}
    for name in FIELDS:
        first = names_of(name)[0]
        assert first.startswith("ROLLOUT_") or first in references


def wrong_texts(field: FieldInfo) -> Iterator[str]:
    """Invalid values for a setting's environment variable."""
    found = kind(field)
    if found is bool:
        yield from ("maybe", "2", "")
    if found in (int, float):
        yield from ("many", "", "nan", "inf", "-inf", "1e999", "0x10", "1 2")
        for bound in field.metadata:
            if isinstance(bound, Gt):
                yield str(bound.gt)
            if isinstance(bound, Ge):
                yield str(int(str(bound.ge)) - 1)
            if isinstance(bound, Le):
                yield str(int(float(str(bound.le))) + 1)
    if found is int:
        yield from ("1.5", "1e3")
    if get_origin(found) is Literal:
        yield from ("", "xml", "TEXT ", "None")
    if get_origin(found) is dict:
        yield from ("a", "a=", "=a", "a=b,c", "a= ", " =a", "a=b,a=c")
    if get_origin(found) is tuple:
        yield from (",", " , ,", ",,")


def test_wrong_values_are_told_in_one_line_that_names_the_settings(invoke: Invoke) -> None:
    """In each round, every setting that has a further wrong value has it."""
    wrong = {names_of(name)[0]: list(wrong_texts(field)) for name, field in FIELDS.items()}
    assert sum(map(len, wrong.values())) > 500
    for number in range(max(map(len, wrong.values()))):
        texts = {variable: each[number] for variable, each in wrong.items() if number < len(each)}
        told = invoke(**texts)
        assert (told.exit_code, told.stdout) == (1, "")
        (line,) = told.stderr.splitlines()
        errors = re.split("; (?=[A-Z_]{4})", line.removeprefix("rollout config: "))
        said = [re.fullmatch(r"([A-Z_]+)(?: \([\w, ]+\))?: .+", error) for error in errors]
        assert sorted(found[1] for found in said if found) == sorted(texts), line
        assert len(said) == len(texts)


def test_all_that_is_wrong_is_told_at_once(invoke: Invoke) -> None:
    told = invoke(ROLLOUT_MAX_RUNNING="0", ROLLOUT_LOG_FORMAT="xml", ROLLOUT_TARGETS=",", HTTP_CLIENT_TIMEOUT="-1")
    (line,) = told.stderr.splitlines()
    for variable in ("ROLLOUT_MAX_RUNNING", "ROLLOUT_LOG_FORMAT", "ROLLOUT_TARGETS", "HTTP_CLIENT_TIMEOUT"):
        assert variable in line


def test_where_json_is_asked_for_the_same_is_told_in_it(invoke: Invoke) -> None:
    wrong = {"ROLLOUT_MAX_RUNNING": "0", "ROLLOUT_LOG_FORMAT": "xml"}
    told, people = invoke("--json", **wrong), invoke(**wrong)
    assert (told.exit_code, told.stderr) == (1, "")
    error = json.loads(told.stdout)["error"]
    assert (error["command"], error["kind"]) == ("config", "failed")
    assert people.stderr == f"rollout config: {error['message']}\n"


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_a_key_is_never_shown(name: str) -> None:
    loaded = Settings(_env_file=None, **{name: "marker-0123456789"})
    assert "marker" not in repr(loaded)
    assert "marker" not in str(loaded)
    assert "marker" not in loaded.model_dump_json()
    with pytest.raises(WrongSettings) as caught:
        load(**{name: ["marker-0123456789"], "max_running": 0})
    assert "marker" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", "\t"])
@pytest.mark.parametrize("name", ["targets", "api_keys"])
def test_nothing_is_an_empty_list(name: str, text: str) -> None:
    assert getattr(Settings(_env_file=None, **{name: text}), name) == ()


def test_entries_may_be_spaced() -> None:
    assert Settings(_env_file=None, targets=" 10.0.0.0/8 ,, a.example:80,").targets == ("10.0.0.0/8", "a.example:80")
