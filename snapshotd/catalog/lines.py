"""Lines: the parts of a snapshot's conversation and journal. Written inside a transaction of the caller.

A line continues its origin (a snapshot of another line, or of an earlier part of the same trajectory) and keeps a
number of its messages. Inside a line, snapshots are numbered as they came, so "up to this snapshot" is a comparison of
row numbers. `tables/conversations.py` and `tables/journal.py` read from the beginning, across forks and rewinds.
"""

from __future__ import annotations

from typing import NamedTuple

from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.lookup import read_row, snapshot_numbers
from snapshotd.errors import Conflict
from snapshotd.types import SnapshotID, TrajectoryID, short

_WRITER_SELECT = """
SELECT t.pk, t.fence, h.id, (SELECT max(pk) FROM lines WHERE trajectory = t.pk)
FROM trajectories t JOIN snapshots h ON h.pk = t.head WHERE t.id = ?
"""


class LineWriter(NamedTuple):
    """The writer's place in a trajectory: its row, its present line, its head."""

    trajectory: int
    line: int
    head: SnapshotID


def find_writer(db: CatalogDatabase, trajectory_id: TrajectoryID, fence: int | None) -> LineWriter:
    """The place of a trajectory's writer. NotFound; Conflict: another writer has a later fence."""
    trajectory, present, head, line = read_row(db, "trajectory", trajectory_id, _WRITER_SELECT)
    if fence is not None and fence < present:
        raise Conflict(
            f"trajectory {short(trajectory_id)} cannot be written any more under fence {fence}, because another writer has "
            f"{present}, and its head is {short(head)} by now: fork from {short(head)}, or let that writer end first"
        )
    return LineWriter(trajectory, line, head)


def set_began(db: CatalogDatabase, trajectory: int, began: SnapshotID | None) -> None:
    """Set the snapshot at which a replay of a trajectory (in row `trajectory`) begins. NotFound."""
    if began is not None:
        db.write("UPDATE trajectories SET began = ? WHERE pk = ?", (snapshot_numbers(db, began)[0], trajectory))


def add_line(db: CatalogDatabase, trajectory: int, origin: int | None, kept: int) -> int:
    """Begin a line; its row."""
    return db.insert("INSERT INTO lines (trajectory, forked_from, kept) VALUES (?,?,?)", (trajectory, origin, kept))


class Position(NamedTuple):
    """The place of a snapshot (in row `number`). `state`: the row of its agent's state."""

    number: int
    line: int
    messages: int
    state: int | None


def position_of(db: CatalogDatabase, snapshot_id: SnapshotID) -> Position:
    """The place of a snapshot. NotFound."""
    select = "SELECT pk, line, messages, agent_state FROM snapshots WHERE id = ?"
    return Position(*read_row(db, "snapshot", snapshot_id, select))


def save_state(db: CatalogDatabase, content: str | None, before: int | None) -> int | None:
    """The row of a state; `before` where it is None or the same as there."""
    if content is None or db.read("SELECT 1 FROM states WHERE pk = ? AND content = ?", (before, content)):
        return before
    if before is None and content == "{}":
        return None
    return db.insert("INSERT INTO states (content) VALUES (?)", (content,))
