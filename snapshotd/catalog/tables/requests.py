"""Requests that carry a key of their client's, and what each has made. A row is written by the transaction that makes
it, so that a client that has lost an answer can ask again: nothing is made twice."""

from __future__ import annotations

import json
from collections.abc import Sequence

from snapshotd.catalog.database import CatalogDatabase
from snapshotd.errors import Conflict
from snapshotd.types import RequestKey

KEPT_NS = 24 * 3600 * 1_000_000_000
"""Age from which a key is forgotten. A client asks again within seconds."""
KEPT_MAX = 100_000
"""Most keys that are kept: about 20 MB."""


def add_request(db: CatalogDatabase, request: RequestKey | None, made: Sequence[str]) -> None:
    """Record what a request has made (None: it has no key). The oldest keys go. Inside a transaction of the caller."""
    if request is None:
        return
    db.write("DELETE FROM requests WHERE key = ? OR created_at_ns < ?", (request.key, request.at_ns - KEPT_NS))
    db.write(
        "INSERT INTO requests (key, digest, made, created_at_ns) VALUES (?,?,?,?)",
        (request.key, request.digest, json.dumps(made), request.at_ns),
    )
    db.write("DELETE FROM requests WHERE pk <= (SELECT max(pk) FROM requests) - ?", (KEPT_MAX,))


class RequestTable:
    """Requests with an idempotency key, and what each has made. A row is kept for a day."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db

    def add(self, request: RequestKey | None, made: Sequence[str]) -> None:
        """Record the ids of what a request has made, where that is not in the catalog. The catalog's methods with a
        parameter `request` do the same in their own transaction. None: the request has no key, and nothing is recorded."""
        with self._db.transaction():
            add_request(self._db, request, made)

    def find(self, request: RequestKey) -> tuple[str, ...] | None:
        """The ids of what the request has made (snapshots of a step or tag, trajectories, a command); None: nothing, or
        it was a day ago. Conflict: the key is another request's."""
        row = self._db.read_one("SELECT digest, made, created_at_ns FROM requests WHERE key = ?", (request.key,))
        if row is None or row[2] < request.at_ns - KEPT_NS:
            return None
        if row[0] not in (request.digest, *request.earlier):
            raise Conflict(
                f"the idempotency key {request.key!r} belongs to another request, which was answered already; give each "
                "request a key of its own, and repeat one with the same method, path and body"
            )
        return tuple(json.loads(row[1]))

    def forget(self, request: RequestKey) -> None:
        """The request has made nothing that stays. Not an error when it is not recorded."""
        with self._db.transaction():
            self._db.write("DELETE FROM requests WHERE key = ?", (request.key,))
