"""`--wait`: the durability that a command waits for when it makes a snapshot."""

from __future__ import annotations

from typing import Literal

import click

from snapshotd.client.client import Snapshotd

Wait = Literal["captured", "stored"]


wait_option = click.option(
    "--wait",
    type=click.Choice(["captured", "stored"]),
    help="Leave when the snapshot survives a crash of the daemon (captured, the default), or power loss too (stored). With --json, "
    'the answer then has "state".',
)
"""--wait, as the parameter `wait`: None when it was not given, which means captured but says nothing about it."""


def state_of(client: Snapshotd, *refs: str) -> str:
    """Return the state that these snapshots have in common: that of the first one that is not stored, or `stored`."""
    states = [client.snapshot(ref).state for ref in refs]
    return next((state for state in states if state != "stored"), "stored")


def wait_for_head(client: Snapshotd, trajectory: str, wait: Wait) -> str:
    """Wait until the snapshots that a trajectory has now are as durable as `wait` says. Returns the state of the newest."""
    head = client.trajectory(trajectory).head
    if wait == "stored":
        client.flush(trajectory)
    return state_of(client, head)
