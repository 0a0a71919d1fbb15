"""`snapshotd policy`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.retention import policy_of, retention_options, rules
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_trajectory


@declare(
    "policy",
    examples=[
        "snapshotd policy",
        "snapshotd policy --keep-last 20 --keep-within 7d --max-size 50g",
        "snapshotd policy nightly --keep-every 10 --keep-failed 3",
        "snapshotd policy nightly --clear",
    ],
)
@retention_options
@click.option("--clear", is_flag=True, help="Remove the policy.")
@json_option
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(ctx: click.Context, /, trajectory: str | None, clear: bool, as_json: bool, **options: Any) -> None:
    """Show or set which snapshots keep their files.

    Without rules, shows the global policy, or the one that holds for a trajectory. With rules, sets it to exactly
    these. A snapshot keeps its files if any rule keeps it; without any rule all do. Heads, tagged ones, the first of a
    trajectory, the origin of a fork and the snapshot that a running sandbox stands on always keep them. No files go
    before the next `snapshotd prune`, which a folder with hooks has by itself once an hour; calls and conversations are
    never removed. With --json:
    {"trajectory","policy":{keep_last,keep_within_s,keep_every,keep_failed,max_bytes}}.
    """
    wanted = policy_of(options)
    if clear and wanted is not None:
        refuse("--clear removes the policy and takes no rules; leave one of them out")
    client = connect(ctx)
    policy = client.set_policy(wanted, trajectory) if clear or wanted is not None else client.policy(trajectory)
    if as_json:
        found = None if trajectory is None else client.trajectory(trajectory).id
        print_json({"trajectory": found, "policy": policy})
        return
    for option, value in rules(policy):
        click.echo(f"{option:13} {value}")
    if not rules(policy):
        click.echo("every snapshot keeps its files")
