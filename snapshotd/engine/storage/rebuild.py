"""Bringing a catalog back from the records in the repository.

A snapshot comes back if its record is readable and the snapshots come back that it needs: its parent and the one that
it follows, down to the first of its line, where its conversation and journal begin. Every other snapshot is listed with
its tree, which can still be read. Facts that no record holds are made up or gone:

- A trajectory's head is the last of its snapshots that came back; it is `stopped`, or `interrupted` if it has an agent,
  without exit code.
- A fork that took no snapshot of its own has no record and is gone. Snapshots that were not stored are gone, and
  journal entries that no snapshot bound.
- Approvals, compensations and the key-value store are in no record.
- Removed snapshots that were not collected yet come back. If two trajectories then have one name, the newer one keeps
  it; if a tag has the name too, the tag keeps it.
- Tags are those of the latest tags record.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.engine.storage.archiver import count_between
from snapshotd.engine.storage.records import Record, decode_any
from snapshotd.errors import Conflict, DataLoss, NotFound, VersionMismatch
from snapshotd.repo.base import Repository
from snapshotd.types import (
    CallID,
    Image,
    ImageID,
    RecordID,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryID,
    TreeID,
    short,
)

_PREFERRED = (SnapshotState.LOST, SnapshotState.STORED, SnapshotState.PRUNED)
"""Among several records of one snapshot, the one whose state is last here counts: a pruned snapshot never goes back."""
_NEVER = -(1 << 63)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A snapshot whose record is readable and which could not come back, because of `reason` (one clause)."""

    snapshot: SnapshotID
    trajectory: TrajectoryID
    seq: int
    tree: TreeID | None
    record: RecordID
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of the parts that came back, and the parts that did not. `unreadable`: records with the fault of each;
    their trajectories are unknown. `lost`: snapshots that came back without their files, because their tree is not in
    the repository. `unnamed`: trajectories that gave up a name."""

    images: int
    trajectories: int
    snapshots: int
    tags: int
    unreadable: tuple[tuple[RecordID, str], ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    lost: tuple[SnapshotID, ...] = ()
    unnamed: tuple[tuple[TrajectoryID, str], ...] = ()
    dropped_tags: tuple[str, ...] = ()


def rebuild(
    records: Iterable[tuple[RecordID, bytes]], catalog: Catalog, has_tree: Callable[[TreeID], bool] = lambda _: True
) -> Report:
    """Fill a catalog that has no trajectories from records in any order; duplicates do no harm. All or nothing, in one
    transaction.

    `has_tree` tells whether a tree is in the repository. The result depends on the set of records and not on their
    order. Errors: Conflict (the catalog is not empty), and errors of `records` itself. A damaged record is not an
    error. Images that are in the catalog already stay as they are. Memory: all records.
    """
    if catalog.trajectories.list():
        raise Conflict("the catalog cannot be rebuilt because it holds trajectories: move it away first")
    read = _Read(records)
    line_up = _LineUp(read)
    rows, lost = _make_rows(line_up, read, has_tree)
    lines, unnamed = _make_lines(line_up, read, {name for row in rows for name in row.snapshot.tags})
    here = {image.id for image in catalog.images.list()}
    images = [
        replace(image, tree=image.tree if image.tree and has_tree(image.tree) else None)
        for image in read.images_for(lines, rows)
    ]
    catalog.others.restore([image for image in images if image.id not in here], lines, rows)
    for image in images:
        if image.id in here and image.tree is not None:
            catalog.images.set_tree(image.id, image.tree)
    placed = line_up.placed
    dropped = sorted(name for name, snapshot_id in read.tags.items() if snapshot_id not in placed)
    return Report(
        len(images),
        len(lines),
        len(rows),
        len(read.tags) - len(dropped),
        tuple(sorted(read.unreadable)),
        line_up.list_left_out(),
        tuple(lost),
        tuple(unnamed),
        tuple(dropped),
    )


def count_changes(catalog: Catalog, repository: Repository) -> None:
    """Count the changed files of stored snapshots that have no count: their records were made before the daemon had
    counted. Where a tree is damaged there is none afterwards either."""
    images = {image.id: image.tree for image in catalog.images.list()}
    for uncounted in [one.id for one in catalog.snapshots.all() if one.files is None]:
        snapshot = catalog.snapshots.get(uncounted)
        below = images.get(snapshot.stack.image)
        if snapshot.parent is not None:
            below = catalog.snapshots.get(snapshot.parent).tree
        if snapshot.tree is None or below is None:
            continue
        with contextlib.suppress(DataLoss, NotFound):
            catalog.snapshots.set_files(snapshot.id, count_between(repository, below, snapshot.tree))


class _Read:
    """The facts of all readable records."""

    def __init__(self, records: Iterable[tuple[RecordID, bytes]]) -> None:
        self.snapshots: dict[SnapshotID, tuple[RecordID, Record]] = {}
        self.images: dict[ImageID, Image] = {}
        self.trajectories: dict[TrajectoryID, Trajectory] = {}
        self.tags: Mapping[str, SnapshotID] = {}
        self.unreadable: set[tuple[RecordID, str]] = set()
        tags_rank = (_NEVER, RecordID(""))
        for record_id, data in records:
            try:
                record = decode_any(data)
            except (DataLoss, VersionMismatch) as exc:
                self.unreadable.add((record_id, exc.message))
                continue
            if isinstance(record, Record):
                known = self.snapshots.get(record.snapshot.id)
                if known is None or _rank(record_id, record) > _rank(*known):
                    self.snapshots[record.snapshot.id] = (record_id, record)
            elif (record.at_ns, record_id) > tags_rank:
                self.tags, tags_rank = record.tags, (record.at_ns, record_id)
        self._settle()

    def _settle(self) -> None:
        """If records contradict each other about an image or a trajectory, the latest counts; but a name once lost is
        lost."""
        records = [record for _, record in self.snapshots.values()]
        for record in sorted(records, key=lambda one: (one.snapshot.created_at_ns, one.snapshot.seq, one.snapshot.id)):
            image, known = record.image, self.images.get(record.image.id)
            if known is not None:
                image = replace(image, name=image.name if known.name else "", tree=image.tree or known.tree)
            self.images[image.id] = image
            self.trajectories[record.trajectory.id] = record.trajectory

    def images_for(self, lines: list[Trajectory], rows: list[SnapshotRow]) -> list[Image]:
        """The images that are needed, oldest first, so that among images with one name the newest gets it."""
        needed = {line.spec.image for line in lines} | {row.snapshot.stack.image for row in rows}
        return sorted((self.images[one] for one in needed), key=lambda image: (image.created_at_ns, image.id))


def _rank(record_id: RecordID, record: Record) -> tuple[int, bool, RecordID]:
    return _PREFERRED.index(record.snapshot.state), record.snapshot.files is not None, record_id


class _LineUp:
    """The snapshots that come back, parents first, otherwise oldest first."""

    def __init__(self, read: _Read) -> None:
        self._read = read
        self._refused: dict[SnapshotID, str] = {}
        self._next: dict[tuple[TrajectoryID, SnapshotID | None], SnapshotID] = {}
        self._calls: set[CallID] = set()
        self.placed: dict[SnapshotID, Record] = {}
        waiting: dict[SnapshotID, list[Snapshot]] = {}
        ready: list[tuple[int, int, SnapshotID]] = []
        for _, record in read.snapshots.values():
            for needed in _needs(record.snapshot):
                waiting.setdefault(needed, []).append(record.snapshot)
            if not _needs(record.snapshot):
                _push(ready, record.snapshot)
        while ready:
            snapshot_id = heapq.heappop(ready)[2]
            record = read.snapshots[snapshot_id][1]
            reason = self._find_misfit(record)
            if reason is not None:
                self._refused[snapshot_id] = reason
                continue
            self.placed[snapshot_id] = record
            self._next[record.snapshot.trajectory, record.snapshot.parent] = snapshot_id
            self._calls.update(entry.id for entry in record.entries)
            for child in waiting.get(snapshot_id, ()):
                if _needs(child) <= self.placed.keys():
                    _push(ready, child)

    def _find_misfit(self, record: Record) -> str | None:
        """The reason why a snapshot does not continue its parent or the snapshot that it follows; None: it does. Both
        have their places already."""
        snapshot = record.snapshot
        trajectory = self._read.trajectories[snapshot.trajectory]
        if trajectory.spec.image not in self._read.images:
            return f"no record tells of image {short(trajectory.spec.image)}, which its trajectory starts from"
        if (snapshot.trajectory, snapshot.parent) in self._next:
            return f"snapshot {short(self._next[snapshot.trajectory, snapshot.parent])} has its place in the line"
        if any(entry.id in self._calls for entry in record.entries):
            return "its journal has a call that another snapshot has"
        parent = self.placed[snapshot.parent].snapshot if snapshot.parent is not None else None
        first = parent is None or parent.trajectory != snapshot.trajectory
        fits = not first or snapshot.parent == trajectory.forked_from
        if parent is not None:
            fits = fits and snapshot.seq == parent.seq + 1
        continued = self.placed[snapshot.continues].snapshot.messages if snapshot.continues is not None else 0
        kept = snapshot.messages - len(record.messages)
        if kept != continued and (snapshot.follows is None or kept > continued):
            return f"its conversation does not continue that of {short(snapshot.continues or '')}"
        return None if fits else "it does not continue what it names as its parent"

    def list_left_out(self) -> tuple[LeftOut, ...]:
        found = []
        for record_id, record in self._read.snapshots.values():
            one = record.snapshot
            if one.id in self.placed:
                continue
            reason = self._refused.get(one.id)
            if reason is None:
                gone = min(_needs(one) - self.placed.keys(), key=lambda needed: needed != one.parent)
                what = "its parent" if gone == one.parent else "what it follows,"
                why = "could not come back" if gone in self._read.snapshots else "has no readable record"
                reason = f"{what} {short(gone)} {why}"
            found.append(LeftOut(one.id, one.trajectory, one.seq, one.tree, record_id, reason))
        return tuple(sorted(found, key=lambda out: (out.trajectory, out.seq, out.snapshot)))


def _needs(snapshot: Snapshot) -> set[SnapshotID]:
    """The snapshots that have to be placed before it."""
    return {one for one in (snapshot.parent, snapshot.follows) if one is not None}


def _push(ready: list[tuple[int, int, SnapshotID]], snapshot: Snapshot) -> None:
    heapq.heappush(ready, (snapshot.created_at_ns, snapshot.seq, snapshot.id))


def _make_rows(
    line_up: _LineUp, read: _Read, has_tree: Callable[[TreeID], bool]
) -> tuple[list[SnapshotRow], list[SnapshotID]]:
    tags: dict[SnapshotID, list[str]] = {}
    for name, snapshot_id in read.tags.items():
        tags.setdefault(snapshot_id, []).append(name)
    rows: list[SnapshotRow] = []
    lost: list[SnapshotID] = []
    before: set[SnapshotID] = set()
    for snapshot_id, record in line_up.placed.items():
        snapshot = replace(record.snapshot, tags=tuple(sorted(tags.get(snapshot_id, ()))))
        if snapshot.base is not None and snapshot.base not in before:
            snapshot = replace(
                snapshot, base=None, own_layers=len(snapshot.stack.layers)
            )  # only all its layers make it
        if snapshot.tree is not None and not has_tree(snapshot.tree):
            snapshot = replace(snapshot, state=SnapshotState.LOST, tree=None)
            lost.append(snapshot_id)
        rows.append(
            SnapshotRow(snapshot, record.messages, read.snapshots[snapshot_id][0], record.entries, record.state)
        )
        before.add(snapshot_id)
    return rows, lost


def _make_lines(
    line_up: _LineUp, read: _Read, taken: set[str]
) -> tuple[list[Trajectory], list[tuple[TrajectoryID, str]]]:
    heads: dict[TrajectoryID, SnapshotID] = {}
    for snapshot_id, record in line_up.placed.items():
        heads[record.snapshot.trajectory] = snapshot_id  # the last one stays
    lines = [replace(read.trajectories[one], head=head) for one, head in heads.items()]
    lines = [replace(line, began=line.began if line.began in line_up.placed else None) for line in lines]
    lines.sort(key=lambda line: (line.created_at_ns, line.id))
    unnamed: list[tuple[TrajectoryID, str]] = []
    for index in range(len(lines) - 1, -1, -1):
        name = lines[index].name
        if name is not None and name in taken:
            unnamed.append((lines[index].id, name))
            lines[index] = replace(lines[index], name=None)
        elif name is not None:
            taken.add(name)
    return lines, unnamed
