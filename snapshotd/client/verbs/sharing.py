"""The verbs that take snapshots to another machine and back: exports, imports, and a cache of bundles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from snapshotd.api import operations
from snapshotd.api.record import record
from snapshotd.api.storage import ExportOptions, ExportQuery
from snapshotd.api.wire import check_ref
from snapshotd.client.bundles.sealing import Sealing, unseal
from snapshotd.client.exchange import members_of
from snapshotd.client.feeding import Readable
from snapshotd.client.local.arguments import local_path
from snapshotd.client.results import ExportInfo, ImportInfo
from snapshotd.client.transport import UploadSource
from snapshotd.client.twofold import closing, on_this_machine, verb
from snapshotd.client.verbs.base import Progress, VerbPart, Wait, result_of
from snapshotd.errors import DaemonUnavailable, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd


@record(frozen=True)
class CacheImportInfo:
    """An entry of a cache that was taken in. `exact`: it has the key that was asked for, not only its beginning."""

    key: str
    exact: bool
    imported: ImportInfo


def export_file(
    client: Snapshotd,
    ref: str | Sequence[str],
    to: str | Path,
    *,
    since: str | None = None,
    encrypt: str | Path | None = None,
    progress: Progress | None = None,
    moved: Callable[[int], object] | None = None,
    **options: Unpack[ExportOptions],
) -> ExportInfo:
    """`export` into a local file, which is there whole or not at all: written as `to` + ".part" (mode 0600),
    flushed, then renamed to `to`, in place of an older one. `moved` hears how many bytes have been written so
    far."""
    from snapshotd.client.local.part_file import part_file

    with part_file(local_path(to)) as write:
        counting = _Counting(write, moved)
        warnings = client.export(ref, counting.write, since=since, encrypt=encrypt, progress=progress, **options)
    return ExportInfo(counting.count, warnings)


def export_to_cache(
    client: Snapshotd,
    ref: str,
    cache: str | Path,
    key: str,
    *,
    whole: bool = False,
    since: str | None = None,
    encrypt: str | Path | None = None,
    progress: Progress | None = None,
    moved: Callable[[int], object] | None = None,
) -> ExportInfo | None:
    """`export` a bundle into a cache, a local folder or a bucket ("s3://bucket/prefix"), under `key`. An entry never
    changes: None, and nothing is written, if the key has one. It is there whole or not at all. UsageError: a key or a
    cache that cannot be one; and errors of the store."""
    from snapshotd.client.bundles.cache import open_cache

    with open_cache(cache) as entries:
        if entries.has(key):
            return None

        def produce(write: Callable[[bytes], object]) -> ExportInfo:
            counting = _Counting(write, moved)
            warnings = client.export(ref, counting.write, whole=whole, since=since, encrypt=encrypt, progress=progress)
            return ExportInfo(counting.count, warnings)

        return entries.save(key, produce)


def import_bundle(
    client: Snapshotd,
    source: str | Path | Readable,
    *,
    name: str | None = None,
    decrypt: str | Path | None = None,
    wait: Wait = "captured",
    progress: Progress | None = None,
) -> ImportInfo:
    """Take a bundle in, all or nothing, from a local file or an open one. Tags come along; a tag that is taken here
    stays as it is, with a warning. If all snapshots are here already, the answer names them, with `snapshot_count` 0.
    UsageError (malformed), NotFound (the snapshot it builds on is not here), Conflict (parts of it are here
    already), LimitExceeded, VersionMismatch; and errors of reading the source. `decrypt`: the key file of an encrypted
    bundle; DataLoss if it is another one, or the bundle was changed."""
    if isinstance(source, str | Path):
        try:
            opened = local_path(source).open("rb", buffering=0)
        except OSError as exc:
            raise UsageError(
                f"the bundle {source} cannot be read: {exc.strerror}; name a file that `snapshotd export` wrote"
            ) from exc
        with opened:
            return client.import_bundle(opened, name=name, decrypt=decrypt, wait=wait, progress=progress)
    from snapshotd.client.local.tree import Reader, read_pieces

    pieces = read_pieces(unseal(source, decrypt))
    imported = client._take_bundle(Reader(pieces), name, progress)
    if wait == "stored":
        for item in imported.trajectories:
            client.flush(item.id)
    return imported


def import_from_cache(
    client: Snapshotd,
    cache: str | Path,
    key: str,
    restore_keys: Sequence[str] = (),
    *,
    name: str | None = None,
    decrypt: str | Path | None = None,
    wait: Wait = "captured",
    progress: Progress | None = None,
) -> CacheImportInfo | None:
    """`import_bundle` from a cache: the entry of exactly `key`; else the newest that begins with `key`, then with
    each of `restore_keys` in their order; else None. Every byte is verified before the daemon sees it: DataLoss, and
    nothing is taken, if one differs."""
    from snapshotd.client.bundles.cache import open_cache

    with open_cache(cache) as entries:
        found = entries.find(key, restore_keys)
        if found is None:
            return None
        imported = client.import_bundle(found, name=name, decrypt=decrypt, wait=wait, progress=progress)
        return CacheImportInfo(found.key, found.exact, imported)


class SharingVerbs(VerbPart):
    """Part of `Snapshotd`."""

    @verb
    async def export(
        self,
        ref: str | Sequence[str],
        write: Callable[[bytes], object],
        *,
        since: str | None = None,
        encrypt: str | Path | None = None,
        progress: Progress | None = None,
        **options: Unpack[ExportOptions],
    ) -> tuple[str, ...]:
        """Write a snapshot (with `whole`: its trajectory up to it) as one file: a `bundle` for `import_bundle` (with
        `since`: only the snapshots after that one), an `oci` image for `docker load`, or the plain `tar`. Returns
        warnings: what the form cannot hold.

        `atif` and `jsonl` are what was said and done up to it, without files, for evaluation and training
        (docs/agents/training.md); several refs give several, and with `forks` each is followed by all that were forked from
        it. UsageError: nothing is recorded of one that is named.

        With `encrypt`, a file whose content is the key, the output is sealed
        (AES-256-GCM), and only `import_bundle` with the same key reads it.

        If anything is raised, also in the middle, the output is not whole.
        """
        if encrypt is not None:
            sealing = Sealing(encrypt, write)
            warnings = await self.export(ref, sealing.write, since=since, progress=progress, **options)
            sealing.end()
            return warnings
        query = ExportQuery(since=since, **options)
        if not isinstance(ref, str):
            if query.form not in ("atif", "jsonl") and len(ref) != 1:
                raise UsageError(
                    f"an export as {query.form} holds one snapshot, and {len(ref)} are named; export each of them"
                )
            warned: list[str] = []
            for one in ref:
                warned += await self.export(one, write, since=since, progress=progress, **options)
            return tuple(warned)
        if since is not None:
            check_ref(since)
        async for item in await self._transport.frames(*operations.EXPORT.at(ref), query=members_of(query)):
            if isinstance(item, bytes):
                write(item)
            elif item["event"] == "progress" and progress is not None:
                progress(item["message"])
            elif item["event"] == "result":
                return tuple(item["warnings"])
        raise DaemonUnavailable(
            "the daemon ended the export early, so what was written is not whole; repeat the command"
        )

    export_file = on_this_machine(export_file)
    export_to_cache = on_this_machine(export_to_cache)

    @verb
    async def _take_bundle(self, source: UploadSource, name: str | None, progress: Progress | None) -> ImportInfo:
        sent = await self._transport.upload(operations.IMPORT_BUNDLE.to(), source, query={"name": name})
        async with closing(sent) as events:
            answer = await result_of(events, progress, "the import", "`snapshotd ls` shows whether it is there")
        return ImportInfo.of(answer["imported"])

    import_bundle = on_this_machine(import_bundle)
    import_from_cache = on_this_machine(import_from_cache)


class _Counting:
    """`write`, and a count of its bytes for `moved`."""

    def __init__(self, write: Callable[[bytes], object], moved: Callable[[int], object] | None) -> None:
        self._write, self._moved, self.count = write, moved, 0

    def write(self, data: bytes) -> None:
        self._write(data)
        self.count += len(data)
        if self._moved is not None:
            self._moved(self.count)
