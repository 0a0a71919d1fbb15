"""`snapshotd bisect`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.api.experiments import Tried
from snapshotd.cli.changes import change_json, change_line
from snapshotd.cli.command import after_dashes, connect, declare, json_option, refuse
from snapshotd.cli.documents import content_text
from snapshotd.cli.follow import note
from snapshotd.cli.snapshots import snapshot_json
from snapshotd.cli.text import call_text, print_json, printable, status
from snapshotd.cli.values import Count, complete_snapshot, complete_trajectory, process_options
from snapshotd.client.branching.results import BisectInfo
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.terms import number_of, short

_EXAMPLES = [
    "snapshotd bisect agent -- pytest -q",
    "snapshotd bisect --good known-good --bad a1b2c3 agent -- make check",
    "snapshotd bisect --parallel 4 --json agent -- ./reproduce.sh | jq -r .first_bad.id",
]
_FILES, _MESSAGES, _CHARS = 20, 6, 500


@declare("bisect", examples=_EXAMPLES, splits=True)
@click.option(
    "--good", metavar="ID", help="Where it passes.  [default: the beginning]", shell_complete=complete_snapshot
)
@click.option("--bad", metavar="ID", help="Where it fails.  [default: the head]", shell_complete=complete_snapshot)
@click.option("--parallel", metavar="N", type=Count(1), default=1, help="Snapshots tried at once.  [default: 1]")
@click.option("--repeat", metavar="N", type=Count(0), default=1, help="Times to run the border again.  [default: 1]")
@process_options
@json_option
@click.argument(
    "words", metavar="TRAJECTORY -- CMD [ARGS]...", nargs=-1, type=click.UNPROCESSED, shell_complete=complete_trajectory
)
def command(
    ctx: click.Context,
    words: tuple[str, ...],
    good: str | None,
    bad: str | None,
    parallel: int,
    repeat: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Find the call that broke it: the first snapshot where a command fails.

    The command runs in throw-away forks of snapshots between a good and a bad one, which halve what is left. Exit code
    0 passes, 125 cannot tell, everything else fails. At the end the border runs again: a command that now passes and
    now fails is said to be flaky. Shown are the call, what it changed, and what was said before it.

    With --json: {"first_bad","last_good","unknown","tried":[{"snapshot","round","outcome","exit_code"}],"rounds",
    "flaky","changes"}.
    """
    after = after_dashes(ctx)
    trajectory, argv = words[0] if words else "", list(after if after is not None else words[1:])
    if not trajectory or (after is not None and len(words) > 1):
        refuse("name one trajectory and a command: `snapshotd bisect TRAJECTORY -- CMD`")
    client = connect(ctx)
    options["env"] = dict(options["env"])
    found = client.bisect(
        trajectory, argv, good=good, bad=bad, parallel=parallel, repeat=repeat, on_tried=_say, **options
    )
    before = found.first_bad.parent or found.last_good.id
    changes = list(client.diff(before, found.first_bad.id))
    if as_json:
        print_json(_json(found) | {"changes": [change_json(change) for change in changes]})
        return
    _show(client, found)
    for change in changes[:_FILES]:
        click.echo(f"  {change_line(change)}")
    if len(changes) > _FILES:
        click.echo(f"  and {len(changes) - _FILES} more: snapshotd diff {short(found.first_bad.id)}")


def _say(tried: Tried) -> None:
    word = {"good": "passes", "bad": "fails", "untestable": "cannot tell"}[tried.outcome]
    note(f"{tried.snapshot.seq} {short(tried.snapshot.id)} {tried.snapshot.tool.name}: {word} ({tried.exit_code})")


def _json(found: BisectInfo) -> dict[str, Any]:
    return {
        "first_bad": snapshot_json(found.first_bad),
        "last_good": snapshot_json(found.last_good),
        "unknown": [one.id for one in found.unknown],
        "tried": [
            {"snapshot": one.snapshot.id, "round": one.round, "outcome": one.outcome, "exit_code": one.exit_code}
            for one in found.tried
        ],
        "rounds": found.rounds,
        "flaky": found.flaky,
    }


def _show(client: Snapshotd, found: BisectInfo) -> None:
    click.echo(f"{click.style('first bad', bold=True)}  {_line(found.first_bad)}")
    click.echo(f"{click.style('last good', bold=True)}  {_line(found.last_good)}")
    if found.unknown:
        note(
            f"could not test {number_of(len(found.unknown), 'snapshot')} between them; the call of each may have broken it, too"
        )
    if found.flaky:
        told = ", ".join(
            f"{passed} of {runs} runs pass at {short(one.id)}"
            for one in (found.last_good, found.first_bad)
            for passed, runs in (found.counts(one),)
        )
        note(f"the command is flaky, so this may not be where it broke: {told}; --repeat asks more often")
    said = client.conversation(found.first_bad.id)[found.last_good.messages :]
    for message in said[-_MESSAGES:]:
        first, *rest = _message_text(message.content)[:_CHARS].split("\n")
        click.echo(f"  {printable(message.role)}: {printable(first)}")
        for line in rest:
            click.echo(f"    {printable(line)}")


def _message_text(content: Any) -> str:
    """The text of a message, also of a tool's result that is an object with a text."""
    inner = content.get("content") if isinstance(content, dict) else None
    return content_text(inner if isinstance(inner, str) else content)


def _line(one: SnapshotInfo) -> str:
    call = call_text(one.tool.name, one.tool.arguments, _CHARS)
    return f"{one.seq} {short(one.id)}  {call}  {status(one.tool.status)}"
