"""`snapshotd find`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import id_text, print_json, printable
from snapshotd.cli.values import complete_trajectory
from snapshotd.client.results import FIND_MAX, HitInfo
from snapshotd.terms import number_of


@declare(
    "find",
    examples=[
        "snapshotd find 'connection refused'",
        "snapshotd find '\"no such file\" config*' agent-1",
        "snapshotd find --json TODO | jq -r '.hits[].snapshot'",
    ],
)
@click.option("-n", "--limit", type=click.IntRange(1, FIND_MAX), default=50, show_default=True, help="Most hits.")
@click.option("--before", type=click.IntRange(0), help='The next hits: "next" of the answer before.')
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("text")
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(
    ctx: click.Context, text: str, trajectory: str | None, limit: int, before: int | None, no_trunc: bool, as_json: bool
) -> None:
    """Find text in arguments, outputs and messages.

    Lists the records that have all words of TEXT, the newest first, in all trajectories, or in the history of one: where
    a fork shares it with its origin, a hit is given once, as the origin's. "several words" stand in a row, word* is a
    beginning; letters are compared without case and accents. The index takes the first 256 KiB of arguments and
    messages, and the first 192 KiB and the last 64 KiB of outputs. With --json:
    {hits: [{trajectory,name,snapshot,seq,kind,part,excerpt,matches,cut,created_at}],next,waiting}.
    """
    found = connect(ctx).find(text, trajectory, limit=limit, before=before)
    if as_json:
        print_json(found)
        return
    for hit in found.hits:
        click.echo(_line(hit, full=no_trunc))
    if found.next is not None:
        click.echo(f"there are more: add --before {found.next}", err=True)
    if found.waiting:
        click.echo(f"{number_of(found.waiting, 'snapshot')} not in the index yet", err=True)


def _line(hit: HitInfo, *, full: bool) -> str:
    owner = click.style(printable(hit.name or id_text(hit.trajectory, full=full)), fg="magenta")
    place = f"{hit.seq} {click.style(id_text(hit.snapshot, full=full), fg='yellow')}"
    kind = hit.kind if hit.kind == "argument" else f"{hit.kind} {printable(hit.part)}"
    return f"{owner} {place} {click.style(kind, fg='cyan')}: {_highlight(hit)}"


def _highlight(hit: HitInfo) -> str:
    """The excerpt in one line, its matches in bold."""
    text, at, parts = hit.excerpt, 0, []
    for begin, end in hit.matches:
        parts += [_one_line(text[at:begin]), click.style(_one_line(text[begin:end]), fg="red", bold=True)]
        at = end
    return "".join([*parts, _one_line(text[at:])]).strip()


def _one_line(text: str) -> str:
    return printable(text.replace("\n", " "))
