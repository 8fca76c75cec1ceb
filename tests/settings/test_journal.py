"""Where the journal is, and which keys it accepts."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from rollout_server.settings import WrongSettings, load
from rollout_server.settings.journal import journal_directory

NO_HOME = "ROLLOUT_JOURNAL: this user has no home directory"


def test_memory_is_memory_everywhere() -> None:
    for port in (0, 50051):
        assert journal_directory("memory", port, durable_by_default=True) is None
        assert journal_directory("memory", port, durable_by_default=False) is None


@pytest.mark.parametrize("port", [0, 50051])
@pytest.mark.parametrize("durable", [True, False])
def test_a_named_directory_is_used_whatever_the_default(tmp_path: Path, port: int, durable: bool) -> None:
    assert journal_directory(str(tmp_path / "j"), port, durable_by_default=durable) == tmp_path / "j"
    assert not (tmp_path / "j").exists()


def test_a_relative_path_belongs_to_the_working_directory_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert journal_directory("state/journal", 0, durable_by_default=False) == tmp_path / "state" / "journal"
    assert journal_directory("./memory", 0, durable_by_default=False) == tmp_path / "memory"


def test_a_tilde_is_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    assert journal_directory("~/journal", 0, durable_by_default=False) == Path("/home/of/me/journal")


def test_by_default_each_port_of_a_served_server_has_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    monkeypatch.setenv("HOME", "/home/of/me")
    assert journal_directory(None, 50051, durable_by_default=True) == Path("/state/rollout-server/50051")
    assert journal_directory(None, 50052, durable_by_default=True) == Path("/state/rollout-server/50052")
    assert journal_directory(None, 50051, durable_by_default=False) is None


@pytest.mark.parametrize("state", [None, "", "state"])
def test_without_a_full_xdg_state_home_it_is_below_the_home_directory(
    monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    monkeypatch.setenv("HOME", "/home/of/me")
    if state is None:
        monkeypatch.delenv("XDG_STATE_HOME")
    else:
        monkeypatch.setenv("XDG_STATE_HOME", state)
    found = journal_directory(None, 50051, durable_by_default=True)
    assert found == Path("/home/of/me/.local/state/rollout-server/50051")


def test_a_port_that_changes_means_memory() -> None:
    assert journal_directory(None, 0, durable_by_default=True) is None
    assert journal_directory(None, 0, durable_by_default=False) is None


@pytest.mark.parametrize("setting", [None, "~/journal", "~nobody-of-this-name/journal"])
def test_a_user_without_a_home_is_asked_for_a_directory(monkeypatch: pytest.MonkeyPatch, setting: str | None) -> None:
    def unknown(_: object) -> pwd.struct_passwd:
        raise KeyError

    for variable in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)  # a container may run as a user that has no entry
    with pytest.raises(WrongSettings) as caught:
        journal_directory(setting, 50051, durable_by_default=True)
    assert str(caught.value).startswith(NO_HOME)


@pytest.mark.parametrize("text", ["", " ", "\t"])
def test_an_empty_directory_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("ROLLOUT_JOURNAL", text)
    with pytest.raises(WrongSettings) as caught:
        load(_env_file=None)
    assert str(caught.value).startswith("ROLLOUT_JOURNAL: is empty; name a directory, or memory")


def test_a_fernet_key_is_accepted() -> None:
    key = Fernet.generate_key().decode()
    loaded = load(_env_file=None, journal_key=key).journal_key
    assert loaded is not None
    assert loaded.get_secret_value() == key


@pytest.mark.parametrize("key", ["", "marker-1", "marker" * 10, "märker", "bWFya2Vy", "A" * 43])
def test_another_key_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("ROLLOUT_JOURNAL_KEY", key)
    with pytest.raises(WrongSettings) as caught:
        load(_env_file=None)
    text = str(caught.value)
    assert text.startswith("ROLLOUT_JOURNAL_KEY: is not a Fernet key; create one with python -c")
    assert text.isprintable()
    assert "marker" not in text
    with pytest.raises(ValueError, match=r"Fernet|ASCII"):
        Fernet(key)


def test_what_is_unset_has_its_default() -> None:
    loaded = load(_env_file=None)
    assert (loaded.journal, loaded.journal_key, loaded.on_interrupt) == (None, None, "resume")
