"""The verbs about the fleet that a daemon is a node of. `Fleet` calls them."""

from __future__ import annotations

from snapshotd.api import operations
from snapshotd.api.fleet import (
    DrainRequest,
    EndReservationRequest,
    FleetNodeInfo,
    FleetSnapshotInfo,
    ForgetRequest,
    ReserveRequest,
)
from snapshotd.api.service import NodeStats
from snapshotd.client.twofold import verb
from snapshotd.client.verbs.base import VerbPart


class FleetVerbs(VerbPart):
    """Part of `Snapshotd`. Unavailable: the fleet's database does not answer."""

    @verb
    async def fleet_nodes(self) -> list[FleetNodeInfo]:
        """The nodes of the daemon's fleet with their room, by name; [] where it is alone."""
        return await self._transport.call(operations.FLEET_NODES)

    @verb
    async def fleet_snapshot(self, ref: str) -> FleetSnapshotInfo:
        """The home of a snapshot, and whether every node can read it. UsageError: the daemon is alone."""
        return await self._transport.call(operations.FLEET_SNAPSHOT, ref)

    @verb
    async def fleet_status(self) -> list[NodeStats]:
        """Leases, trajectories, room and lag of the nodes of the daemon's fleet, by name. UsageError: the daemon is alone."""
        return await self._transport.call(operations.FLEET_STATUS)

    @verb
    async def drain_node(self, node: str, *, draining: bool = True) -> None:
        """Let no new sandboxes begin on a node of the daemon's fleet, and have it hand over its trajectories; with
        `draining=False` end that. NotFound; UsageError: the daemon is alone."""
        await self._transport.call(operations.DRAIN_NODE, body=DrainRequest(node, draining))

    @verb
    async def forget_node(self, node: str) -> None:
        """Have no list name a node of the daemon's fleet any more that is gone for good; a daemon that begins under its name later
        is a node again. Conflict: its lease runs, or it owns trajectories that other nodes can take over; NotFound; UsageError:
        the daemon is alone."""
        await self._transport.call(operations.FORGET_NODE, body=ForgetRequest(node))

    @verb
    async def reserve(self, node: str, count: int, memory_bytes: int) -> str:
        """Reserve room for so many sandboxes of so much memory each on a node. Returns the reservation, which runs out after the
        length of a lease. Conflict: there is no such room."""
        body = ReserveRequest(node, count, memory_bytes)
        return (await self._transport.call(operations.RESERVE, body=body)).reservation

    @verb
    async def end_reservation(self, node: str, reservation: str) -> None:
        """Give a reservation back, whose sandboxes run now. Not an error when it has run out."""
        await self._transport.call(operations.END_RESERVATION, body=EndReservationRequest(node, reservation))
