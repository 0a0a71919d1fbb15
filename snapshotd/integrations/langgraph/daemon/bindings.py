"""The files of each checkpoint, in the file: a checkpoint's row names the snapshot of its sandbox, so state and
files become visible in one commit, behind a snapshot that exists. And which calls were made after which checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from snapshotd.sqlite import Database, Row

_SELECT = """
SELECT c.pk, t.name, s.ns, c.id, c.metadata, c.trajectory, c.snapshot
FROM checkpoint c CROSS JOIN space s ON s.pk = c.space CROSS JOIN thread t ON t.pk = s.thread
"""


class Bound(NamedTuple):
    """A checkpoint with its files."""

    pk: int
    thread: str
    ns: str
    id: str
    root: str
    """The checkpoint of the outermost graph that it belongs to; itself, if it is one of that."""
    trajectory: str | None
    """The sandbox that goes on from it; None: a fork has to be made."""
    snapshot: str

    def same_step(self, other: Bound) -> bool:
        """True if a call that was made after the one checkpoint was made after the other, too."""
        if self.thread != other.thread:
            return False
        return self.id == other.id if self.ns == other.ns else self.root == other.root


class Call(NamedTuple):
    """A call that was about to be made. `after`: its snapshot, once it is known."""

    pk: int
    trajectory: str
    before: str
    after: str | None


class Bindings:
    """Every method that changes something is one durable transaction. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def find(self, thread: str, ns: str, checkpoint: str) -> Bound | None:
        """A checkpoint and its files; None: there is no such checkpoint, or it is bound to no files."""
        row = self._db.read_one(
            f"{_SELECT} WHERE c.shown AND c.snapshot IS NOT NULL AND c.pk = (SELECT c2.pk FROM thread t2"
            " CROSS JOIN space s2 ON s2.thread = t2.pk AND s2.ns = ? CROSS JOIN checkpoint c2 ON c2.space = s2.pk AND c2.id = ?"
            " WHERE t2.name = ?)",
            (ns, checkpoint, thread),
        )
        return None if row is None else _decode(row)

    def latest(self, thread: str, ns: str) -> Bound | None:
        """The checkpoint of a thread with the greatest id, among those that are bound to files."""
        row = self._db.read_one(
            f"{_SELECT} WHERE t.name = ? AND s.ns = ? AND c.shown AND c.snapshot IS NOT NULL ORDER BY c.id DESC LIMIT 1",
            (thread, ns),
        )
        return None if row is None else _decode(row)

    def has_moved_on(self, bound: Bound, first: str, since: Sequence[str]) -> bool:
        """True if another step, of any thread, went on from one of the snapshots `since`. They follow `first`, one after the
        other."""
        known = self._db.read(
            "SELECT after FROM call WHERE after IN (SELECT value FROM json_each(?))", (json.dumps(since),)
        )
        made = {after for (after,) in known}
        # A call whose snapshot is there and not noted yet: the process that makes it is about to, or was killed.
        unknown = [before for before, one in zip((first, *since), since, strict=False) if one not in made]
        rows = self._db.read(
            f"{_SELECT} WHERE c.snapshot IN (SELECT value FROM json_each(?1)) OR c.pk IN"
            " (SELECT checkpoint FROM call WHERE after IN (SELECT value FROM json_each(?1)) OR after IS NULL AND"
            " trajectory = ?2 AND before IN (SELECT value FROM json_each(?3)))",
            (json.dumps(since), bound.trajectory, json.dumps(unknown)),
        )
        return not all(bound.same_step(_decode(row)) for row in rows)

    def take(self, bound: Bound, trajectory: str) -> Bound:
        """Let a sandbox go on from a checkpoint, unless it has one already. Returns the checkpoint as it is then."""
        with self._db.transaction():
            self._db.write(
                "UPDATE checkpoint SET trajectory = ? WHERE pk = ? AND trajectory IS NULL", (trajectory, bound.pk)
            )
            row = self._db.read_one(f"{_SELECT} WHERE c.pk = ?", (bound.pk,))
        return bound if row is None else _decode(row)

    def home(self, trajectory: str) -> str | None:
        """The snapshot that a sandbox held when it was given to a saver for the first time."""
        row = self._db.read_one("SELECT snapshot FROM home WHERE trajectory = ?", (trajectory,))
        return None if row is None else str(row[0])

    def settle(self, trajectory: str, snapshot: str) -> str:
        """Set `home` if it is not set, and return it."""
        with self._db.transaction():
            self._db.write("INSERT INTO home VALUES (?, ?) ON CONFLICT DO NOTHING", (trajectory, snapshot))
        return self.home(trajectory) or snapshot

    def owner(self, trajectory: str) -> str | None:
        """A thread that has a checkpoint in this sandbox."""
        row = self._db.read_one(
            "SELECT t.name FROM checkpoint c CROSS JOIN space s ON s.pk = c.space CROSS JOIN thread t ON t.pk = s.thread"
            " WHERE c.trajectory = ? LIMIT 1",
            (trajectory,),
        )
        return None if row is None else str(row[0])

    def has_inner(self, thread: str, task: str) -> bool:
        """True if a task of a thread has run a graph of its own."""
        found = self._db.read_one(
            "SELECT 1 FROM thread t CROSS JOIN space s ON s.thread = t.pk WHERE t.name = ? AND instr(s.ns, ?)",
            (thread, f":{task}"),
        )
        return found is not None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def calls(self, bound: Bound, name: str) -> list[Call]:
        """The calls of this name after a checkpoint, the newest first."""
        rows = self._db.read(
            "SELECT pk, trajectory, before, after FROM call WHERE checkpoint = ? AND name = ? ORDER BY pk DESC",
            (bound.pk, name),
        )
        return [Call(*row) for row in rows]

    def last_call(self, bound: Bound) -> str | None:
        """The snapshot of the last call that was made after a checkpoint."""
        row = self._db.read_one(
            "SELECT after FROM call WHERE checkpoint = ? AND after IS NOT NULL ORDER BY pk DESC LIMIT 1", (bound.pk,)
        )
        return None if row is None else str(row[0])

    def begin(self, bound: Bound, name: str, trajectory: str, before: str) -> int:
        """Note that a call is about to be made, from the snapshot `before` on."""
        with self._db.transaction():
            return self._db.insert(
                "INSERT INTO call (checkpoint, name, trajectory, before) VALUES (?, ?, ?, ?)",
                (bound.pk, name, trajectory, before),
            )

    def end(self, pk: int, after: str | None) -> None:
        """Note the snapshot of a call that was made; None: forget the call, which was not made."""
        with self._db.transaction():
            if after is None:
                self._db.write("DELETE FROM call WHERE pk = ?", (pk,))
            else:
                self._db.write("UPDATE call SET after = ? WHERE pk = ?", (after, pk))


def _decode(row: Row) -> Bound:
    pk, thread, ns, checkpoint, metadata, trajectory, snapshot = row
    above = (json.loads(metadata).get("parents") or {}) if ns and metadata else {}
    return Bound(pk, thread, ns, checkpoint, str(above.get("", checkpoint)), trajectory, snapshot)
