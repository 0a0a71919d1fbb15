"""`snapshotd rewind`."""

from __future__ import annotations

import itertools
from typing import Any

import click

from snapshotd.api.history import RewindMode
from snapshotd.cli.changes import change_json, change_line
from snapshotd.cli.command import ask, connect, declare, is_terminal, json_option, refuse
from snapshotd.cli.commands.history.effects import effect_row
from snapshotd.cli.documents import content_text, shorten
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.text import print_json, printable
from snapshotd.cli.values import complete_snapshot, complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option
from snapshotd.client.results import EffectInfo, RewindPreview
from snapshotd.terms import short

_EXAMPLES = [
    "snapshotd rewind box a1b2c3",
    "snapshotd rewind --files box before-the-mess",
    "snapshotd rewind --preview box a1b2c3",
    "snapshotd rewind --session 4f2c project a1b2c3",
    "snapshotd rewind --compensate box a1b2c3 && snapshotd undo box",
]
_SHOWN_FILES, _SHOWN_MESSAGES = 40, 20
_WORDS: dict[str, str] = {
    "files": "the files",
    "conversation": "the agent's mind",
    "both": "files and the agent's mind",
}


@declare("rewind", examples=_EXAMPLES)
@click.option("--files", "mode", flag_value="files", help="Only the files; conversation, journal and state go on.")
@click.option("--conversation", "mode", flag_value="conversation", help="Only the agent's mind; the files stay.")
@click.option("--both", "mode", flag_value="both", help="Both; the default.")
@click.option("--preview", "--dry-run", "preview", is_flag=True, help="Only show what would happen.")
@click.option(
    "--compensate", is_flag=True, help="Run the compensations of irreversible calls that are left behind, newest first."
)
@click.option(
    "--session",
    metavar="ID",
    help="In your own folder: take back what this session of the agent changed, and no other (all: every one's).",
)
@click.option("-y", "--yes", is_flag=True, help="Leave irreversible calls behind without asking.")
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("snapshot", metavar="ID", shell_complete=complete_snapshot)
def command(
    ctx: click.Context,
    trajectory: str,
    snapshot: str,
    mode: RewindMode | None,
    preview: bool,
    compensate: bool,
    session: str | None,
    yes: bool,
    wait: Wait | None,
    as_json: bool,
) -> None:
    """Go back to an older snapshot, in place.

    Files, conversation, journal and state, or one of the two. In a few milliseconds, and recorded as a new snapshot:
    nothing is lost, and `snapshotd undo` takes it back. Where irreversible calls would be left behind, asks on a
    terminal, and elsewhere refuses without --compensate or --yes. Background commands (`exec --detach`) are ended before.
    Refused while other processes live in the sandbox.

    In a user's own folder (`snapshotd hooks`), only files that the agent alone has changed since are put back, and only
    if they are as it left them; the others are named, and stay. The command that goes on with its session is printed.
    Where several sessions have changed files, --session says whose changes go.

    With --json: the new snapshot as `log --json` has it; with --preview,
    {"head","target","rewinds","changes","change_count","messages","effects",
    "untouched"}.
    """
    client = connect(ctx)
    chosen: RewindMode = mode or "both"
    if preview:
        found = client.preview_rewind(trajectory, snapshot, mode=chosen, session=session)
        if as_json:
            print_json(_json(found))
        else:
            _show(trajectory, found)
        return
    if chosen != "files" and not compensate and not yes:
        # Asked for the mind alone, which needs no comparison of files: that would take longer than the rewind.
        left = client.preview_rewind(trajectory, snapshot, mode="conversation", max_files=0).effects
        if left and (as_json or not is_terminal()):
            refuse(
                f"rewinding {trajectory} would leave {_effect_names(left)} behind, which cannot be undone; choose --compensate or --yes, "
                f"or look at it with --preview"
            )
        if left:
            _show(trajectory, client.preview_rewind(trajectory, snapshot, mode=chosen, session=session))
            ask("Rewind all the same?")
    report_snapshot(
        client,
        client.rewind(
            trajectory, snapshot, mode=chosen, compensate=compensate, wait=wait or "captured", session=session
        ),
        wait,
        as_json=as_json,
    )


def _effect_names(left: tuple[EffectInfo, ...]) -> str:
    names = [f"{printable(item.name)} ({short(item.call)})" for item in left[:5]]
    return ", ".join(names) + (f" and {len(left) - 5} more" if len(left) > 5 else "")


def _json(preview: RewindPreview) -> dict[str, Any]:
    return {
        "head": preview.head,
        "target": preview.target,
        "rewinds": preview.rewinds,
        "changes": [change_json(item) for item in preview.changes],
        "change_count": preview.change_count,
        "messages": preview.messages,
        "effects": preview.effects,
        "untouched": list(preview.untouched),
    }


def _show(trajectory: str, preview: RewindPreview) -> None:
    click.echo(f"{trajectory} from {short(preview.head)} to {short(preview.target)}: {_WORDS[preview.rewinds]}")
    click.echo(click.style(f"files that change: {preview.change_count}", bold=True))
    for change in itertools.islice(preview.changes, _SHOWN_FILES):
        click.echo(f"  {change_line(change)}")
    _rest(preview.change_count - min(len(preview.changes), _SHOWN_FILES))
    for sentence in preview.untouched[:_SHOWN_FILES]:
        click.echo(f"  {printable(sentence)}")
    _rest(len(preview.untouched) - _SHOWN_FILES)
    click.echo(click.style(f"messages that go: {len(preview.messages)}", bold=True))
    for message in preview.messages[:_SHOWN_MESSAGES]:
        click.echo(f"  {printable(message.role)}: {shorten(printable(content_text(message.content)))}")
    _rest(len(preview.messages) - _SHOWN_MESSAGES)
    click.echo(click.style(f"calls that cannot be undone: {len(preview.effects)}", bold=True))
    for effect in preview.effects:
        click.echo("  " + "  ".join(effect_row(effect, full=False)))


def _rest(count: int) -> None:
    if count > 0:
        click.echo(f"  … and {count} more")
