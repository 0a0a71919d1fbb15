"""`snapshotd prune`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import ask, connect, declare, is_terminal, json_option, refuse
from snapshotd.cli.progress import Meter
from snapshotd.cli.retention import policy_of, retention_options
from snapshotd.cli.text import ago, id_text, print_json, printable, size, table
from snapshotd.cli.values import Duration
from snapshotd.client.results import PruneInfo
from snapshotd.terms import PRUNE_GRACE_S, number_of


@declare(
    "prune",
    examples=[
        "snapshotd prune --dry-run",
        "snapshotd prune --force",
        "snapshotd prune --dry-run --keep-last 5 --keep-within 2d",
    ],
)
@click.option("--dry-run", is_flag=True, help="Only show what would go, and why.")
@click.option("-f", "--force", is_flag=True, help="Do not ask.")
@retention_options
@click.option(
    "--grace",
    metavar="TIME",
    type=Duration(zero=True),
    default=f"{PRUNE_GRACE_S / 60:.0f}m",
    show_default=True,
    help="Leave alone what was written less than this ago; a later prune takes it. 0 is nothing.",
)
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
def command(
    ctx: click.Context, /, dry_run: bool, force: bool, no_trunc: bool, grace: float, as_json: bool, **options: Any
) -> None:
    """Give up the files of snapshots that no policy keeps, and free the space.

    Rules given here count instead of the policies that are set. `snapshotd policy --help` explains policies, and names
    the snapshots that are always kept. Shows the snapshots that would go and asks before any goes; without a terminal
    to ask at, --force is needed. Interrupted at any point, it can be run again. With --json:
    {dry_run,pruned:[{snapshot,trajectory,seq,created_at,reason}],kept,freed_bytes,evicted_layer_bytes, repository_bytes}.
    """
    policy = policy_of(options)
    asks = not dry_run and not force
    if asks and not is_terminal():
        refuse(
            "a prune removes files for good, and there is no terminal to ask at; look with --dry-run, then give --force"
        )
    client = connect(ctx)
    if asks:
        with Meter("looking what would go", quiet=as_json) as meter:
            plan = client.prune(policy, dry_run=True, grace_s=grace, progress=meter.line)
        if not as_json:
            _print(plan, no_trunc)
        ask(
            f"Give up the files of {number_of(len(plan.pruned), 'snapshot')} for good, to free {size(plan.freed_bytes)}?"
        )
    with Meter("looking what would go" if dry_run else "pruning", quiet=as_json) as meter:
        report = client.prune(policy, dry_run=dry_run, grace_s=grace, progress=meter.line)
    if as_json:
        print_json(report)
    elif asks:
        click.echo(_totals(report))  # the plan listed the snapshots before the question
    else:
        _print(report, no_trunc)


def _print(report: PruneInfo, full: bool) -> None:
    if report.pruned:
        rows = [
            (
                id_text(item.snapshot, full=full),
                id_text(item.trajectory, full=full),
                str(item.seq),
                ago(item.created_at),
                printable(item.reason),
            )
            for item in report.pruned
        ]
        table(("SNAPSHOT", "TRAJECTORY", "SEQ", "CREATED", "WHY"), rows, right=(2,))
    click.echo(_totals(report))


def _totals(report: PruneInfo) -> str:
    gone, freed = ("would go", "would be freed") if report.dry_run else ("went", "freed")
    evicted = f", {size(report.evicted_layer_bytes)} of layers evicted" if report.evicted_layer_bytes else ""
    return (
        f"{number_of(len(report.pruned), 'snapshot')} {gone}, kept: {report.kept}; {size(report.freed_bytes)} {freed}{evicted}; "
        f"the repository takes {size(report.repository_bytes)}"
    )
