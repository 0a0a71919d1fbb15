"""The catalog in one SQLite file. See `base.py` for the meaning of each method, `schema.py` for the tables, `database.py` for durability.

Cost: every lookup and `commit_snapshot` is O(log n) in the size of the catalog; a list costs what it returns; `referenced_*` scan once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from snapshotd.catalog import rows
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.database import Database, Row, Value
from snapshotd.errors import Ambiguous, Conflict, DataLoss, InternalError, NotFound, UsageError
from snapshotd.types import (
    NAME_PATTERN,
    BlobID,
    ExperimentID,
    FileChanges,
    Image,
    ImageID,
    LayerID,
    Message,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    short,
)

MIN_PREFIX_CHARS = 4
_CANDIDATES = 5
_PAGE_ROWS = 500
_PAGE_CHARS = 1 << 20
_AFTER_ALL = "\U0010ffff"
"""Sorts after every character of an id, so that [prefix, prefix + this) is a range of the id's index."""

_MESSAGE_INSERT = "INSERT INTO messages (trajectory, position, role, content) VALUES (?,?,?,?)"
_TRAJECTORY_INSERT = """
INSERT INTO trajectories (id, name, image, runtime, network, memory_bytes, cpus, pids, agent, env, status, exit_code, created_at_ns,
    experiment, forked_from, head)
VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)
"""
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
            if self._db.read("SELECT 1 FROM images WHERE id = ?", (image.id,)):
                raise Conflict(f"image {image.id} is in the catalog already: use it as it is")
            self._db.write("UPDATE images SET name = '' WHERE name = ? AND name <> ''", (image.name,))
            self._db.write(
                "INSERT INTO images (id, name, source, source_id, bytes, files, created_at_ns, env, workdir) VALUES (?,?,?,?,?,?,?,?,?)",
                (
                    image.id, image.name, rows.encode_text(image.source), rows.encode_text(image.source_id), image.bytes, image.files,
                    image.created_at_ns, rows.encode_pairs(image.env), rows.encode_text(image.workdir),
                ),
            )  # fmt: skip

    def images(self) -> list[Image]:
        return [rows.decode_image(row) for row in self._db.read(rows.IMAGE_SELECT + " ORDER BY i.pk DESC")]

    def find_image(self, ref: str) -> Image:
        if not _searchable(ref):
            raise _no("image", ref)
        found = self._db.read(rows.IMAGE_SELECT + " WHERE i.name = ?", (ref,)) if ref else []
        if not found and len(ref) >= MIN_PREFIX_CHARS:
            found = self._db.read(rows.IMAGE_SELECT + " WHERE i.id >= ? AND i.id < ? LIMIT ?", (*_range(ref), _CANDIDATES + 1))
        if not found:
            raise _no("image", ref)
        _check_unique(ref, [row[0] for row in found])
        return rows.decode_image(found[0])

    def remove_image(self, image_id: ImageID) -> None:
        with self._db.transaction():
            number = self._image_number(image_id)
            user = self._db.read_one(
                "SELECT id FROM trajectories WHERE image = ?1 UNION ALL"
                " SELECT t.id FROM stacks k JOIN snapshots s ON s.stack = k.pk JOIN trajectories t ON t.pk = s.trajectory"
                " WHERE k.image = ?1 LIMIT 1", (number,),
            )  # fmt: skip
            if user is not None:
                raise Conflict(f"image {short(image_id)} cannot be removed because trajectory {short(user[0])} uses it: remove that first")
            self._db.write("DELETE FROM images WHERE pk = ?", (number,))

    def _image_number(self, image_id: ImageID) -> int:
        row = self._db.read_one("SELECT pk FROM images WHERE id = ?", (image_id,))
        if row is None:
            raise _no("image", image_id)
        return int(row[0])

    # -- trajectories --------------------------------------------------------------------------------------------------------

    def add_trajectories(self, items: Sequence[tuple[Trajectory, Snapshot | None]]) -> None:
        with self._db.transaction():
            for trajectory, snapshot in items:
                self._add_trajectory(trajectory, snapshot)

    def _add_trajectory(self, trajectory: Trajectory, snapshot: Snapshot | None) -> None:
        if trajectory.name is not None:
            taken = self._db.read_one("SELECT id FROM trajectories WHERE name = ?", (trajectory.name,))
            if taken is not None:
                raise Conflict(f"the name {trajectory.name} belongs to trajectory {short(taken[0])}: choose another or remove that one")
        if self._db.read("SELECT 1 FROM trajectories WHERE id = ?", (trajectory.id,)):
            raise Conflict(f"trajectory {trajectory.id} is in the catalog already")
        origin, messages = None, 0
        if trajectory.forked_from is not None:
            origin, messages = self._snapshot_numbers(trajectory.forked_from)
        first = snapshot.id if snapshot is not None else trajectory.forked_from
        if first is None or trajectory.head != first:
            raise InternalError(f"trajectory {trajectory.id} must begin at its head, not at {first}")
        spec = trajectory.spec
        number = self._db.insert(
            _TRAJECTORY_INSERT,
            (
                trajectory.id, trajectory.name, self._image_number(spec.image), spec.runtime, spec.network.value,
                spec.limits.memory_bytes, spec.limits.cpus, spec.limits.pids, rows.encode_agent(trajectory.agent),
                rows.encode_pairs(trajectory.env), trajectory.status.value, trajectory.exit_code, trajectory.created_at_ns,
                trajectory.experiment, origin, origin or 0,
            ),
        )  # fmt: skip
        if snapshot is not None:
            if snapshot.trajectory != trajectory.id or snapshot.parent != trajectory.forked_from or snapshot.messages != messages:
                raise InternalError(f"snapshot {snapshot.id} does not fit the trajectory {trajectory.id} that it is to begin")
            self._insert_snapshot(snapshot, number, origin, self._add_stack(snapshot.stack))

    def get_trajectory(self, trajectory_id: TrajectoryID) -> Trajectory:
        found = self._trajectories("WHERE t.id = ?", (trajectory_id,))
        if not found:
            raise _no("trajectory", trajectory_id)
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
                raise _no("trajectory", trajectory_id)

    def remove_trajectory(self, trajectory_id: TrajectoryID) -> None:
        db = self._db
        with db.transaction():
            row = db.read_one("SELECT pk FROM trajectories WHERE id = ?", (trajectory_id,))
            if row is None:
                raise _no("trajectory", trajectory_id)
            own: Row = (row[0],)
            fork = db.read_one(
                "SELECT t.id FROM trajectories t JOIN snapshots s ON s.pk = t.forked_from WHERE s.trajectory = ? LIMIT 1", own
            )
            if fork is not None:
                raise Conflict(
                    f"trajectory {short(trajectory_id)} cannot be removed because trajectory {short(fork[0])} was forked from it: "
                    "remove that first"
                )
            stacks = rows.encode_json([number for (number,) in db.read("SELECT DISTINCT stack FROM snapshots WHERE trajectory = ?", own)])
            db.write("DELETE FROM tags WHERE snapshot IN (SELECT pk FROM snapshots WHERE trajectory = ?)", own)
            db.write("DELETE FROM messages WHERE trajectory = ?", own)
            db.write("DELETE FROM trajectories WHERE pk = ?", own)
            db.write("DELETE FROM snapshots WHERE trajectory = ?", own)
            db.write(
                "DELETE FROM stacks WHERE pk IN (SELECT value FROM json_each(?))"
                " AND NOT EXISTS (SELECT 1 FROM snapshots s WHERE s.stack = stacks.pk)", (stacks,),
            )  # fmt: skip

    # -- snapshots -----------------------------------------------------------------------------------------------------------

    def commit_snapshot(self, snapshot: Snapshot, messages: Sequence[Message], *, expected_head: SnapshotID) -> None:
        contents = [(rows.encode_text(message.role), rows.encode_json(message.content)) for message in messages]
        with self._db.transaction():
            row = self._db.read_one(_HEAD_SELECT, (snapshot.trajectory,))
            if row is None:
                raise _no("trajectory", snapshot.trajectory)
            trajectory, head, head_id, position, stack, image, layers = row
            if head_id != expected_head:
                raise Conflict(
                    f"snapshot {short(snapshot.id)} cannot follow {short(expected_head)} because the head of trajectory "
                    f"{short(snapshot.trajectory)} is {short(head_id)} by now: fork from {short(expected_head)}, or go on from the head"
                )
            if snapshot.parent != head_id or snapshot.messages != position + len(contents):
                raise InternalError(f"snapshot {snapshot.id} does not continue its parent {head_id} ({position} messages)")
            if (image, layers) != (snapshot.stack.image, rows.encode_layers(snapshot.stack)):
                stack = self._add_stack(snapshot.stack)
            self._insert_snapshot(snapshot, trajectory, head, stack)
            self._db.write_many(_MESSAGE_INSERT, ((trajectory, position + offset, *content) for offset, content in enumerate(contents)))

    def _add_stack(self, stack: Stack) -> int:
        return self._db.insert(
            "INSERT INTO stacks (image, layers) VALUES (?,?)", (self._image_number(stack.image), rows.encode_layers(stack))
        )

    def _insert_snapshot(self, snapshot: Snapshot, trajectory: int, parent: int | None, stack: int) -> None:
        number = self._db.insert(rows.SNAPSHOT_INSERT, rows.snapshot_values(snapshot, trajectory, parent, stack))
        self._db.write("UPDATE trajectories SET head = ? WHERE pk = ?", (number, trajectory))
        for name in snapshot.tags:
            self._add_tag(number, name, move=False)

    def _snapshot_numbers(self, snapshot_id: SnapshotID) -> tuple[int, int]:
        """Row number and conversation length. NotFound."""
        row = self._db.read_one("SELECT pk, messages FROM snapshots WHERE id = ?", (snapshot_id,))
        if row is None:
            raise _no("snapshot", snapshot_id)
        return row[0], row[1]

    def get_snapshot(self, snapshot_id: SnapshotID) -> Snapshot:
        row = self._db.read_one(rows.SNAPSHOT_SELECT + "WHERE s.id = ?", (snapshot_id,))
        if row is None:
            raise _no("snapshot", snapshot_id)
        return rows.SnapshotDecoder()(row)

    def snapshots(self, trajectory_id: TrajectoryID) -> list[Snapshot]:
        with self._db.lock:
            found = self._db.read(rows.SNAPSHOT_SELECT + "WHERE t.id = ? ORDER BY s.seq", (trajectory_id,))
            if not found:
                self.get_trajectory(trajectory_id)  # a fork has none of its own at first; an unknown trajectory is NotFound
        decode = rows.SnapshotDecoder()
        return [decode(row) for row in found]

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
            self._db.write_many("UPDATE snapshots SET state = ? WHERE id = ?", ((state.value, snapshot_id) for snapshot_id in ids))

    # -- conversations -------------------------------------------------------------------------------------------------------

    def conversation(self, snapshot_id: SnapshotID) -> Iterator[Message]:
        return self._stream(snapshot_id, self._segments(snapshot_id))  # not a generator itself: NotFound comes at the call

    def _segments(self, snapshot_id: SnapshotID) -> list[tuple[int, int, int]]:
        """(trajectory, first position, end) of each stretch of the conversation, from its beginning."""
        segments = []
        with self._db.lock:
            number, _ = self._snapshot_numbers(snapshot_id)
            while number:
                row = self._db.read_one(
                    "SELECT t.pk, s.messages, f.pk, f.messages FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory"
                    " LEFT JOIN snapshots f ON f.pk = t.forked_from WHERE s.pk = ?", (number,),
                )  # fmt: skip
                assert row is not None
                trajectory, end, number, begin = row
                segments.append((trajectory, begin or 0, end))
        return segments[::-1]

    def _stream(self, snapshot_id: SnapshotID, segments: list[tuple[int, int, int]]) -> Iterator[Message]:
        for trajectory, position, end in segments:
            while position < end:
                page = self._db.read_page(
                    "SELECT position, role, content FROM messages WHERE trajectory = ? AND position >= ? AND position < ?"
                    " ORDER BY position",
                    (trajectory, position, end), rows=_PAGE_ROWS, size=_PAGE_CHARS,
                )  # fmt: skip
                if [row[0] for row in page] != list(range(position, position + len(page))) or not page:
                    self._snapshot_numbers(snapshot_id)  # NotFound: removed while it was read
                    raise DataLoss(f"message {position} of snapshot {short(snapshot_id)} is missing: restore the catalog from a backup")
                yield from map(rows.decode_message, page)
                position += len(page)

    # -- references by people ------------------------------------------------------------------------------------------------

    def resolve_snapshot(self, ref: str) -> Snapshot:
        with self._db.lock:
            row = self._named(ref, ("tags", "names"))
            return self.get_snapshot(row[0] if row else self._by_prefix("snapshot", ref)[0])

    def resolve_trajectory(self, ref: str) -> Trajectory:
        with self._db.lock:
            row = self._named(ref, ("names", "tags"))
            return self.get_trajectory(row[1] if row else self._by_prefix("trajectory", ref)[1])

    def _named(self, ref: str, order: Sequence[str]) -> Row | None:
        """(snapshot id, trajectory id) of what is called exactly `ref`, looking among tags and trajectory names in that order."""
        where = {
            "tags": "JOIN tags g ON g.snapshot = s.pk WHERE g.name = ?",
            "names": "JOIN trajectories n ON n.head = s.pk WHERE n.name = ?",
        }
        owner = {"tags": "(SELECT id FROM trajectories WHERE pk = s.trajectory)", "names": "n.id"}
        if not _searchable(ref):
            return None
        for kind in order:
            row = self._db.read_one(f"SELECT s.id, {owner[kind]} FROM snapshots s {where[kind]}", (ref,))
            if row is not None:
                return row
        return None

    def _by_prefix(self, wanted: str, ref: str) -> Row:
        """(snapshot id, trajectory id) of the one snapshot or trajectory whose id begins with `ref`."""
        if len(ref) < MIN_PREFIX_CHARS or not _searchable(ref):
            raise _no(wanted, ref)
        bounds = (*_range(ref), _CANDIDATES + 1)
        found = self._db.read(
            "SELECT s.id, s.id, t.id FROM snapshots s JOIN trajectories t ON t.pk = s.trajectory WHERE s.id >= ? AND s.id < ? LIMIT ?",
            bounds,
        ) + self._db.read(
            "SELECT t.id, s.id, t.id FROM trajectories t JOIN snapshots s ON s.pk = t.head WHERE t.id >= ? AND t.id < ? LIMIT ?", bounds
        )
        if not found:
            raise _no(wanted, ref)
        _check_unique(ref, [row[0] for row in found])
        return found[0][1:]

    def tag(self, snapshot_id: SnapshotID, name: str, *, move: bool = False) -> None:
        with self._db.transaction():
            self._add_tag(self._snapshot_numbers(snapshot_id)[0], name, move=move)

    def _add_tag(self, snapshot: int, name: str, *, move: bool) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise UsageError(
                f"{name[:80]!r} cannot be a tag: use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit"
            )
        row = self._db.read_one("SELECT s.pk, s.id FROM tags g JOIN snapshots s ON s.pk = g.snapshot WHERE g.name = ?", (name,))
        if row is not None and row[0] != snapshot and not move:
            raise Conflict(f"the tag {name} belongs to snapshot {short(row[1])}: move it, or choose another name")
        self._db.write("INSERT INTO tags VALUES (?,?) ON CONFLICT (name) DO UPDATE SET snapshot = excluded.snapshot", (name, snapshot))

    def untag(self, name: str) -> None:
        with self._db.transaction():
            if not _searchable(name) or not self._db.write("DELETE FROM tags WHERE name = ?", (name,)):
                raise _no("tag", name)

    # -- what is referenced --------------------------------------------------------------------------------------------------

    def referenced_layers(self) -> set[LayerID]:
        return {LayerID(row[0]) for row in self._db.read("SELECT DISTINCT value FROM stacks, json_each(stacks.layers)")}

    def referenced_blobs(self) -> set[BlobID]:
        found = self._db.read("SELECT call_output, call_stdout, call_stderr FROM snapshots")
        return {BlobID(blob) for row in found for blob in row if blob is not None}

    def experiment(self, experiment_id: ExperimentID) -> list[Trajectory]:
        found = self._trajectories("WHERE t.experiment = ? ORDER BY t.pk", (experiment_id,))
        if not found:
            raise _no("experiment", experiment_id)
        return found


def _no(kind: str, ref: str) -> NotFound:
    shown = ref if NAME_PATTERN.fullmatch(ref) else repr(ref[:80])
    where = {"image": "`snapshotd image ls` lists them", "experiment": "`snapshotd ls` shows them"}
    return NotFound(f"there is no {kind} {shown}: {where.get(kind, '`snapshotd ls` and `snapshotd log` show what there is')}")


def _range(prefix: str) -> tuple[str, str]:
    return prefix, prefix + _AFTER_ALL


def _searchable(ref: str) -> bool:
    """Whether it can be a value in the database at all; a string with lone surrogates matches nothing."""
    return isinstance(rows.encode_text(ref), str)


def _check_unique(ref: str, ids: list[str]) -> None:
    if len(ids) > 1:
        shown = ", ".join(short(one) for one in sorted(ids)[:_CANDIDATES])
        more = ", ..." if len(ids) > _CANDIDATES else ""
        raise Ambiguous(f"{ref} fits several ids ({shown}{more}): type more characters")
