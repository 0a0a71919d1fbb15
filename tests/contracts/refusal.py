"""Checking that something is refused, for contract suites (which import no pytest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshotd.errors import SnapshotdError


def refuses(error: type[SnapshotdError], action: Callable[..., Any], *values: Any, says: tuple[str, ...] = ()) -> None:
    """`action(*values)` raises `error` with a message that contains each of `says`."""
    message = None
    try:
        action(*values)
    except error as exc:
        message = exc.message
    assert message is not None, f"{error.__name__} was not raised"
    assert all(text in message for text in says), (says, message)
