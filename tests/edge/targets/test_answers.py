"""DNS results: single addresses, mixed ones, and addresses that embed another address."""

from __future__ import annotations

import pytest
from rollout_server.edge.targets.rules import TargetRefused, TargetRules


def allowed(rules: str, host: str, *answers: str, port: int = 80) -> bool:
    """Whether these addresses are allowed."""
    try:
        TargetRules.parse(rules).check_addresses(host, port, answers)
    except TargetRefused:
        return False
    return True


@pytest.mark.parametrize(
    ("rules", "answers", "expected"),
    [
        # No rules.
        ("", ["10.0.0.1", "127.0.0.1", "::1", "93.184.216.34"], True),
        ("", ["10.0.0.1", "169.254.169.254"], False),
        ("", ["fe80::1%eth0"], False),
        ("", ["::ffff:169.254.169.254"], False),
        ("", ["64:ff9b::a9fe:a9fe"], False),
        ("", ["ff02::1"], False),
        ("", ["224.0.0.251"], False),
        ("", ["255.255.255.255"], False),
        # A rule for the name: its addresses are accepted, except for reserved ones.
        ("b.example", ["93.184.216.34", "10.0.0.1"], True),
        ("b.example,10.0.0.0/8", ["93.184.216.34"], True),
        ("b.example", ["93.184.216.34", "169.254.169.254"], False),
        ("b.example,0.0.0.0/0", ["169.254.169.254"], False),
        ("*.example", ["93.184.216.34"], True),
        ("b.example:81", ["93.184.216.34"], False),
        # No rule for the name: every address must lie in a network.
        ("10.0.0.0/8", ["10.0.0.1", "10.255.255.255"], True),
        ("10.0.0.0/8", ["10.0.0.1", "11.0.0.1"], False),
        ("10.0.0.0/8", ["11.0.0.1", "10.0.0.1"], False),
        ("10.0.0.0/8:80", ["10.0.0.1"], True),
        ("10.0.0.0/8:81", ["10.0.0.1"], False),
        ("10.0.0.0/8", ["::ffff:10.0.0.1"], True),
        ("10.0.0.0/8", ["::ffff:0a00:0001", "::ffff:11.0.0.1"], False),
        ("10.0.0.0/8", ["64:ff9b::10.0.0.1"], True),
        ("10.0.0.0/8", ["64:ff9b::11.0.0.1"], False),
        ("10.0.0.0/8", ["::ffff:0:10.0.0.1"], True),
        ("", ["::ffff:0:169.254.169.254"], False),
        ("10.0.0.0/8", ["2002:a00:1::1"], False),
        ("10.0.0.0/8", ["::10.0.0.1"], False),
        ("10.0.0.0/8", ["::a00:1"], False),
        ("64:ff9b::/96", ["64:ff9b::10.0.0.1"], True),
        ("64:ff9b::/96", ["64:ff9b::169.254.169.254"], False),
        ("2001:db8::/32", ["2001:db8::1", "10.0.0.1"], False),
        ("2001:db8::/32", ["2001:db8::1"], True),
        ("::/0", ["10.0.0.1"], False),
        ("0.0.0.0/0", ["::ffff:10.0.0.1", "10.0.0.1"], True),
        ("other.example", ["10.0.0.1"], False),
        ("::/0", ["fe80::1%eth0"], False),
    ],
)
def test_answers_for_a_name(rules: str, answers: list[str], expected: bool) -> None:
    assert allowed(rules, "b.example", *answers) is expected
    assert allowed(rules, "B.Example.", *answers) is expected


def test_a_name_is_no_other_name() -> None:
    assert not allowed("b.example", "xb.example", "10.0.0.1")
    assert not allowed("*.b.example", "b.example", "10.0.0.1")


def test_the_refusal_says_what_resolves_to_what() -> None:
    with pytest.raises(TargetRefused) as caught:
        TargetRules.parse("10.0.0.0/8").check_addresses("b.example", 8080, ["10.0.0.1", "11.0.0.1"])
    text = "the target b.example resolves to 11.0.0.1, which this server's ROLLOUT_TARGETS do not allow at port 8080"
    assert str(caught.value) == text


def test_the_refusal_of_a_reserved_address_says_that_nothing_allows_it() -> None:
    with pytest.raises(TargetRefused, match=r"169\.254\.169\.254, which is reserved .* and never called"):
        TargetRules().check_addresses("b.example", 80, ["169.254.169.254"])


@pytest.mark.parametrize("answer", ["127.0.0.1", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1", "127.8.0.1"])
def test_names_do_not_lead_a_server_that_others_reach_to_its_own_machine(answer: str) -> None:
    for rules in ("", "b.example", "localhost,*.example", "0.0.0.0/0,::/0"):
        for host in ("b.example", "localhost"):
            with pytest.raises(TargetRefused, match=r"loopback|do not allow"):
                TargetRules.parse(rules, loopback=False).check_addresses(host, 80, [answer])
    TargetRules.parse("127.0.0.0/8,::1,0.0.0.0,::", loopback=False).check_addresses("b.example", 80, [answer])


def test_the_refusal_of_a_loopback_address_says_what_would_allow_it() -> None:
    with pytest.raises(TargetRefused, match=r"ROLLOUT_TARGETS lists 127\.0\.0\.0/8 or a part of it, at port 80"):
        TargetRules(loopback=False).check_addresses("b.example", 80, ["127.0.0.1"])


@pytest.mark.parametrize("answer", ["", "b.example", "10.0.0.1.", "010.0.0.1", "10.1", "[::1]", "10.0.0.1:80"])
def test_an_answer_that_is_no_address_is_refused(answer: str) -> None:
    with pytest.raises(TargetRefused, match="something that is not an address"):
        TargetRules().check_addresses("b.example", 80, [answer])


@pytest.mark.parametrize("host", ["0x7f.1", "127.1", "127。0。0。1", "a..b", "::1%lo", ""])
def test_a_host_that_can_be_read_in_two_ways_has_no_answers(host: str) -> None:
    """Such a host is refused much earlier. If one gets here, it has no addresses."""
    with pytest.raises(TargetRefused):
        TargetRules().check_addresses(host, 80, ["127.0.0.1"])
