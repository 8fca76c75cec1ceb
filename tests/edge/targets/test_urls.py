"""URLs as an attacker writes them: an accepted one names the same host for every parser; all others are refused."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from rollout_server.edge.targets.host_port import read_host, read_url
from rollout_server.edge.targets.rules import TargetRules
from yarl import URL

FIELD = "spec.completions.url"
INNER = TargetRules.parse(
    "trainer.internal,*.svc.cluster.local:8000-8100,10.0.0.0/8,[2001:db8::]/32:443,127.0.0.1:9001"
)
NAMES = TargetRules.parse("trainer.internal")


def said(rules: TargetRules, url: str) -> str:
    """The error for a URL; empty if it is allowed."""
    violations = list(rules.violations(url, FIELD))
    assert {v.field for v in violations} <= {FIELD}
    return "; ".join(v.description for v in violations)


@pytest.mark.parametrize(
    "url",
    [
        "http://trainer.internal",
        "https://TRAINER.Internal./v1",
        "http://trainer.internal:1/",
        "http://trainer.internal:/",
        "grpc://a.svc.cluster.local:8000",
        "grpcs://a.b.SVC.cluster.local:8100",
        "HTTP://10.255.0.1:5",
        "http://[::ffff:10.0.0.1]",
        "https://[2001:db8::5]",
        "https://[2001:DB8:0:0::5]:443/a/b",
        "http://127.0.0.1:9001",
        # Their addresses decide.
        "http://elsewhere.example",
        "http://localhost:9002",
    ],
)
def test_what_the_rules_name_is_allowed(url: str) -> None:
    assert said(INNER, url) == ""


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://127.0.0.1:9002",
            "http://127.0.0.2:9001",
            "http://11.0.0.1",
            "http://9.255.255.255",
            "http://0.0.0.0",
        ),
        *("https://[2001:db8::5]:444", "http://[2001:db8::5]", "https://[2001:db9::]", "http://[::1]", "http://[::]"),
    ],
)
def test_addresses_outside_the_rules_are_refused(url: str) -> None:
    assert "ROLLOUT_TARGETS" in said(INNER, url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://elsewhere.example", "http://xtrainer.internal", "http://trainer.internal.evil.example"),
        *("http://a.trainer.internal", "http://internal", "http://localhost.", "http://10.0.0.1", "http://[::1]"),
    ],
)
def test_where_only_names_are_listed_no_other_name_can_be_meant(url: str) -> None:
    assert "ROLLOUT_TARGETS" in said(NAMES, url)


@pytest.mark.parametrize(
    ("rules", "url", "allowed"),
    [
        ("*.a.example:80", "http://b.a.example", True),
        ("*.a.example:80", "http://c.b.a.example", True),
        ("*.a.example:80", "http://a.example", False),
        ("*.a.example:80", "http://ba.example", False),
        ("*.a.example:80", "http://b.a.example:81", False),
        ("*.a.example:80", "https://b.a.example", False),
        ("a.example:443", "https://a.example", True),
        ("a.example:443", "grpcs://a.example", True),
        ("a.example:80", "grpc://a.example", True),
        # A name may lie in a network at one of its ports.
        ("10.0.0.0/8:80", "http://b.example", True),
        ("10.0.0.0/8:80", "http://b.example:81", False),
    ],
)
def test_names_and_ports(rules: str, url: str, allowed: bool) -> None:
    assert (said(TargetRules.parse(rules), url) == "") is allowed


@pytest.mark.parametrize(
    "host",
    [
        # One address in many spellings.
        *(
            "0",
            "127.1",
            "127.0.1",
            "2130706433",
            "0x7f000001",
            "0x7f.1",
            "0x7f.0.0.1",
            "0X7F.1",
            "0177.0.0.1",
            "017700000001",
        ),
        *(
            "127.0.0.01",
            "127.0.0.1.",
            "127.0.0.1..",
            "127.0.0.0x1",
            "00.0.0.0",
            "1.2.3.4.5",
            "256.0.0.1",
            "4294967297",
            "a.1",
        ),
        *("127。0。0。1", "１２７.0.0.1", "①②⑦.0.0.1", "127．0．0．1", "٣.0.0.1", "127.0.0.1\u200b", "127\u00ad.0.0.1"),
        # IPv6 addresses with additions or omissions.
        *(
            "[::1%25lo]",
            "[::1%lo]",
            "[fe80::1%25eth0]",
            "[::1",
            "::1]",
            "::1",
            "[[::1]]",
            "[v1.x]",
            "[127.0.0.1]",
            "[::1]a",
        ),
        *("[]", "[trainer.internal]", "[::ffff:127.1]", "[::1.]"),
        # Names that parsers split differently.
        *("trainer.internal\\@evil.example", "evil.example\\.trainer.internal", "evil.example\\trainer.internal"),
        *("trainer.internal%2eevil.example", "evil.example%00.trainer.internal", "evil.example\x00.trainer.internal"),
        *(
            "evil.example\t.trainer.internal",
            "tra\niner.internal",
            "evil.example .trainer.internal",
            "trainer.internal\r\nX: y",
        ),
        *(
            "trainer..internal",
            ".trainer.internal",
            "trainer.internal..",
            "..",
            ".",
            "",
            ":80",
            "a,b",
            "a;b",
            "a'b",
            "a$b",
        ),
        *(
            "trainer.internal。",
            "trainer。internal",
            "ｔrainer.internal",
            "trainer.ınternal",
            "bücher.de",
            "a" * 64,
            "a." * 127 + "aa",
        ),
        # User info.
        *(
            "user:hunter2@trainer.internal",
            "trainer.internal@evil.example",
            "trainer.internal:80@evil.example",
            "@trainer.internal",
        ),
        *("a@b@trainer.internal", "127.0.0.1%2f@trainer.internal"),
        # Ports.
        *("trainer.internal:0", "trainer.internal:65536", "trainer.internal:99999999999", "trainer.internal:８０"),
        *(
            "trainer.internal:+80",
            "trainer.internal:-1",
            "trainer.internal:80:81",
            "trainer.internal: 80",
            "trainer.internal:0x50",
        ),
    ],
)
@pytest.mark.parametrize("rules", [TargetRules(), INNER, TargetRules.parse("0.0.0.0/0,::/0,trainer.internal")])
def test_a_host_that_can_be_read_in_two_ways_is_refused(rules: TargetRules, host: str) -> None:
    text = said(rules, f"http://{host}/v1")
    assert text.startswith(("needs", "must"))
    assert host == "" or len(host) < 3 or host not in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "trainer.internal",
            "//trainer.internal",
            "http:trainer.internal",
            "http:/trainer.internal",
            "http:///trainer.internal",
        ),
        *(
            " http://trainer.internal",
            "\x00http://trainer.internal",
            "ht\ntp://trainer.internal",
            "http\t://trainer.internal",
        ),
        *(
            "http:\\\\trainer.internal",
            "http:/\\trainer.internal",
            "file:///etc/passwd",
            "unix:///run/docker.sock",
            "gopher://a",
        ),
        *(
            "httpx://a",
            "http+unix://a",
            "ftp://trainer.internal",
            "javascript://trainer.internal",
            "grpc:trainer.internal",
        ),
    ],
)
def test_what_is_no_url_with_a_scheme_of_ours_is_refused(url: str) -> None:
    assert said(TargetRules(), url)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc", "grpcs", "HTTPS"])
def test_schemes_are_a_rule_too(scheme: str) -> None:
    text = said(TargetRules.parse("", "https,grpcs"), f"{scheme}://trainer.internal")
    assert ("ROLLOUT_TARGET_SCHEMES" in text) is (scheme.lower() not in ("https", "grpcs"))


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "192.168.0.1", "127.0.0.1", "[::1]", "0.0.0.0", "100.64.0.1", "[fd00::1]", "trainer", "a_b"]
)
def test_without_rules_private_targets_are_allowed(host: str) -> None:
    assert said(TargetRules(), f"http://{host}:9001/v1") == ""


@pytest.mark.parametrize(
    "host",
    [
        *("169.254.169.254", "169.254.1.1", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]"),
        *("[64:ff9b::169.254.169.254]", "[64:ff9b:1::a9fe:a9fe]", "[fe80::1]", "[fe80::a9fe:a9fe]"),
        *("224.0.0.1", "255.255.255.255", "[ff02::1]"),
        *("[fd00:ec2::254]", "[fd20:ce::254]", "[fd00:42::42]"),
        *("168.63.129.16", "192.0.0.192", "100.100.100.200"),
    ],
)
def test_reserved_addresses_are_never_allowed(host: str) -> None:
    url = f"http://{host}/latest/meta-data"
    # The last rule names networks that NAT64 gateways translate into reserved ones.
    for rules in ("", "0.0.0.0/0,::/0", "10.0.0.0/8", "trainer.internal", "100.0.0.0/8,64:ff9b::a9fe:0/112"):
        assert "is reserved" in said(TargetRules.parse(rules), url)


LOOPBACK = ["127.0.0.1", "127.255.0.9", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_server_that_others_reach_calls_loopback_only_by_a_rule_for_it(host: str) -> None:
    url = f"http://{host}:9001/v1"
    assert said(TargetRules(), url) == ""
    for rules in ("", "0.0.0.0/0,::/0", "10.0.0.0/8", "trainer.internal,localhost"):
        assert "loopback" in said(TargetRules.parse(rules, loopback=False), url)
    listed = "127.0.0.0/8:9000-9005,0.0.0.0,[::1]:9001,::"
    assert said(TargetRules.parse(listed, loopback=False), url) == ""
    assert "loopback" in said(TargetRules.parse(listed, loopback=False), url.replace("9001", "9006")) or host in (
        *("0.0.0.0", "[::]"),
    )


@pytest.mark.parametrize(
    "tail",
    [
        *("#", "?", "/#", "/?", "/v1#", "/v1?", "/v2/keys/purge#", "/v2/keys/purge?", "?x#y", "/a?x=1", "#@b", "/?#"),
        *("/..", "/.", "/../admin", "/v1/../admin", "/v1/./a", "/%2e%2e/admin", "/.%2E/a", "/%2e", "/v1/%252e%252e/a"),
        *("/..%2fadmin", "/a%2Fb", "/a%5c..", "/a%00", "/a%0d%0aX:y", "/%c0%ae%c0%ae/a", "/%", "/%zz", "/a%20b"),
        *("\\", "/\\", "\\..\\admin", "/..\\admin", "/..;/admin", "/a;b=c", "//", "//evil.example", "/a//b"),
        *(
            "/ ",
            " ",
            "/a b",
            "/a\tb",
            "/a\n",
            "/a\r\nX: y",
            "/a\x00",
            "/a\x7f",
            "/\u2025/",
            "/\uff0e\uff0e/",
            "/\u2024./",
        ),
        *("/bücher", "/a\u200b", "/a\u2028", "/a\ud800", "/<", "/a|b", "/{a}", "/[a]", '/"', "/`", "/^"),
    ],
)
@pytest.mark.parametrize(
    "base", ["http://trainer.internal", "https://trainer.internal:8443/v1", "grpc://trainer.internal"]
)
def test_what_makes_another_path_of_the_one_behind_it_is_refused(base: str, tail: str) -> None:
    assert said(TargetRules(), base + tail).startswith(("must", "needs"))


def test_a_url_has_a_length() -> None:
    assert said(TargetRules(), "http://a/".ljust(2048, "x")) == ""
    assert "2048" in said(TargetRules(), "http://a/".ljust(2049, "x"))


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/", "/a/b.c/~d/e_f-g", "/...", "/..a", "/a..", "/@b", "/x:y=z,(1)"]
)
def test_plain_paths_are_allowed(path: str) -> None:
    assert said(TargetRules(), f"http://trainer.internal{path}") == ""


@pytest.mark.parametrize("host", ["[2002:a9fe:a9fe::1]", "[::169.254.169.254]", "[2001:0:a9fe:a9fe::1]"])
def test_tunnels_to_reserved_addresses_are_refused(host: str) -> None:
    assert "is reserved" in said(TargetRules.parse("::/0"), f"http://{host}")
    assert "is reserved" in said(TargetRules(), f"http://{host}")


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://trainer.internal:81/v1", "trainer.internal", 81),
        ("http://A_b.example.", "a_b.example.", 80),
        ("http://a:/", "a", 80),
        ("https://[2001:db8::1]", "2001:db8::1", 443),
        ("http://[::ffff:10.0.0.1]:8", "::ffff:10.0.0.1", 8),
        ("http://10.0.0.1/@b", "10.0.0.1", 80),
        ("http://xn--bcher-kva.de/a:1@b", "xn--bcher-kva.de", 80),
    ],
)
def test_what_is_allowed_is_one_host_for_every_reader(url: str, host: str, port: int) -> None:
    """The parsers on the way: this project's, the standard library's, and aiohttp's."""
    assert said(TargetRules(), url) == ""
    assert read_url(url).port == port
    assert read_host(host) == read_url(url).host
    assert urlsplit(url).hostname == host
    assert URL(url, encoded=True).raw_host.lower() == host  # type: ignore[union-attr]
    assert URL(url, encoded=True).port == port


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("user:hunter2@trainer.internal", "must not hold a user name or password"),
        ("bücher.de", "punycode"),
        ("127.1", "four decimal numbers"),
        ("[::1%25lo]", "must not name a zone"),
        ("[x]", "an IPv6 address in its brackets"),
        ("a:0", "a port from 1 to 65535"),
        ("a..b", "single dots"),
    ],
)
def test_what_is_wrong_is_said(host: str, text: str) -> None:
    assert text in said(TargetRules(), f"http://{host}/v1")
