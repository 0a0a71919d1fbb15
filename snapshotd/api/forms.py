"""The forms that the API gives to times, durations and paths."""

from __future__ import annotations

from datetime import UTC, datetime

_LATEST_NS = 253_402_300_799_999_999_999
"""The last instant that ISO 8601 with four digits can say."""


def iso_time(at_ns: int) -> str:
    """Nanoseconds since the epoch as `2025-01-31T12:00:00.123456Z`."""
    seconds, rest = divmod(min(at_ns, _LATEST_NS), 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}Z"


def milliseconds(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


def path_text(path: bytes) -> str:
    """A sandbox path from its root, as records have it."""
    return "/" + path.decode(errors="surrogateescape")
