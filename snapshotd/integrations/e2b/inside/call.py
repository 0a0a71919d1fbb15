"""A request within a sandbox: whose it is, and how long it may take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from starlette.datastructures import Headers

from snapshotd.api.wire import TIMEOUT_MAX_S
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.people import Person
from snapshotd.integrations.e2b.records import Box

_KEEPALIVE_S = 90.0


@dataclass(frozen=True, slots=True)
class InnerCall:
    box: Box
    person: Person
    timeout_s: float | None = None
    """The timeout of a command that the call starts."""
    keepalive_s: float = _KEEPALIVE_S
    """A stream says so often that it is alive."""

    @classmethod
    def of(cls, box: Box, person: Person, headers: Headers) -> InnerCall:
        """The call that a request's headers describe. WireError: a header is no number."""
        timeout_ms = _number(headers, "connect-timeout-ms")
        ping_s = _number(headers, "keepalive-ping-interval")
        timeout_s = None if not timeout_ms else min(timeout_ms / 1000, TIMEOUT_MAX_S)
        return cls(box, person, timeout_s, _KEEPALIVE_S if not ping_s else min(max(ping_s, 1.0), 3600.0))


def _number(headers: Headers, name: str) -> float | None:
    given = headers.get(name)
    if given is None:
        return None
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise WireError("invalid_argument", f"the header {name} has to be a number, not {given!r}")
    return number
