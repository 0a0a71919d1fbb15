"""The bundle: snapshots as one file, for another state directory. Its bytes are described in docs/bundle-format.md.

    snapshotd-bundle.json       which snapshots, in order, what they build on, and their tags
    snapshots/<n>.json          record of the n-th snapshot (records.py)
    outputs/<blob id>           its call's outputs, where no earlier snapshot had them
    layers/<n>/<k>              its files: what makes them of those before, a tar in pieces of 8 MiB
    snapshotd-bundle.sha256     hash of every byte before, so that a cut or damaged file is found before anything is taken

The whole is a tar, in one gzip stream by default (zlib level 1). Layers are pieces because a tar says sizes first: this
way no data have to be gathered on disk. Nothing depends on the clock or the machine: the same snapshots give the same
bytes.

This module writes bundles; bundle_reading.py checks and reads them, and imports.py takes them in.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from snapshotd.catalog.base import Catalog
from snapshotd.engine.storage import records
from snapshotd.errors import DataLoss, InternalError, LimitExceeded, UsageError
from snapshotd.formats.tar_reader import BLOCK
from snapshotd.formats.tar_writer import END, ArchiveMarks, file_header, write_tree
from snapshotd.repo.base import Repository
from snapshotd.terms import number_of
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import BlobID, Image, JournalEntry, Message, Snapshot, SnapshotID, Trajectory, short

FORMAT = "snapshotd bundle"
VERSION = 2
MAX_SNAPSHOTS = 100_000
MAX_RECORD_BYTES = 128 << 20
MAX_RECORD_VALUES = 4_000_000
"""Commas and opening brackets of a record: they bound the memory that its values take."""
PIECE_BYTES = 8 << 20
MAX_HEAD_BYTES = 8 << 20
HEAD, TRAILER = b"snapshotd-bundle.json", b"snapshotd-bundle.sha256"
_SLICE_BYTES = 1 << 20
GZIP_WBITS = 31


@dataclass(frozen=True, slots=True)
class Facts:
    """The content of a snapshot's record besides the snapshot itself."""

    trajectory: Trajectory
    image: Image
    messages: Sequence[Message]
    entries: Sequence[JournalEntry] = ()
    state: dict[str, Any] | None = None


class BundleSource(Protocol):
    """The source of the snapshots to export. Everything it gives must stay there until the export is over."""

    def facts(self, snapshot: Snapshot, *, whole: bool) -> Facts:
        """The snapshot's additions to the conversation and the agent's state, or (`whole`) both up to it; and the
        journal entries that it binds."""

    def layer(self, snapshot: Snapshot, below: Snapshot | None) -> AbstractContextManager[View] | None:
        """The layer that makes the snapshot's files from the files of `below` (None: from an empty tree); None if they
        are the same. The snapshot has a tree."""

    def output(self, blob: BlobID) -> tuple[int, Iterator[bytes]]:
        """An output: its size and its bytes."""


class StoredSource:
    """Stored snapshots, read from the repository; the caller pins them."""

    def __init__(
        self, catalog: Catalog, repository: Repository, image: Callable[[Snapshot], Image], scratch: str | None = None
    ) -> None:
        self._catalog, self._repository, self._image, self._scratch = catalog, repository, image, scratch

    def facts(self, snapshot: Snapshot, *, whole: bool) -> Facts:
        catalog = self._catalog
        messages = list(catalog.conversations.read(snapshot.id)) if whole else catalog.conversations.own(snapshot.id)
        state = (
            (catalog.conversations.state(snapshot.id) or None)
            if whole
            else catalog.conversations.own_state(snapshot.id)
        )
        entries = catalog.journal.own(snapshot.id)
        return Facts(catalog.trajectories.get(snapshot.trajectory), self._image(snapshot), messages, entries, state)

    def layer(self, snapshot: Snapshot, below: Snapshot | None) -> View | None:
        tree = snapshot.tree
        if tree is None or (below is not None and below.tree is None):
            raise InternalError(f"snapshot {snapshot.id} cannot be exported: it is not stored")
        if below is None or below.tree is None:
            return StoredView(self._repository, tree, scratch=self._scratch)
        return None if tree == below.tree else DifferenceView(self._repository, tree, below.tree, scratch=self._scratch)

    def output(self, blob: BlobID) -> tuple[int, Iterator[bytes]]:
        return self._repository.size_bytes(blob), self._repository.load(blob)


def export_bundle(
    snapshots: Sequence[Snapshot],
    source: BundleSource,
    write: Callable[[bytes], object],
    *,
    since: Snapshot | None = None,
    compress: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[str, ...]:
    """Write `snapshots`, each the parent of the next and none captured only, as a bundle.

    Without `since` the first one comes with its whole tree, conversation and state, else with its additions to `since`,
    which is its parent and has a tree. A snapshot that another one follows is in the bundle or, with `since`, before it
    (see `line_of`). Snapshots without files (pruned, lost) go without. Returns warnings, one sentence each: files that
    a tar cannot hold. UsageError (they do not follow each other), LimitExceeded (too many; a record too long). Errors
    of the source and of `write` pass through; the bundle is then cut off, which its reader notices.
    """
    if not snapshots or len(snapshots) > MAX_SNAPSHOTS:
        raise LimitExceeded(
            f"{number_of(len(snapshots), 'snapshot')} cannot be one bundle (1 to {MAX_SNAPSHOTS}); "
            "export them in parts, each since a snapshot"
        )
    before = since
    for snapshot in snapshots:
        if before is not None and snapshot.parent != before.id:
            raise UsageError(
                f"snapshot {short(snapshot.id)} does not follow {short(before.id)}; a bundle holds one line of snapshots"
            )
        before = snapshot
    if since is not None and since.tree is None:
        raise UsageError(
            f"snapshot {short(since.id)} has no files (any more), so nothing can be exported since it; choose another"
        )
    writer = _Writer(write, compress)
    writer.file(HEAD, _head(snapshots, since))
    warnings: list[str] = []
    sent: set[BlobID] = set()
    below = since
    for number, snapshot in enumerate(snapshots):
        progress(f"snapshot {number + 1} of {len(snapshots)}")
        writer.file(
            b"snapshots/%d.json" % number,
            _record(snapshot, source.facts(snapshot, whole=number == 0 and since is None)),
        )
        for blob in snapshot.call.outputs:
            if blob not in sent:
                sent.add(blob)
                writer.content(f"outputs/{blob}".encode(), *source.output(blob))
        if snapshot.tree is not None:
            layer = source.layer(snapshot, below)
            if layer is not None:
                with layer as view:
                    warnings += [
                        f"snapshot {short(snapshot.id)}: {text}"
                        for text in writer.layer(number, view, whole=below is None)
                    ]
            below = snapshot
    writer.finish()
    return tuple(warnings)


def _head(snapshots: Sequence[Snapshot], since: Snapshot | None) -> bytes:
    tags = {name: snapshot.id for snapshot in snapshots for name in snapshot.tags}
    head = {
        "format": FORMAT,
        "version": VERSION,
        "since": since.id if since else None,
        "snapshots": [one.id for one in snapshots],
        "tags": dict(sorted(tags.items())),
    }
    data = json.dumps(head, separators=(",", ":")).encode()
    if len(data) > MAX_HEAD_BYTES:
        raise LimitExceeded(
            f"{number_of(len(snapshots), 'snapshot')} with {number_of(len(tags), 'tag')} cannot be one bundle; "
            "export them in parts, each since a snapshot"
        )
    return data


def line_of(catalog: Catalog, snapshot: Snapshot, *, whole: bool, since: SnapshotID | None) -> list[Snapshot]:
    """The snapshots that `export_bundle` takes: this one; with `whole` also its trajectory up to it, and before that as
    far as its conversation goes back; with `since` also all that came after that one, across forks. UsageError (`since`
    is not before it; its conversation continues a snapshot outside this line), NotFound."""
    found = [snapshot]
    followed: set[SnapshotID] = set()
    while since is not None or whole:
        first = found[-1]
        if first.parent == since and since is not None:
            break
        earlier = None if first.parent is None else catalog.snapshots.get(first.parent)
        if since is None and (earlier is None or (earlier.trajectory != snapshot.trajectory and not followed)):
            break
        if earlier is None or snapshot.id == since:
            raise UsageError(
                f"snapshot {short(since or '')} does not come before {short(snapshot.id)}; `snapshotd log` shows what does"
            )
        followed = _add_followed(first, followed)
        found.append(earlier)
        followed.discard(earlier.id)
    if since is not None:
        followed = _find_later(catalog, since, _add_followed(found[-1], followed))
    if followed:
        raise UsageError(
            f"snapshot {short(snapshot.id)} cannot be exported with what came before it, because its conversation went on from snapshot "
            f"{short(min(followed))}, which is not in its line; export it alone"
        )
    return found[::-1]


def _add_followed(first: Snapshot, followed: set[SnapshotID]) -> set[SnapshotID]:
    """Return the snapshots that must come before the first one of the bundle, because the bundle's snapshots follow
    them."""
    return followed if first.follows is None else {*followed, first.follows}


def _find_later(catalog: Catalog, snapshot_id: SnapshotID, wanted: set[SnapshotID]) -> set[SnapshotID]:
    """The members of `wanted` that are neither the snapshot nor one of its ancestors."""
    left = set(wanted)
    at: SnapshotID | None = snapshot_id
    while at is not None and left:
        left.discard(at)
        at = catalog.snapshots.get(at).parent if left else None
    return left


def _record(snapshot: Snapshot, facts: Facts) -> bytes:
    data = records.encode(
        snapshot, facts.trajectory, facts.image, facts.messages, entries=facts.entries, state=facts.state
    )
    if is_too_large(data):
        raise LimitExceeded(
            f"the conversation of snapshot {short(snapshot.id)} is too long for one record; export it in parts, each since a snapshot"
        )
    return data


def is_too_large(data: bytes) -> bool:
    return len(data) > MAX_RECORD_BYTES or sum(data.count(sign) for sign in (b"[", b"{", b",")) > MAX_RECORD_VALUES


class _Writer:
    """The outer tar, hashed and compressed as it goes."""

    def __init__(self, write: Callable[[bytes], object], compress: bool) -> None:
        self._sink = write
        self._packer = zlib.compressobj(1, zlib.DEFLATED, GZIP_WBITS) if compress else None
        self._hash = hashlib.sha256()

    def file(self, name: bytes, data: bytes | memoryview) -> None:
        for part in (file_header(name, len(data)), data, bytes(-len(data) % BLOCK)):
            self._write(part)

    def content(self, name: bytes, size: int, pieces: Iterator[bytes]) -> None:
        self._write(file_header(name, size))
        done = 0
        for piece in pieces:
            done += len(piece)
            self._write(piece)
        if done != size:
            raise DataLoss(f"{name.decode()} has {done} bytes where {size} are recorded; run `snapshotd check`")
        self._write(bytes(-size % BLOCK))

    def layer(self, number: int, view: View, *, whole: bool) -> tuple[str, ...]:
        gathered = bytearray()
        count = 0

        def gather(data: bytes) -> None:
            nonlocal count
            gathered.extend(data)
            while len(gathered) >= PIECE_BYTES:
                with memoryview(gathered) as whole, whole[:PIECE_BYTES] as piece:
                    self.file(b"layers/%d/%d" % (number, count), piece)
                del gathered[:PIECE_BYTES]
                count += 1

        warnings = write_tree(view, gather, marks=ArchiveMarks.NONE if whole else ArchiveMarks.OVERLAY)
        if gathered:
            self.file(b"layers/%d/%d" % (number, count), bytes(gathered))
        return warnings

    def finish(self) -> None:
        self.file(TRAILER, self._hash.hexdigest().encode() + b"\n")
        self._write(END)
        if self._packer is not None:
            self._sink(self._packer.flush())

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        with memoryview(data) as whole:
            for at in range(0, len(whole), _SLICE_BYTES):  # a compressor holds several copies of its input
                part = whole[at : at + _SLICE_BYTES]
                packed = bytes(part) if self._packer is None else self._packer.compress(part)
                if packed:
                    self._sink(packed)
