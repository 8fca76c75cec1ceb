"""The syntax of the rules, and error messages for invalid ones."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
from rollout_server.edge.targets.rule_parser import Rule, read_rule
from rollout_server.edge.targets.rules import TargetRules


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("trainer.internal", Rule("trainer.internal")),
        ("Trainer.Internal.", Rule("trainer.internal")),
        ("localhost", Rule("localhost")),
        ("my_trainer-1:9001", Rule("my_trainer-1", low=9001, high=9001)),
        ("*.svc.cluster.local", Rule("svc.cluster.local", wildcard=True)),
        ("*.svc.cluster.local:1-65535", Rule("svc.cluster.local", wildcard=True)),
        ("xn--bcher-kva.de:443", Rule("xn--bcher-kva.de", low=443, high=443)),
        ("10.0.0.0/8", Rule(network=ip_network("10.0.0.0/8"))),
        ("10.0.0.0/8:8080-8130", Rule(network=ip_network("10.0.0.0/8"), low=8080, high=8130)),
        ("10.1.2.3", Rule(network=ip_network("10.1.2.3/32"))),
        ("10.1.2.3:80", Rule(network=ip_network("10.1.2.3/32"), low=80, high=80)),
        ("2001:db8::/32", Rule(network=ip_network("2001:db8::/32"))),
        ("2001:db8::1", Rule(network=ip_network("2001:db8::1/128"))),
        ("::1", Rule(network=ip_network("::1/128"))),
        ("[::1]", Rule(network=ip_network("::1/128"))),
        ("[::1]:443", Rule(network=ip_network("::1/128"), low=443, high=443)),
        ("[2001:db8::]/32:443", Rule(network=ip_network("2001:db8::/32"), low=443, high=443)),
        ("[2001:db8::/32]:443-444", Rule(network=ip_network("2001:db8::/32"), low=443, high=444)),
        ("[2001:DB8::]/32", Rule(network=ip_network("2001:db8::/32"))),
    ],
)
def test_a_rule_is_read(text: str, rule: Rule) -> None:
    assert read_rule(text) == rule
    assert TargetRules.parse(f" other.example , {text} ,").rules == (Rule("other.example"), rule)


@pytest.mark.parametrize(
    "text",
    [
        *("*", "*:80", "*.", "a.*.b", "a*.b", "**.b", "*.10.0.0.1", "*.10"),
        *("http://trainer.internal", "trainer.internal/v1", "user@trainer.internal", "a b", "a..b", ".a", "-a-.b!"),
        *(
            "10.0.0.1/8",
            "10.0.0.0/33",
            "10.0.0.0/-1",
            "10.0.0.0/255.0.0.0.0",
            "10.0.0",
            "10.1",
            "0x0a.0.0.1",
            "010.0.0.1",
        ),
        *(
            "2001:db8::/32:443",
            "[2001:db8::",
            "2001:db8::]",
            "[]",
            "[10.0.0.1]",
            "[trainer]",
            "[::1]8",
            "[::1]/x",
            "[::1]/129",
        ),
        *("::ffff:10.0.0.0/104", "::ffff:10.0.0.1", "fe80::1%eth0", "[fe80::1%eth0]:80", "::g"),
        *("a:", "a:0", "a:65536", "a:80-", "a:-80", "a:90-80", "a:x", "a:８０", "10.0.0.0/8:", "[::1]:", "a:080000"),
        *("bücher.de", "127。0。0。1", "a\tb", "x" * 64, ".".join(["x" * 60] * 5)),
    ],
)
def test_what_is_no_rule_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a rule for targets: it (needs|must|has|is)") as caught:
        TargetRules.parse(f"fine.example,{text}")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        *("169.254.169.254", "169.254.0.0/16", "169.254.1.0/24:80", "fe80::/10", "[fe80::1]:80", "fd00:ec2::254"),
        *("100.100.100.200", "224.0.0.0/8", "255.255.255.255", "ff02::/16"),
    ],
)
def test_a_rule_for_what_is_never_called_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is reserved .* and never called, so no rule can allow it"):
        TargetRules.parse(f"fine.example,{text}")


def test_lists_are_read_as_texts_are() -> None:
    assert TargetRules.parse(("a.example", " 10.0.0.0/8:80 "), ("HTTPS",)) == TargetRules.parse(
        "a.example,10.0.0.0/8:80", "https"
    )
    assert TargetRules.parse((), ("http", "https", "grpc", "grpcs")) == TargetRules()
    with pytest.raises(ValueError, match=r"'a\.example,b\.example' is not a rule"):
        TargetRules.parse(["a.example,b.example"])


@pytest.mark.parametrize("text", [",", " , ", ",,", ("",)])
def test_a_text_without_rules_does_not_pass_for_no_rules(text: str | tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="contains no rule"):
        TargetRules.parse(text)


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_no_rules(text: str) -> None:
    assert TargetRules.parse(text) == TargetRules()


def test_schemes_are_read() -> None:
    assert TargetRules.parse("", "HTTPS, grpcs").schemes == {"https", "grpcs"}
    assert TargetRules.parse().schemes == {"http", "https", "grpc", "grpcs"}


@pytest.mark.parametrize(
    ("text", "named"), [("https,file", "'file'"), ("https,unix:", "'unix:'"), ("", "''"), ((), "()"), (",", "','")]
)
def test_what_is_no_scheme_is_named(text: str | tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match="is not a scheme of a target") as caught:
        TargetRules.parse("", text)
    assert named in str(caught.value)
