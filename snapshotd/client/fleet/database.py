"""The nodes of a fleet as its PostgreSQL database knows them."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from snapshotd.client.client import Snapshotd
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import NotFound
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.opening import open_coordination
from snapshotd.fleet.places import ForkBlock, NodeRoom
from snapshotd.types import SnapshotID, TrajectoryID


class DatabaseNodes(KnownNodes):
    """Room is reserved there, and a node gets a published snapshot by itself. Each node is known by a login of its
    address (`snapshotd login`), or all by one token."""

    def __init__(self, url: str, token: str | None, pin: str | None, ca: str | None) -> None:
        """Errors: as `fleet.opening.open_coordination`."""
        self._token, self._pin, self._ca = token, pin, ca
        self._clients: dict[NodeID, Snapshotd] = {}
        self._lock = threading.Lock()
        self._opened = ExitStack()
        self._coordination = self._opened.enter_context(open_coordination(url))

    def names(self) -> list[NodeID]:
        return [room.node for room in self.rooms()]

    def client(self, node: NodeID) -> Snapshotd:
        with self._lock:
            if node not in self._clients:
                self._clients[node] = self._reach(node)
            return self._clients[node]

    def _reach(self, node: NodeID) -> Snapshotd:
        address = next((room.address for room in self.rooms() if room.node == node), None)
        if not address:
            why = "has no node" if address is None else "knows no address of"
            raise NotFound(f"the fleet {why} {node}: set SNAPSHOTD_NODE_ADDRESS there, and start its daemon")
        return Snapshotd(host=address, token=self._token, pin=self._pin, ca=self._ca, autostart=False)

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
        return bool(self._coordination.published([SnapshotID(snapshot.id)]))

    def close(self) -> None:
        self._opened.close()
