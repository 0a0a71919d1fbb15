"""A prune on a node of a fleet: what it may give up, and what the others need. One node at a time, under the collector's lease.

    1 the fleet's catalog says `pruned`, for snapshots of this node that no tag, fork or reader anywhere needs      <- the commit point
    2 this node's catalog says so
    3 garbage is what neither the fleet's catalog nor this node's unpublished snapshots refer to; it is deleted by a prune after
      the grace (repo/fleet/base.py)

The rows of the fleet's catalog are the references, so heads, tags and approvals of every node keep what they need. Snapshots that
another node has stored and not published are safe for half of the grace, and are stored again later. So a prune whose node stood
still past the collector's lease deletes nothing that is needed, although another one has begun since.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from snapshotd.engine.context import Context
from snapshotd.engine.node.copying import roots_of
from snapshotd.engine.node.marks import PublishedMarks
from snapshotd.engine.node.shared import Claims, SharedHistory
from snapshotd.engine.storage.upkeep import PruneScope
from snapshotd.errors import SnapshotdError
from snapshotd.failpoints import hit
from snapshotd.fleet.base import SECOND_NS
from snapshotd.fleet.collection import COLLECTION_TTL_NS
from snapshotd.repo.base import Peers, Reclaimed, Roots
from snapshotd.types import SnapshotID, SnapshotState, Trajectory, TrajectoryID

_log = logging.getLogger(__name__)


class NodePruneScope(PruneScope):
    """See the module's text. For one prune at a time."""

    def __init__(
        self,
        context: Context,
        shared: SharedHistory,
        claims: Claims,
        marks: PublishedMarks,
        epoch: Callable[[], int],
        publish_removals: Callable[[], None],
        refresh: Callable[[TrajectoryID], object],
    ) -> None:
        """`epoch`: gives the number of this daemon among the node's daemons. `publish_removals`: tells the fleet which
        trajectories were removed here. `refresh`: see `OtherCatalogs`."""
        super().__init__(shared.catalog)
        self._context, self._own = context, context.catalog
        self._shared, self._claims, self._marks, self._epoch = shared, claims, marks, epoch
        self._publish_removals, self._refresh = publish_removals, refresh
        self._fence = 0

    def refresh(self) -> None:
        for one in self._own.trajectories.list():
            if self._marks.is_foreign(one.id):
                self._refresh(one.id)

    def choose_own(self, trajectories: Iterable[Trajectory]) -> Iterable[Trajectory]:
        claimed = self._claims.claims()
        return [one for one in trajectories if one.id in claimed and not self._marks.is_foreign(one.id)]

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._claims.check_lease()
        self._publish_removals()
        collection, node = self._shared.collection, self._shared.node
        self._fence = collection.begin_collecting(node, self._epoch())
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(COLLECTION_TTL_NS / SECOND_NS / 3):
                try:
                    collection.prolong(self._fence)
                except SnapshotdError as exc:
                    _log.warning("another node may collect meanwhile: %s", exc.message)

        keeper = threading.Thread(target=keep, name="fleet-collect")
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()
            try:
                collection.end_collecting(self._fence)
            except SnapshotdError as exc:
                _log.info("the collector's lease runs out by itself: %s", exc.message)

    def choose_unneeded(self, snapshots: Sequence[SnapshotID]) -> Collection[SnapshotID]:
        published = self._shared.coordination.find_published(snapshots)
        return {*self.catalog.others.choose_unneeded(published), *self._find_pruned(snapshots)}

    def give_up(self, snapshots: Sequence[SnapshotID]) -> Collection[SnapshotID]:
        with self._shared.together():
            gone = self._shared.collection.remove_published(self._fence, self.catalog.others.choose_unneeded(snapshots))
            self.catalog.snapshots.set_pruned(gone)
        hit("engine.prune.told")
        return {*gone, *self._find_pruned(snapshots)}

    def _find_pruned(self, snapshots: Sequence[SnapshotID]) -> list[SnapshotID]:
        """Choose the ones that the fleet knows to have no files: a crash may have come before this node's catalog did."""
        found = self.catalog.snapshots.get_many(snapshots).values()
        return [one.id for one in found if one.state is SnapshotState.PRUNED]

    def more_roots(self) -> Roots:
        unpublished = [one for one in self._own.snapshots.all() if not self._marks.is_published(one)]
        images = {image.id: image for image in self._context.images.list()}
        return roots_of(self._own.snapshots.record, unpublished, images)

    def peers(self) -> Peers | None:
        return self._shared.peers()

    def tell(self, reclaimed: Reclaimed) -> None:
        if reclaimed.segment is not None:
            self._shared.segments.note(self._shared.node, reclaimed.segment)

    def find_still_known(self, removed: Collection[TrajectoryID]) -> Collection[TrajectoryID]:
        there = {one.id for one in self.catalog.trajectories.list()} if removed else set()
        return there.intersection(removed)
