"""`snapshotd cp`."""

from __future__ import annotations

import os
import posixpath
import sys
from typing import NamedTuple

import click

from snapshotd.cli.command import connect, declare, json_option, refuse, standard_input
from snapshotd.cli.follow import note_warnings
from snapshotd.cli.progress import Meter
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.text import print_json, size
from snapshotd.cli.waiting import Wait, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import RestoreInfo, WriteInfo
from snapshotd.errors import NotFound
from snapshotd.terms import number_of

STREAM = "-"


class Inside(NamedTuple):
    """A path of a sandbox or a snapshot."""

    ref: str
    path: str


@declare(
    "cp",
    examples=[
        "snapshotd cp app.py box:/workspace/app.py",
        "snapshotd cp box:/workspace/out ./out",
        "snapshotd cp best:report.txt .",
        "tar -c src | snapshotd cp - box:/workspace",
        "snapshotd cp box:/etc - | tar -t",
    ],
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Whose new files are, by name or number. [root's]")
@wait_option
@json_option
@click.argument("source", metavar="SOURCE")
@click.argument("target", metavar="TARGET")
def command(ctx: click.Context, source: str, target: str, user: str | None, wait: Wait | None, as_json: bool) -> int:
    """Copy files into a sandbox, or out of a sandbox or snapshot.

    One of the two is ID:PATH, the other a path of this machine (one with a colon in it begins with / or .), or - for a
    tar on standard input or output. A path of a sandbox that does not start with / starts at /workspace. The rules are
    those of `docker cp`: into a directory that is there, a file or folder goes under its name; the content of a folder
    goes there if the source ends with /. ; missing directories are made on the way into a sandbox. A device or pipe of
    this machine that is the TARGET is written to, and no link, device or pipe is ever replaced.

    Into a sandbox, it is one tool call with one snapshot: a file that cannot be written to its end stays as it was. Out
    of it, a trajectory stands for its files as they are now, a snapshot's id or tag for those of the snapshot. With
    --json: the snapshot as `log --json` has it; on the way out {"file_count","directories","bytes","warnings"}.
    """
    origin, goal = _inside(source), _inside(target)
    if (origin is None) == (goal is None):
        refuse("one of SOURCE and TARGET must be ID:PATH, and the other a path of this machine or -")
    client = connect(ctx)
    if goal is not None:
        with Meter(f"copying to {target}", quiet=as_json) as meter:
            done = _into(client, source, goal, user, wait or "captured", meter)
        note_warnings(done.warnings)
        report_snapshot(client, done.snapshot, wait, as_json=as_json)
        return 0
    assert origin is not None
    if user is not None or wait is not None:
        refuse("--user and --wait are for files that go into a sandbox")
    if target == STREAM:
        return _stream_out(client, origin, as_json)
    with Meter(f"copying {source}", quiet=as_json) as meter:
        report = _out(client, origin, target, meter)
    if as_json:
        print_json(report)
        return 0
    note_warnings(report.warnings)
    click.echo(
        f"{number_of(report.file_count, 'file')} and {number_of(report.directories, 'directory')}, {size(report.bytes)}, "
        f"in {target}",
        err=True,
    )
    return 0


def _inside(text: str) -> Inside | None:
    """ID:PATH; None for a path of this machine."""
    ref, colon, path = text.partition(":")
    if not colon or not ref or ref.startswith((".", "/")) or "/" in ref:
        return None
    return Inside(ref, path if path.startswith("/") else f"/workspace/{path}")


def _into(client: Snapshotd, source: str, goal: Inside, user: str | None, wait: Wait, meter: Meter) -> WriteInfo:
    if source == STREAM:
        stdin = standard_input()
        if stdin is None or stdin.isatty():
            refuse("a tar is read from standard input, which is a terminal; send it through a pipe")
        return client.write_archive(goal.ref, goal.path, stdin, user=user, wait=wait, moved=meter.show_bytes)
    if not os.path.exists(source):
        refuse(f"there is no {source} on this machine; write ID:PATH for one of a sandbox")
    kind = _kind(client, goal)
    is_folder = os.path.isdir(source)
    path = _goal(source, goal.path, kind == "directory", is_folder=is_folder, is_there=kind is not None)
    return client.upload(goal.ref, source, path, user=user, wait=wait, moved=meter.show_bytes)


def _out(client: Snapshotd, origin: Inside, target: str, meter: Meter) -> RestoreInfo:
    is_folder = client.stat_file(*origin).is_dir
    is_there = os.path.lexists(target)
    to = _goal(origin.path, target, os.path.isdir(target), is_folder=is_folder, is_there=is_there)
    if to != target and os.path.lexists(to) and (os.path.islink(to) or not (os.path.isfile(to) or os.path.isdir(to))):
        refuse(f"{to} is no regular file, and is not replaced; move it away, or name another place")
    return client.download(*origin, to, moved=meter.show_bytes)


def _stream_out(client: Snapshotd, origin: Inside, as_json: bool) -> int:
    if as_json:
        refuse("--json and the tar cannot both go to standard output; name a file or a folder")
    if sys.stdout.isatty():
        refuse(
            "a tar is no text, so it is not written to a terminal; name a file or a folder, or send it through a pipe"
        )
    warnings = client.read_archive(*origin, sys.stdout.buffer.write)
    sys.stdout.buffer.flush()
    note_warnings(warnings)
    return 0


def _goal(source: str, target: str, in_directory: bool, *, is_folder: bool, is_there: bool) -> str:
    """Return the path at which a file or folder goes, by the rules of `docker cp`."""
    if in_directory:
        content_only = is_folder and (source.endswith("/.") or posixpath.normpath(source) in (".", "/"))
        name = posixpath.basename(posixpath.normpath(source))
        return target if content_only else posixpath.join(target, name)
    if is_there and is_folder:
        refuse(f"{target} is no directory, so a folder cannot go there; name another place")
    if not is_folder and target.endswith("/"):
        refuse(f"there is no directory {target}; make it, or leave out the slash at the end")
    return target


def _kind(client: Snapshotd, place: Inside) -> str | None:
    try:
        return client.stat_file(*place).kind
    except NotFound:
        return None
