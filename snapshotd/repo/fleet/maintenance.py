"""The repository of one node of a fleet, as its archive process has it: written, published, merged and collected."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from snapshotd.errors import Conflict, DataLoss, Unsupported
from snapshotd.repo.base import Peers, Reclaimed, RepairResult, Roots, SharedMaintenance
from snapshotd.repo.fleet.base import GRACE_S, check_key, check_node
from snapshotd.repo.fleet.garbage import Garbage
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.fleet.reads import remove_stale
from snapshotd.repo.fleet.segments import Segments
from snapshotd.repo.fleet.store import FleetStore
from snapshotd.repo.format.index import create_index
from snapshotd.repo.upkeep.maintenance import PackMaintenance
from snapshotd.repo.upkeep.reach import mark
from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.base import Store


class FleetMaintenance(PackMaintenance, SharedMaintenance):
    """See `fleet/base.py`. Not thread-safe. Owns the writer; the bucket's store is the caller's."""

    _index_kind = FleetIndex

    def __init__(
        self,
        bucket: Store,
        node: str,
        peers: Peers,
        index_path: Path,
        key: bytes,
        packer_command: Sequence[str] | None = None,
    ) -> None:
        """NotPermitted when the key is not the fleet's; UsageError for a node that cannot be one; OSError."""
        check_key(bucket, key)
        self._fleet_store = FleetStore(bucket, check_node(node), peers, self._homes, self._merge_missed)
        super().__init__(self._fleet_store, index_path, key, packer_command)
        self._segments = Segments(bucket, node, peers, key)
        self._garbage = Garbage(self._fleet_store, peers, key)
        self._thread: int | None = None
        """The thread that may merge when a pack is missing; None while no pack may move."""
        self._must_look = True
        """Objects were taken away since the last publication, or may have been before this process began."""

    def _homes(self) -> FleetIndex | None:
        return None if self._writer is None else self._index_of(self._writer)

    @staticmethod
    def _index_of(writer: PackRepository) -> FleetIndex:
        assert isinstance(writer.index, FleetIndex)
        return writer.index

    def _open(self) -> PackRepository:
        if not self._index_path.exists():
            create_index(self._index_path)  # packs without an index are the rule in a fleet: the segments follow
        opened = super()._open()
        self._thread = threading.get_ident()
        return opened

    def merge(self, *, ahead: bool = False) -> None:
        """See `SharedMaintenance.merge`."""
        self._must_look |= self._segments.merge(self._index_of(self.writer()), ahead=ahead)

    def _merge_missed(self) -> None:
        """Merge, since a pack is gone: another node may have told where its objects are."""
        if self._thread == threading.get_ident():
            self.merge(ahead=True)

    def publish(self, roots: Roots, *, now: float, grace_s: float = GRACE_S) -> int:
        """Flush, and let the fleet know what this node has stored. Returns the number of the node's last segment. The
        caller commits to the fleet's catalog afterwards, within a quarter of the grace, that `roots` are needed.

        Conflict: objects that the roots need were collected while this node was away; nothing is published, and all of
        this node's unpublished snapshots must be archived again. OSError: nobody needs what was published; try again."""
        writer = self.writer()
        writer.flush()
        self.merge()
        if self._must_look:
            self._take_back(roots, now - grace_s / 2)
            self._must_look = False
        return self._segments.publish(self._index_of(writer))

    def _take_back(self, roots: Roots, limit_s: float) -> None:
        """Let condemned objects that the roots need live again. Conflict when one is gone, or was condemned too long ago."""
        writer = self.writer()
        index = self._index_of(writer)
        try:
            with index.seeing_condemned():
                live = mark(writer.reader, index, roots, set(), lambda _: None).live
        except DataLoss as exc:
            index.condemn_unpublished()
            raise self._too_late(exc.message) from exc
        needed = {raw: at_ms for raw, at_ms in index.condemned_objects().items() if raw in live}
        if needed and min(needed.values()) <= limit_s * 1000:
            index.condemn_unpublished()
            raise self._too_late(f"the object {min(needed).hex()} is about to go")
        self._garbage.take_back(index, list(needed))

    def _too_late(self, why: str) -> Conflict:
        node = self._fleet_store.node
        return Conflict(
            f"node {node} has not published for so long that the fleet has collected what its snapshots build upon ({why}): "
            "archive its unpublished snapshots again"
        )

    def collect(
        self,
        roots: Roots,
        *,
        grace_s: float,
        now: float,
        dry_run: bool,
        progress: Callable[[str], object],
        wanted: Callable[[bytes], bool] = lambda _: False,
    ) -> Reclaimed:
        """See `Maintenance.collect` and `fleet/base.py`. `roots` are those of the whole fleet, read at `now`. Dead objects
        are condemned now and deleted by a collection after the grace; `freed_bytes` counts it now. A grace below `GRACE_S` counts for
        a dry run alone: other nodes may be about to publish what builds upon garbage."""
        grace_s = grace_s if dry_run else max(grace_s, GRACE_S)
        writer = self.writer()
        if not dry_run:
            writer.give_up()
        self._segments.merge(self._index_of(writer))
        self._must_look = True
        index = self._index_of(writer)
        self._thread = None
        try:
            if not dry_run:
                index.settle_copies(self._fleet_store.node)
            collection = self._garbage.plan(index, roots, grace_s=grace_s, now=now, progress=progress, wanted=wanted)
            if dry_run:
                return collection.planned.reclaimed
            self._segments.publish(index)
            result = self._garbage.run(index, collection, progress)
            self._segments.publish(index, collection=True)
            buried = self._garbage.expire(index, grace_s=grace_s, now=now, progress=progress)
            self._segments.publish(index, collection=True)
            self._garbage.remove_tombstones(index, buried, grace_s=grace_s, now=now)
            remove_stale(self._fleet_store.bucket, index)
            writer.reader.forget()
            return replace(result, segment=index.last_merged(self._fleet_store.node)[0])
        finally:
            self._thread = threading.get_ident()

    def repair(self, progress: Callable[[str], object]) -> RepairResult:
        """Unsupported: packs that are damaged come from a backup of the bucket, and a node makes a damaged index again from the
        segments."""
        raise Unsupported(
            "the packs of a fleet are not repaired by one node: restore those that `snapshotd check` names from a backup of the bucket. "
            f"Where this node's index is damaged, stop the node, remove {self._index_path}, and start it, which makes the index again "
            "from the bucket; snapshots that it had not published are archived again"
        )
