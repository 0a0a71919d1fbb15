"""Rows of snapshots from one catalog of a fleet to another: what a node publishes, and what another one takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from snapshotd.catalog.base import Catalog, SnapshotRow
from snapshotd.repo.base import Roots
from snapshotd.types import BlobID, Image, ImageID, RecordID, Snapshot, SnapshotID, Trajectory, TrajectoryID, TreeID


def rows_of(catalog: Catalog, snapshots: Iterable[Snapshot]) -> Iterator[SnapshotRow]:
    """Everything that is recorded with these snapshots. NotFound: one was removed meanwhile."""
    for snapshot in snapshots:
        yield SnapshotRow(
            snapshot,
            tuple(catalog.conversations.own(snapshot.id)),
            catalog.snapshots.record(snapshot.id),
            tuple(catalog.journal.own(snapshot.id)),
            catalog.conversations.own_state(snapshot.id),
        )


def needed_by(catalog: Catalog, snapshot: Snapshot) -> tuple[list[Trajectory], list[Snapshot]]:
    """A snapshot with those before it in its trajectory, and what they stand on in other ones: a fork's origin, and what a
    rewind went back to. Each snapshot comes after those that it names. NotFound: one was removed meanwhile."""
    last: dict[TrajectoryID, Snapshot] = {}
    found: dict[SnapshotID, Snapshot] = {}
    trajectories: dict[TrajectoryID, Trajectory] = {}
    waiting = [snapshot]
    while waiting:
        one = waiting.pop()
        known = last.get(one.trajectory)
        if known is not None and known.seq >= one.seq:
            continue
        trajectory = trajectories[one.trajectory] = catalog.trajectories.get(one.trajectory)
        own = catalog.snapshots.of_trajectory(one.trajectory, before=one.seq + 1)
        last[one.trajectory] = one
        found.update((each.id, each) for each in own)
        names = {name for each in own for name in named_by(each)} | {trajectory.began, trajectory.forked_from}
        elsewhere = catalog.snapshots.get_many(name for name in names if name is not None and name not in found)
        waiting += [each for each in elsewhere.values() if each.trajectory != one.trajectory]
    ends = [trajectory_at(trajectories[one], last[one].id, found) for one in trajectories]
    return ends, list(_in_order(found))


def named_by(snapshot: Snapshot) -> list[SnapshotID]:
    """The snapshots that have to be in a catalog before this one."""
    return [one for one in (snapshot.parent, snapshot.follows, snapshot.base) if one is not None]


def trajectory_at(trajectory: Trajectory, head: SnapshotID, known: Mapping[SnapshotID, object]) -> Trajectory:
    """A trajectory as it was when `head` was its head. The place where its program began is left out if it is not known."""
    began = trajectory.began if trajectory.began in known else None
    return replace(trajectory, head=head, began=began)


def roots_of(
    record: Callable[[SnapshotID], RecordID | None], snapshots: Sequence[Snapshot], images: Mapping[ImageID, Image]
) -> Roots:
    """Everything that these snapshots need in the repository."""
    trees: dict[TreeID, str] = {image.tree: image.id for image in images.values() if image.tree is not None}
    contents: dict[BlobID, str] = {}
    records: dict[RecordID, str] = {}
    for snapshot in snapshots:
        if snapshot.tree is not None:
            trees.setdefault(snapshot.tree, snapshot.id)
        contents.update(dict.fromkeys(snapshot.call.outputs, snapshot.id))
        known = record(snapshot.id)
        if known is not None:
            records[known] = snapshot.id
    return Roots(trees, contents, records)


def _in_order(found: Mapping[SnapshotID, Snapshot]) -> Iterator[Snapshot]:
    """Snapshots, each after those that it names. Iterative: a line has thousands."""
    done: set[SnapshotID] = set()
    for one in sorted(found.values(), key=lambda each: (each.trajectory, each.seq)):
        waiting = [one]
        while waiting:
            at = waiting[-1]
            missing = [found[name] for name in named_by(at) if name in found and name not in done]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if at.id not in done:
                done.add(at.id)
                yield at
