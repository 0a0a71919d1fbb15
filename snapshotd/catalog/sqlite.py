"""The catalog in one SQLite file. See `base.py` for the meaning of each method, `schema.py` for the tables, `database.py` for durability.

Cost: every lookup and `commit_snapshot` is O(log n) in the size of the catalog; a list costs what it returns; `referenced_*` scan once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from snapshotd.catalog import rows
from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.catalog.database import Database, Row, Value
from snapshotd.catalog.inserts import add_image, add_snapshot, add_stack, add_tag, add_trajectory, restore_rows
from snapshotd.catalog.lookup import (
    CANDIDATES,
    MIN_PREFIX_CHARS,
    by_prefix,
    check_unique,
    id_range,
    image_number,
    named,
    no,
    searchable,
    snapshot_numbers,
    trajectory_number,
)
from snapshotd.errors import Conflict, DataLoss, InternalError
from snapshotd.types import (
    BlobID,
    ExperimentID,
    FileChanges,
    Image,
    ImageID,
    LayerID,
    Message,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
    short,
)

_PAGE_ROWS = 500
_PAGE_CHARS = 1 << 20
_HEAD_SELECT = """
SELECT t.pk, h.pk, h.id, h.messages, h.stack, i.id, k.layers
FROM trajectories t JOIN snapshots h ON h.pk = t.head JOIN stacks k ON k.pk = h.stack JOIN images i ON i.pk = k.image
WHERE t.id = ?
"""


class SqliteCatalog(Catalog):
    def __init__(self, path: Path | Literal[":memory:"]) -> None:
        """Open the catalog at `path`, creating it (mode 0600) if there is none. ":memory:" is private to this object and gone with it.
        Errors: as `database.Database`."""
        self._db = Database(path)

    def close(self) -> None:
        self._db.close()

    def flush(self) -> None:
        self._db.flush()

    # -- small facts ---------------------------------------------------------------------------------------------------------

    def get_meta(self, key: str) -> str | None:
        row = self._db.read_one("SELECT value FROM meta WHERE key = ?", (key,))
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        with self._db.transaction():
            self._db.write("INSERT INTO meta VALUES (?,?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    # -- images --------------------------------------------------------------------------------------------------------------

    def add_image(self, image: Image) -> None:
        with self._db.transaction():
            add_image(self._db, image)

    def images(self) -> list[Image]:
        return [rows.decode_image(row) for row in self._db.read(rows.IMAGE_SELECT + " ORDER BY i.pk DESC")]

    def find_image(self, ref: str) -> Image:
        if not searchable(ref):
            raise no("image", ref)
        found = self._db.read(rows.IMAGE_SELECT + " WHERE i.name = ?", (ref,)) if ref else []
        if not found and len(ref) >= MIN_PREFIX_CHARS:
            found = self._db.read(rows.IMAGE_SELECT + " WHERE i.id >= ? AND i.id < ? LIMIT ?", (*id_range(ref), CANDIDATES + 1))
        if not found:
            raise no("image", ref)
        check_unique(ref, [row[0] for row in found])
        return rows.decode_image(found[0])

    def remove_image(self, image_id: ImageID) -> None:
        with self._db.transaction():
            number = image_number(self._db, image_id)
            user = self._db.read_one(
                "SELECT id FROM trajectories WHERE image = ?1 UNION ALL"
                " SELECT t.id FROM stacks k JOIN snapshots s ON s.stack = k.pk JOIN trajectories t ON t.pk = s.trajectory"
                " WHERE k.image = ?1 LIMIT 1", (number,),
            )  # fmt: skip
            if user is not None:
                raise Conflict(f"image {short(image_id)} cannot be removed because trajectory {short(user[0])} uses it: remove that first")
            self._db.write("DELETE FROM images WHERE pk = ?", (number,))

    # -- trajectories --------------------------------------------------------------------------------------------------------

    def add_trajectories(self, items: Sequence[tuple[Trajectory, Snapshot | None]]) -> None:
        with self._db.transaction():
            for trajectory, snapshot in items:
                self._add_trajectory(trajectory, snapshot)

    def _add_trajectory(self, trajectory: Trajectory, snapshot: Snapshot | None) -> None:
        origin, messages = None, 0
        if trajectory.forked_from is not None:
            origin, messages = snapshot_numbers(self._db, trajectory.forked_from)
        first = snapshot.id if snapshot is not None else trajectory.forked_from
        if first is None or trajectory.head != first:
            raise InternalError(f"trajectory {trajectory.id} must begin at its head, not at {first}")
        number = add_trajectory(self._db, trajectory, origin)
        if snapshot is not None:
            if snapshot.trajectory != trajectory.id or snapshot.parent != trajectory.forked_from or snapshot.messages != messages:
                raise InternalError(f"snapshot {snapshot.id} does not fit the trajectory {trajectory.id} that it is to begin")
            self._add_head(snapshot, number, origin, add_stack(self._db, snapshot.stack))

    def _add_head(self, snapshot: Snapshot, trajectory: int, parent: int | None, stack: int) -> None:
        head = add_snapshot(self._db, snapshot, trajectory, parent, stack)
        self._db.write("UPDATE trajectories SET head = ? WHERE pk = ?", (head, trajectory))

    def restore_rows(self, images: Iterable[Image], trajectories: Sequence[Trajectory], snapshots: Iterable[SnapshotRow]) -> None:
        with self._db.transaction():
            restore_rows(self._db, images, trajectories, snapshots)

    def get_trajectory(self, trajectory_id: TrajectoryID) -> Trajectory:
        found = self._trajectories("WHERE t.id = ?", (trajectory_id,))
        if not found:
            raise no("trajectory", trajectory_id)
        return found[0]

    def trajectories(self, status: TrajectoryStatus | None = None) -> list[Trajectory]:
        if status is None:
            return self._trajectories("ORDER BY t.pk")
        return self._trajectories("WHERE t.status = ? ORDER BY t.pk", (status.value,))

    def _trajectories(self, where: str, values: Sequence[Value] = ()) -> list[Trajectory]:
        return [rows.decode_trajectory(row) for row in self._db.read(rows.TRAJECTORY_SELECT + where, values)]

    def set_status(self, trajectory_id: TrajectoryID, status: TrajectoryStatus, exit_code: int | None = None) -> None:
        with self._db.transaction():
            if not self._db.write(
                "UPDATE trajectories SET status = ?, exit_code = coalesce(?, exit_code) WHERE id = ?",
                (status.value, exit_code, trajectory_id),
            ):
                raise no("trajectory", trajectory_id)

    def remove_trajectory(self, trajectory_id: TrajectoryID) -> None:
        db = self._db
        with db.transaction():
            row = db.read_one("SELECT pk FROM trajectories WHERE id = ?", (trajectory_id,))
            if row is None:
                raise no("trajectory", trajectory_id)
            own: Row = (row[0],)
            fork = db.read_one(
                "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.forked_from WHERE s.trajectory = ? LIMIT 1", own
            )
            if fork is not None:
                raise Conflict(
                    f"trajectory {short(trajectory_id)} cannot be removed because trajectory {short(fork[0])} was forked from it: "
                    "remove that first"
                )
            self._release_bases(trajectory_id, row[0])
            stacks = rows.encode_json([number for (number,) in db.read("SELECT DISTINCT stack FROM snapshots WHERE trajectory = ?", own)])
            db.write("DELETE FROM tags WHERE snapshot IN (SELECT pk FROM snapshots WHERE trajectory = ?)", own)
            db.write("DELETE FROM messages WHERE trajectory = ?", own)
            db.write("DELETE FROM trajectories WHERE pk = ?", own)
            db.write("DELETE FROM snapshots WHERE trajectory = ?", own)
            db.write(
                "DELETE FROM stacks WHERE pk IN (SELECT value FROM json_each(?))"
                " AND NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.stack = stacks.pk)", (stacks,),
            )  # fmt: skip

    def _release_bases(self, trajectory_id: TrajectoryID, number: int) -> None:
        """Before a trajectory's rows go: nothing else may derive its tree from them (after a rewind to another trajectory's snapshot)."""
        others = "FROM snapshots b JOIN snapshots s ON s.base = b.pk WHERE b.trajectory = ?1 AND s.trajectory <> ?1"
        waiting = self._db.read_one(
            f"SELECT s.id, (SELECT id FROM trajectories WHERE pk = s.trajectory) {others} AND s.state = 'captured' LIMIT 1", (number,)
        )
        if waiting is not None:
            raise Conflict(
                f"trajectory {short(trajectory_id)} cannot be removed because snapshot {short(waiting[0])} of trajectory "
                f"{short(waiting[1])} was made from it and is not stored yet: try again when it is, or remove that trajectory first"
            )
        self._db.write(  # what is stored needs no base; a lost one could only be derived from all of its layers
            "UPDATE snapshots SET base = NULL,"
            " own_layers = (SELECT json_array_length(layers) FROM stacks WHERE stacks.pk = snapshots.stack)"
            f" WHERE pk IN (SELECT s.pk {others})", (number,),
        )  # fmt: skip

    # -- snapshots -----------------------------------------------------------------------------------------------------------

    def commit_snapshot(self, snapshot: Snapshot, messages: Sequence[Message], *, expected_head: SnapshotID) -> None:
        contents = [rows.encode_message(message) for message in messages]
        with self._db.transaction():
            row = self._db.read_one(_HEAD_SELECT, (snapshot.trajectory,))
            if row is None:
                raise no("trajectory", snapshot.trajectory)
            trajectory, head, head_id, position, stack, image, layers = row
            if head_id != expected_head:
                raise Conflict(
                    f"snapshot {short(snapshot.id)} cannot follow {short(expected_head)} because the head of trajectory "
                    f"{short(snapshot.trajectory)} is {short(head_id)} by now: fork from {short(expected_head)}, or go on from the head"
                )
            if snapshot.parent != head_id or snapshot.messages != position + len(contents):
                raise InternalError(f"snapshot {snapshot.id} does not continue its parent {head_id} ({position} messages)")
            if (image, layers) != (snapshot.stack.image, rows.encode_layers(snapshot.stack)):
                stack = add_stack(self._db, snapshot.stack)
            self._add_head(snapshot, trajectory, head, stack)
            self._db.write_many(rows.MESSAGE_INSERT, ((trajectory, position + offset, *content) for offset, content in enumerate(contents)))

    def get_snapshot(self, snapshot_id: SnapshotID) -> Snapshot:
        row = self._db.read_one(rows.SNAPSHOT_SELECT + "WHERE s.id = ?", (snapshot_id,))
        if row is None:
            raise no("snapshot", snapshot_id)
        return rows.SnapshotDecoder()(row)

    def snapshots(self, trajectory_id: TrajectoryID, last: int | None = None) -> list[Snapshot]:
        limit = -1 if last is None else max(last, 0)
        with self._db.lock:
            number = trajectory_number(self._db, trajectory_id)
            found = self._db.read(rows.SNAPSHOT_SELECT + "WHERE s.trajectory = ? ORDER BY s.seq DESC LIMIT ?", (number, limit))
        decode = rows.SnapshotDecoder()
        return [decode(row) for row in reversed(found)]

    def count_snapshots(self, trajectory_id: TrajectoryID) -> int:
        with self._db.lock:
            number = trajectory_number(self._db, trajectory_id)
            row = self._db.read_one("SELECT count(*) FROM snapshots WHERE trajectory = ?", (number,))
        assert row is not None
        return int(row[0])

    def all_snapshots(self) -> Iterator[Snapshot]:
        last = 0
        while True:
            page = self._db.read_page(rows.SNAPSHOT_SELECT + "WHERE s.pk > ? ORDER BY s.pk", (last,), rows=_PAGE_ROWS, size=_PAGE_CHARS)
            if not page:
                return
            decode = rows.SnapshotDecoder()
            yield from map(decode, page)
            last = page[-1][0]

    def set_files(self, snapshot_id: SnapshotID, files: FileChanges) -> None:
        with self._db.transaction():
            self._db.write(
                "UPDATE snapshots SET files_added = ?, files_changed = ?, files_deleted = ?, files_bytes = ? WHERE id = ?",
                (files.added, files.changed, files.deleted, files.bytes, snapshot_id),
            )

    def set_state(self, snapshot_ids: Iterable[SnapshotID], state: SnapshotState) -> None:
        ids = list(snapshot_ids)
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = ?1, tree = iif(?1 = 'stored', tree, NULL) WHERE id = ?2",
                ((state.value, snapshot_id) for snapshot_id in ids),
            )

    def unstored(self) -> list[SnapshotID]:
        return [SnapshotID(row[0]) for row in self._db.read("SELECT id FROM snapshots WHERE state = 'captured' ORDER BY pk")]

    def set_stored(self, snapshot_id: SnapshotID, tree: TreeID, record: RecordID) -> None:
        with self._db.transaction():
            self._db.write(
                "UPDATE snapshots SET state = 'stored', tree = ?, record = ? WHERE id = ? AND state IN ('captured', 'lost')",
                (tree, record, snapshot_id),
            )

    def set_pruned(self, snapshot_ids: Iterable[SnapshotID]) -> None:
        ids = list(snapshot_ids)
        with self._db.transaction():
            self._db.write_many(
                "UPDATE snapshots SET state = 'pruned', tree = NULL WHERE id = ? AND state = 'stored'",
                ((snapshot_id,) for snapshot_id in ids),
            )

    def record(self, snapshot_id: SnapshotID) -> RecordID | None:
        row = self._db.read_one("SELECT record FROM snapshots WHERE id = ?", (snapshot_id,))
        if row is None:
            raise no("snapshot", snapshot_id)
        return None if row[0] is None else RecordID(row[0])

    def set_record(self, snapshot_id: SnapshotID, record: RecordID) -> None:
        with self._db.transaction():
            self._db.write("UPDATE snapshots SET record = ? WHERE id = ?", (record, snapshot_id))

    def forget_outputs(self, blobs: Iterable[BlobID]) -> None:
        gone = [(blob,) for blob in blobs]
        with self._db.transaction():
            for column in ("call_output", "call_stdout", "call_stderr"):
                self._db.write_many(f"UPDATE snapshots SET {column} = NULL WHERE {column} = ?", iter(gone))

    def set_image_tree(self, image_id: ImageID, tree: TreeID) -> None:
        with self._db.transaction():
            self._db.write("UPDATE images SET tree = ? WHERE id = ?", (tree, image_id))

    # -- conversations -------------------------------------------------------------------------------------------------------

    def own_messages(self, snapshot_id: SnapshotID) -> list[Message]:
        row = self._db.read_one(
            "SELECT s.trajectory, coalesce(p.messages, 0), s.messages FROM snapshots s LEFT JOIN snapshots p ON p.pk = s.parent"
            " WHERE s.id = ?", (snapshot_id,),
        )  # fmt: skip
        if row is None:
            raise no("snapshot", snapshot_id)
        return list(self._stream(snapshot_id, [row]))

    def conversation(self, snapshot_id: SnapshotID) -> Iterator[Message]:
        return self._stream(snapshot_id, self._segments(snapshot_id))  # not a generator itself: NotFound comes at the call

    def _segments(self, snapshot_id: SnapshotID) -> list[tuple[int, int, int]]:
        """(trajectory, first position, end) of each stretch of the conversation, from its beginning."""
        segments = []
        with self._db.lock:
            number, _ = snapshot_numbers(self._db, snapshot_id)
            while number:
                row = self._db.read_one(
                    "SELECT t.pk, s.messages, f.pk, f.messages FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
                    " LEFT JOIN snapshots f ON f.pk = t.forked_from WHERE s.pk = ?", (number,),
                )  # fmt: skip
                assert row is not None
                trajectory, end, number, begin = row
                segments.append((trajectory, begin or 0, end))
        return segments[::-1]

    def _stream(self, snapshot_id: SnapshotID, segments: Sequence[Row]) -> Iterator[Message]:
        for trajectory, position, end in segments:
            while position < end:
                page = self._db.read_page(
                    "SELECT position, role, content FROM messages WHERE trajectory = ? AND position >= ? AND position < ?"
                    " ORDER BY position",
                    (trajectory, position, end), rows=_PAGE_ROWS, size=_PAGE_CHARS,
                )  # fmt: skip
                if [row[0] for row in page] != list(range(position, position + len(page))) or not page:
                    snapshot_numbers(self._db, snapshot_id)  # NotFound: removed while it was read
                    raise DataLoss(f"message {position} of snapshot {short(snapshot_id)} is missing: restore the catalog from a backup")
                yield from map(rows.decode_message, page)
                position += len(page)

    # -- references by people ------------------------------------------------------------------------------------------------

    def resolve_snapshot(self, ref: str) -> Snapshot:
        with self._db.lock:
            row = named(self._db, ref, ("tags", "names"))
            return self.get_snapshot(row[0] if row else by_prefix(self._db, "snapshot", ref)[0])

    def resolve_trajectory(self, ref: str) -> Trajectory:
        with self._db.lock:
            row = named(self._db, ref, ("names", "tags"))
            return self.get_trajectory(row[1] if row else by_prefix(self._db, "trajectory", ref)[1])

    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False) -> None:
        with self._db.transaction():
            add_tag(self._db, snapshot_numbers(self._db, snapshot_id)[0], name, move=move)

    def untag(self, name: str) -> None:
        with self._db.transaction():
            if not searchable(name) or not self._db.write("DELETE FROM tags WHERE name = ?", (name,)):
                raise no("tag", name)

    def tags(self) -> dict[str, SnapshotID]:
        return dict(self._db.read("SELECT name, snapshots.id FROM tags JOIN snapshots ON snapshots.pk = tags.snapshot ORDER BY name"))

    # -- what is referenced --------------------------------------------------------------------------------------------------

    def referenced_layers(self) -> set[LayerID]:
        return {LayerID(row[0]) for row in self._db.read("SELECT DISTINCT value FROM stacks, json_each(stacks.layers)")}

    def referenced_blobs(self) -> set[BlobID]:
        found = self._db.read("SELECT call_output, call_stdout, call_stderr FROM snapshots")
        return {BlobID(blob) for row in found for blob in row if blob is not None}

    def unstored_blobs(self) -> set[BlobID]:
        found = self._db.read("SELECT call_output, call_stdout, call_stderr FROM snapshots WHERE state = 'captured'")
        return {BlobID(blob) for row in found for blob in row if blob is not None}

    def referenced_trees(self) -> set[TreeID]:
        found = self._db.read("SELECT tree FROM snapshots WHERE tree IS NOT NULL UNION ALL SELECT tree FROM images WHERE tree IS NOT NULL")
        return {TreeID(row[0]) for row in found}

    def referenced_records(self) -> set[RecordID]:
        return {RecordID(row[0]) for row in self._db.read("SELECT record FROM snapshots WHERE record IS NOT NULL")}

    def experiment(self, experiment_id: ExperimentID) -> list[Trajectory]:
        found = self._trajectories("WHERE t.experiment = ? ORDER BY t.pk", (experiment_id,))
        if not found:
            raise no("experiment", experiment_id)
        return found

