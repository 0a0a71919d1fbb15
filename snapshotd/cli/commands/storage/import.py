"""`snapshotd import`. The module has its command's name, like all of them, and is loaded by it."""  # noqa: N999

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.follow import note, note_warnings
from snapshotd.cli.github import GitHub, github_option
from snapshotd.cli.langgraph import WORD, move
from snapshotd.cli.progress import Meter
from snapshotd.cli.text import print_json
from snapshotd.cli.values import Name
from snapshotd.cli.waiting import Wait, state_of, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ImportInfo
from snapshotd.client.verbs.sharing import CacheImportInfo
from snapshotd.errors import UsageError


class _Source:
    """A file that tells how much of it was read."""

    def __init__(self, raw: io.FileIO, meter: Meter) -> None:
        self._raw = raw
        self._meter = meter
        self._count = 0

    def read(self, count: int) -> bytes:
        data = self._raw.read(count) or b""
        self._count += len(data)
        self._meter.show_bytes(self._count)
        return data


@declare(
    "import",
    examples=[
        "snapshotd import best.bundle",
        "snapshotd import nightly.bundle --name nightly-copy --wait stored",
        "snapshotd import --cache /srv/cache --key linux-$(git rev-parse HEAD) --restore-keys linux-",
        "ssh other snapshotd export best | snapshotd import -",
        "snapshotd import langgraph --from sqlite:///agent.db --to threads.db",
    ],
)
@click.option("--name", type=Name(), metavar="NAME", help="Name of the trajectory; else the one it had.")
@click.option("--cache", metavar="DIR|s3://...", help="From a cache in place of a file; with --key.")
@click.option("--key", metavar="KEY", help="Key of the entry; else the newest entry that begins with it.")
@click.option(
    "--restore-keys",
    metavar="PREFIX",
    multiple=True,
    help="If there is none: the newest entry that begins with this. Again, or one a line, in their order.",
)
@click.option(
    "--decrypt", metavar="FILE", type=click.Path(), help="The bundle is encrypted with the content of this file."
)
@click.option("--from", "source", metavar="URL", help="With `langgraph`: the saver that has the threads.")
@click.option("--to", "target", metavar="FILE", help="With `langgraph`: the file of a SnapshotdSaver.")
@click.option(
    "--thread", "threads", metavar="ID", multiple=True, help="With `langgraph`: only this thread. Again for more."
)
@wait_option
@github_option
@json_option
@click.argument("file", metavar="[FILE|-|langgraph]", required=False, type=click.Path())
def command(
    ctx: click.Context,
    file: str | None,
    name: str | None,
    cache: str | None,
    key: str | None,
    restore_keys: tuple[str, ...],
    decrypt: str | None,
    source: str | None,
    target: str | None,
    threads: tuple[str, ...],
    wait: Wait | None,
    github: GitHub | None,
    as_json: bool,
) -> int:
    """Take in what `snapshotd export` wrote.

    All or nothing; - is standard input. Tags come along; a tag that is taken here stays as it is, with a warning.
    Snapshots that are here already are not taken again, which is no error. Prints the trajectories' ids. With --json:
    {"trajectories":[ids],"snapshot_count","warnings"}.

    With --cache and --key the bundle is an entry that `snapshotd export --cache` made: the one of exactly this key, else
    the newest that begins with it, else with a --restore-keys. If there is none, the exit code is 1. JSON has "cache_key"
    and "cache_hit" too (true: exactly this key).

    With `langgraph`, threads of LangGraph are copied from a saver (sqlite:///PATH, postgres://..., redis://..., or a
    path) into the file of a SnapshotdSaver; a thread that is there already is refused, and nothing is copied then.
    JSON: {"from","to","checkpoints"}.
    """
    if source is not None or target is not None or threads:
        if file != WORD or source is None or target is None:
            refuse("--from, --to and --thread are for `snapshotd import langgraph --from URL --to FILE`")
        return move(source, target, threads, as_json=as_json)
    if (cache is None) != (key is None) or (restore_keys and cache is None):
        refuse("--cache and --key go together, and --restore-keys with them: the cache, and the entry in it")
    if (file is None) == (cache is None):
        refuse("name the bundle to import, a file or - (or --cache and --key, and no file)")
    client = connect(ctx)
    found: CacheImportInfo | None = None
    if cache is not None and key is not None:
        prefixes = [line.strip() for text in restore_keys for line in text.splitlines() if line.strip()]
        with Meter(f"importing {key}", quiet=as_json) as meter:
            found = client.import_from_cache(
                cache, key, prefixes, name=name, decrypt=decrypt, wait=wait or "captured", progress=meter.line
            )
        if found is None:
            return _report_miss(cache, key, github, as_json)
        done = found.imported
    else:
        done = _from_file(client, str(file), name, decrypt, wait or "captured", as_json)
    return _report_import(client, done, found, wait, github, as_json)


def _from_file(
    client: Snapshotd, file: str, name: str | None, decrypt: str | None, wait: Wait, quiet: bool
) -> ImportInfo:
    with _open(file) as raw:
        mode = os.fstat(raw.fileno())
        total = mode.st_size if stat.S_ISREG(mode.st_mode) else None
        with Meter(f"importing {file}", total_bytes=total, quiet=quiet) as meter:
            return client.import_bundle(_Source(raw, meter), name=name, decrypt=decrypt, wait=wait, progress=meter.line)


def _report_miss(cache: str, key: str, github: GitHub | None, as_json: bool) -> int:
    if github is not None:
        github.outputs({"cache-hit": False, "cache-matched-key": ""})
    if as_json:
        print_json({"trajectories": [], "snapshot_count": 0, "warnings": [], "cache_key": None, "cache_hit": False})
    note(f"the cache {cache} has no entry for {key}")
    return 1


def _report_import(
    client: Snapshotd,
    done: ImportInfo,
    found: CacheImportInfo | None,
    wait: Wait | None,
    github: GitHub | None,
    as_json: bool,
) -> int:
    ids = [item.id for item in done.trajectories]
    if github is not None:
        matched = {} if found is None else {"cache-hit": found.exact, "cache-matched-key": found.key}
        github.outputs({**matched, "trajectory": ids[0] if ids else "", "snapshots": done.snapshot_count})
        github.warn(done.warnings)
    if as_json:
        answer: dict[str, Any] = {
            "trajectories": ids,
            "snapshot_count": done.snapshot_count,
            "warnings": list(done.warnings),
        }
        if found is not None:
            answer.update(cache_key=found.key, cache_hit=found.exact)
        if wait is not None:
            answer["state"] = state_of(client, *ids)
        print_json(answer)
        return 0
    if found is not None:
        note(f"from the key {found.key}")
    if not done.snapshot_count:
        note("all snapshots of the bundle are here already; nothing was taken but tags that they lacked")
    note_warnings(done.warnings)
    for each in ids:
        click.echo(each)
    return 0


def _open(file: str) -> io.FileIO:
    """Open the bundle without a buffer: a thread stuck in a read then holds no lock that the end of the process needs."""
    if file == "-":
        if sys.stdin.isatty():
            refuse("a bundle does not come from a terminal; name a file, or send it through a pipe")
        return open(0, "rb", buffering=0, closefd=False)
    try:
        return open(file, "rb", buffering=0)
    except OSError as exc:
        raise UsageError(
            f"the bundle {file} cannot be read: {exc.strerror}; name a file that `snapshotd export` wrote"
        ) from exc
