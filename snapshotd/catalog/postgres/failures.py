"""The meaning of PostgreSQL's errors in the words of the product."""

from __future__ import annotations

import psycopg

from snapshotd.errors import (
    Conflict,
    DataLoss,
    InternalError,
    LimitExceeded,
    NotFound,
    NotPermitted,
    OutOfSpace,
    SnapshotdError,
    Unavailable,
)

REMEDY = "restore the database from a backup"

_KINDS: tuple[tuple[tuple[str, ...], type[SnapshotdError], str], ...] = (
    (
        ("53100",),
        OutOfSpace,
        "{what} cannot be written because the server's disk is full: free some space and try again",
    ),
    (("XX001", "XX002", "58"), DataLoss, "{what} is damaged ({said}): {remedy}"),
    (("42P01", "42703", "42883", "3F000"), DataLoss, "{what} lacks a table, column or function ({said}): {remedy}"),
    (("55P03",), Conflict, "{what} is locked by another process, which has been writing for 10 s: try again"),
    (("40001", "40P01"), Conflict, "{what} was changed by another process at the same time ({said}): try again"),
    (("3D000",), NotFound, "{what} cannot be opened because the server has no such database: create it first"),
    (("28", "42501"), NotPermitted, "{what} cannot be used ({said}): check the user, its password and its rights"),
    (("54", "22001"), LimitExceeded, "a value is too long for {what} ({said})"),
    (
        ("25006",),
        Unavailable,
        "{what} takes no changes now ({said}): try again when the server is a primary that writes",
    ),
    (("53", "57P", "08", "25P03"), Unavailable, "{what} does not answer ({said}): try again when the server runs"),
)
"""SQLSTATEs, or their beginnings, to what they mean (https://www.postgresql.org/docs/current/errcodes-appendix.html).
25P03 is the end of a transaction that waited too long, 25006 what a standby says."""


def meaning(exc: psycopg.Error, what: str) -> SnapshotdError:
    """The error to raise for one of the driver's. A connection that broke has no SQLSTATE."""
    state, said = exc.sqlstate or "", " ".join(str(exc).split()) or type(exc).__name__
    if not state and isinstance(exc, psycopg.OperationalError | psycopg.InterfaceError):
        state, said = _guess_state(said)
    for beginnings, kind, sentence in _KINDS:
        if state.startswith(beginnings):
            return kind(sentence.format(what=what, said=said, remedy=REMEDY))
    return InternalError(f"{what} refused a statement ({type(exc).__name__}: {said})")


def _guess_state(said: str) -> tuple[str, str]:
    """A SQLSTATE for what a server said when a connection was made: libpq gives only its words."""
    unknown = "does not exist" in said
    if (
        "no pg_hba.conf entry" in said
        or "authentication failed" in said
        or "no password supplied" in said
        or (unknown and 'role "' in said)
    ):
        return "28000", said
    if unknown and 'database "' in said:
        return "3D000", said
    return "08006", said
