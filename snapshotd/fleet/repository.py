"""The facts of a fleet's repository that its database has: how many index segments each node has published, and since when readers
have pinned."""

from __future__ import annotations

from snapshotd.fleet.base import SECOND_NS, NodeID
from snapshotd.fleet.tables import FleetTables


class PublishedSegments:
    """The numbers of the nodes' last segments. A number is written when its segment is in the bucket, at the latest in the
    transaction that publishes what needs it. Errors: as `Coordination`."""

    def __init__(self, tables: FleetTables) -> None:
        self._tables = tables

    def numbers(self) -> dict[str, int]:
        """Every node that has ever published, with the number of its last segment."""
        return {node: int(number) for node, number in self._tables.read("SELECT node, number FROM {}.segments")}

    def note(self, node: NodeID, number: int) -> None:
        """Note that a node's segments up to this number are in the bucket. Numbers only grow."""
        self._tables.write(
            "INSERT INTO {}.segments (node, number) VALUES (?1, ?2)"
            " ON CONFLICT (node) DO UPDATE SET number = greatest(segments.number, excluded.number)",
            (node, number),
        )

    def oldest_pin_s(self) -> float | None:
        """The time (seconds since the epoch) since when the oldest pin has held; None: there is none."""
        ((since_ns,),) = self._tables.read(f"SELECT min(since_ns) FROM {{}}.pins WHERE until_ns > {self._tables.clock}")
        return None if since_ns is None else since_ns / SECOND_NS
