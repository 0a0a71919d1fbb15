"""The fleet that the daemon is a node of, for drivers that place forks on its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from snapshotd.api.fleet import FleetNodeInfo, FleetSnapshotInfo, ReservationInfo
from snapshotd.api.service import NodeStats
from snapshotd.catalog.base import Catalog
from snapshotd.errors import NotFound, UsageError

if TYPE_CHECKING:  # a daemon that is alone loads nothing of a fleet
    from snapshotd.fleet.base import NodeID
    from snapshotd.fleet.coordination import PostgresCoordination
    from snapshotd.fleet.places import NodeRoom


class FleetService:
    """Each method is one request to the fleet's database. Thread-safe. Unavailable: it does not answer."""

    def __init__(self, catalog: Catalog, coordination: PostgresCoordination | None) -> None:
        """`coordination`: None: the daemon is alone."""
        self._catalog, self._known = catalog, coordination

    def fleet_nodes(self) -> list[FleetNodeInfo]:
        """The nodes of the fleet that the daemon belongs to, with their room, by name; none where there is no fleet."""
        return [] if self._known is None else [_info(room) for room in self._known.rooms()]

    def fleet_status(self) -> list[NodeStats]:
        """Leases, trajectories, room and lag of all nodes, by name. UsageError: the daemon is alone."""
        return [*self._coordination().describe_nodes()]

    def fleet_snapshot(self, ref: str) -> FleetSnapshotInfo:
        """The home of a snapshot, and whether every node can read it. UsageError: the daemon is alone."""
        snapshot = self._catalog.refs.find_snapshot(ref)
        coordination = self._coordination()
        try:
            home = coordination.owner(snapshot.trajectory).node
        except NotFound:  # it was made a moment ago
            home = None
        return FleetSnapshotInfo(home or "", bool(coordination.find_published([snapshot.id])))

    def drain_node(self, node: str, *, draining: bool = True) -> None:
        """Let no new sandboxes begin on a node, and have it hand over its trajectories; or end that. NotFound."""
        self._coordination().drain_node(cast("NodeID", node), draining=draining)

    def forget_node(self, node: str) -> None:
        """Have no list name a node any more that is gone for good. NotFound; Conflict: its lease runs, or it owns trajectories that
        other nodes can take over."""
        from snapshotd.fleet.forgetting import forget_node  # few daemons are nodes

        forget_node(self._coordination().tables, cast("NodeID", node))

    def reserve(self, node: str, count: int, memory_bytes: int) -> ReservationInfo:
        """Reserve room for sandboxes on a node, until its next renewals have had time to count them. `Conflict`: the room is not
        there, or the node drains, or its lease has run out."""
        return ReservationInfo(self._coordination().reserve(cast("NodeID", node), count, memory_bytes))

    def end_reservation(self, node: str, reservation: str) -> None:
        """Give a reservation back: its sandboxes run, so their node counts them. Not an error when it has run out."""
        self._coordination().begin_reserved(cast("NodeID", node), reservation)

    def _coordination(self) -> PostgresCoordination:
        if self._known is None:
            raise UsageError(
                "this daemon is no node of a fleet (SNAPSHOTD_FLEET): ask one that is, or the fleet's database"
            )
        return self._known


def _info(room: NodeRoom) -> FleetNodeInfo:
    return FleetNodeInfo(
        room.node,
        address=room.address,
        architecture=room.architecture,
        abilities=tuple(sorted(room.abilities)),
        cpus=room.cpus,
        promised_cpus=room.promised_cpus,
        free_memory_bytes=max(0, room.free_bytes),
        starting_count=max(0, room.starting),
        starting_max=room.starting_most,
        lease_s=max(0, room.lease_ns) / 1e9,
        draining=room.draining,
    )
