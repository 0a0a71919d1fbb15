"""The things that all nodes of a fleet share, in its PostgreSQL database: the catalog, the right to write, the repository's segments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from snapshotd.catalog.base import Catalog
from snapshotd.fleet.base import Claim, NodeID, OwnedTrajectory
from snapshotd.fleet.collection import Collection
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.repository import PublishedSegments
from snapshotd.repo.base import Peers
from snapshotd.types import TrajectoryID


class Claims(Protocol):
    """The node's right to write (`rights.NodeRights`)."""

    def check_lease(self) -> None:
        """Unavailable: the node may not act now."""

    def claim(self, trajectory: TrajectoryID) -> Claim:
        """Conflict: another node owns it; Unavailable."""
        ...

    def claims(self) -> Mapping[TrajectoryID, Claim]:
        """All that the node owns, as far as it knows."""
        ...

    def give_up(self, trajectories: Sequence[TrajectoryID]) -> None:
        """Give up the claims of trajectories that are about to be removed from the fleet. Their end is no loss of this
        node."""

    def keep(self, trajectories: Sequence[TrajectoryID]) -> None:
        """Claim trajectories again that were not removed after all."""

    def branch_off(self, row: OwnedTrajectory, lost: Claim, side: TrajectoryID) -> Claim:
        """Own a side branch of a trajectory that was taken over. Conflict, Unavailable."""
        ...


@dataclass(frozen=True, slots=True)
class SharedHistory:
    """The parts of the fleet's one database. `node`: this node's name. `together`: a transaction that the others'
    transactions become parts of."""

    node: NodeID
    catalog: Catalog
    coordination: PostgresCoordination
    segments: PublishedSegments
    collection: Collection
    together: Callable[[], AbstractContextManager[None]]

    def peers(self) -> Peers:
        """The nodes and their last segments now. Unavailable."""
        return Peers(self.segments.numbers(), self.segments.oldest_pin_s())
