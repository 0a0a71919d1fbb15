"""Rows that come from elsewhere: from another catalog of a fleet, a bundle, or the repository."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from snapshotd.catalog import rows
from snapshotd.catalog.database import CatalogDatabase
from snapshotd.catalog.entries import add_bound_entry
from snapshotd.catalog.inserts import add_image, add_messages, add_snapshot, add_stack, add_trajectory
from snapshotd.catalog.lines import Position, add_line, position_of, save_state, set_began
from snapshotd.catalog.lookup import find_tag, read_row, snapshot_numbers, trajectory_number
from snapshotd.catalog.parts import SnapshotRow
from snapshotd.catalog.tables.approvals import replace_approvals, replace_compensations
from snapshotd.catalog.tables.figures import Figures
from snapshotd.errors import Conflict, InternalError
from snapshotd.terms import number_of
from snapshotd.types import Approval, Compensation, Image, Snapshot, SnapshotID, Stack, Trajectory, TrajectoryID

_UNNEEDED = """
SELECT s.id FROM snapshots s WHERE s.id IN (SELECT value FROM json_each(?))
AND NOT EXISTS (SELECT 1 FROM tags WHERE snapshot = s.pk)
AND NOT EXISTS (SELECT 1 FROM trajectories WHERE head = s.pk OR forked_from = s.pk OR began = s.pk)
AND NOT EXISTS (SELECT 1 FROM approvals WHERE snapshot = s.pk AND status = 'pending')
"""
_SIDE_INSERT = """
INSERT INTO trajectories (id, image, runtime, network, memory_bytes, cpus, pids, disk_bytes, agent, env, status, exit_code,
    created_at_ns, experiment, forked_from, head, began, fence)
SELECT ?, image, runtime, network, memory_bytes, cpus, pids, disk_bytes, agent, env, status, exit_code, created_at_ns, experiment,
    ?, head, began, fence FROM trajectories WHERE pk = ?
"""


class OtherRows:
    """Rows that were recorded elsewhere, or earlier, or are to be another trajectory's."""

    def __init__(self, db: CatalogDatabase, figures: Figures, tell: Callable[[TrajectoryID], object]) -> None:
        """`tell`: told of each trajectory that changed."""
        self._db, self._figures, self._tell = db, figures, tell

    def restore(
        self, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]
    ) -> None:
        """Add rows that were recorded elsewhere, or earlier, unchanged: states, trees, records and tags included; all
        or none. Parents and bases come before the snapshots that name them, or are here already; so do images. A
        trajectory's `head` is one of its own snapshots or its `forked_from`. Conflict when an id, name or tag is taken;
        NotFound for a named row that does not exist."""
        with self._db.transaction():
            for image in images:
                add_image(self._db, image)
            for trajectory in trajectories:
                add_trajectory(self._db, trajectory, None)
            restored = _Snapshots(self._db)
            for row in snapshots:
                restored.add(row)
            for trajectory in trajectories:
                self._connect(trajectory)
        for trajectory in trajectories:
            self._tell(trajectory.id)

    def add_missing(
        self,
        images: Iterable[Image],
        trajectories: Sequence[Trajectory],
        snapshots: Iterable[SnapshotRow],
        approvals: Sequence[Approval] = (),
        compensations: Sequence[Compensation] = (),
    ) -> None:
        """Add those rows that are not here, all or none; so it can be repeated. The order is that of `restore`. A
        name or tag that is taken here is left out. A trajectory that is here gets the status, exit code, network and
        environment of the given one, and its head, unless that is an earlier snapshot. Approvals and compensations are as they
        are given afterwards."""
        db = self._db
        with db.transaction():
            for image in images:
                if not db.read("SELECT 1 FROM images WHERE id = ?", (image.id,)):
                    taken = db.read("SELECT 1 FROM images WHERE name = ?", (image.name,))
                    add_image(db, replace(image, name="") if taken else image)
            new, known = [], []
            for trajectory in trajectories:
                if db.read("SELECT 1 FROM trajectories WHERE id = ?", (trajectory.id,)):
                    known.append(trajectory)
                    continue
                new.append(trajectory)
                free = trajectory.name is None or not self._is_taken(trajectory.name)
                add_trajectory(db, trajectory if free else replace(trajectory, name=None), None)
            restored = _Snapshots(db)
            for row in snapshots:
                if not db.read("SELECT 1 FROM snapshots WHERE id = ?", (row.snapshot.id,)):
                    tags = tuple(name for name in row.snapshot.tags if not self._is_taken(name))
                    restored.add(replace(row, snapshot=replace(row.snapshot, tags=tags)))
            for trajectory in new:
                self._connect(trajectory)
            for trajectory in known:
                self._go_on(trajectory)
            replace_approvals(db, approvals)
            replace_compensations(db, compensations)
        for trajectory in trajectories:
            self._tell(trajectory.id)

    def _is_taken(self, name: str) -> bool:
        """True if a trajectory has the name, or a snapshot has it as a tag, of any tenant."""
        return bool(self._db.read("SELECT 1 FROM trajectories WHERE name = ?", (name,)) or find_tag(self._db, name))

    def _go_on(self, trajectory: Trajectory) -> None:
        """Update a trajectory that is here by a newer record of it. Its head never goes back."""
        own = trajectory_number(self._db, trajectory.id)
        self._db.write(
            "UPDATE trajectories SET status = ?, exit_code = ?, network = ?, env = ? WHERE pk = ?",
            (
                trajectory.status.value,
                trajectory.exit_code,
                str(trajectory.spec.network),
                rows.encode_pairs(trajectory.env),
                own,
            ),
        )
        self._db.write(
            "UPDATE trajectories SET head = n.pk FROM snapshots n, snapshots h WHERE trajectories.pk = ?1 AND n.id = ?2"
            " AND h.pk = trajectories.head AND n.trajectory = ?1 AND (h.trajectory <> ?1 OR h.seq < n.seq)",
            (own, trajectory.head),
        )
        set_began(self._db, own, trajectory.began)

    def _connect(self, trajectory: Trajectory) -> None:
        """Give a trajectory its head, origin, beginning and, where it has no snapshot of its own, its line."""
        db = self._db
        own = trajectory_number(db, trajectory.id)
        origin, messages = (None, 0) if trajectory.forked_from is None else snapshot_numbers(db, trajectory.forked_from)
        head = snapshot_numbers(db, trajectory.head)[0]
        if head != origin and not db.read("SELECT 1 FROM snapshots WHERE pk = ? AND trajectory = ?", (head, own)):
            raise InternalError(f"the head of trajectory {trajectory.id} is another one's snapshot")
        db.write("UPDATE trajectories SET forked_from = ?, head = ? WHERE pk = ?", (origin, head, own))
        if not db.read("SELECT 1 FROM lines WHERE trajectory = ?", (own,)):
            add_line(db, own, origin, messages)
        set_began(db, own, trajectory.began)

    def choose_unneeded(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """Choose the ones of `snapshots` that are here, and whose files no tag, head, fork, beginning of a program or pending approval here
        needs, in the same order."""
        found = {one for (one,) in self._db.read(_UNNEEDED, (rows.encode_json(list(snapshots)),))}
        return [one for one in snapshots if one in found]

    def split_trajectory(self, trajectory_id: TrajectoryID, first: SnapshotID, side: TrajectoryID) -> None:
        """Make a new trajectory `side`, a nameless fork, of a trajectory's own snapshots from `first` on, with their
        conversation, journal, approvals and compensations. The rest is interrupted; where nothing is left, the trajectory itself
        becomes `side`. Not an error when that was done. NotFound."""
        with self._db.lock:
            with self._db.transaction():
                self._split(trajectory_id, first, side)
            self._figures.forget(trajectory_id)
        for one in (trajectory_id, side):
            self._tell(one)

    def _split(self, trajectory_id: TrajectoryID, first: SnapshotID, side: TrajectoryID) -> None:
        db = self._db
        seq, line, before, line_before, messages, present = read_row(
            db,
            "snapshot",
            first,
            "SELECT s.seq, s.line, p.pk, p.line, p.messages, t.id FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
            " LEFT JOIN snapshots p ON p.pk = s.parent AND p.trajectory = s.trajectory WHERE s.id = ?",
        )
        if present == side:
            return
        own = trajectory_number(db, trajectory_id)
        if before is None:
            db.write("UPDATE trajectories SET id = ? WHERE pk = ?", (side, own))
            return
        made = db.insert(_SIDE_INSERT, (side, before, own))
        db.write(
            "UPDATE trajectories SET head = ?, status = 'interrupted', exit_code = NULL WHERE pk = ?", (before, own)
        )
        if line == line_before:
            self._split_line(own, line, before, messages, seq)
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

    def _split_line(self, own: int, line: int, before: int, messages: int, seq: int) -> None:
        """Give the snapshots of a line up to the one in row `before` a line of their own. The other part stays, so that a
        trajectory's present line is its latest still."""
        db = self._db
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


class _Snapshots:
    """Snapshots in an order in which each comes after the ones that it names."""

    def __init__(self, db: CatalogDatabase) -> None:
        self._db = db
        self._owners: dict[TrajectoryID, int] = {}
        self._stacks: dict[SnapshotID, tuple[Stack, int]] = {}
        """Stacks of the restored snapshots: most share their parent's."""

    def add(self, row: SnapshotRow) -> None:
        db, snapshot = self._db, row.snapshot
        if db.read("SELECT 1 FROM snapshots WHERE id = ?", (snapshot.id,)):
            raise Conflict(f"snapshot {snapshot.id} is in the catalog already")
        if snapshot.trajectory not in self._owners:
            self._owners[snapshot.trajectory] = trajectory_number(db, snapshot.trajectory)
        owner = self._owners[snapshot.trajectory]
        parent = None if snapshot.parent is None else position_of(db, snapshot.parent)
        followed = None if snapshot.follows is None else position_of(db, snapshot.follows)
        continued = followed or parent
        kept = snapshot.messages - len(row.messages)
        line = self._line(snapshot, owner, continued, kept)
        state = save_state(
            db,
            None if row.state is None else rows.encode_json(row.state),
            None if continued is None else continued.state,
        )
        place = rows.Place(
            owner,
            line,
            None if parent is None else parent.number,
            self._stack(snapshot),
            None if followed is None else followed.number,
            state,
        )
        number = add_snapshot(db, snapshot, place, row.record)
        add_messages(db, line, kept, row.messages)
        for entry in row.entries:
            add_bound_entry(db, line, snapshot, number, entry)

    def _line(self, snapshot: Snapshot, owner: int, continued: Position | None, kept: int) -> int:
        """The line that a snapshot goes on with, or begins: the first of its trajectory, and one that follows, do
        that."""
        position = 0 if continued is None else continued.messages
        if kept != position and (snapshot.follows is None or not 0 <= kept <= position):
            raise InternalError(
                f"snapshot {snapshot.id} does not continue {snapshot.continues} ({number_of(position, 'message')})"
            )
        if snapshot.follows is None and continued is not None:
            found = self._db.read_one("SELECT pk FROM lines WHERE pk = ? AND trajectory = ?", (continued.line, owner))
            if found is not None:
                return int(found[0])
        return add_line(self._db, owner, None if continued is None else continued.number, kept)

    def _stack(self, snapshot: Snapshot) -> int:
        above = self._stacks.get(snapshot.parent) if snapshot.parent is not None else None
        number = above[1] if above is not None and above[0] == snapshot.stack else add_stack(self._db, snapshot.stack)
        self._stacks[snapshot.id] = (snapshot.stack, number)
        return number
