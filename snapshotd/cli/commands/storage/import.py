"""`snapshotd import`. The module has its command's name, like all of them, and is loaded by it."""  # noqa: N999

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json
from snapshotd.cli.values import Name
from snapshotd.cli.waiting import Wait, state_of, wait_option
from snapshotd.errors import UsageError


class _Source:
    """A file that tells how much of it was read."""

    def __init__(self, raw: io.FileIO, meter: Meter) -> None:
        self._raw = raw
        self._meter = meter
        self._count = 0

    def read(self, count: int) -> bytes:
        data = self._raw.read(count) or b""
        self._count += len(data)
        self._meter.moved(self._count)
        return data


@declare(
    "import",
    examples=[
        "snapshotd import best.bundle",
        "snapshotd import nightly.bundle --name nightly-copy --wait stored",
        "ssh other snapshotd export best | snapshotd import -",
    ],
)
@click.option("--name", type=Name(), metavar="NAME", help="Name of the trajectory; else the one it had.")
@wait_option
@json_option
@click.argument("file", metavar="FILE|-", type=click.Path())
@click.pass_context
def command(ctx: click.Context, file: str, name: str | None, wait: Wait | None, as_json: bool) -> int:
    """Take in what `snapshotd export` wrote.

    All or nothing; - is standard input. Tags come along; a tag that is taken here stays as it is, with a warning.
    Snapshots that are here already are not taken again, which is no error. Prints the trajectories' ids. With --json:
    {"trajectories":[ids],"snapshots","warnings"}.
    """
    with _open(file) as raw:
        client = connect(ctx)
        mode = os.fstat(raw.fileno())
        total = mode.st_size if stat.S_ISREG(mode.st_mode) else None
        with Meter(f"importing {file}", total_bytes=total, quiet=as_json) as meter:
            done = client.import_bundle(_Source(raw, meter), name=name, wait=wait or "captured", progress=meter.line)
    ids = [item.id for item in done.trajectories]
    if as_json:
        answer: dict[str, Any] = {"trajectories": ids, "snapshots": done.snapshots, "warnings": list(done.warnings)}
        if wait is not None:
            answer["state"] = state_of(client, *ids)
        print_json(answer)
        return 0
    if not done.snapshots:
        note("all snapshots of the bundle are here already; nothing was taken but tags that they lacked")
    for warning in done.warnings:
        note(f"warning: {warning}")
    for each in ids:
        click.echo(each)
    return 0


def _open(file: str) -> io.FileIO:
    """Unbuffered, so that a thread stuck in a read holds no lock that the end of the process needs."""
    if file == "-":
        if sys.stdin.isatty():
            refuse("a bundle does not come from a terminal; name a file, or send it through a pipe")
        return open(0, "rb", buffering=0, closefd=False)
    try:
        return open(file, "rb", buffering=0)
    except OSError as exc:
        raise UsageError(
            f"the bundle {file} cannot be read: {exc.strerror}; name a file that `snapshotd export` wrote"
        ) from exc
