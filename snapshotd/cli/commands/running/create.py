"""`snapshotd create`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import connect, declare, is_local, json_option
from snapshotd.cli.follow import note, patience
from snapshotd.cli.text import print_answer
from snapshotd.cli.values import check_folder, idle_option, make_image, sandbox_keywords, sandbox_options
from snapshotd.cli.waiting import Wait, wait_option


@declare(
    "create",
    examples=["snapshotd create --workspace . --name box", "ID=$(snapshotd create)", "snapshotd create --json"],
    docker_codes=True,
)
@sandbox_options
@idle_option
@wait_option
@json_option
def command(
    ctx: click.Context, /, wait: Wait | None, idle_timeout: float | None, as_json: bool, **options: Any
) -> None:
    """Start a sandbox without an agent.

    Prints the trajectory's id; `snapshotd exec` runs commands in it. It runs until it is stopped,
    or for --idle-timeout. With --json: {"trajectory","snapshot"}, the ids.
    """
    if options["workspace"] is not None and is_local(ctx):
        check_folder(options["workspace"], "workspace")
    client = connect(ctx)
    keywords = sandbox_keywords(options)
    make_image(client, keywords, note)
    with patience():
        trajectory, snapshot = client.create(wait=wait or "captured", idle_timeout=idle_timeout or 0, **keywords)
    state = {} if wait is None else {"state": snapshot.state}
    print_answer({"trajectory": trajectory.id, "snapshot": snapshot.id, **state}, trajectory.id, as_json=as_json)
