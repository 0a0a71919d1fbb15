"""The rules of a network of some hosts: what they are in text, what they allow, and how they change."""

from __future__ import annotations

import ipaddress

import pytest

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.network import HostRules, Network, is_public

ADDRESS = ipaddress.ip_address


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("PyPI.org.", "pypi.org"),
        ("*.PyPI.org:8443", "*.pypi.org:8443"),
        ("10.1.2.3/16", "10.1.0.0/16"),
        ("10.1.2.3:5432", "10.1.2.3:5432"),
        ("[fd00::1]/8", "[fd00::]/8"),
        ("!*", "!*"),
        ("_srv.x-y.example", "_srv.x-y.example"),
    ],
)
def test_a_rule_has_one_text(text: str, canonical: str) -> None:
    network = Network.parse(f"allow:{text}")
    assert network.rules == (canonical,)
    assert Network.parse(str(network)) == network


@pytest.mark.parametrize(
    "text",
    [
        "http://a",
        "a:b",
        "a..b",
        "-a.b",
        "1.2.3",
        "a:0",
        "a:70000",
        "ä.de",
        "10.0.0.0/33",
        "[::1",
        "*x.y",
        "a b",
        "!",
        "a:1:2",
    ],
)
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no rule for hosts"):
        Network.parse(f"allow:{text}")


def test_the_port_of_the_proxys_own_name_server_is_no_rule() -> None:
    with pytest.raises(UsageError, match="on port 53"):
        Network.parse("allow:a.b:53")
    assert Network.parse("allow:*,!a.b:53").rules == ("*", "!a.b:53")


def test_bounds() -> None:
    with pytest.raises(LimitExceeded):
        HostRules(f"h{number}.example" for number in range(257))
    with pytest.raises(LimitExceeded):
        HostRules(f"a.example:{number}" for number in range(101, 170))
    with pytest.raises(UsageError):
        Network.parse("everything")
    assert Network.parse("none") is Network.NONE


def test_names() -> None:
    rules = HostRules(["a.example", "*.b.example", "c.example:22", "!bad.b.example", "!d.b.example:80"])
    allowed = {
        (name, port)
        for name in (
            "a.example",
            "x.a.example",
            "b.example",
            "x.b.example",
            "y.x.b.example",
            "xb.example",
            "bad.b.example",
        )
        for port in (22, 80, 443)
        if rules.allows_name(name, port)
    }
    assert allowed == {(n, p) for n in ("a.example", "x.b.example", "y.x.b.example") for p in (80, 443)}
    assert [rules.allows_name("c.example", port) for port in (22, 443, None)] == [True, False, True]
    assert [rules.allows_name("d.b.example", port) for port in (80, 443, None)] == [False, True, True]
    assert rules.ports == {22, 80, 443}


def test_addresses() -> None:
    rules = HostRules(["10.0.0.0/8", "0.0.0.0/0:81", "!10.6.0.0/16", "52.1.2.3"])
    assert rules.allows_address(ADDRESS("10.1.2.3"), 443)
    assert not rules.allows_address(ADDRESS("10.6.2.3"), 443)
    assert not rules.allows_address(ADDRESS("10.1.2.3"), 22)
    assert rules.allows_address(ADDRESS("8.8.8.8"), 81)
    assert rules.names_range(ADDRESS("10.1.2.3"), 443, own=True)
    assert not rules.names_range(ADDRESS("127.0.0.1"), 443, own=True), "everything is not the machine itself"
    assert rules.names_range(ADDRESS("52.1.2.3"), 443, own=True), "the address itself is"
    assert HostRules(["10.1.2.3:5432"]).names_range(ADDRESS("10.1.2.3"), 5432, own=False)
    assert not HostRules(["10.1.2.3:5432"]).names_range(ADDRESS("10.1.2.3"), 443, own=False)
    assert not HostRules(["52.1.2.0/24"]).names_range(ADDRESS("52.1.2.3"), 443, own=True)


NOT_OF_THE_INTERNET = """
127.0.0.1 0.0.0.0 10.0.0.1 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1 100.100.100.200 192.0.0.192 192.0.2.1
192.88.99.1 168.63.129.16 198.18.0.1 224.0.0.1 240.0.0.1 255.255.255.255 ::1 :: ::7f00:1 fe80::1 fec0::1 fc00::1
fd00:ec2::254 ff02::1 64:ff9b::7f00:1 64:ff9b:1::7f00:1 2002:7f00:1:: 2001::1 2001:db8::1 4000::1 5f00::1
"""


def test_addresses_that_are_not_of_the_internet() -> None:
    assert [text for text in NOT_OF_THE_INTERNET.split() if is_public(ADDRESS(text))] == []


def test_addresses_of_the_internet() -> None:
    for address in ("8.8.8.8", "168.63.129.17", "192.0.1.1", "2606:4700::1111", "2a00:1450::1"):
        assert is_public(ADDRESS(address)), address
    for rule, address in [
        ("168.63.129.16", "168.63.129.16"),
        ("192.0.0.0/24", "192.0.0.192"),
        ("[fec0::]/10", "fec0::1"),
    ]:
        assert HostRules([rule]).names_range(ADDRESS(address), 443, own=False), rule
    assert not HostRules(["168.63.0.0/16"]).names_range(ADDRESS("168.63.129.16"), 443, own=False)


@pytest.mark.parametrize(
    ("before", "allow", "deny", "after"),
    [
        (["a.b", "*.a.b"], [], ["*.a.b"], ["a.b"]),
        (["*.a.b"], [], ["x.a.b"], ["*.a.b", "!x.a.b"]),
        (["*.a.b", "!x.a.b"], ["x.a.b"], [], ["*.a.b", "x.a.b"]),
        (["a.b", "c.d:22"], [], ["*"], []),
        (["a.b"], ["e.f"], ["*"], ["e.f"]),
        (["10.0.0.0/8"], [], ["10.1.0.0/16", "11.0.0.0/8"], ["10.0.0.0/8", "!10.1.0.0/16"]),
        (["a.b"], [], ["9.9.9.9"], ["a.b", "!9.9.9.9"]),
        (["*", "!a.b"], ["a.b:443"], ["a.b"], None),
        (["*", "!*.b"], ["a.b"], [], None),
        (["10.0.0.0/8", "!10.1.0.0/16"], ["10.1.2.3"], [], None),
        (["*"], [], ["evil.example:80"], ["*", "!evil.example:80"]),
    ],
)
def test_changes(before: list[str], allow: list[str], deny: list[str], after: list[str] | None) -> None:
    if after is None:
        with pytest.raises(UsageError, match="stays denied by the rule !"):
            HostRules(before).with_changes(allow, deny)
        return
    assert list(HostRules(before).with_changes(allow, deny).texts) == after


def test_a_change_names_hosts_and_not_denials() -> None:
    with pytest.raises(UsageError, match=r"name the host alone: a\.b"):
        HostRules(()).with_changes(["!a.b"], ())
