"""The reader of bundles (bundle.py), which are hostile."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

from snapshotd.engine.transfer.bundle import (
    FORMAT,
    GZIP_WBITS,
    HEAD,
    MAX_HEAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORD_VALUES,
    MAX_SNAPSHOTS,
    TRAILER,
    VERSION,
    is_too_large,
)
from snapshotd.errors import LimitExceeded, UsageError, check_format
from snapshotd.formats.tar_reader import BLOCK, Member, MemberKind, TarReader
from snapshotd.repo.base import Reader
from snapshotd.terms import number_of
from snapshotd.types import KNOWN_NAME_PATTERN, BlobID, SnapshotID

_ID = re.compile(r"[0-9a-f]{32}")
_OUTPUT = re.compile(rb"outputs/([0-9a-f]{64})")
_READ_BYTES = 1 << 18
_GZIP = b"\x1f\x8b"
_NO_BUNDLE = "this is no bundle of snapshotd, or its beginning is damaged; `snapshotd export` makes one"


class BundleReader:
    """Reads a bundle front to back; nothing in it is trusted. Call the methods in the order of the file:

        reader = BundleReader(read)     # .since, .snapshots, .tags
        for n in range(len(reader.snapshots)):
            reader.record(n)
            for blob, size in reader.outputs(n): ... reader.pieces()
            reader.layer(n)             # a stream to be read to its end, or None
        reader.finish()                 # only then is any of it what somebody has written as a whole

    Errors: UsageError (no bundle, damaged, cut off, malformed), LimitExceeded, VersionMismatch; what `read` raises. Memory:
    some MiB and one record.
    """

    def __init__(self, read: Reader, max_bytes: int) -> None:
        self._stream = _Stream(read, max_bytes)
        self._tar = TarReader(self._stream)
        self._members = iter(self._tar)
        self._member: Member | None = None
        try:
            self._advance()
        except UsageError as exc:
            raise UsageError(_NO_BUNDLE) from exc
        head = self._json(self._take(HEAD, MAX_HEAD_BYTES))
        since, snapshots = head.get("since"), head.get("snapshots")
        if not isinstance(snapshots, list) or not snapshots or not all(_is_id(one) for one in snapshots):
            raise UsageError("the bundle is malformed: it does not say which snapshots it holds")
        if len(snapshots) > MAX_SNAPSHOTS:
            raise LimitExceeded(
                f"the bundle holds {number_of(len(snapshots), 'snapshot')}; {MAX_SNAPSHOTS} is the most that is taken at once"
            )
        if (since is not None and not _is_id(since)) or len({since, *snapshots}) != 1 + len(snapshots):
            raise UsageError("the bundle is malformed: its snapshots do not follow each other")
        self.since = SnapshotID(since) if since is not None else None
        self.snapshots = tuple(SnapshotID(one) for one in snapshots)
        self.tags = _tags(head, set(snapshots))

    def record(self, number: int) -> bytes:
        """The record of a snapshot, not decoded, of bounded size and number of values."""
        data = self._take(b"snapshots/%d.json" % number, MAX_RECORD_BYTES)
        if is_too_large(data):
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
        if self._take(TRAILER, 100) != expected.encode() + b"\n":
            raise UsageError("the bundle is damaged: its checksum does not match; copy it again")
        if self._member is not None:
            raise UsageError(f"the bundle is malformed: {_show_name(self._member.path)} comes after its end")
        if not self._tar.ended_by_marker or self._stream.read(BLOCK + 1) != bytes(BLOCK):
            raise UsageError("the bundle is malformed: it does not end where it must")

    # -- inside --------------------------------------------------------------------------------------------------------

    def next_piece(self, name: bytes) -> bool:
        """Go on to the next file if it is the one called `name`."""
        self._advance()
        return self._member is not None and self._member.path == name

    def _advance(self) -> None:
        self._member = next(self._members, None)
        if self._member is not None and (self._member.kind is not MemberKind.FILE or self._member.extents is not None):
            raise UsageError(f"the bundle is malformed: {_show_name(self._member.path)} is not a plain file")

    def _take(self, name: bytes, limit: int) -> bytes:
        """The present file, which must be called `name`, as a whole; then go on to the next."""
        if name == HEAD and (self._member is None or self._member.path != HEAD):
            raise UsageError(_NO_BUNDLE)
        if self._member is None:
            raise UsageError(f"the bundle is cut off: {name.decode()} is missing; copy it again")
        if self._member.path != name:
            raise UsageError(
                f"the bundle is malformed: {_show_name(self._member.path)} stands where {name.decode()} must be"
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
            raise UsageError("the bundle is malformed: its head is not JSON") from exc
        if not isinstance(value, dict) or value.get("format") != FORMAT or type(value.get("version")) is not int:
            raise UsageError(_NO_BUNDLE)
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
        self._unpacker = zlib.decompressobj(GZIP_WBITS) if self._packed[: len(_GZIP)] == _GZIP else None

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
                raise UsageError("the bundle is cut off; copy it again")
            try:
                data = self._unpacker.decompress(packed, size)
            except zlib.error as exc:
                raise UsageError(f"the bundle is damaged: it cannot be unpacked ({exc}); copy it again") from exc
            self._packed = self._unpacker.unconsumed_tail
            if data:
                return data
        if self._unpacker.unused_data or self._packed or self._source(1):
            raise UsageError("the bundle is malformed: something follows its end")
        return b""


def _tags(head: dict[str, Any], snapshots: set[str]) -> dict[str, SnapshotID]:
    """The tags of the bundle's snapshots, by name."""
    tags = head.get("tags")
    if not isinstance(tags, dict):
        raise UsageError("the bundle is malformed: it does not say which tags its snapshots have")
    for name, snapshot in tags.items():
        if not KNOWN_NAME_PATTERN.fullmatch(name) or not isinstance(snapshot, str) or snapshot not in snapshots:
            raise UsageError(
                f"the bundle is malformed: {ascii(name)[:100]} cannot be a tag, or names no snapshot of it"
            )
    return {name: SnapshotID(snapshot) for name, snapshot in tags.items()}


def _is_id(value: object) -> bool:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _show_name(name: bytes) -> str:
    return ascii(name.decode("utf-8", "backslashreplace"))[:200]
