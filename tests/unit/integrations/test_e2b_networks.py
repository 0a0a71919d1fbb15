"""E2B's words for a network, and the daemon's."""

from __future__ import annotations

from typing import Any

import pytest

from snapshotd.errors import NotPermitted, UsageError
from snapshotd.integrations.e2b.control.networks import ALL_TRAFFIC, network_for, network_of, rules_of
from snapshotd.integrations.e2b.failures import WireError

OPEN = f"allow:*,{ALL_TRAFFIC}"


@pytest.mark.parametrize(
    ("given", "default", "network"),
    [
        ({}, "none", "none"),
        ({}, "bridge", "bridge"),
        ({}, "allow:pypi.org", "allow:pypi.org"),
        ({"allow_internet_access": True}, "none", "bridge"),
        ({"allow_internet_access": True}, "allow:*", "allow:*"),
        ({"allow_internet_access": False}, "bridge", "allow:"),
        ({"denyOut": [ALL_TRAFFIC]}, "bridge", "allow:"),
        ({"allowOut": ["1.1.1.1"]}, "none", "bridge"),
        ({"allowOut": ["pypi.org", "*.PyPI.org"], "denyOut": [ALL_TRAFFIC]}, "bridge", "allow:pypi.org,*.pypi.org"),
        ({"allowOut": ["10.1.0.0/16"], "allow_internet_access": False}, "bridge", "allow:10.1.0.0/16"),
        ({"allowOut": ["fd00::/8", "[fd01::1]"], "denyOut": [ALL_TRAFFIC]}, "none", "allow:[fd00::]/8,[fd01::1]"),
        ({"allowOut": ["10.0.0.1:8080"], "denyOut": [ALL_TRAFFIC]}, "none", "allow:10.0.0.1:8080"),
        ({"denyOut": ["8.8.8.0/24"]}, "none", f"{OPEN},!8.8.8.0/24"),
        ({"denyOut": ["8.8.8.0/24"], "allowOut": ["1.1.1.1"]}, "allow:pypi.org", "allow:pypi.org,!8.8.8.0/24"),
    ],
)
def test_the_network_that_is_meant(given: dict[str, Any], default: str, network: str) -> None:
    assert network_of(given, default) == network


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"denyOut": ["8.8.8.0/24"], "allowOut": ["8.8.8.8"]}, "unimplemented"),
        ({"denyOut": ["8.8.8.8"], "allowOut": ["8.8.8.0/24"]}, "unimplemented"),
        ({"egressProxy": {"address": "proxy:1080"}}, "unimplemented"),
        ({"allowOut": "pypi.org"}, "invalid_argument"),
        ({"allowOut": [1]}, "invalid_argument"),
    ],
)
def test_a_network_that_is_not_done(given: dict[str, Any], code: str) -> None:
    with pytest.raises(WireError) as failed:
        network_of(given, "bridge")
    assert failed.value.code == code


def test_an_address_that_is_none() -> None:
    with pytest.raises(UsageError):
        network_of({"allowOut": ["not a name"], "denyOut": [ALL_TRAFFIC]}, "bridge")


def test_rules_for_a_sandbox_that_has_rules() -> None:
    assert rules_of("bridge") == ("*", ALL_TRAFFIC)
    assert rules_of("none") == rules_of("allow:") == ()
    assert rules_of("allow:pypi.org") == ("pypi.org",)


@pytest.mark.parametrize(
    ("given", "default", "network"),
    [
        ({}, "bridge", OPEN),
        ({"allow_internet_access": True}, "none", OPEN),
        ({}, "allow:10.1.0.7", "allow:10.1.0.7"),  # the server's owner says so
        ({"allowOut": ["pypi.org", ALL_TRAFFIC], "denyOut": [ALL_TRAFFIC]}, "none", f"allow:pypi.org,{ALL_TRAFFIC}"),
        ({"denyOut": ["10.0.0.0/8"]}, "none", f"{OPEN},!10.0.0.0/8"),
    ],
)
def test_a_tenant_gets_what_is_public(given: dict[str, Any], default: str, network: str) -> None:
    assert network_for("acme", given, default) == network


@pytest.mark.parametrize("address", ["10.0.0.1", "169.254.169.254:80", "fd00::/8", "8.8.8.8"])
def test_a_tenant_allows_hosts_by_name_alone(address: str) -> None:
    given = {"allowOut": [address], "denyOut": [ALL_TRAFFIC]}
    with pytest.raises(NotPermitted, match="by their names"):
        network_for("acme", given, "bridge")
    assert network_for("default", given, "bridge") == network_of(given, "bridge")
