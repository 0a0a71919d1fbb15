"""The facts of the fleet's catalog that this node knows without asking: up to where each trajectory is published, and which ones came
from other nodes. The truth is in PostgreSQL; a mark may be behind it, after a crash between the two."""

from __future__ import annotations

import json
from collections.abc import Mapping

from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound
from snapshotd.types import Snapshot, SnapshotID, TrajectoryID

_PUBLISHED, _FOREIGN, _TAGS = "fleet/published/", "fleet/foreign/", "fleet/tags"


class PublishedMarks:
    """Facts in this node's catalog. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._known: dict[TrajectoryID, int] = {}

    def published_seq(self, trajectory: TrajectoryID) -> int:
        """The `seq` up to which a trajectory's own snapshots are published; -1: none is."""
        known = self._known.get(trajectory)
        if known is None:
            known = self._known[trajectory] = int(self._catalog.get_meta(_PUBLISHED + trajectory) or -1)
        return known

    def is_published(self, snapshot: Snapshot) -> bool:
        """True if other nodes can read it."""
        return snapshot.seq <= self.published_seq(snapshot.trajectory)

    def set_published(self, trajectory: TrajectoryID, seq: int) -> None:
        """Note that a trajectory's snapshots up to this one are published."""
        if self.published_seq(trajectory) != seq:
            self._catalog.set_meta(_PUBLISHED + trajectory, str(seq))
            self._known[trajectory] = seq

    def is_foreign(self, trajectory: TrajectoryID) -> bool:
        """True if another node may have published more of a trajectory than is here."""
        return self._catalog.get_meta(_FOREIGN + trajectory) == "1"

    def set_foreign(self, trajectory: TrajectoryID, *, foreign: bool) -> None:
        """Note whether another node goes on with a trajectory from now on."""
        if self.is_foreign(trajectory) != foreign:
            self._catalog.set_meta(_FOREIGN + trajectory, "1" if foreign else "")

    def told_tags(self) -> dict[str, SnapshotID]:
        """The tags as the fleet was told of them."""
        told: dict[str, SnapshotID] = json.loads(self._catalog.get_meta(_TAGS) or "{}")
        return told

    def set_told_tags(self, tags: Mapping[str, SnapshotID]) -> None:
        """Note the tags that the fleet was told of."""
        if tags != self.told_tags():
            self._catalog.set_meta(_TAGS, json.dumps(tags))

    def find_unpublished(self, trajectory: TrajectoryID) -> list[Snapshot]:
        """A trajectory's own snapshots that are not published, oldest first. [] when it was removed."""
        count = self.count_unpublished(trajectory)
        return self._catalog.snapshots.of_trajectory(trajectory, count) if count else []

    def count_unpublished(self, trajectory: TrajectoryID) -> int:
        """The number of a trajectory's own snapshots that are not published."""
        try:
            head = self._catalog.snapshots.get(self._catalog.trajectories.get(trajectory).head)
            if head.trajectory != trajectory:
                return 0  # a fork at its beginning
            published = self.published_seq(trajectory)
            return head.seq - published if published >= 0 else self._catalog.snapshots.count(trajectory)
        except NotFound:
            return 0
