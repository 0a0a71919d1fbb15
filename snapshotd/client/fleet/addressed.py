"""The nodes of a fleet, by the addresses that they have told it."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from snapshotd.client.client import Snapshotd
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.fleet.branch import client_of, place_of
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import DaemonUnavailable, NotFound, NotPermitted
from snapshotd.fleet.base import SECOND_NS, NodeID
from snapshotd.fleet.places import ForkBlock, NodeRoom

R = TypeVar("R")


class AddressedNodes(KnownNodes):
    """Room is reserved in the fleet, and a node gets a published snapshot by itself.

    An address is what a row of the database says, which may be false. So it has to be one of https://, and nothing is sent
    there but with the login that this user has made for it (`snapshotd login`), or by the client that was made for it."""

    def __init__(self) -> None:
        self._clients: dict[NodeID, Snapshotd] = {}
        self._lock = threading.Lock()

    @abstractmethod
    def rooms(self) -> list[NodeRoom]:
        """All nodes of the fleet: those whose leases have run out, too."""

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
        return self._at(address)

    def _at(self, address: str) -> Snapshotd:
        """A client of the node that is said to be there. NotPermitted."""
        if not address.startswith("https://"):
            raise NotPermitted(
                f"{address[:80]!r} is no address of a node, which is https://HOST:PORT: look at SNAPSHOTD_NODE_ADDRESS there, and at "
                "who writes to the fleet's database"
            )
        return client_of(address)


class AskedNodes(AddressedNodes):
    """Each of them tells of all, so one address is enough; the others are asked when that one does not answer."""

    def __init__(self, first: Snapshotd) -> None:
        super().__init__()
        self._named = self._asked = first
        self._known: list[NodeRoom] = []

    def _at(self, address: str) -> Snapshotd:
        return self._named if address == place_of(self._named) else super()._at(address)

    def rooms(self) -> list[NodeRoom]:
        self._known = [
            NodeRoom(
                NodeID(one.node),
                architecture=one.architecture,
                abilities=frozenset(one.abilities),
                cpus=one.cpus,
                promised_cpus=one.promised_cpus,
                free_bytes=one.free_memory_bytes,
                starting=one.starting_count,
                starting_most=one.starting_max,
                lease_ns=int(one.lease_s * SECOND_NS),
                draining=one.draining,
                address=one.address,
            )
            for one in self._ask(lambda client: client.fleet_nodes())
        ]
        return self._known

    def reserve(self, block: ForkBlock, memory_bytes: int) -> str:
        return self._ask(lambda client: client.reserve(block.node, block.count, memory_bytes))

    def end_reservation(self, block: ForkBlock) -> None:
        self._ask(lambda client: client.end_reservation(block.node, block.reservation))

    def home(self, snapshot: SnapshotInfo, answered: NodeID) -> NodeID:
        return NodeID(self.client(answered).fleet_snapshot(snapshot.id).node) or answered

    def is_published(self, snapshot: SnapshotInfo) -> bool:
        return self._ask(lambda client: client.fleet_snapshot(snapshot.id)).published

    def _ask(self, question: Callable[[Snapshotd], R]) -> R:
        """The answer of the node that answered last, else of the first other one that answers."""
        try:
            return question(self._asked)
        except DaemonUnavailable:
            for room in filter(lambda room: room.address, self._known):
                with contextlib.suppress(DaemonUnavailable, NotPermitted):
                    other = self._at(room.address)
                    answer = question(other)
                    self._asked = other
                    return answer
            raise
