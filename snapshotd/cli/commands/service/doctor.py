"""`snapshotd doctor`."""

from __future__ import annotations

import click

from snapshotd.cli.command import connect, declare, json_option
from snapshotd.cli.text import print_json, printable
from snapshotd.engine.host import doctor
from snapshotd.errors import Unsupported

_MARKS = {True: ("ok", "green"), None: ("warn", "yellow"), False: ("MISSING", "red")}


@declare("doctor", examples=["sudo snapshotd doctor", "snapshotd doctor --json | jq '.[] | select(.ok == false)'"])
@json_option
def command(ctx: click.Context, as_json: bool) -> int:
    """Say what this machine lacks, and the fix for each.

    Looks at the kernel, overlay, runc, Docker, FUSE, reflinks, cgroups and privileges, and on a node of a fleet at
    PostgreSQL, the bucket and the cache; starts no daemon and changes nothing. The exit code is 7 when something is missing
    that sandboxes need. With --json: an array of {name,ok,detail,fix}; ok is null for a warning.
    """
    checks = doctor.diagnose(connect(ctx, autostart=False).state_dir)
    if as_json:
        print_json(checks)
    else:
        show(checks)
    return Unsupported.exit_code if any(check.ok is False for check in checks) else 0


def show(checks: list[doctor.Check]) -> None:
    """One line per check, its fix below it."""
    width = max((len(check.name) for check in checks), default=0)
    for check in checks:
        mark, colour = _MARKS[check.ok]
        click.echo(f"{click.style(f'{mark:7}', fg=colour)}  {check.name:{width}}  {printable(check.detail)}")
        if check.fix:
            click.echo(f"{'':7}  {'':{width}}  fix: {printable(check.fix)}")
