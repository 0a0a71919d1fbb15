"""Waiting for what the kernel has no event for. Standard library only: the starter's process imports it."""

from __future__ import annotations

import time
from collections.abc import Iterator


def attempts(timeout_s: float, first_s: float = 0.0001, longest_s: float = 0.01) -> Iterator[None]:
    """Yields again and again, at least once, until `timeout_s` has passed. Between two yields it sleeps, `first_s` at first,
    then twice as long each time, up to `longest_s`."""
    deadline, pause_s = time.monotonic() + timeout_s, first_s
    while True:
        yield
        if time.monotonic() > deadline:
            return
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, longest_s)
