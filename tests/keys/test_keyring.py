"""The configured keys: their syntax, the caller of a header, and a key file that is replaced while the server runs."""

from __future__ import annotations

import ast
import hashlib
import inspect
import logging
import os
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_server.core.error import Unauthenticated
from rollout_server.edge.api_keys import ANONYMOUS, Keyring, entry_of, key_of, new_key, read_entries
from rollout_server.runtime.start_request import Caller

ALICE, BOB, ADMIN = "key-of-alice-0123", "key-of-bob-4567", "key-of-admin-89ab"
HEX = hashlib.sha256(ALICE.encode()).hexdigest()
ENTRIES = [entry_of("alice", ALICE), entry_of("bob", BOB), entry_of("root", ADMIN, admin=True)]


@pytest.fixture
def ring() -> Keyring:
    return Keyring(read_entries(ENTRIES, "ROLLOUT_API_KEYS"))


def refused(ring: Keyring, header: str | None) -> str:
    """The error text for a header."""
    with pytest.raises(Unauthenticated) as caught:
        ring.caller(header)
    return str(caught.value)


def put(file: Path, *lines: str) -> None:
    """Replace a file atomically."""
    beside = file.with_suffix(".part")
    beside.write_text("\n".join(lines))
    beside.replace(file)


def test_each_key_is_its_caller(ring: Keyring) -> None:
    assert ring.demands
    assert ring.caller(f"Bearer {ALICE}") == Caller("alice")
    assert ring.caller(f"Bearer {BOB}") == Caller("bob")
    assert ring.caller(f"Bearer {ADMIN}") == Caller("root", admin=True)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER   {}", "{}", "  {} ", " Bearer {} "])
def test_the_scheme_may_be_left_out(ring: Keyring, form: str) -> None:
    assert ring.caller(form.format(ALICE)) == Caller("alice")


MALFORMED = [
    *(None, "", " ", "Bearer", "Bearer ", "bearer  ", "Basic", "\x00", "é", "\ud800", "ключ", "🔑", "\udcff\udcfe"),
    *(f"Basic {ALICE}", f"Token {ALICE}", f"Bearer {ALICE} x", f"Bearer{ALICE}", f"Bearer Bearer {ALICE}"),
    *(f"{ALICE},{BOB}", f"Bearer {ALICE[:-1]}", f"Bearer {ALICE}x", f"Bearer {ALICE.upper()}", f"Bearer {ALICE}\x00"),
    *(f"Bearer {HEX}", f"Bearer sha256:{HEX}", HEX, ENTRIES[0], f'Bearer "{ALICE}"', f"Bearer {ALICE}é"),
    *(f"Bearer \N{FULLWIDTH LATIN SMALL LETTER K}{ALICE[1:]}", "Bearer " + "x" * 2**20),
]


@pytest.mark.parametrize("header", MALFORMED, ids=lambda header: ascii(header)[:40])
def test_anything_else_is_refused_in_the_same_words(ring: Keyring, header: str | None) -> None:
    assert refused(ring, header) == refused(ring, None)


@given(st.text() | st.text().map("Bearer {}".format))
def test_no_text_breaks_it(header: str) -> None:
    refused(Keyring(read_entries(ENTRIES, "here")), header)


def test_without_keys_everybody_is_anonymous() -> None:
    ring = Keyring(())
    assert not ring.demands
    assert ring.caller(None) == ring.caller("Bearer anything") == Caller(ANONYMOUS)


def test_the_anonymous_key_lets_in_and_is_nobody_else(ring: Keyring) -> None:
    first, second = ring.anonymous_key(), ring.anonymous_key()
    assert first != second
    assert ring.caller(f"Bearer {first}") == ring.caller(second) == Caller(ANONYMOUS)
    assert Keyring(()).anonymous_key() != first
    refused(Keyring(read_entries(ENTRIES, "here")), first)


def test_a_demand_is_not_made_by_the_anonymous_key() -> None:
    ring = Keyring(())
    ring.anonymous_key()
    assert not ring.demands


def test_two_keys_of_one_name_are_one_caller() -> None:
    ring = Keyring(read_entries([entry_of("a", "one"), entry_of("a", "two"), entry_of("b", "three")], "here"))
    assert ring.caller("one") == ring.caller("two") != ring.caller("three")


@pytest.mark.parametrize("text", ["", " ", " key", "key ", "key\n", "ke\ty", "schlüssel", "🔑", "\x7f", "a\x00b"])
def test_a_key_that_no_header_carries_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(ValueError, match="printable ASCII") as caught:
        key_of("default", text)
    assert "schl" not in str(caught.value)


def test_no_repr_shows_a_key_or_its_hash(ring: Keyring) -> None:
    shown = repr((ring, key_of("a", ALICE), read_entries(ENTRIES, "here"), vars(ring)))
    assert ALICE not in shown
    assert HEX not in shown
    assert repr(hashlib.sha256(ALICE.encode()).digest()) not in shown


def test_keys_that_are_made_are_long_and_never_the_same() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    for key in made:
        assert len(key) >= 43
        assert Keyring([key_of("a", key)]).caller(f"Bearer {key}") == Caller("a")


LINES = [
    "# a file of keys",
    "",
    f"  {ENTRIES[0]}  # of the trainer",
    ENTRIES[1].replace(" ", "\t \t"),
    f"upper sha256:{hashlib.sha256(b'upper').hexdigest().upper()}",
]


def test_entries_are_read_with_comments_and_white_space() -> None:
    ring = Keyring(read_entries(LINES, "here"))
    assert [ring.caller(key).name for key in (ALICE, BOB, "upper")] == ["alice", "bob", "upper"]


WRONG_ENTRIES = {
    "the_key_itself": f"alice {ALICE}",
    "the_key_alone": ALICE,
    "no_name": f"sha256:{HEX}",
    "no_algorithm": f"alice {HEX}",
    "another_algorithm": f"alice md5:{HEX[:32]}",
    "short": f"alice sha256:{HEX[:-1]}",
    "long": f"alice sha256:{HEX}0",
    "no_hex": f"alice sha256:{'g' * 64}",
    "another_word": f"alice sha256:{HEX} owner",
    "two": f"alice sha256:{HEX} bob sha256:{HEX}",
    "no_such_name": f"al/ice sha256:{HEX}",
    "long_name": f"{'a' * 65} sha256:{HEX}",
    "wide_digits": f"alice sha256:{'٣' * 64}",
    "anonymous": f"{ANONYMOUS} sha256:{HEX}",
    "anonymous_admin": f"{ANONYMOUS} sha256:{HEX} admin",
    "hash_of_nothing": f"alice sha256:{hashlib.sha256(b'').hexdigest()}",
}


@pytest.mark.parametrize("entry", WRONG_ENTRIES.values(), ids=WRONG_ENTRIES.keys())
def test_a_wrong_entry_is_named_by_its_place_and_not_repeated(entry: str) -> None:
    with pytest.raises(ValueError, match="here, entry 3: ") as caught:
        read_entries(["# keys", ENTRIES[1], entry], "here")
    assert ALICE not in str(caught.value)
    assert HEX[:32] not in str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "a" * 65, "a\nb", ANONYMOUS, "#a"])
def test_no_entry_is_made_for_a_name_that_could_not_be_read(name: str) -> None:
    with pytest.raises(ValueError, match="a key's name"):
        entry_of(name, ALICE)


@pytest.mark.parametrize("admin", [False, True])
def test_an_entry_that_is_made_can_be_read(admin: bool) -> None:
    key = new_key()
    assert Keyring(read_entries([entry_of("a.b@c-d_E1", key, admin=admin)], "here")).caller(key).admin is admin


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring([key_of("default", "given")], file)
    put(file, ENTRIES[1], entry_of("alice", "another"))
    assert ring.caller(ALICE) == Caller("alice")  # the file has not been checked yet
    ring.refresh()
    refused(ring, ALICE)
    assert [ring.caller(key).name for key in (BOB, "another", "given")] == ["bob", "alice", "default"]


def test_a_file_that_is_written_in_place_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    put(file, entry_of("a", "one"))
    os.utime(file, (0, 0))
    ring = Keyring((), file)
    file.write_text(entry_of("a", "two"))  # the same length as before
    ring.refresh()
    refused(ring, "one")
    assert ring.caller("two") == Caller("a")


BROKEN = {
    "no_entry": b"this is no key\n",
    "half_an_entry": f"{ENTRIES[1]}\n{ENTRIES[0][:40]}".encode(),
    "a_key": ALICE.encode(),
    "no_utf8": b"\xff\xfe\x00a",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_kept_out_and_told_of_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring((), file)
    file.write_bytes(content)
    for _ in range(3):
        ring.refresh()
        assert ring.caller(ALICE) == Caller("alice")
        refused(ring, BOB)
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "stay unchanged" in record.getMessage()
    assert ALICE not in caplog.text
    put(file, ENTRIES[1])
    ring.refresh()
    assert ring.caller(BOB) == Caller("bob")
    assert [each.levelname for each in caplog.records] == ["ERROR", "INFO"]


def test_a_file_that_could_not_be_opened_for_a_moment_is_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the process has too many open files, nothing about the key file changes when that ends."""
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring((), file)
    put(file, ENTRIES[1])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        ring.refresh()
    assert ring.caller(ALICE) == Caller("alice")
    ring.refresh()
    refused(ring, ALICE)
    assert ring.caller(BOB) == Caller("bob")


def test_a_file_that_goes_away_is_told_of_once_and_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring((), file)
    file.unlink()
    for _ in range(3):
        ring.refresh()
    assert ring.caller(ALICE) == Caller("alice")
    assert ring.demands
    assert [str(file) in record.getMessage() for record in caplog.records] == [True]
    put(file, ENTRIES[1])
    ring.refresh()
    assert ring.caller(BOB) == Caller("bob")
    file.unlink()
    ring.refresh()
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 2


def test_what_stands_where_the_file_was_is_no_reason_to_let_anybody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring((), file)
    file.unlink()
    file.mkdir()
    ring.refresh()
    assert ring.caller(ALICE) == Caller("alice")
    refused(ring, BOB)


def test_an_empty_file_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    put(file, ENTRIES[0])
    ring = Keyring((), file)
    put(file, "# nobody")
    ring.refresh()
    assert ring.demands
    for header in (None, "", ALICE):
        refused(ring, header)


def test_a_link_that_is_turned_is_followed(tmp_path: Path) -> None:
    """Kubernetes replaces the files of a secret by changing a symbolic link."""
    for name, entry in (("one", ENTRIES[0]), ("two", ENTRIES[1])):
        put(tmp_path / name, entry)
    file, turned = tmp_path / "keys", tmp_path / "turned"
    file.symlink_to("one")
    ring = Keyring((), file)
    turned.symlink_to("two")
    turned.replace(file)
    ring.refresh()
    refused(ring, ALICE)
    assert ring.caller(BOB) == Caller("bob")


def test_a_file_that_cannot_be_read_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing"):
        Keyring((), tmp_path / "missing")
    put(tmp_path / "keys", "nonsense")
    with pytest.raises(ValueError, match="entry 1"):
        Keyring((), tmp_path / "keys")


def test_every_key_is_compared_as_a_digest_in_constant_time() -> None:
    """Checked on the source: the loop over the keys has no early exit, and it compares digests."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Keyring.caller)))
    (loop,) = (node for node in ast.walk(tree) if isinstance(node, ast.For))
    assert not [node for node in ast.walk(loop) if isinstance(node, ast.Break | ast.Return | ast.Raise | ast.Continue)]
    (condition,) = (node.test for node in ast.walk(loop) if isinstance(node, ast.If))
    assert ast.unparse(condition) == "hmac.compare_digest(key.digest, digest)"
    assert not [node for node in ast.walk(loop) if isinstance(node, ast.Compare)]
