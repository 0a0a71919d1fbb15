"""The sandbox that a request to the E2B server is for, and numbers that clients write."""

from __future__ import annotations

import time

import pytest
from starlette.datastructures import Headers

from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.keys import AccessKeys
from snapshotd.integrations.e2b.server import find_address

SANDBOX = "abcdefgh12345678"
HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("host", "domain", "found"),
    [
        (f"8000-{SANDBOX}.localhost:3000", "localhost:3000", (SANDBOX, 8000)),
        (f"8000-{SANDBOX.upper()}.Example.org", "example.org", (SANDBOX, 8000)),
        (f"8000-{SANDBOX}.example.org:443", "example.org", (SANDBOX, 8000)),
        (f"8000-{SANDBOX}.evil.example", "example.org", None),
        (f"8000-{SANDBOX}.example.org.evil.example", "example.org", None),
        ("api.example.org", "example.org", None),
    ],
)
def test_a_host_names_a_sandbox_below_the_domain_alone(host: str, domain: str, found: tuple[str, int] | None) -> None:
    assert find_address(Headers({"host": host}), domain) == found


def test_a_number_of_many_digits_is_refused() -> None:
    with pytest.raises(WireError, match="is no port"):
        find_address(Headers({"e2b-sandbox-id": SANDBOX, "e2b-sandbox-port": HUGE}), "localhost")
    keys = AccessKeys({"e2b_key": "default"}, b"secret")
    with pytest.raises(WireError, match="the signature is too old"):
        keys.find_signer([], "/file", "read", "user", "signature", HUGE)
    with pytest.raises(WireError):
        keys.find_signer([], "/file", "read", "user", "signature", str(int(time.time()) + 60))
