"""The seams of a node that publishes nothing."""

from __future__ import annotations

from snapshotd.catalog.base import Catalog
from snapshotd.errors import Unavailable
from snapshotd.fleet.base import Claim, OwnedTrajectory, Taken
from snapshotd.types import TrajectoryID


class NotPublishing:
    """A `Publisher` and a `Takeover`: everything stays on this node."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def start(self) -> None:
        """Nothing begins."""

    def close(self) -> None:
        """Nothing ends."""

    def lag(self) -> int:
        return len(self._catalog.unstored())

    def publish(self, trajectory: TrajectoryID, timeout_s: float) -> None:
        raise Unavailable("this node does not publish")

    def bring(self, trajectory: TrajectoryID) -> None:
        raise Unavailable("this node has no histories of others")

    def is_incomplete(self, trajectory: TrajectoryID) -> bool:
        return False

    def unpublished(self, trajectory: TrajectoryID) -> int:
        return 0

    def branch_off(self, row: OwnedTrajectory) -> Claim | None:
        return None

    def intend(self, taken: Taken) -> None:
        """Nothing is written."""
