"""Nodes that are named one by one: this machine's daemon, or daemons by their addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from snapshotd.at_once import PER_PROCESSOR, at_once
from snapshotd.client.client import Snapshotd
from snapshotd.client.fleet.base import KnownNodes
from snapshotd.errors import DaemonUnavailable, NotFound
from snapshotd.fleet.base import NodeID
from snapshotd.fleet.places import NodeRoom

_ASKED_AT_ONCE = 32


class ListedNodes(KnownNodes):
    """They need no database: each is asked for its room, and a snapshot that one of them lacks is brought to it."""

    def __init__(self, clients: Mapping[NodeID, Snapshotd]) -> None:
        self._clients = dict(clients)

    def names(self) -> list[NodeID]:
        return list(self._clients)

    def client(self, node: NodeID) -> Snapshotd:
        try:
            return self._clients[node]
        except KeyError:
            raise NotFound(f"the fleet has no node {node}: its nodes are {', '.join(self._clients)}") from None

    def rooms(self) -> list[NodeRoom]:
        return sorted(self._ask(), key=lambda room: list(self._clients).index(room.node))

    def _ask(self) -> Iterator[NodeRoom]:
        for _, room in at_once(self.names(), _ASKED_AT_ONCE, self._room, thread="fleet"):
            if room is not None:
                yield room

    def _room(self, node: NodeID) -> NodeRoom | None:
        """None: it does not answer."""
        try:
            said = self.client(node).status()
        except DaemonUnavailable:
            return None
        processors = said["processor_count"]
        return NodeRoom(
            node,
            cpus=processors,
            free_bytes=said["free_memory_bytes"],
            starting_most=PER_PROCESSOR * processors,
            lease_ns=1,  # it has just answered
        )
