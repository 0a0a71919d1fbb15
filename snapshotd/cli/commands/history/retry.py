"""`snapshotd retry`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.follow import note, patience
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.values import complete_task, complete_trajectory
from snapshotd.cli.waiting import Wait, wait_option


@declare("retry", examples=["snapshotd retry nightly build", "snapshotd retry --no-resume nightly build"])
@click.option("--no-compensate", is_flag=True, help="Leave what the task did outside as it is.")
@click.option("--no-resume", is_flag=True, help="Only go back; the program is not started.")
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("task", shell_complete=complete_task)
def command(
    ctx: click.Context,
    trajectory: str,
    task: str,
    no_compensate: bool,
    no_resume: bool,
    wait: Wait | None,
    as_json: bool,
) -> None:
    """Do one task of an agent again.

    Goes back to the snapshot before the task began, compensates its irreversible calls, and lets the program go on from
    there. Tasks that completed after it and do not depend on it stay completed, with their files. `snapshotd attach`
    follows the program. With --json: the new snapshot as `log --json` has it.
    """
    client = connect(ctx)
    with patience():
        taken = client.retry(
            trajectory, task, compensate=not no_compensate, resume=not no_resume, wait=wait or "captured"
        )
    report_snapshot(client, taken, wait, as_json=as_json)
    if not no_resume:
        note(f"the program goes on; `snapshotd attach {trajectory}` follows it")
