"""`snapshotd shell`."""

from __future__ import annotations

import sys
from typing import Any

import click

from snapshotd.cli.command import connect, declare, is_terminal, refuse, standard_input
from snapshotd.cli.commands.running.exec import exec_in_pipes, exec_in_terminal
from snapshotd.cli.each import EachShell, TypedInput, enable_editing
from snapshotd.cli.follow import note
from snapshotd.cli.values import complete_snapshot, complete_trajectory
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ExecInfo
from snapshotd.terms import SHELL, short


@declare(
    "shell",
    examples=[
        "snapshotd shell box",
        "snapshotd shell --snapshot a1b2c3   # in a throw-away fork",
        "snapshotd shell --workspace .       # in a new sandbox",
        "snapshotd shell --each box          # a snapshot after each line",
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
@click.option("--each", is_flag=True, help="Take a snapshot after each command line, not one at the end.")
@click.option(
    "--shell",
    "shell",
    metavar="CMD",
    help="With --each: the shell that runs the lines, such as dash; else bash, or sh.",
)
@click.option("-u", "--user", metavar="USER[:GROUP]", help="Who runs it in the sandbox, by name or number.")
@click.option("-w", "--cwd", metavar="DIR", help="Working directory in the sandbox.")
@click.option("-q", "--quiet", is_flag=True, help="No line about the snapshot.")
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(
    ctx: click.Context,
    trajectory: str | None,
    snapshot: str | None,
    workspace: str | None,
    image: str | None,
    each: bool,
    shell: str | None,
    quiet: bool,
    **options: Any,
) -> int:
    """Open a shell in a sandbox.

    It is bash, or sh where there is none. The shell is one tool call, with one snapshot when it ends. With --workspace
    or --image, or without anything, it runs in a new sandbox, whose name the last line tells. The exit code is the
    shell's.

    With --each every command line is a tool call with its own snapshot, the line among its arguments, and its exit code.
    `back` gives the sandbox the files from before the last line; `snap NAME` gives its snapshot a name; Ctrl-D or `exit`
    ends. Each line runs in a shell of its own that ends with it: directory, umask and variables go on in the next line, in
    bash functions and aliases too; jobs do not (`snapshotd exec --detach` starts a server). Every variable that a line
    sets is exported. A text that breaks off in a quote or a loop is read on. Lines may come from a file or a pipe, too.
    The exit code is that of the last line.
    """
    new = workspace is not None or image is not None
    if (trajectory is not None) + (snapshot is not None) + new > 1:
        refuse("a shell runs in one place: a trajectory, --snapshot, or a new sandbox (--workspace, --image)")
    if each and snapshot is not None:
        refuse(
            "a throw-away fork ends with its first command; leave out --each, or fork the snapshot (`snapshotd fork`)"
        )
    if shell is not None and not each:
        refuse("--shell is for --each; `snapshotd exec -it TRAJECTORY SHELL` starts another shell")
    if not each and not is_terminal():  # before a sandbox is made for it
        refuse(
            "standard input is no terminal, and a shell needs one; `snapshotd shell --each NAME` takes lines from a file or a pipe, "
            "`snapshotd exec NAME -- CMD` runs one command"
        )
    client = connect(ctx)
    options["stdin"], options["env"] = standard_input(), {}
    if snapshot is not None:
        return exec_in_terminal(client, "", snapshot, [*SHELL], options, quiet).exit_code
    made = None
    if trajectory is None:
        client.ensure_image(image or "default", progress=None if quiet else note)
        made, _ = client.create(workspace=workspace, image=image or "default")
        trajectory = made.id
    code = (
        _each(client, trajectory, shell, options, quiet)
        if each
        else exec_in_terminal(client, trajectory, None, [*SHELL], options, quiet).exit_code
    )
    if made is not None and not quiet:
        note(f"the sandbox is {short(made.id)}: `snapshotd shell {short(made.id)}` goes on in it")
    return code


def _each(client: Snapshotd, trajectory: str, shell: str | None, options: dict[str, Any], quiet: bool) -> int:
    typed = is_terminal()

    def run(argv: list[str], more: dict[str, Any]) -> ExecInfo:
        if not typed:
            return exec_in_pipes(client, trajectory, None, argv, {**options, **more, "stdin": None}, quiet)
        keys = TypedInput(sys.stdin.fileno())
        try:
            return exec_in_terminal(client, trajectory, None, argv, {**options, **more, "stdin": keys}, quiet)
        finally:
            keys.end()

    with enable_editing():
        return EachShell(client, trajectory, run, shell, options["cwd"]).work(typed=typed)
