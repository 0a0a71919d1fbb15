"""`snapshotd export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note, note_warnings
from snapshotd.cli.github import GitHub, github_option
from snapshotd.cli.langgraph import WORD, move
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json, size
from snapshotd.cli.values import complete_snapshot
from snapshotd.client.client import Snapshotd
from snapshotd.client.local.part_file import part_file

_MIND = ("atif", "jsonl", "html")
"""Forms that hold no files."""


@declare(
    "export",
    examples=[
        "snapshotd export best -o best.bundle",
        "snapshotd export nightly --trajectory -o nightly.bundle",
        "snapshotd export nightly --trajectory --since a1b2c3 -o newer.bundle",
        "snapshotd export known-good --cache /srv/cache --key linux-$(git rev-parse HEAD)",
        "snapshotd export best --encrypt ci.key -o best.bundle",
        "snapshotd export best --format oci | docker load",
        "snapshotd export langgraph --from threads.db --to postgres://localhost/agents",
        "snapshotd export best --format tar -o - | tar -t",
        "snapshotd export nightly --format atif -o trajectory.json",
        "snapshotd export agent --format jsonl --with-forks -o train.jsonl",
        "snapshotd export agent --format html --with-forks -o agent.html",
    ],
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="-",
    type=click.Path(),
    help="Where to; - is standard output, the default.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["bundle", "oci", "tar", "atif", "jsonl", "html"]),
    default="bundle",
    show_default=True,
    help="For `snapshotd import`, for `docker load`, the plain tree; without files, for evaluation and training, or as a page.",
)
@click.option("--trajectory", "whole", is_flag=True, help="The whole trajectory up to the snapshot, not it alone.")
@click.option(
    "--since",
    metavar="ID",
    help="Only the snapshots after this one; the importing side must have it.",
    shell_complete=complete_snapshot,
)
@click.option(
    "--with-forks",
    "forks",
    is_flag=True,
    help="With atif, jsonl and html: all trajectories that were forked from it, too.",
)
@click.option(
    "--cache", metavar="DIR|s3://...", help="Into a cache, a folder or a bucket, under --key; an entry never changes."
)
@click.option("--key", metavar="KEY", help="Key of the entry in the cache.")
@click.option(
    "--encrypt", metavar="FILE", type=click.Path(), help="Encrypt the bundle; the content of this file is the key."
)
@click.option("--from", "source", metavar="FILE", help="With `langgraph`: the file of a SnapshotdSaver.")
@click.option("--to", "target", metavar="URL", help="With `langgraph`: the saver that gets the threads.")
@click.option(
    "--thread", "threads", metavar="ID", multiple=True, help="With `langgraph`: only this thread. Again for more."
)
@github_option
@json_option
@click.argument("snapshots", metavar="ID...|langgraph", nargs=-1, required=True, shell_complete=complete_snapshot)
def command(
    ctx: click.Context,
    snapshots: tuple[str, ...],
    output: str,
    form: Literal["bundle", "oci", "tar", "atif", "jsonl", "html"],
    whole: bool,
    since: str | None,
    forks: bool,
    cache: str | None,
    key: str | None,
    encrypt: str | None,
    source: str | None,
    target: str | None,
    threads: tuple[str, ...],
    github: GitHub | None,
    as_json: bool,
) -> int:
    """Write a snapshot, or a whole trajectory, as one file.

    A bundle holds files, conversation, tool calls and tags, and `snapshotd import` takes it in elsewhere. Files that
    a format cannot hold become warnings. The file has its name only when it is whole: until then it is FILE.part, which
    is removed after an error.

    With --cache and --key it becomes an entry of a cache, which `snapshotd import --cache` finds by the key or by its
    beginning. If the key has an entry, that one stays, and nothing is written.

    With --format atif, each trajectory is one line with a document of the Agent Trajectory Interchange Format; with jsonl,
    each of its conversations is one line with messages in the form of OpenAI's chat. Both take several IDs, hold no
    files, and go up to the snapshot or the head. `docs/agents/training.md` describes them.

    With --format html, whole trajectories are a page that a browser opens without a server (`docs/ui.md`): calls,
    conversations, outputs and patches, of each the first 64 KiB, and no files.

    With `langgraph`, threads of LangGraph are copied from the file of a SnapshotdSaver into another saver, as `snapshotd
    import langgraph` does the other way round.

    With --json: {"file","bytes","warnings"}; with --cache {"key","saved","bytes","warnings"}; of langgraph
    {"from","to","checkpoints"}.
    """
    if source is not None or target is not None or threads:
        if snapshots != (WORD,) or source is None or target is None:
            refuse("--from, --to and --thread are for `snapshotd export langgraph --from FILE --to URL`")
        return move(source, target, threads, as_json=as_json)
    _check(output, form, cache, key, whole=whole or since is not None, encrypted=encrypt is not None, as_json=as_json)
    if form in _MIND:
        snapshot = ", ".join(snapshots)
    elif forks or len(snapshots) > 1:
        refuse(f"an export as {form} holds one snapshot; several IDs and --with-forks are for atif, jsonl and html")
    else:
        (snapshot,) = snapshots
    if cache is not None and key is not None:
        return _to_cache(ctx, snapshot, cache, key, whole, since, encrypt, github, as_json)
    client = connect(ctx)
    with Meter(f"exporting {snapshot}", quiet=as_json) as meter:
        if form == "html":
            count, warnings = _write_page(client, snapshots, output, forks, meter)
        elif output == "-":
            count = 0

            def write(data: bytes) -> None:
                nonlocal count
                sys.stdout.buffer.write(data)
                count += len(data)
                meter.show_bytes(count)

            warnings = client.export(
                snapshots, write, form=form, whole=whole, since=since, forks=forks, encrypt=encrypt, progress=meter.line
            )
            sys.stdout.buffer.flush()
        else:
            done = client.export_file(
                snapshots,
                output,
                form=form,
                whole=whole,
                since=since,
                forks=forks,
                encrypt=encrypt,
                progress=meter.line,
                moved=meter.show_bytes,
            )
            count, warnings = done.bytes, done.warnings
    _report({"file": output, "bytes": count}, warnings, github, as_json)
    if output != "-" and not as_json:
        click.echo(f"{size(count)} in {click.format_filename(output)}", err=True)
    return 0


def _write_page(
    client: Snapshotd, refs: tuple[str, ...], output: str, forks: bool, meter: Meter
) -> tuple[int, tuple[str, ...]]:
    from snapshotd.page.export import export_page  # no other command needs it

    client.version()  # brings the daemon up
    text, warnings = export_page(client.socket_path, refs, forks=forks, progress=meter.line)
    data = text.encode()
    if output == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return len(data), warnings
    with part_file(Path(output)) as write:
        write(data)
    return len(data), warnings


def _check(
    output: str, form: str, cache: str | None, key: str | None, *, whole: bool, encrypted: bool, as_json: bool
) -> None:
    """UsageError: options that exclude each other."""
    if (cache is None) != (key is None):
        refuse("--cache and --key go together: the cache, and the name of the entry in it")
    if form != "bundle" and (cache is not None or encrypted):
        refuse(f"an export as {form} is for other programs; --cache and --encrypt are for bundles")
    if form in _MIND and whole:
        refuse(f"an export as {form} always has all up to the snapshot; --trajectory and --since are for bundles")
    if form != "bundle" and whole:
        refuse(f"an export as {form} holds the files of one snapshot; --trajectory and --since are for bundles")
    if cache is not None:
        if output != "-":
            refuse("a bundle goes into the cache or into a file; leave out --cache or -o")
        return
    if output == "-":
        if as_json:
            refuse("--json and the export cannot both go to standard output; name a file with -o")
        if sys.stdout.isatty() and form not in _MIND:
            refuse(
                "an export is no text, so it is not written to a terminal; name a file with -o, or send it through a pipe"
            )


def _to_cache(
    ctx: click.Context,
    snapshot: str,
    cache: str,
    key: str,
    whole: bool,
    since: str | None,
    encrypt: str | None,
    github: GitHub | None,
    as_json: bool,
) -> int:
    client = connect(ctx)
    with Meter(f"exporting {snapshot}", quiet=as_json) as meter:
        done = client.export_to_cache(
            snapshot, cache, key, whole=whole, since=since, encrypt=encrypt, progress=meter.line, moved=meter.show_bytes
        )
    count, warnings = (0, ()) if done is None else (done.bytes, done.warnings)
    _report({"key": key, "saved": done is not None, "bytes": count}, warnings, github, as_json)
    if not as_json:
        note(
            f"the key {key} has an entry, which stays as it is"
            if done is None
            else f"{size(count)} under the key {key}"
        )
    return 0


def _report(values: dict[str, object], warnings: tuple[str, ...], github: GitHub | None, as_json: bool) -> None:
    if github is not None:
        github.outputs(values)
        github.warn(warnings)
    if as_json:
        print_json({**values, "warnings": warnings})
    else:
        note_warnings(warnings)
