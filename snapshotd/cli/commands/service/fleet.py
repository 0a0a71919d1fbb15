"""`snapshotd fleet`: look at the nodes of a fleet, and drain one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import click

from snapshotd.api.stats import NodeStats
from snapshotd.cli.command import CONTEXT_SETTINGS, CliGroup, declare, json_option
from snapshotd.cli.text import print_json, printable, size, table

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
        found = coordination.describe_nodes()
    if as_json:
        print_json([asdict(one) for one in found])
        return 0
    show_nodes(found)
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


def show_nodes(found: Sequence[NodeStats]) -> None:
    """Print a table of nodes."""
    rows = [
        (
            printable(one.node),
            one.state,
            f"{one.lease_s:.0f} s",
            str(one.trajectory_count),
            size(one.free_memory_bytes),
            f"{one.starting_count} of {one.starting_max}",
            str(one.unpublished_count),
        )
        for one in found
    ]
    table(("NODE", "STATE", "LEASE", "TRAJECTORIES", "FREE", "STARTING", "LAG"), rows)


command.add_command(status)
command.add_command(drain)
