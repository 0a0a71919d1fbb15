"""Time, chance and names that stay the same in a replay: asked for once, recorded, and answered from the record when
the program starts again. Within a tool they are ordinary values, since a replay does not run the tool."""

from __future__ import annotations

import os
import time
from typing import Any

from snapshotd.agent.calls import running
from snapshotd.agent.session import session


def now() -> float:
    """The time in seconds since 1970, as `time.time()`."""
    return float(_fact("now", time.time()))


def random() -> float:
    """A random number from 0 up to and without 1. Independent of Python's `random` module and its seed."""
    return float(_fact("random", _chance()))


def randint(low: int, high: int) -> int:
    """A random integer from `low` to `high`, both included. ValueError if there is none, or one of them has more than
    53 bits."""
    if low > high or max(abs(low), abs(high)) >= 1 << 53:
        raise ValueError(
            "There is no random integer from {} to {}; the first may not be above the second, nor one beyond 2^53.".format(
                low, high
            )
        )
    span = high - low + 1
    limit = (1 << 64) // span * span
    while True:
        drawn = int.from_bytes(os.urandom(8), "big")
        if drawn < limit:  # the rest would make some results more likely
            return int(_fact("random", low + drawn % span))


def seed() -> int:
    """A random integer from 0 up to 2^53, for `random.seed` and other generators: a replay seeds them as they were, and
    each fork has its own after the snapshot."""
    return int(_fact("seed", int.from_bytes(os.urandom(7), "big") >> 3))


def uuid() -> str:
    """A random UUID (version 4) as text."""
    import uuid as generator  # costs milliseconds to import and is rarely needed

    return str(_fact("uuid", str(generator.uuid4())))


def _chance() -> float:
    return (int.from_bytes(os.urandom(7), "big") >> 3) * 2.0**-53


def _fact(kind: str, value: Any) -> Any:
    if running() is not None or not session.inside():
        return value
    return session.request("fact", {"kind": kind, "value": value})["value"]
