"""`snapshotd approval`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import click

from snapshotd.cli.changes import change_json, change_line
from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.documents import as_page
from snapshotd.cli.text import print_json, printable
from snapshotd.cli.values import complete_approval
from snapshotd.client.results import ApprovalInfo, ApprovalView
from snapshotd.terms import short


@declare("approval", examples=["snapshotd approval a1b2c3", "snapshotd approval --json a1b2c3 | jq .arguments"])
@json_option
@click.argument("approval", metavar="ID", shell_complete=complete_approval)
def command(ctx: click.Context, approval: str, as_json: bool) -> None:
    """Show what an approval is about.

    The output names the trajectory that asks, the tool and its arguments, and the files that changed since the
    trajectory's last approval or its beginning. With --json: the approval as `approvals --json` has it,
    and {"changes","more","since"}.
    """
    view = connect(ctx).approval(approval)
    if as_json:
        print_json(
            {
                **dataclasses.asdict(view.approval),
                "changes": [change_json(item) for item in view.changes],
                "more": view.more,
                "since": view.since,
            }
        )
    else:
        _print(view)


def _print(view: ApprovalView) -> None:
    item = view.approval
    name = view.trajectory.name or short(item.trajectory)
    facts = [
        ("approval", item.id),
        ("status", decision_text(item)),
        ("trajectory", f"{name}  ({item.trajectory})"),
        ("snapshot", item.snapshot),
        ("asked", item.created_at),
        ("expires", item.expires_at or "never"),
        ("tool", printable(item.name)),
        ("side effect", item.side_effect),
    ]
    if item.question is not None:
        facts.append(("question", printable(item.question)))
    for key, value in facts:
        click.echo(click.style(f"{key:13}", bold=True) + value)
    _json_lines("arguments:", item.arguments)
    if item.edited is not None:
        _json_lines("arguments as approved:", item.edited[0])
    since = "the beginning" if view.since is None else f"snapshot {short(view.since)}"
    click.echo(click.style(f"files that changed since {since}:", bold=True))
    for change in view.changes:
        click.echo(f"  {change_line(change)}")
    if view.more:
        how = "" if view.since is None else f"; `snapshotd diff {short(view.since)} {short(item.snapshot)}` lists all"
        click.echo(f"  … and more{how}")
    if not view.changes:
        click.echo("  none")


def _json_lines(title: str, value: object) -> None:
    click.echo(click.style(title, bold=True))
    for line in as_page(value).splitlines():
        click.echo(f"  {line}")


def report_decisions(decisions: Iterable[ApprovalInfo], *, as_json: bool) -> None:
    """Print each decision when it is made, or all of them as JSON."""
    done = []
    for each in decisions:
        done.append(each)
        if not as_json:
            click.echo(f"{short(each.id)}  {decision_text(each)}")
    if as_json:
        print_json(done)


def decision_text(item: ApprovalInfo) -> str:
    """`approved by ann at ...: looks right`, or the status alone."""
    text = item.status
    if item.by is not None:
        text += f" by {printable(item.by)}"
    if item.decided_at is not None:
        text += f" at {item.decided_at}"
    return text if item.reason is None else f"{text}: {printable(item.reason)}"
