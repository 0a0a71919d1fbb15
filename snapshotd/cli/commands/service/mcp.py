"""`snapshotd mcp`."""

from __future__ import annotations

from pathlib import Path

import click

from snapshotd.cli.command import connect, connect_async, declare, refuse
from snapshotd.cli.values import NetworkText, complete_trajectory
from snapshotd.engine.host import integrations

_EXAMPLES = [
    "claude mcp add snapshotd -- snapshotd mcp",
    "snapshotd mcp --trajectory fix-tests --read-only",
    "snapshotd mcp --http 8765 --token-file ~/.snapshotd-mcp",
]


@declare("mcp", examples=_EXAMPLES)
@click.option(
    "--http", "port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve HTTP on this port of 127.0.0.1."
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="With --http: the token that requests need; made if missing.  [default: mcp.token in the state directory]",
)
@click.option(
    "--trajectory",
    metavar="TRAJECTORY",
    shell_complete=complete_trajectory,
    help="Only this trajectory and what is forked from it; tools take it where they are given none.",
)
@click.option("--read-only", is_flag=True, help="Only tools that change and run nothing.")
@click.option(
    "--network",
    type=NetworkText(),
    metavar="none|bridge|allow:HOST,...",
    default="none",
    show_default=True,
    help="What new sandboxes reach.",
)
@click.option(
    "--isolation",
    type=click.Choice(["none"]),
    help="Also sandboxes without isolation: their commands may do what your user may. New ones are such.",
)
@click.option("--no-elicitation", is_flag=True, help="Ask nobody at the client about calls that wait for a person.")
def command(
    ctx: click.Context,
    port: int | None,
    token_file: Path | None,
    trajectory: str | None,
    read_only: bool,
    network: str,
    isolation: str | None,
    no_elicitation: bool,
) -> None:
    """Serve the daemon's verbs to an agent that speaks MCP.

    Speaks the Model Context Protocol on standard input and output, or with --http on the loopback. The client gets tools
    for sandboxes alone: run commands, read and write files, look at the history, rewind, fork, compare, score, bisect. It
    reaches no folder of this machine. Calls that the policy file gates are asked about at the client, if it can ask its
    user, else they wait for `snapshotd approve`.
    """
    with integrations.require("mcp"):  # only then: a web server, which no other command needs
        from snapshotd.integrations.mcp import transports
        from snapshotd.integrations.mcp.server import McpOptions, SnapshotdServer
        from snapshotd.integrations.token_file import token_of
    if token_file is not None and port is None:
        refuse("--token-file is for --http: give a port, or leave it out")

    client = connect(ctx)
    only = None if trajectory is None else client.trajectory(trajectory).id
    client.version()  # brings the daemon up, so that the first tool need not
    options = McpOptions(only, read_only, isolation == "none", network, not no_elicitation)
    server = SnapshotdServer(connect_async(ctx), options)
    if port is None:
        transports.serve_stdio(server)
        return
    path = token_file or client.state_dir / "mcp.token"
    token = token_of(path)
    transports.serve_http(server, port, token, lambda address: click.echo(f"{address}  token in {path}", err=True))
