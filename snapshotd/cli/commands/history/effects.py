"""`snapshotd effects`."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import short_json
from snapshotd.cli.text import id_text, print_json, printable, status, table
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
    if as_json:
        print_json(found)
    else:
        table(("CALL", "NAME", "ARGUMENTS", "STATUS", "COMPENSATED", "COMPENSATION"), effect_rows(found, full=full))


def effect_rows(found: Iterable[EffectInfo], *, full: bool) -> list[tuple[str, ...]]:
    """One row for each: the call, its arguments and status, and its compensation."""
    return [
        (
            id_text(item.call, full=full),
            printable(item.name),
            short_json(item.arguments),
            status(item.status or "cut off"),
            status(item.compensated or "no"),
            "-" if item.compensation is None else printable(shlex.join(item.compensation)),
        )
        for item in found
    ]
