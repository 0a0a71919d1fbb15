"""`snapshotd serve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from snapshotd.cli.command import connect, declare
from snapshotd.cli.commands.service.daemon import own_settings, serve_daemon
from snapshotd.client.client import Snapshotd
from snapshotd.config import Config

_EXAMPLES = [
    "sudo snapshotd serve --listen 0.0.0.0:7676",
    "sudo snapshotd serve --listen 0.0.0.0:443 --tls-cert /etc/snapshotd/cert.pem --tls-key /etc/snapshotd/key.pem",
    "snapshotd serve --listen http://127.0.0.1:7676",
]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@declare("serve", examples=_EXAMPLES)
@click.option(
    "--listen",
    metavar="ADDR",
    help="Address and port for other machines; the port is 7676 by default.  [$SNAPSHOTD_LISTEN]",
)
@click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate to show, in PEM, with those that signed it.")
@click.option("--tls-key", metavar="FILE", type=_FILE, help="The certificate's key, in PEM.")
@click.option("--foreground", is_flag=True, help="Log to standard error instead of daemon.log in the state directory.")
@click.option(
    "--isolation",
    type=click.Choice(["none"]),
    help="none: be the daemon also where nothing isolates sandboxes, for those alone that ask for `--isolation none`.",
)
@click.pass_context
def command(
    ctx: click.Context,
    listen: str | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    foreground: bool,
    isolation: str | None,
) -> int:
    """Be the daemon, for other machines too.

    It answers on its socket as every daemon does, and with --listen also other machines, over TLS, each with a token of
    `snapshotd token create`. Without a certificate of yours it makes one on the first start and prints its fingerprint, by
    which clients know it. An address of the loopback after http:// goes without TLS, for a proxy on this machine. A daemon
    that runs already has to be stopped first.
    """
    given: dict[str, Any] = {
        "listen": listen,
        "tls_cert": None if tls_cert is None else str(tls_cert.absolute()),
        "tls_key": None if tls_key is None else str(tls_key.absolute()),
    }

    def settings(client: Snapshotd) -> Config:
        return replace(own_settings(client), **{name: value for name, value in given.items() if value is not None})

    return serve_daemon(connect(ctx, autostart=False), settings, isolation, foreground=foreground)
