"""Writing new rows, inside a transaction of the caller: one by one as the product goes on, and in bulk when a catalog is rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snapshotd.catalog import rows
from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.database import Database
from snapshotd.catalog.lookup import image_number, snapshot_numbers, trajectory_number
from snapshotd.errors import Conflict, InternalError, UsageError
from snapshotd.types import NAME_PATTERN, Image, RecordID, Snapshot, SnapshotID, Stack, Trajectory, TrajectoryID, short


def add_image(db: Database, image: Image) -> None:
    """See `Catalog.add_image`."""
    if db.read("SELECT 1 FROM images WHERE id = ?", (image.id,)):
        raise Conflict(f"image {image.id} is in the catalog already: use it as it is")
    db.write("UPDATE images SET name = '' WHERE name = ? AND name <> ''", (image.name,))
    db.write(rows.IMAGE_INSERT, rows.image_values(image))


def add_trajectory(db: Database, trajectory: Trajectory, forked_from: int | None) -> int:
    """Insert a trajectory whose head is `forked_from`, or (None) has to be set before the transaction ends. Returns its row.
    Conflict when its name or id is taken; NotFound (its image)."""
    if trajectory.name is not None:
        taken = db.read_one("SELECT id FROM trajectories WHERE name = ?", (trajectory.name,))
        if taken is not None:
            raise Conflict(f"the name {trajectory.name} belongs to trajectory {short(taken[0])}: choose another or remove that one")
    if db.read("SELECT 1 FROM trajectories WHERE id = ?", (trajectory.id,)):
        raise Conflict(f"trajectory {trajectory.id} is in the catalog already")
    values = rows.trajectory_values(trajectory, image_number(db, trajectory.spec.image), forked_from, forked_from or 0)
    return db.insert(rows.TRAJECTORY_INSERT, values)


def add_stack(db: Database, stack: Stack) -> int:
    """Insert a stack; its row. NotFound (its image)."""
    return db.insert("INSERT INTO stacks (image, layers) VALUES (?,?)", (image_number(db, stack.image), rows.encode_layers(stack)))


def add_snapshot(
    db: Database, snapshot: Snapshot, trajectory: int, parent: int | None, stack: int, record: RecordID | None = None
) -> int:  # fmt: skip
    """Insert a snapshot with its tags, not yet as anybody's head; its row. NotFound (its base), Conflict (a tag is taken)."""
    base = None
    if snapshot.base is not None:
        base = parent if snapshot.base == snapshot.parent else snapshot_numbers(db, snapshot.base)[0]
    number = db.insert(rows.SNAPSHOT_INSERT, rows.snapshot_values(snapshot, trajectory, parent, stack, base, record))
    for name in snapshot.tags:
        add_tag(db, number, name, move=False)
    return number


def add_tag(db: Database, snapshot: int, name: str, *, move: bool) -> None:
    """See `Catalog.tag`."""
    if not NAME_PATTERN.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be a tag: use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        )
    row = db.read_one("SELECT s.pk, s.id FROM tags g JOIN snapshots s ON s.pk = g.snapshot WHERE g.name = ?", (name,))
    if row is not None and row[0] != snapshot and not move:
        raise Conflict(f"the tag {name} belongs to snapshot {short(row[1])}: move it, or choose another name")
    db.write("INSERT INTO tags VALUES (?,?) ON CONFLICT (name) DO UPDATE SET snapshot = excluded.snapshot", (name, snapshot))


def restore_rows(db: Database, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]) -> None:
    """See `Catalog.restore_rows`."""
    for image in images:
        add_image(db, image)
    for trajectory in trajectories:
        add_trajectory(db, trajectory, None)
    _restore_snapshots(db, snapshots)
    for trajectory in trajectories:
        origin = None if trajectory.forked_from is None else snapshot_numbers(db, trajectory.forked_from)[0]
        head = snapshot_numbers(db, trajectory.head)[0]
        if head != origin and not db.read(
            "SELECT 1 FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory WHERE s.pk = ? AND t.id = ?", (head, trajectory.id)
        ):
            raise InternalError(f"the head of trajectory {trajectory.id} is another one's snapshot")
        db.write("UPDATE trajectories SET forked_from = ?, head = ? WHERE id = ?", (origin, head, trajectory.id))


def _restore_snapshots(db: Database, snapshots: Iterable[SnapshotRow]) -> None:
    owners: dict[TrajectoryID, int] = {}
    stacks: dict[SnapshotID, tuple[Stack, int]] = {}  # of each line's latest snapshot: most share their parent's
    for row in snapshots:
        snapshot = row.snapshot
        if db.read("SELECT 1 FROM snapshots WHERE id = ?", (snapshot.id,)):
            raise Conflict(f"snapshot {snapshot.id} is in the catalog already")
        if snapshot.trajectory not in owners:
            owners[snapshot.trajectory] = trajectory_number(db, snapshot.trajectory)
        owner = owners[snapshot.trajectory]
        parent, begin = (None, 0) if snapshot.parent is None else snapshot_numbers(db, snapshot.parent)
        if snapshot.messages != begin + len(row.messages):
            raise InternalError(f"snapshot {snapshot.id} does not continue its parent {snapshot.parent} ({begin} messages)")
        above = stacks.get(snapshot.parent) if snapshot.parent is not None else None
        stack = above[1] if above is not None and above[0] == snapshot.stack else add_stack(db, snapshot.stack)
        stacks[snapshot.id] = (snapshot.stack, stack)
        add_snapshot(db, snapshot, owner, parent, stack, row.record)
        db.write_many(
            rows.MESSAGE_INSERT, ((owner, begin + offset, *rows.encode_message(message)) for offset, message in enumerate(row.messages))
        )
