"""SQLite's files: a database and its log are one thing, and the log of another moment damages it.

Source: sqlite.org/tempfiles.html, sqlite.org/howtocorrupt.html (1.4).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

_PARTS = (b"-wal", b"-shm", b"-journal")
_LOGS = ("-wal", "-journal")


def groups(paths: Iterable[bytes]) -> dict[bytes, list[bytes]]:
    """The paths by the database that they may belong to: as itself, as its log, or as the log's index."""
    found: dict[bytes, list[bytes]] = {}
    for path in paths:
        suffix = next((one for one in _PARTS if path.endswith(one)), b"")
        found.setdefault(path[: len(path) - len(suffix)], []).append(path)
    return found


def log_in(database: str, ignored: Collection[str]) -> str | None:
    """The log of a database among the paths that are ignored."""
    return next((database + part for part in _LOGS if database + part in ignored), None)


def without_log(recorded: Iterable[str], ignored: Collection[str]) -> list[str]:
    """A warning for each database that is recorded while its log is ignored."""
    return [
        f"{path} is recorded without {log}, which is ignored: without it the database may be damaged, or of another moment"
        for path in recorded
        if (log := log_in(path, ignored)) is not None
    ]
