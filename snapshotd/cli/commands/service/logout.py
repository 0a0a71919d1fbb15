"""`snapshotd logout`."""

from __future__ import annotations

import click

from snapshotd.cli.command import declare


@declare("logout", examples=["snapshotd logout https://build.example.org:7676"])
@click.argument("host", metavar="https://HOST:PORT")
def command(ctx: click.Context, host: str) -> None:
    """Forget the token of a daemon on another machine.

    It is forgotten here alone: `snapshotd token revoke` on the daemon's machine ends it.
    """
    from snapshotd.client.remote.logins import remove_login
    from snapshotd.client.remote.tls import TlsWay

    remove_login(TlsWay(host, "-", "sha256:" + "0" * 64).place)
