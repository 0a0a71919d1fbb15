"""The nodes of a fleet as its PostgreSQL database knows them: for operators, who may read and write it."""

from __future__ import annotations

from contextlib import ExitStack

from snapshotd.client.fleet.addressed import AddressedNodes
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import NotFound
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.opening import open_coordination
from snapshotd.fleet.places import ForkBlock, NodeRoom
from snapshotd.types import SnapshotID, TrajectoryID


class DatabaseNodes(AddressedNodes):
    """The database is asked for everything."""

    def __init__(self, url: str) -> None:
        """Errors: as `fleet.opening.open_coordination`."""
        super().__init__()
        self._opened = ExitStack()
        self._coordination = self._opened.enter_context(open_coordination(url))

    def rooms(self) -> list[NodeRoom]:
        return self._coordination.rooms()

    def reserve(self, block: ForkBlock, memory_bytes: int) -> str:
        return self._coordination.reserve(block.node, block.count, memory_bytes)

    def end_reservation(self, block: ForkBlock) -> None:
        self._coordination.begin_reserved(block.node, block.reservation)

    def home(self, snapshot: SnapshotInfo, answered: NodeID) -> NodeID:
        try:
            return self._coordination.owner(TrajectoryID(snapshot.trajectory)).node or answered
        except NotFound:
            return answered

    def is_published(self, snapshot: SnapshotInfo) -> bool:
        return bool(self._coordination.find_published([SnapshotID(snapshot.id)]))

    def close(self) -> None:
        self._opened.close()
