"""The end of a node that is gone for good: no list names it any more.

Its row stays for the epoch: were one drawn twice, a daemon that stood still and a later one of that name would each take the
other's rights for its own. Trajectories that never were published stay the node's as well, since no other node can have them.
"""

from __future__ import annotations

from snapshotd.errors import Conflict, NotFound
from snapshotd.fleet.base import SECOND_NS, NodeID
from snapshotd.fleet.protocol import FORGOTTEN
from snapshotd.fleet.tables import FleetTables
from snapshotd.terms import number_of
from snapshotd.types import short

LISTED = f"host <> '{FORGOTTEN}'"
"""SQL: a node has not been forgotten."""
WATCHED = f"({LISTED} OR EXISTS (SELECT 1 FROM {{}}.owners WHERE owners.node = nodes.node))"
"""SQL: others watch a node. One that was forgotten too early may publish once more before it knows, and that can be taken over."""


def no_node(node: NodeID) -> NotFound:
    """The error of a node that no list names."""
    return NotFound(f"there is no node {node}: `snapshotd fleet status` lists them")


def forget_node(tables: FleetTables, node: NodeID) -> None:
    """Have no list name a node any more. The next daemon of that name is a node again. Conflict: its lease runs, or it owns
    trajectories that other nodes can take over; NotFound; Unavailable."""
    with tables.database.transaction(alone=False):
        rows = tables.read(
            f"SELECT until_ns - {tables.clock} FROM {{}}.nodes WHERE node = ? AND {LISTED} FOR UPDATE", node
        )
        if not rows:
            raise no_node(node)
        if (left_ns := rows[0][0]) > 0:
            raise Conflict(
                f"node {node} holds its lease for {left_ns // SECOND_NS + 1} s more: it can be forgotten when its daemon has ended and the "
                "lease has run out"
            )
        owned = tables.read(
            "SELECT trajectory FROM {}.owners JOIN {}.published USING (trajectory) WHERE node = ? AND snapshot = head ORDER BY trajectory",
            node,
        )
        if owned:
            raise Conflict(
                f"node {node} owns {number_of(len(owned), 'trajectory')} that no other node has taken over: `snapshotd resume ID` on "
                f"another node takes each over, such as {short(owned[0][0])}"
            )
        tables.write(
            "UPDATE {}.nodes SET host = ?, epoch = epoch + 1, draining = false WHERE node = ?", (FORGOTTEN, node)
        )
