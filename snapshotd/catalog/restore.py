"""Adding rows in bulk, as they were elsewhere or earlier, inside a transaction of the caller."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from snapshotd.catalog import rows
from snapshotd.catalog.commits import set_began
from snapshotd.catalog.database import CatalogDatabase, Row
from snapshotd.catalog.entries import restore_entries
from snapshotd.catalog.inserts import add_image, add_messages, add_snapshot, add_stack, add_trajectory
from snapshotd.catalog.lines import Position, add_line, position_of, save_state
from snapshotd.catalog.lookup import find_tag, snapshot_numbers, trajectory_number
from snapshotd.catalog.parts import SnapshotRow
from snapshotd.catalog.tables.approvals import replace_approvals, replace_compensations
from snapshotd.errors import Conflict, InternalError
from snapshotd.terms import number_of
from snapshotd.types import Approval, Compensation, Image, Snapshot, SnapshotID, Stack, Trajectory, TrajectoryID


def restore_rows(
    db: CatalogDatabase, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]
) -> None:
    """See `Catalog.restore_rows`."""
    for image in images:
        add_image(db, image)
    for trajectory in trajectories:
        add_trajectory(db, trajectory, None)
    restored = _Snapshots(db)
    for row in snapshots:
        restored.add(row)
    for trajectory in trajectories:
        _connect(db, trajectory)


def add_missing_rows(
    db: CatalogDatabase,
    images: Iterable[Image],
    trajectories: Sequence[Trajectory],
    snapshots: Iterable[SnapshotRow],
    approvals: Sequence[Approval],
    compensations: Sequence[Compensation],
) -> None:
    """See `OtherRows.add_missing`."""
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
        name = trajectory.name
        free = name is None or not (_holder_of(db, name) or find_tag(db, name))
        add_trajectory(db, trajectory if free else replace(trajectory, name=None), None)
    restored = _Snapshots(db)
    for row in snapshots:
        if not db.read("SELECT 1 FROM snapshots WHERE id = ?", (row.snapshot.id,)):
            tags = tuple(name for name in row.snapshot.tags if not (find_tag(db, name) or _holder_of(db, name)))
            restored.add(replace(row, snapshot=replace(row.snapshot, tags=tags)))
    for trajectory in new:
        _connect(db, trajectory)
    for trajectory in known:
        _go_on(db, trajectory)
    replace_approvals(db, approvals)
    replace_compensations(db, compensations)


def _holder_of(db: CatalogDatabase, name: str) -> list[Row]:
    """The trajectory that has a name, of any tenant."""
    return db.read("SELECT 1 FROM trajectories WHERE name = ?", (name,))


def _go_on(db: CatalogDatabase, trajectory: Trajectory) -> None:
    """Update a trajectory that is here by a newer record of it. Its head never goes back."""
    own = trajectory_number(db, trajectory.id)
    db.write(
        "UPDATE trajectories SET status = ?, exit_code = ?, network = ?, env = ? WHERE pk = ?",
        (
            trajectory.status.value,
            trajectory.exit_code,
            str(trajectory.spec.network),
            rows.encode_pairs(trajectory.env),
            own,
        ),
    )
    db.write(
        "UPDATE trajectories SET head = n.pk FROM snapshots n, snapshots h WHERE trajectories.pk = ?1 AND n.id = ?2"
        " AND h.pk = trajectories.head AND n.trajectory = ?1 AND (h.trajectory <> ?1 OR h.seq < n.seq)",
        (own, trajectory.head),
    )
    set_began(db, own, trajectory.began)


def _connect(db: CatalogDatabase, trajectory: Trajectory) -> None:
    """Give a trajectory its head, origin, beginning and, where it has no snapshot of its own, its line."""
    own = trajectory_number(db, trajectory.id)
    origin, messages = (None, 0) if trajectory.forked_from is None else snapshot_numbers(db, trajectory.forked_from)
    head = snapshot_numbers(db, trajectory.head)[0]
    if head != origin and not db.read("SELECT 1 FROM snapshots WHERE pk = ? AND trajectory = ?", (head, own)):
        raise InternalError(f"the head of trajectory {trajectory.id} is another one's snapshot")
    db.write("UPDATE trajectories SET forked_from = ?, head = ? WHERE pk = ?", (origin, head, own))
    if not db.read("SELECT 1 FROM lines WHERE trajectory = ?", (own,)):
        add_line(db, own, origin, messages)
    set_began(db, own, trajectory.began)


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
        restore_entries(db, line, snapshot, number, row.entries)

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
