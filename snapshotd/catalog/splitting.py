"""Making a side branch of the last snapshots of a trajectory, inside a transaction of the caller."""

from __future__ import annotations

from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.lookup import read_row, trajectory_number
from snapshotd.types import SnapshotID, TrajectoryID

_SIDE_INSERT = """
INSERT INTO trajectories (id, image, runtime, network, memory_bytes, cpus, pids, disk_bytes, agent, env, status, exit_code,
    created_at_ns, experiment, forked_from, head, began, fence)
SELECT ?, image, runtime, network, memory_bytes, cpus, pids, disk_bytes, agent, env, status, exit_code, created_at_ns, experiment,
    ?, head, began, fence FROM trajectories WHERE pk = ?
"""


def split_trajectory(db: CatalogDatabase, trajectory: TrajectoryID, first: SnapshotID, side: TrajectoryID) -> None:
    """See `OtherRows.split_trajectory`."""
    seq, line, before, line_before, messages, present = read_row(
        db,
        "snapshot",
        first,
        "SELECT s.seq, s.line, p.pk, p.line, p.messages, t.id FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
        " LEFT JOIN snapshots p ON p.pk = s.parent AND p.trajectory = s.trajectory WHERE s.id = ?",
    )
    if present == side:
        return
    own = trajectory_number(db, trajectory)
    if before is None:
        db.write("UPDATE trajectories SET id = ? WHERE pk = ?", (side, own))
        return
    made = db.insert(_SIDE_INSERT, (side, before, own))
    db.write("UPDATE trajectories SET head = ?, status = 'interrupted', exit_code = NULL WHERE pk = ?", (before, own))
    if line == line_before:
        _split_line(db, own, line, before, messages, seq)
    db.write("UPDATE snapshots SET trajectory = ? WHERE trajectory = ? AND seq >= ?", (made, own, seq))
    db.write(
        "UPDATE lines SET trajectory = ?1 WHERE pk IN (SELECT line FROM snapshots WHERE trajectory = ?1)"
        " OR (trajectory = ?2 AND pk > ?3 AND NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.line = lines.pk AND s.trajectory = ?2))",
        (made, own, line),
    )
    db.write(
        "UPDATE approvals SET trajectory = ?1 WHERE snapshot IN (SELECT pk FROM snapshots WHERE trajectory = ?1)",
        (made,),
    )
    db.write(
        "UPDATE compensations SET trajectory = ?1 WHERE trajectory = ?2 AND entry IN"
        " (SELECT e.id FROM entries e JOIN lines l ON l.pk = e.line WHERE l.trajectory = ?1)",
        (made, own),
    )


def _split_line(db: CatalogDatabase, own: int, line: int, before: int, messages: int, seq: int) -> None:
    """Give the snapshots of a line up to the one in row `before` a line of their own. The other part stays, so that a
    trajectory's present line is its latest still."""
    kept = db.insert(
        "INSERT INTO lines (trajectory, forked_from, kept) SELECT trajectory, forked_from, kept FROM lines WHERE pk = ?",
        (line,),
    )
    last = db.read_one(
        "SELECT max(e.number) FROM entries e JOIN snapshots s ON s.pk = e.snapshot WHERE e.line = ? AND s.seq < ?",
        (line, seq),
    )
    number = -1 if last is None or last[0] is None else last[0]
    db.write("UPDATE messages SET line = ? WHERE line = ? AND position < ?", (kept, line, messages))
    db.write("UPDATE entries SET line = ? WHERE line = ? AND number <= ?", (kept, line, number))
    db.write("UPDATE snapshots SET line = ? WHERE line = ? AND trajectory = ? AND seq < ?", (kept, line, own, seq))
    db.write("UPDATE lines SET forked_from = ?, kept = ? WHERE pk = ?", (before, messages, line))
