"""`snapshotd shell`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import connect, declare, refuse, standard_input
from snapshotd.cli.commands.running.exec import in_terminal
from snapshotd.cli.follow import note
from snapshotd.cli.values import complete_snapshot, complete_trajectory
from snapshotd.terms import short

_SHELL = ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"]


@declare(
    "shell",
    examples=[
        "snapshotd shell box",
        "snapshotd shell --snapshot a1b2c3   # in a throw-away fork",
        "snapshotd shell --workspace .       # in a new sandbox",
    ],
    docker_codes=True,
)
@click.option(
    "--snapshot",
    metavar="ID",
    help="In a throw-away fork of this snapshot; nothing of it is kept.",
    shell_complete=complete_snapshot,
)
@click.option("--workspace", metavar="DIR", type=click.Path(), help="In a new sandbox, with a copy of this folder.")
@click.option("--image", metavar="IMAGE", help="In a new sandbox of this image.")
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Who runs it in the sandbox, by name or number.")
@click.option("-w", "--cwd", metavar="DIR", help="Working directory in the sandbox.")
@click.option("-q", "--quiet", is_flag=True, help="No line about the snapshot.")
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    trajectory: str | None,
    snapshot: str | None,
    workspace: str | None,
    image: str | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Open a shell in a sandbox.

    It is bash, or sh where there is none. The shell is one tool call, with one snapshot when it ends. With --workspace
    or --image, or without anything, it runs in a new sandbox, whose name the last line tells. The exit code is the
    shell's.
    """
    new = workspace is not None or image is not None
    if (trajectory is not None) + (snapshot is not None) + new > 1:
        refuse("a shell runs in one place: a trajectory, --snapshot, or a new sandbox (--workspace, --image)")
    client = connect(ctx)
    options["stdin"], options["env"] = standard_input(), {}
    if snapshot is not None:
        return in_terminal(client, "", snapshot, _SHELL, options, quiet).exit_code
    made = None
    if trajectory is None:
        made, _ = client.create(workspace=workspace, image=image or "default")
        trajectory = made.id
    code = in_terminal(client, trajectory, None, _SHELL, options, quiet).exit_code
    if made is not None and not quiet:
        note(f"the sandbox is {short(made.id)}: `snapshotd shell {short(made.id)}` goes on in it")
    return code
