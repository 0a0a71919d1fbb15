"""`snapshotd tag`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import RawOutput, note
from snapshotd.cli.github import GitHub, github_option
from snapshotd.cli.text import id_text, print_json, table
from snapshotd.cli.values import Name, complete_snapshot, complete_tag
from snapshotd.client.client import Snapshotd
from snapshotd.terms import short


@declare(
    "tag",
    examples=[
        "snapshotd tag a1b2c3 best",
        "snapshotd tag --move d4e5f6 best",
        "snapshotd tag --if 'make test' agent known-good",
        "snapshotd tag --delete best",
        "snapshotd tag --list",
    ],
)
@click.option("--move", is_flag=True, help="Take the tag away from the snapshot that has it.")
@click.option("--delete", metavar="NAME", help="Remove this tag; the snapshot stays.", shell_complete=complete_tag)
@click.option("-l", "--list", "listed", is_flag=True, help="List all tags.")
@click.option(
    "--if",
    "condition",
    metavar="CMD",
    help="Only if this shell command passes in a throw-away fork of the snapshot; then the tag moves, as with --move.",
)
@github_option
@json_option
@click.argument("snapshot", metavar="ID", required=False, shell_complete=complete_snapshot)
@click.argument("name", required=False, type=Name())
def command(
    ctx: click.Context,
    snapshot: str | None,
    name: str | None,
    move: bool,
    delete: str | None,
    listed: bool,
    condition: str | None,
    github: GitHub | None,
    as_json: bool,
) -> int:
    """Name a snapshot, or take a name away.

    A tag can be used wherever a snapshot's id can, and is no trajectory's name. With --if, the command's output goes to
    standard error; when it fails, the tag stays where it is and the exit code is 1.

    With --json: {"snapshot","name"}, with --if also {"exit_code","tagged"}; with --delete {"removed":[name]}, or of --list an array of
    {"name","snapshot","trajectory"}.
    """
    client = connect(ctx)
    if listed:
        if snapshot is not None or move or delete is not None or condition is not None:
            refuse("--list takes nothing else; `snapshotd tag ID NAME` gives a tag")
        _list(client, as_json)
        return 0
    if delete is not None:
        if snapshot is not None or move or condition is not None:
            refuse("--delete NAME takes nothing else; `snapshotd tag ID NAME` gives a tag")
        client.untag(delete)
        if as_json:
            print_json({"removed": [delete]})
        return 0
    if snapshot is None or name is None:
        refuse("a tag needs a snapshot and a name: `snapshotd tag ID NAME`")
    if condition is not None:
        return _tag_if(client, client.snapshot(snapshot).id, name, condition, github, as_json=as_json)
    tagged = client.tag(snapshot, name, move=move)
    if github is not None:
        github.outputs({"snapshot": tagged, "tagged": True})
    if as_json:
        print_json({"snapshot": tagged, "name": name})
    return 0


def _list(client: Snapshotd, as_json: bool) -> None:
    found = sorted((name, item.id, item.trajectory) for item in client.all_snapshots() for name in item.tags)
    if as_json:
        print_json([{"name": name, "snapshot": item, "trajectory": line} for name, item, line in found])
    else:
        rows = [(name, id_text(item, full=False), id_text(line, full=False)) for name, item, line in found]
        table(("TAG", "SNAPSHOT", "TRAJECTORY"), rows)


def _tag_if(
    client: Snapshotd, snapshot: str, name: str, condition: str, github: GitHub | None, *, as_json: bool
) -> int:
    raw = RawOutput()
    argv = ["/bin/sh", "-c", condition]
    code = client.tag_if(snapshot, name, argv, on_output=lambda _, data: raw.write("stderr", data)).exit_code
    if as_json:
        print_json({"snapshot": snapshot, "name": name, "exit_code": code, "tagged": code == 0})
    if github is not None:
        github.outputs({"snapshot": snapshot, "tagged": code == 0, "exit-code": code})
    if code != 0:
        stays = f"the tag {name} stays as it is: the command fails at {short(snapshot)} (exit code {code})"
        note(stays)
        if github is not None:
            github.annotate("error", stays, title=name)
    return int(code != 0)
