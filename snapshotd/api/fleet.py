"""The nodes of a fleet, for a driver that places forks on them."""

from __future__ import annotations

from typing import Annotated

from snapshotd.api.operation import ADMIN, RUN, Operation
from snapshotd.api.record import ApiRecord, Bounds, Request, record
from snapshotd.api.service import NodeStats
from snapshotd.api.wire import FORK_MAX

NODE_MAX = 63
_Node = Annotated[str, Bounds(min_length=1, max_length=NODE_MAX, pattern=r"^[a-z0-9-]+$")]


@record(frozen=True)
class FleetNodeInfo(ApiRecord):
    """A node and its room, less what is reserved there, since its last renewal."""

    node: str
    """Name of the node."""
    address: str
    """Where clients reach it; empty: it has told none."""
    architecture: str
    abilities: tuple[str, ...]
    cpus: float
    promised_cpus: float
    """Processors that its sandboxes have been given."""
    free_memory_bytes: int
    starting_count: int
    starting_max: int
    lease_s: float
    """Seconds that are left of the node's lease; 0: it has run out."""
    draining: bool


@record(frozen=True)
class FleetSnapshotInfo(ApiRecord):
    node: str
    """Its home: the node that owns its trajectory, and has its layers. Empty: the fleet does not know it yet."""
    published: bool
    """Every node can read it."""


@record(frozen=True)
class DrainRequest(Request):
    node: _Node
    draining: bool = True
    """False: the node is used again."""


@record(frozen=True)
class ForgetRequest(Request):
    node: _Node


@record(frozen=True)
class ReserveRequest(Request):
    node: _Node
    count: Annotated[int, Bounds(ge=1, le=FORK_MAX * 256)]
    """Sandboxes."""
    memory_bytes: Annotated[int, Bounds(ge=0, le=1 << 50)]
    """Memory of each sandbox."""


@record(frozen=True)
class ReservationInfo(ApiRecord):
    reservation: str
    """Runs out after the length of a lease."""


@record(frozen=True)
class EndReservationRequest(Request):
    node: _Node
    reservation: Annotated[str, Bounds(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]


FLEET_NODES = Operation("GET", "/fleet/nodes", list[FleetNodeInfo], RUN, "fleet", by="fleet")
FLEET_SNAPSHOT = Operation("GET", "/fleet/snapshots/{ref}", FleetSnapshotInfo, RUN, "fleet", by="fleet")
FLEET_STATUS = Operation("GET", "/fleet/status", list[NodeStats], ADMIN, "fleet", by="fleet")
DRAIN_NODE = Operation[None]("POST", "/fleet/drain", None, ADMIN, "fleet", body=DrainRequest, by="fleet")
FORGET_NODE = Operation[None]("POST", "/fleet/forget", None, ADMIN, "fleet", body=ForgetRequest, by="fleet")
RESERVE = Operation("POST", "/fleet/reservations", ReservationInfo, RUN, "fleet", body=ReserveRequest, by="fleet")
END_RESERVATION = Operation[None](
    "POST", "/fleet/reservations/end", None, RUN, "fleet", body=EndReservationRequest, by="fleet"
)
