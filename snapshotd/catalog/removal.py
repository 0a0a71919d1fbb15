"""Forgetting a trajectory, inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Collection

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.inserts import REFUSED, WARNINGS
from snapshotd.catalog.lookup import id_range, trajectory_number
from snapshotd.errors import Conflict
from snapshotd.types import TrajectoryID, short

_USERS = (
    (
        "was forked from it",
        "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.forked_from WHERE s.trajectory = ?1",
    ),
    (
        "goes on from a conversation in it",
        "SELECT t.id FROM snapshots s JOIN lines l ON l.forked_from = s.pk JOIN trajectories t ON t.pk = l.trajectory"
        " WHERE s.trajectory = ?1",
    ),
    (
        "began its program in it",
        "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.began WHERE s.trajectory = ?1",
    ),
)
"""The reasons that keep a trajectory, and the rows that give them. The trajectory's own rows do not count."""
_BUILT_ON_IT = "FROM snapshots b JOIN snapshots s ON s.base = b.pk WHERE b.trajectory = ?1 AND s.trajectory <> ?1"
"""Snapshots of others that derive their trees from its (after a rewind to one)."""

_INHERITED_COMPENSATIONS = """
UPDATE compensations SET trajectory = (SELECT l.trajectory FROM entries e JOIN lines l ON l.pk = e.line WHERE e.id = compensations.entry)
WHERE trajectory = ?1
AND EXISTS (SELECT 1 FROM entries e JOIN lines l ON l.pk = e.line WHERE e.id = compensations.entry AND l.trajectory <> ?1)
"""
"""A fork's compensation stays with the call, which is an ancestor's: the call must not be compensated again."""

_REMOVED = "removed/"
"""Begin of the names of facts, one for each removed trajectory whose id is still known."""


def check_removable(db: CatalogDatabase, trajectory_id: TrajectoryID, gone: Collection[TrajectoryID] = ()) -> int:
    """See `Catalog.check_removable`. Returns the trajectory's number."""
    own: Row = (trajectory_number(db, trajectory_id),)
    for why, users in _USERS:
        user = next((one for (one,) in db.read(f"{users} AND t.pk <> ?1", own) if one not in gone), None)
        if user is not None:
            raise Conflict(
                f"trajectory {short(trajectory_id)} cannot be removed because trajectory {short(user)} {why}: remove that first"
            )
    waiting = db.read(
        f"SELECT s.id, (SELECT id FROM trajectories WHERE pk = s.trajectory) {_BUILT_ON_IT} AND s.state = 'captured'",
        own,
    )
    for snapshot, owner in waiting:
        if owner in gone:
            continue
        raise Conflict(
            f"trajectory {short(trajectory_id)} cannot be removed because snapshot {short(snapshot)} of trajectory "
            f"{short(owner)} was made from it and is not stored yet: try again when it is, or remove that trajectory first"
        )
    return int(own[0])


def remove_trajectory(db: CatalogDatabase, trajectory_id: TrajectoryID) -> None:
    """See `Catalog.remove_trajectory`."""
    own: Row = (check_removable(db, trajectory_id),)
    db.write(  # a stored snapshot needs no base; a lost one could only be derived from all of its layers
        "UPDATE snapshots SET base = NULL,"
        " own_layers = (SELECT json_array_length(layers) FROM stacks WHERE stacks.pk = snapshots.stack)"
        f" WHERE pk IN (SELECT s.pk {_BUILT_ON_IT})",
        own,
    )
    stacks, states = (
        rows.encode_json(
            [
                n
                for (n,) in db.read(f"SELECT DISTINCT {column} FROM snapshots WHERE trajectory = ?", own)
                if n is not None
            ]
        )
        for column in ("stack", "agent_state")
    )
    for table in ("tags", "damaged_outputs"):
        db.write(f"DELETE FROM {table} WHERE snapshot IN (SELECT pk FROM snapshots WHERE trajectory = ?)", own)
    for kind in (WARNINGS, REFUSED):
        db.write(
            "DELETE FROM meta WHERE key IN (SELECT ? || '/' || id FROM snapshots WHERE trajectory = ?)", (kind, *own)
        )
    db.write(_INHERITED_COMPENSATIONS, own)
    for table in ("messages", "entries"):
        db.write(f"DELETE FROM {table} WHERE line IN (SELECT pk FROM lines WHERE trajectory = ?)", own)
    for table in ("approvals", "compensations"):
        db.write(f"DELETE FROM {table} WHERE trajectory = ?", own)
    db.write("DELETE FROM trajectories WHERE pk = ?", own)
    db.write("INSERT INTO meta VALUES (? || ?, '') ON CONFLICT DO NOTHING", (_REMOVED, trajectory_id))
    for table in ("snapshots", "lines"):
        db.write(f"DELETE FROM {table} WHERE trajectory = ?", own)
    for table, column, numbers in (("stacks", "stack", stacks), ("states", "agent_state", states)):
        db.write(
            f"DELETE FROM {table} WHERE pk IN (SELECT CAST(value AS BIGINT) FROM json_each(?))"
            f" AND NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.{column} = {table}.pk)",
            (numbers,),
        )


def removed_trajectories(db: CatalogDatabase) -> set[TrajectoryID]:
    """See `Catalog.removed_trajectories`."""
    return {
        TrajectoryID(key.removeprefix(_REMOVED))
        for (key,) in db.read("SELECT key FROM meta WHERE key >= ? AND key < ?", id_range(_REMOVED))
    }


def forget_removed(db: CatalogDatabase, trajectories: Collection[TrajectoryID]) -> None:
    """See `Catalog.forget_removed`."""
    ids = rows.encode_json(list(trajectories))
    db.write("DELETE FROM meta WHERE key IN (SELECT ? || value FROM json_each(?))", (_REMOVED, ids))
