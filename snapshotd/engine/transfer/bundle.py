"""The bundle: snapshots as one file, for another state directory. Its bytes are described in docs/bundle-format.md.

    snapshotd-bundle.json       which snapshots, in order, what they build on, and their tags
    snapshots/<n>.json          record of the n-th snapshot (records.py)
    outputs/<blob id>           its call's outputs, where no earlier snapshot had them
    layers/<n>/<k>              its files: what makes them of those before, a tar in pieces of 8 MiB
    snapshotd-bundle.sha256     hash of every byte before, so that a cut or damaged file is found before anything is taken

The whole is a tar, in one gzip stream by default (zlib level 1). Layers are pieces because a tar says sizes first: this
way no data have to be gathered on disk. Nothing depends on the clock or the machine: the same snapshots give the same
bytes.

This module writes bundles; `BundleReader` checks and reads them, and imports.py takes them in.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from snapshotd.catalog.base import Catalog
from snapshotd.engine.storing import records
from snapshotd.errors import DataLoss, InternalError, LimitExceeded, UsageError, check_format
from snapshotd.formats.tar_reader import BLOCK, Member, MemberKind, TarReader
from snapshotd.formats.tar_writer import END, ArchiveMarks, file_header, write_tree
from snapshotd.repo.base import Reader, Repository
from snapshotd.terms import number_of
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import (
    KNOWN_NAME_PATTERN,
    BlobID,
    Image,
    JournalEntry,
    Message,
    Snapshot,
    SnapshotID,
    Trajectory,
    short,
)

FORMAT = "snapshotd bundle"
VERSION = 2
MAX_SNAPSHOTS = 100_000
MAX_RECORD_BYTES = 128 << 20
MAX_RECORD_VALUES = 4_000_000
"""Commas and opening brackets of a record: they bound the memory that its values take."""
PIECE_BYTES = 8 << 20
_MAX_HEAD_BYTES = 8 << 20
_HEAD, _TRAILER = b"snapshotd-bundle.json", b"snapshotd-bundle.sha256"
_ID = re.compile(r"[0-9a-f]{32}")
_OUTPUT = re.compile(rb"outputs/([0-9a-f]{64})")
_READ_BYTES = 1 << 18
_SLICE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"
_GZIP_WBITS = 31


# -- writing -----------------------------------------------------------------------------------------------------------


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
        messages = list(catalog.conversation(snapshot.id)) if whole else catalog.own_messages(snapshot.id)
        state = (catalog.state(snapshot.id) or None) if whole else catalog.own_state(snapshot.id)
        entries = catalog.own_entries(snapshot.id)
        return Facts(catalog.get_trajectory(snapshot.trajectory), self._image(snapshot), messages, entries, state)

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
    writer.file(_HEAD, _head(snapshots, since))
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
    if len(data) > _MAX_HEAD_BYTES:
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
        earlier = None if first.parent is None else catalog.get_snapshot(first.parent)
        if since is None and (earlier is None or (earlier.trajectory != snapshot.trajectory and not followed)):
            break
        if earlier is None or snapshot.id == since:
            raise UsageError(
                f"snapshot {short(since or '')} does not come before {short(snapshot.id)}; `snapshotd log` shows what does"
            )
        followed = _followed(first, followed)
        found.append(earlier)
        followed.discard(earlier.id)
    if since is not None:
        followed = _not_before(catalog, since, _followed(found[-1], followed))
    if followed:
        raise UsageError(
            f"snapshot {short(snapshot.id)} cannot be exported with what came before it, because its conversation went on from snapshot "
            f"{short(min(followed))}, which is not in its line; export it alone"
        )
    return found[::-1]


def _followed(first: Snapshot, followed: set[SnapshotID]) -> set[SnapshotID]:
    """The snapshots that the bundle's snapshots follow and that must come before the first one, once the bundle begins
    earlier."""
    return followed if first.follows is None else {*followed, first.follows}


def _not_before(catalog: Catalog, snapshot_id: SnapshotID, wanted: set[SnapshotID]) -> set[SnapshotID]:
    """The members of `wanted` that are neither the snapshot nor one of its ancestors."""
    left = set(wanted)
    at: SnapshotID | None = snapshot_id
    while at is not None and left:
        left.discard(at)
        at = catalog.get_snapshot(at).parent if left else None
    return left


def _record(snapshot: Snapshot, facts: Facts) -> bytes:
    data = records.encode(
        snapshot, facts.trajectory, facts.image, facts.messages, entries=facts.entries, state=facts.state
    )
    if _too_large(data):
        raise LimitExceeded(
            f"the conversation of snapshot {short(snapshot.id)} is too long for one record; export it in parts, each since a snapshot"
        )
    return data


def _too_large(data: bytes) -> bool:
    return len(data) > MAX_RECORD_BYTES or sum(data.count(sign) for sign in (b"[", b"{", b",")) > MAX_RECORD_VALUES


class _Writer:
    """The outer tar, hashed and compressed as it goes."""

    def __init__(self, write: Callable[[bytes], object], compress: bool) -> None:
        self._sink = write
        self._packer = zlib.compressobj(1, zlib.DEFLATED, _GZIP_WBITS) if compress else None
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
        self.file(_TRAILER, self._hash.hexdigest().encode() + b"\n")
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


# -- reading -----------------------------------------------------------------------------------------------------------


class BundleReader:
    """Reads a bundle front to back; nothing in it is trusted. Call the methods in the order of the file:

        reader = BundleReader(read)     # .since, .snapshots, .tags
        for n in range(len(reader.snapshots)):
            reader.record(n)
            for blob, size in reader.outputs(n): ... reader.pieces()
            reader.layer(n)             # a stream to be read to its end, or None
        reader.finish()                 # only then is any of it what somebody has written as a whole

    Errors: UsageError (no bundle), DataLoss (damaged, cut off, malformed), LimitExceeded, VersionMismatch; what `read` raises. Memory: some
    MiB and one record.
    """

    def __init__(self, read: Reader, max_bytes: int) -> None:
        self._stream = _Stream(read, max_bytes)
        self._tar = TarReader(self._stream)
        self._members = iter(self._tar)
        self._member: Member | None = None
        try:
            self._advance()
        except (UsageError, DataLoss) as exc:
            raise UsageError(
                "this is no bundle of snapshotd, or its beginning is damaged; `snapshotd export` makes one"
            ) from exc
        head = self._json(self._take(_HEAD, _MAX_HEAD_BYTES))
        since, snapshots = head.get("since"), head.get("snapshots")
        if not isinstance(snapshots, list) or not snapshots or not all(_is_id(one) for one in snapshots):
            raise DataLoss("the bundle is malformed: it does not say which snapshots it holds")
        if len(snapshots) > MAX_SNAPSHOTS:
            raise LimitExceeded(
                f"the bundle holds {number_of(len(snapshots), 'snapshot')}; {MAX_SNAPSHOTS} is the most that is taken at once"
            )
        if (since is not None and not _is_id(since)) or len({since, *snapshots}) != 1 + len(snapshots):
            raise DataLoss("the bundle is malformed: its snapshots do not follow each other")
        self.since = SnapshotID(since) if since is not None else None
        self.snapshots = tuple(SnapshotID(one) for one in snapshots)
        self.tags = _tags(head, set(snapshots))

    def record(self, number: int) -> bytes:
        """The record of a snapshot, not decoded, of bounded size and number of values."""
        data = self._take(b"snapshots/%d.json" % number, MAX_RECORD_BYTES)
        if _too_large(data):
            raise LimitExceeded(
                f"the record of snapshot {number} in the bundle holds more than {MAX_RECORD_VALUES} values"
            )
        return data

    def outputs(self) -> Iterator[BlobID]:
        """The outputs that come next; while at one, `pieces` gives its bytes."""
        while self._member is not None:
            match = _OUTPUT.fullmatch(self._member.path)
            if match is None:
                return
            yield BlobID(match[1].decode())
            for _ in self.pieces():
                pass
            self._advance()

    def pieces(self) -> Iterator[bytes]:
        """The bytes of the present output."""
        return self._tar.pieces()

    def layer(self, number: int) -> LayerStream | None:
        """The files of a snapshot as a tar stream; None if the bundle has none for it."""
        if self._member is None or self._member.path != b"layers/%d/0" % number:
            return None
        return LayerStream(self, number)

    def finish(self) -> None:
        """Make sure that the bundle ends here and is whole."""
        expected = self._stream.digest_before_header
        if self._take(_TRAILER, 100) != expected.encode() + b"\n":
            raise DataLoss("the bundle is damaged: its checksum does not match; copy it again")
        if self._member is not None:
            raise DataLoss(f"the bundle is malformed: {_shown(self._member.path)} comes after its end")
        if not self._tar.ended_by_marker or self._stream.read(BLOCK + 1) != bytes(BLOCK):
            raise DataLoss("the bundle is malformed: it does not end where it must")

    # -- inside --------------------------------------------------------------------------------------------------------

    def next_piece(self, name: bytes) -> bool:
        """Go on to the next file if it is the one called `name`."""
        self._advance()
        return self._member is not None and self._member.path == name

    def _advance(self) -> None:
        self._member = next(self._members, None)
        if self._member is not None and (self._member.kind is not MemberKind.FILE or self._member.extents is not None):
            raise DataLoss(f"the bundle is malformed: {_shown(self._member.path)} is not a plain file")

    def _take(self, name: bytes, limit: int) -> bytes:
        """The present file, which must be called `name`, as a whole; then go on to the next."""
        if self._member is None:
            raise DataLoss(f"the bundle is cut off: {name.decode()} is missing; copy it again")
        if self._member.path != name:
            raise (UsageError if name == _HEAD else DataLoss)(
                f"this is no bundle, or it is malformed: {_shown(self._member.path)} stands where {name.decode()} must be"
            )
        if self._member.size > limit:
            raise LimitExceeded(
                f"{name.decode()} in the bundle has {self._member.size} bytes; {limit} is the most that is taken"
            )
        data = b"".join(self._tar.pieces())
        self._advance()
        return data

    def _json(self, data: bytes) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as exc:
            raise DataLoss("the bundle is malformed: its head is not JSON") from exc
        if not isinstance(value, dict) or value.get("format") != FORMAT or type(value.get("version")) is not int:
            raise UsageError("this is no bundle of snapshotd; `snapshotd export` makes one")
        check_format("the bundle", value["version"], VERSION)
        return value


class LayerStream:
    """The pieces of one layer as a stream; read to the end, it leaves the reader at the next part."""

    def __init__(self, reader: BundleReader, number: int) -> None:
        self._reader, self._number = reader, number
        self._count = 0
        self._pieces = reader.pieces()
        self._rest = memoryview(b"")
        self._ended = False

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" at the end."""
        while not self._rest and not self._ended:
            piece = next(self._pieces, None)
            if piece is not None:
                self._rest = memoryview(piece)
                continue
            self._count += 1
            self._ended = not self._reader.next_piece(b"layers/%d/%d" % (self._number, self._count))
            self._pieces = self._reader.pieces()
        part, self._rest = self._rest[:size], self._rest[size:]
        return bytes(part)


class _Stream:
    """The plain bytes of a bundle, unpacked if they are packed, counted and hashed. Reads are as long as asked for but
    at the end."""

    def __init__(self, read: Reader, max_bytes: int) -> None:
        self._source, self._left = read, max_bytes
        self._packed = b""
        self._hash = hashlib.sha256()
        self.digest_before_header = self._hash.hexdigest()
        """The hash of the bytes before the last header."""
        while len(self._packed) < len(_GZIP) and (piece := read(_READ_BYTES)):
            self._packed += piece
        self._unpacker = zlib.decompressobj(_GZIP_WBITS) if self._packed[: len(_GZIP)] == _GZIP else None

    def read(self, size: int, /) -> bytes:
        if size == BLOCK:  # a header, or something that is no header and does no harm
            self.digest_before_header = self._hash.hexdigest()
        parts = []
        while size and (part := self._some(size)):
            parts.append(part)
            size -= len(part)
        data = b"".join(parts)
        self._left -= len(data)
        if self._left < 0:
            raise LimitExceeded("the bundle holds more than is taken at once; export less at a time, since a snapshot")
        self._hash.update(data)
        return data

    def _some(self, size: int) -> bytes:
        if self._unpacker is None:
            if not self._packed:
                return self._source(size)
            data, self._packed = self._packed[:size], self._packed[size:]
            return data
        while not self._unpacker.eof:
            packed = self._packed or self._source(_READ_BYTES)
            if not packed:
                raise DataLoss("the bundle is cut off; copy it again")
            try:
                data = self._unpacker.decompress(packed, size)
            except zlib.error as exc:
                raise DataLoss(f"the bundle is damaged: it cannot be unpacked ({exc}); copy it again") from exc
            self._packed = self._unpacker.unconsumed_tail
            if data:
                return data
        if self._unpacker.unused_data or self._packed or self._source(1):
            raise DataLoss("the bundle is malformed: something follows its end")
        return b""


def _tags(head: dict[str, Any], snapshots: set[str]) -> dict[str, SnapshotID]:
    """The tags of the bundle's snapshots, by name."""
    tags = head.get("tags")
    if not isinstance(tags, dict):
        raise DataLoss("the bundle is malformed: it does not say which tags its snapshots have")
    for name, snapshot in tags.items():
        if not KNOWN_NAME_PATTERN.fullmatch(name) or not isinstance(snapshot, str) or snapshot not in snapshots:
            raise DataLoss(f"the bundle is malformed: {ascii(name)[:100]} cannot be a tag, or names no snapshot of it")
    return {name: SnapshotID(snapshot) for name, snapshot in tags.items()}


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _shown(name: bytes) -> str:
    return ascii(name.decode("utf-8", "backslashreplace"))[:200]
