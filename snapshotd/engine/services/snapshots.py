"""Trajectories and snapshots: what is recorded of them, and their files."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

from snapshotd.api.snapshots import FileStatus, LogQuery
from snapshotd.api.wire import check_ref
from snapshotd.catalog.base import CallFacts
from snapshotd.engine import markers
from snapshotd.engine.base import LookedAt, Overview
from snapshotd.engine.context import Context
from snapshotd.engine.markers import MARKERS
from snapshotd.engine.records import file_status
from snapshotd.engine.requests import present
from snapshotd.engine.storage import look
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.engine.storage.cold import Cold
from snapshotd.kernel import turns
from snapshotd.trees.base import Change, RestoreReport
from snapshotd.trees.patch import PatchBound, Write
from snapshotd.types import Snapshot, SnapshotID, Trajectory, TrajectoryID


class SnapshotService:
    """Every method may raise NotFound or Ambiguous for a `ref`."""

    def __init__(
        self, context: Context, cold: Cold, archive: Archive, is_published: Callable[[Snapshot], bool] | None = None
    ) -> None:
        """`is_published`: of a node of a fleet."""
        self._context, self._catalog, self._cold, self._archive = context, context.catalog, cold, archive
        self._is_published = is_published

    def trajectories(self) -> list[Trajectory]:
        return self._catalog.trajectories.list()

    def trajectory(self, ref: str) -> Trajectory:
        return self._catalog.refs.find_trajectory(ref)

    def get(self, ref: str) -> Snapshot:
        return self._catalog.refs.find_snapshot(ref)

    def overview(self, trajectory: str | None = None) -> list[Overview]:
        """All trajectories as a list or a tree shows them, oldest first; with `trajectory` that one alone.

        The number of queries grows with their pages (500 trajectories), not with trajectories."""
        if trajectory is None:
            chosen = self._catalog.trajectories.list()
        else:
            chosen = [self._catalog.refs.find_trajectory(check_ref(trajectory, "trajectory"))]
        totals = self._catalog.figures.totals(None if trajectory is None else chosen[0].id)
        size = self._context.store.sizes.total
        newest = [totals[one.id].newest for one in chosen if one.id in totals]
        origins = [one.forked_from for one in chosen if one.forked_from is not None]
        snapshots = self._catalog.snapshots.get_many({*newest, *origins})
        found = []
        for one in chosen:
            turns.give_way()
            own, origin = totals.get(one.id), None if one.forked_from is None else snapshots.get(one.forked_from)
            if own is None:
                found.append(Overview(one, 0, None, origin))
            else:
                taken = snapshots.get(own.newest)
                found.append(Overview(one, own.snapshots, taken, origin, own.file_bytes, size(own.layers), own.model))
        return found

    def look_at(self, snapshots: Sequence[Snapshot]) -> list[LookedAt]:
        """These snapshots with what their journal entries tell."""
        facts = self._catalog.figures.facts([one.id for one in snapshots])
        told = self._is_published
        return [
            LookedAt(one, facts.get(one.id, CallFacts()), self.is_marker(one), None if told is None else told(one))
            for one in snapshots
        ]

    def is_marker(self, snapshot: Snapshot, names: Collection[str] = MARKERS) -> bool:
        """See `markers.is_marker`."""
        return markers.is_marker(self._catalog, snapshot, names)

    def log(self, ref: str, query: LogQuery | None = None) -> list[Snapshot]:
        """A trajectory's own snapshots, oldest first; with `before`, only those with a smaller `seq`; with `last`, only
        this number of the newest. Here and in
        `snapshot`, `files` is None until a background thread has counted the changes; no call waits for that."""
        asked, line = query or LogQuery(), self._catalog.refs.find_trajectory(ref).id
        return self._catalog.snapshots.of_trajectory(line, asked.last, before=asked.before)

    def of_tenant(self, tenant: str, among: TrajectoryID | None = None) -> set[TrajectoryID]:
        """The ids of a tenant's trajectories: all, or the one of `among` if it is one."""
        return self._catalog.trajectories.of_tenant(tenant, among)

    def all(self) -> list[Snapshot]:
        """Every snapshot of every trajectory."""
        return list(self._catalog.snapshots.all())

    def output(self, ref: str, which: Literal["stdout", "stderr", "output"]) -> Iterator[bytes]:
        """A tool call's recorded output in pieces; empty if it has none. DataLoss: it is damaged, or a repair gave it
        up."""
        return self._context.recorded_output(self._catalog.refs.find_snapshot(ref), which) or iter(())

    def diff(self, a: str, b: str | None) -> Iterator[Change]:
        """From `a` to `b`; with one ref, from its parent to it."""
        return look.changes(self._context, a, b)

    def patch(self, a: str, b: str | None, *, root: bytes, write: Write, bound: PatchBound | None = None) -> int:
        """Write the changes below `root` (b"workspace") as a patch with paths relative to it. Returns how many lie
        outside of it. `bound`: leave larger files out."""
        return look.write_patch(self._context, a, b, root, write, bound)

    def cat(self, ref: str, path: bytes) -> Iterator[bytes]:
        """The content of a regular file.

        In pieces. NotFound (naming the path); UsageError for anything that is not a regular
        file."""
        return look.cat(self._context, ref, path)

    def lstat(self, ref: str, path: bytes) -> FileStatus:
        """The entry at a path, links not followed.

        NotFound (naming the path)."""
        return file_status(*look.lstat(self._context, ref, path))

    def restore(self, ref: str, to: Path, *, path: bytes, namespace_pid: int = 0) -> RestoreReport:
        """Write a snapshot's tree (or the part below `path`) into `to`, which must not exist or be empty. `to` is a path
        as the process `namespace_pid` sees it; 0: as the daemon does."""
        return look.restore(self._context, ref, to, path, namespace_pid, self._cold.restore)

    def tag(self, ref: str, name: str, *, move: bool) -> SnapshotID:
        with self._context.pins.pinned(self._catalog.refs.find_snapshot(ref).id) as snapshot:
            self._catalog.refs.tag(snapshot.id, name, move=move, request=present())
        self._archive.save_tags_soon()
        return snapshot.id

    def untag(self, name: str) -> None:
        self._catalog.refs.untag(check_ref(name, "tag"))
        self._archive.save_tags_soon()
