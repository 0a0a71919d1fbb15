"""`snapshotd fleet`: look at the nodes of a fleet, drain one, and forget one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import click

from snapshotd.api.service import NodeStats
from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.text import print_json, printable, size, table
from snapshotd.client.client import Snapshotd

if TYPE_CHECKING:
    from snapshotd.fleet.base import NodeID

_database = click.option(
    "--database",
    metavar="URL",
    help="The fleet's PostgreSQL database, postgresql://user@host/name. Without it, the daemon is asked, which is a node.",
)


class _Database:
    """The fleet's verbs on its database, as a client has them on a node."""

    def __init__(self, url: str) -> None:
        from snapshotd.fleet.opening import open_coordination  # only here: a driver of PostgreSQL

        self._open = partial(open_coordination, url)

    def fleet_status(self) -> Sequence[NodeStats]:
        with self._open() as coordination:
            return coordination.describe_nodes()

    def drain_node(self, node: str, *, draining: bool) -> None:
        with self._open() as coordination:
            coordination.drain_node(cast("NodeID", node), draining=draining)

    def forget_node(self, node: str) -> None:
        from snapshotd.fleet.forgetting import forget_node

        with self._open() as coordination:
            forget_node(coordination.tables, cast("NodeID", node))


def _choose_fleet(ctx: click.Context, database: str | None) -> Snapshotd | _Database:
    return connect(ctx, autostart=False) if database is None else _Database(database)


@declare_group("fleet")
def command() -> None:
    """Look at the nodes of a fleet, drain one, and forget one.

    A fleet is many machines that share one history in a PostgreSQL database. --database needs `pip install
    'snapshotd[fleet]'` and the right to write there. A node on another machine (SNAPSHOTD_HOST) needs a token with the scope
    admin, since the figures are of all tenants.
    """


@declare(
    "status",
    group=command,
    examples=[
        "snapshotd fleet status",
        "snapshotd fleet status --database postgresql://snapshotd@db.example.com/snapshotd",
    ],
)
@_database
@json_option
def status(ctx: click.Context, database: str | None, as_json: bool) -> None:
    """List the nodes: leases, trajectories, room and lag.

    The lag is the number of snapshots that are captured and not published. With --json: an array of
    {"node","state","lease_s","trajectory_count","free_memory_bytes","starting_count","starting_max","unpublished_count",
    "architecture"}; state is "leased", "draining" or "lost" (its lease has run out: others may take its trajectories over).
    """
    found = _choose_fleet(ctx, database).fleet_status()
    if as_json:
        print_json(found)
    else:
        show_nodes(found)


@declare(
    "drain",
    group=command,
    examples=[
        "snapshotd fleet drain node-7",
        "snapshotd fleet drain --database postgresql://snapshotd@db.example.com/snapshotd node-7",
    ],
)
@click.argument("node")
@_database
@click.option("--end", "ends", is_flag=True, help="Let the node be used again.")
@json_option
def drain(ctx: click.Context, node: str, database: str | None, ends: bool, as_json: bool) -> None:
    """Give a node no more forks.

    The node is told at its next renewal. With --json: {"node","draining"}.
    """
    _choose_fleet(ctx, database).drain_node(node, draining=not ends)
    if as_json:
        print_json({"node": node, "draining": not ends})


@declare(
    "forget",
    group=command,
    examples=[
        "snapshotd fleet forget node-7",
        "snapshotd fleet forget --database postgresql://snapshotd@db.example.com/snapshotd node-7",
    ],
)
@click.argument("node")
@_database
@json_option
def forget(ctx: click.Context, node: str, database: str | None, as_json: bool) -> None:
    """Have no list name a node any more that is gone for good.

    It is refused while the node's lease runs, and while the node owns trajectories that other nodes can take over. With
    --json: {"node"}.
    """
    _choose_fleet(ctx, database).forget_node(node)
    if as_json:
        print_json({"node": node})


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
