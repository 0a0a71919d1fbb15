"""`snapshotd cat`."""

from __future__ import annotations

import base64

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import RawOutput
from snapshotd.cli.text import print_json
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.local.arguments import sandbox_path


@declare("cat", examples=["snapshotd cat a1b2c3:/workspace/app.py", "snapshotd cat best:app.py > app.py"])
@json_option
@click.argument("where", metavar="ID:PATH", shell_complete=complete_snapshot)
def command(ctx: click.Context, where: str, as_json: bool) -> None:
    """Print a file as it was in a snapshot.

    A path that does not start with / starts at /workspace. With --json: {"snapshot","path","bytes","content_b64"}.
    """
    ref, colon, path = where.partition(":")
    if not colon or not path:
        refuse(f"{where!r} names no file; write ID:/PATH, such as {ref or 'a1b2c3'}:/workspace/app.py")
    raw_path = sandbox_path(path)
    client = connect(ctx)
    if as_json:
        content = b"".join(client.cat(ref, raw_path))
        print_json(
            {
                "snapshot": client.snapshot(ref).id,
                "path": raw_path.decode(errors="replace"),
                "bytes": len(content),
                "content_b64": base64.b64encode(content).decode(),
            }
        )
        return
    raw = RawOutput()
    for piece in client.cat(ref, raw_path):
        raw.write("stdout", piece)
