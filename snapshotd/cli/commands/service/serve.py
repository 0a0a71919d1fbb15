"""`snapshotd serve`."""

from __future__ import annotations

from pathlib import Path

import click

from snapshotd.cli.command import connect, connect_async, declare, refuse
from snapshotd.engine.host import integrations

_EXAMPLES = [
    "snapshotd serve --e2b",
    "snapshotd serve --e2b --port 3000 --image my-image --network none",
    "snapshotd serve --e2b --host 0.0.0.0 --port 443 --domain sandboxes.example.org --certificate tls.pem --private-key tls.key",
]
_FILE = click.Path(dir_okay=False, path_type=Path)


@declare("serve", examples=_EXAMPLES)
@click.option("--e2b", is_flag=True, help="Serve the API of E2B, for its SDKs and what is built on them.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; another one needs TLS.")
@click.option("--port", type=click.IntRange(0, 65535), default=3000, show_default=True, help="0: any free one.")
@click.option(
    "--domain",
    help="Below it sandboxes and their ports have hosts (PORT-SANDBOX.DOMAIN).  [default: localhost, with the port]",
)
@click.option("--certificate", type=_FILE, metavar="FILE", help="Certificate for TLS, with its chain.")
@click.option("--private-key", type=_FILE, metavar="FILE", help="Its private key.")
@click.option(
    "--key-file",
    type=_FILE,
    metavar="FILE",
    help="The API key that clients need; made if missing.  [default: e2b.key in the state directory]",
)
@click.option("--image", default="default", show_default=True, help="The image that the template `base` is.")
@click.option(
    "--network",
    type=click.Choice(["none", "bridge"]),
    default="bridge",
    show_default=True,
    help="What sandboxes reach that do not say.",
)
@click.option("--rm", "removes", is_flag=True, help="Remove a sandbox that was killed, with its history.")
@click.pass_context
def command(
    ctx: click.Context,
    e2b: bool,
    host: str,
    port: int,
    domain: str | None,
    certificate: Path | None,
    private_key: Path | None,
    key_file: Path | None,
    image: str,
    network: str,
    removes: bool,
) -> int:
    """Serve sandboxes to programs that were written for a service.

    With --e2b: the control API of E2B and the API within its sandboxes, so that its SDKs run unchanged. The environment
    that they need is printed. Each of their sandboxes is a trajectory, and each command and written file a call with a
    snapshot.
    """
    if not e2b:
        refuse("say what to serve: --e2b")
    integrations.require("e2b")
    from snapshotd.integrations.e2b.keys import new_key  # only then: a web server, which no other command needs
    from snapshotd.integrations.e2b.listening import WireAddress
    from snapshotd.integrations.e2b.server import E2BServer, WireOptions
    from snapshotd.integrations.token_file import token_of

    listening = WireAddress(host, port, certificate, private_key)
    listening.check()
    client = connect(ctx)
    client.version()  # brings the daemon up, so that the first request need not
    path = key_file or client.state_dir / "e2b.key"
    made = not path.exists()
    key = token_of(path, new_key)

    with listening.listen() as listener:
        address = listening.url(listener)
        below = domain or f"localhost:{address.rpartition(':')[2]}"
        server = E2BServer(connect_async(ctx), key, WireOptions(below, image, network, removes))
        shown = key if made else f'"$(cat {path})"'
        click.echo(f"export E2B_API_URL={address} E2B_SANDBOX_URL={address} E2B_API_KEY={shown}")
        listening.serve(listener, server, server.stop_streams)
    return 0
