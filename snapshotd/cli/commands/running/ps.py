"""`snapshotd ps`."""

from __future__ import annotations

import shlex
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import ago, id_text, print_ids, print_json, printable, table
from snapshotd.cli.values import complete_trajectory
from snapshotd.client.results import CommandInfo, SandboxInfo

_LINE_CHARS = 60


@declare("ps", examples=["snapshotd ps", "snapshotd stop $(snapshotd ps -q)", "snapshotd ps box   # its commands"])
@click.option("-q", "--quiet", is_flag=True, help="Only the ids: of trajectories, or of the commands that run.")
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("trajectory", required=False, shell_complete=complete_trajectory)
def command(ctx: click.Context, trajectory: str | None, quiet: bool, no_trunc: bool, as_json: bool) -> None:
    """List live sandboxes, or a trajectory's commands.

    With a TRAJECTORY: the commands that run in it, also of a `snapshotd exec` whose client has gone away, and the newest
    ended ones of `snapshotd exec --detach`. `snapshotd kill` ends each. `snapshotd log TRAJECTORY` has the snapshot of
    every command. With --json: an array of
    {trajectory,name,container,pid,runtime,agent_running,started_at}, or of commands: {id,trajectory,argv,cwd,stdin,
    timeout_s,background,started_at,status,exit_code,ended_at,snapshot,error,service,service_state,restarts,port}.

    A service (`exec --detach --service`) has its name, its state and how often it was started again: `starting`, `ready`,
    `ended` or `failed` by itself, `stopped` with its sandbox or for a rewind. The columns are there if there is one.
    """
    client = connect(ctx)
    if trajectory is not None:
        _commands(client.commands(trajectory), quiet=quiet, no_trunc=no_trunc, as_json=as_json)
        return
    found = client.sandboxes()
    if as_json:
        print_json([_json(item) for item in found])
        return
    if quiet:
        print_ids((item.trajectory.id for item in found), full=no_trunc)
        return
    rows = [
        (
            id_text(item.trajectory.id, full=no_trunc),
            item.trajectory.name or "-",
            id_text(item.container, full=no_trunc),
            str(item.pid),
            item.trajectory.runtime,
            "running" if item.agent_running else "-",
            ago(item.started_at),
        )
        for item in found
    ]
    table(("TRAJECTORY", "NAME", "CONTAINER", "PID", "RUNTIME", "AGENT", "STARTED"), rows, right=(3,))


def _json(item: SandboxInfo) -> dict[str, Any]:
    line = item.trajectory
    return {
        "trajectory": line.id,
        "name": line.name,
        "container": item.container,
        "pid": item.pid,
        "runtime": line.runtime,
        "agent_running": item.agent_running,
        "started_at": item.started_at,
    }


def _commands(found: list[CommandInfo], *, quiet: bool, no_trunc: bool, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    if quiet:
        print_ids((item.id for item in found if item.status == "running"), full=no_trunc)
        return
    rows: list[tuple[str, ...]] = [
        (
            id_text(item.id, full=no_trunc),
            item.status,
            "-" if item.exit_code is None else str(item.exit_code),
            ago(item.started_at),
            id_text(item.snapshot, full=no_trunc),
            _line(item, no_trunc),
        )
        for item in found
    ]
    heads: tuple[str, ...] = ("ID", "STATUS", "EXIT", "STARTED", "SNAPSHOT", "COMMAND")
    if any(item.service for item in found):
        heads = (*heads[:-1], "SERVICE", "STATE", "RESTARTS", heads[-1])
        rows = [(*row[:-1], *_service_cells(item), row[-1]) for row, item in zip(rows, found, strict=True)]
    table(heads, rows, right=(2,))


def _service_cells(item: CommandInfo) -> tuple[str, str, str]:
    return ("-", "-", "-") if item.service is None else (item.service, item.service_state or "-", str(item.restarts))


def _line(item: CommandInfo, whole: bool) -> str:
    line = printable(shlex.join(item.argv))
    return line if whole or len(line) <= _LINE_CHARS else line[: _LINE_CHARS - 1] + "…"
