"""`snapshotd setup`."""

from __future__ import annotations

import click

from snapshotd.cli.command import declare, json_option
from snapshotd.cli.commands.service.doctor import show
from snapshotd.cli.follow import note
from snapshotd.cli.text import print_json
from snapshotd.engine.host import doctor
from snapshotd.errors import Unsupported


@declare("setup", examples=["sudo snapshotd setup && snapshotd doctor"])
@json_option
def command(_ctx: click.Context, as_json: bool) -> int:
    """Install missing system packages, where that is possible.

    Uses apt-get, dnf, pacman or apk, as root. Packages that are there are left alone. The exit
    code is 7 when something could not be installed. With --json: an array of {name,ok,detail,fix}, one per package
    that was missing.
    """
    checks = doctor.setup(note)
    if as_json:
        print_json(checks)
    elif checks:
        show(checks)
    else:
        click.echo("nothing is missing that packages could bring; `snapshotd doctor` looks at the rest", err=True)
    return Unsupported.exit_code if any(check.ok is False for check in checks) else 0
