"""`snapshotd network`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json, printable
from snapshotd.cli.values import complete_trajectory

_EXAMPLES = [
    "snapshotd network box",
    "snapshotd network box --allow github.com:22 --deny '*.pypi.org'",
    "snapshotd network box --deny '*'   # nothing is reached any more",
]


@declare("network", examples=_EXAMPLES)
@click.option(
    "--allow", metavar="HOST[:PORT]", multiple=True, help="Reach this, too: a name, *.NAME, or addresses. Any number."
)
@click.option("--deny", metavar="HOST[:PORT]", multiple=True, help="Do not reach this; '*' means anything. Any number.")
@click.option("--only", metavar="HOST[:PORT]", multiple=True, help="Reach this and nothing else. Any number.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
def command(
    ctx: click.Context,
    trajectory: str,
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show, or change, the hosts that a trajectory's sandboxes reach.

    Its network has to be one of hosts (`run --network allow:HOST,...`). First --only, then --deny, then --allow. A running
    sandbox has the change when the command returns, and connections that are not allowed any more are cut; later starts
    and forks have it, too. Without an option the command prints the hosts, one a line, and on standard error what was
    refused since the last snapshot.

    With --json: {"trajectory","network","rules","refused"}.
    """
    client = connect(ctx)
    found = client.network(trajectory, allow=allow, deny=deny, only=only or None)
    if as_json:
        print_json(found)
        return
    for rule in found.rules or ([] if found.network.startswith("allow") else [found.network]):
        click.echo(rule)
    for sentence in found.refused:
        click.echo(f"refused: {printable(sentence)}", err=True)
