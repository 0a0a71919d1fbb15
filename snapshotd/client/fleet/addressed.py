"""The nodes of a fleet, by the addresses that they have told it."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar

from snapshotd.client.client import Snapshotd
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import DaemonUnavailable, NotFound
from snapshotd.fleet.base import SECOND_NS, NodeID
from snapshotd.fleet.places import ForkBlock, NodeRoom

R = TypeVar("R")


class AddressedNodes(KnownNodes):
    """Room is reserved in the fleet, and a node gets a published snapshot by itself. Each node is known by a login of its
    address (`snapshotd login`), or all by one token."""

    def __init__(self, token: str | None, pin: str | None, ca: str | None) -> None:
        self._token, self._pin, self._ca = token, pin, ca
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
        return Snapshotd(host=address, token=self._token, pin=self._pin, ca=self._ca, autostart=False)


class AskedNodes(AddressedNodes):
    """Each of them tells of all, so one address is enough; the others are asked when that one does not answer."""

    def __init__(self, first: Snapshotd, token: str | None, pin: str | None, ca: str | None) -> None:
        super().__init__(token, pin, ca)
        self._asked = first
        self._known: list[NodeRoom] = []

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
            for other in [self._at(room.address) for room in self._known if room.address]:
                with contextlib.suppress(DaemonUnavailable):
                    answer = question(other)
                    self._asked = other
                    return answer
            raise
