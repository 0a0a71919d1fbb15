"""`snapshotd fleet`: look at the nodes of a fleet, and drain one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapshotd.cli.command import CONTEXT_SETTINGS, CliGroup, declare, json_option
from snapshotd.cli.text import print_json, printable, size, table

if TYPE_CHECKING:
    from snapshotd.fleet.places import NodeRoom

_NS = 1e9
_database = click.option(
    "--database", metavar="URL", required=True, help="The fleet's PostgreSQL database: postgresql://user@host/name."
)


@click.group("fleet", cls=CliGroup, context_settings=CONTEXT_SETTINGS)
def command() -> None:
    """Look at the nodes of a fleet, and drain one.

    A fleet is many machines that share one history in a PostgreSQL database. It needs `pip install 'snapshotd[fleet]'`.
    """


@declare("status", examples=["snapshotd fleet status --database postgresql://snapshotd@db.example.com/snapshotd"])
@_database
@json_option
def status(database: str, as_json: bool) -> int:
    """List the nodes: leases, trajectories, room and lag.

    The lag is the number of snapshots that are captured and not published. With --json: an array of
    {"node","state","lease_s","trajectory_count","free_memory_bytes","starting_count","starting_max","unpublished_count",
    "architecture"}; state is "leased", "draining" or "lost" (its lease has run out: others may take its trajectories over).
    """
    from snapshotd.fleet.opening import open_coordination

    with open_coordination(database) as coordination:
        counts = coordination.owned_counts()
        found = [_said(room, counts.get(room.node, 0)) for room in coordination.rooms()]
    if as_json:
        print_json(found)
        return 0
    rows = [
        (
            printable(one["node"]),
            one["state"],
            f"{one['lease_s']:.0f} s",
            str(one["trajectory_count"]),
            size(one["free_memory_bytes"]),
            f"{one['starting_count']} of {one['starting_max']}",
            str(one["unpublished_count"]),
        )
        for one in found
    ]
    table(("NODE", "STATE", "LEASE", "TRAJECTORIES", "FREE", "STARTING", "LAG"), rows)
    return 0


@declare("drain", examples=["snapshotd fleet drain --database postgresql://snapshotd@db.example.com/snapshotd node-7"])
@click.argument("node")
@_database
@click.option("--end", "ends", is_flag=True, help="Let the node be used again.")
@json_option
def drain(node: str, database: str, ends: bool, as_json: bool) -> int:
    """Give a node no more forks.

    The node is told at its next renewal. With --json: {"node","draining"}.
    """
    from snapshotd.fleet.base import NodeID
    from snapshotd.fleet.opening import open_coordination

    with open_coordination(database) as coordination:
        coordination.drain_node(NodeID(node), draining=not ends)
    if as_json:
        print_json({"node": node, "draining": not ends})
    return 0


def _said(room: NodeRoom, owned: int) -> dict[str, Any]:
    state = "lost" if room.lease_ns <= 0 else "draining" if room.draining else "leased"
    return {
        "node": room.node,
        "state": state,
        "lease_s": max(0.0, round(room.lease_ns / _NS, 1)),
        "trajectory_count": owned,
        "free_memory_bytes": max(0, room.free_bytes),
        "starting_count": room.starting,
        "starting_max": room.starting_most,
        "unpublished_count": room.unpublished,
        "architecture": room.architecture,
    }


command.add_command(status)
command.add_command(drain)
