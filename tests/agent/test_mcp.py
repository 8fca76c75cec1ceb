"""`mcp`: which servers and options it accepts, and which policy a tool of a server gets."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_server import mcp
from rollout_server.runtime.tools.toolset import ListedTool

URL = "https://tools.example/mcp"
HINTED, PLAIN = ListedTool("hinted", "", "{}", idempotent=True), ListedTool("plain", "", "{}")


def test_a_server_is_a_url_or_a_command() -> None:
    assert (str(mcp(URL)), mcp(URL).address) == (URL, URL)
    command = mcp(["npx", "-y", "server"], include=["read"], session="shared", environment=["KEY"], directory="/srv")
    assert (str(command), command.address) == ("npx -y server", ("npx", "-y", "server"))
    assert (command.include, command.session) == (("read",), "shared")
    assert (command.environment, command.directory) == (("KEY",), "/srv")
    assert (mcp(URL).include, mcp(URL).session, mcp(URL).policy.timeout) == (None, "rollout", 60.0)
    assert hash(command) == hash(
        mcp(("npx", "-y", "server"), include=("read",), session="shared", environment=("KEY",), directory="/srv")
    )


@pytest.mark.parametrize(
    ("server", "options", "error"),
    [
        ("tools.example", {}, ValueError("begins with http")),
        ("ftp://tools.example", {}, ValueError("begins with http")),
        ("http:///mcp", {}, ValueError("begins with http")),
        ("https://user:secret@tools.example", {}, ValueError("must not contain a user name")),
        ("https://tools.example/#a", {}, ValueError("must not have a fragment")),
        ("https://tools.example/a b", {}, ValueError("printable ASCII")),
        ("https://tools.example:port/", {}, ValueError("cannot be parsed")),
        (5, {}, TypeError("must be a URL or a command")),
        ([], {}, ValueError("a list of texts, none of them empty")),
        (["npx", ""], {}, ValueError("a list of texts, none of them empty")),
        (["npx", 5], {}, ValueError("a list of texts, none of them empty")),
        (URL, {"include": "read"}, TypeError("include must be a list of names")),
        (URL, {"include": [5]}, TypeError("include must be a list of names")),
        (URL, {"include": ["a", "a"]}, ValueError("include lists 'a' twice")),
        (URL, {"session": "call"}, ValueError("session must be")),
        (URL, {"timeout": 0}, ValueError("timeout must be a positive number")),
        (URL, {"retries": -1}, ValueError("retries must be at least 0")),
        (URL, {"concurrency": 0}, ValueError("concurrency must be at least 1")),
        (URL, {"idempotent": "read"}, TypeError("idempotent must be a list of names")),
        (URL, {"bearer_variable": "sk-secret"}, ValueError("take names of environment variables")),
        (URL, {"environment": ["A"]}, ValueError("are for a command")),
        (URL, {"directory": "/srv"}, ValueError("are for a command")),
        (["npx"], {"bearer_variable": "TOKEN"}, ValueError("bearer_variable is for a URL")),
        (URL, {"cache": True}, TypeError("mcp takes no 'cache'; it takes include, session, timeout")),
        (["npx"], {"environment": "TOKEN"}, TypeError("environment must be a list of names")),
    ],
)
def test_what_cannot_be_used_is_refused(server: Any, options: dict[str, Any], error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)) as raised:
        mcp(server, **options)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("idempotent", "expected"),
    [(None, (True, False)), (True, (True, True)), (False, (False, False)), (["plain"], (False, True))],
)
def test_only_idempotent_tools_are_retried(idempotent: Any, expected: tuple[bool, bool]) -> None:
    server = mcp(
        URL, retries=2, idempotent=idempotent, timeout=5, concurrency=3, server_concurrency=4, max_output_tokens=9
    )
    policies = [server.policy_of(tool) for tool in (HINTED, PLAIN)]
    assert tuple(policy.idempotent for policy in policies) == expected
    assert [policy.retries for policy in policies] == [2 if each else 0 for each in expected]
    for policy in policies:
        assert (policy.timeout, policy.concurrency, policy.server_concurrency, policy.max_output_tokens) == (5, 3, 4, 9)
