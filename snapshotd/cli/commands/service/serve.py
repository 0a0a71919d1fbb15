"""`snapshotd serve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from snapshotd.cli.command import connect, connect_async, declare, refuse
from snapshotd.cli.commands.service.daemon import own_settings, serve_daemon
from snapshotd.cli.values import NetworkText
from snapshotd.client.client import Snapshotd
from snapshotd.config import Config
from snapshotd.engine.host import integrations

_EXAMPLES = [
    "sudo snapshotd serve --listen 0.0.0.0:7676",
    "sudo snapshotd serve --listen 0.0.0.0:443 --tls-cert /etc/snapshotd/cert.pem --tls-key /etc/snapshotd/key.pem",
    "snapshotd serve --listen http://127.0.0.1:7676",
    "snapshotd serve --e2b",
    "snapshotd serve --e2b --listen 0.0.0.0:443 --domain sandboxes.example.org --tls-cert cert.pem --tls-key key.pem",
]
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_E2B_LISTEN = "http://127.0.0.1:3000"
_OF_DAEMON, _OF_E2B = ("foreground", "isolation"), ("domain", "key_file", "image", "network", "rm")


@declare("serve", examples=_EXAMPLES)
@click.option(
    "--listen",
    metavar="ADDR",
    help=f"Address and port for other machines.  [$SNAPSHOTD_LISTEN, port 7676; --e2b: {_E2B_LISTEN}]",
)
@click.option("--tls-cert", metavar="FILE", type=_FILE, help="Certificate to show, in PEM, with those that signed it.")
@click.option("--tls-key", metavar="FILE", type=_FILE, help="The certificate's key, in PEM.")
@click.option("--foreground", is_flag=True, help="Log to standard error instead of daemon.log in the state directory.")
@click.option(
    "--isolation",
    type=click.Choice(["none"]),
    help="none: be the daemon also where nothing isolates sandboxes, for those alone that ask for `--isolation none`.",
)
@click.option("--e2b", is_flag=True, help="Serve the API of E2B, for its SDKs and what is built on them.")
@click.option(
    "--domain",
    help="--e2b: below it sandboxes and their ports have hosts (PORT-SANDBOX.DOMAIN).  [default: localhost, with the port]",
)
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="--e2b: the API keys of clients, one a line, perhaps with its tenant behind it; made if missing.  [default: e2b.key in the "
    "state directory]",
)
@click.option("--image", help="--e2b: the image that the template `base` is.  [default: default]")
@click.option(
    "--network",
    type=NetworkText(),
    metavar="none|bridge|allow:HOST,...",
    help="--e2b: what sandboxes reach that do not say.  [default: bridge]",
)
@click.option("--rm", is_flag=True, help="--e2b: remove a sandbox that was killed, with its history.")
def command(ctx: click.Context, /, listen: str | None, tls_cert: Path | None, tls_key: Path | None, **more: Any) -> int:
    """Be the daemon, for other machines too, or serve clients of E2B.

    The daemon answers on its socket as every daemon does, and with --listen also other machines, over TLS, each with a
    token of `snapshotd token create`. Without a certificate of yours it makes one on the first start and prints its
    fingerprint, by which clients know it. An address of the loopback after http:// goes without TLS, for a proxy on this
    machine. A daemon that runs already has to be stopped first.

    With --e2b this is a program beside the daemon: the control API of E2B and the API within its sandboxes, so that its
    SDKs run unchanged. The environment that they need is printed. Each of their sandboxes is a trajectory, and each command
    and written file a call with a snapshot.
    """
    foreign = [name for name in (_OF_DAEMON if more["e2b"] else _OF_E2B) if more[name]]
    if foreign:
        other = "does not go with" if more["e2b"] else "goes with"
        refuse(f"--{foreign[0].replace('_', '-')} {other} --e2b")
    if more["e2b"]:
        return _serve_e2b(ctx, listen or _E2B_LISTEN, tls_cert, tls_key, more)
    given: dict[str, Any] = {
        "listen": listen,
        "tls_cert": None if tls_cert is None else str(tls_cert.absolute()),
        "tls_key": None if tls_key is None else str(tls_key.absolute()),
    }

    def settings(client: Snapshotd) -> Config:
        return replace(own_settings(client), **{name: value for name, value in given.items() if value is not None})

    return serve_daemon(connect(ctx, autostart=False), settings, more["isolation"], foreground=more["foreground"])


def _serve_e2b(
    ctx: click.Context, listen: str, certificate: Path | None, private_key: Path | None, options: dict[str, Any]
) -> int:
    with integrations.require("e2b"):  # only then: a web server, which no other command needs
        from snapshotd.daemon.access.address import parse_listen
        from snapshotd.integrations.e2b.keys import owners_of
        from snapshotd.integrations.e2b.listening import WireAddress
        from snapshotd.integrations.e2b.server import E2BServer, WireOptions

    asked = parse_listen(listen)
    if listen.startswith("https://") and certificate is None:
        refuse("an address after https:// needs --tls-cert and --tls-key with --e2b")
    listening = WireAddress(asked.host, asked.port, certificate, private_key)
    listening.check()
    client = connect(ctx)
    client.version()  # brings the daemon up, so that the first request need not
    path = options["key_file"] or client.state_dir / "e2b.key"
    made = not path.exists()
    owners = owners_of(path)
    with listening.listen() as listener:
        address = listening.url(listener)
        below = options["domain"] or f"localhost:{address.rpartition(':')[2]}"
        served = WireOptions(below, options["image"] or "default", options["network"] or "bridge", options["rm"])
        server = E2BServer(connect_async(ctx), owners, served)
        shown = next(iter(owners)) if made else f'"$(sed "s/ .*//;q" {path})"'
        click.echo(f"export E2B_API_URL={address} E2B_SANDBOX_URL={address} E2B_API_KEY={shown}")
        listening.serve(listener, server, server.stop_streams)
    return 0
