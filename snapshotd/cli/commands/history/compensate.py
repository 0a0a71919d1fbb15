"""`snapshotd compensate`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.commands.history.effects import report_effects
from snapshotd.cli.follow import note
from snapshotd.cli.values import complete_trajectory
from snapshotd.errors import SandboxFailed


@declare("compensate", examples=["snapshotd compensate box", "snapshotd compensate box a1b2c3d4"])
@click.option("--no-trunc", is_flag=True, help="Whole ids.")
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
@click.argument("calls", metavar="[CALL]...", nargs=-1)
def command(ctx: click.Context, trajectory: str, calls: tuple[str, ...], no_trunc: bool, as_json: bool) -> int:
    """Run the compensations of irreversible calls that were left behind.

    Takes all calls that `snapshotd effects` lists, or the named ones; newest first, each at most once, each recorded as
    a tool call. The exit code is 125 when one failed. With --json: as `effects --json`.
    """
    done = connect(ctx).compensate(trajectory, calls)
    report_effects(done, full=no_trunc, as_json=as_json)
    failed = [item for item in done if item.compensated in ("failed", "interrupted", "unknown")]
    if not failed:
        return 0
    note(
        f"{len(failed)} compensations failed, and none is run twice; `snapshotd log {trajectory}` shows what they said"
    )
    return SandboxFailed.exit_code
