"""`snapshotd effects`."""

from __future__ import annotations

import shlex

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import short_json
from snapshotd.cli.text import id_text, print_list, printable, status
from snapshotd.cli.values import complete_trajectory
from snapshotd.client.results import EffectInfo


@declare(
    "effects",
    examples=["snapshotd effects box", "snapshotd effects --json box | jq '.[] | select(.compensated == null)'"],
)
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
def command(ctx: click.Context, trajectory: str, no_trunc: bool, as_json: bool) -> None:
    """List irreversible calls that rewinds left behind.

    Newest first: their effects cannot be taken back, at most compensated (`snapshotd compensate`). With --json: an
    array of {trajectory,call,name,arguments,status,started_at,result,compensation,compensated}.
    """
    report_effects(connect(ctx).effects(trajectory), full=no_trunc, as_json=as_json)


def report_effects(found: list[EffectInfo], *, full: bool, as_json: bool) -> None:
    """Print the calls as a table, or as JSON."""
    header = ("CALL", "NAME", "ARGUMENTS", "STATUS", "COMPENSATED", "COMPENSATION")
    print_list(found, header, lambda item: effect_row(item, full=full), as_json=as_json)


def effect_row(item: EffectInfo, *, full: bool) -> tuple[str, ...]:
    """The call, its arguments and status, and its compensation."""
    return (
        id_text(item.call, full=full),
        printable(item.name),
        short_json(item.arguments),
        status(item.status or "cut off"),
        status(item.compensated or "no"),
        "-" if item.compensation is None else printable(shlex.join(item.compensation)),
    )
