"""The bytes of an index segment: the changes of one node's index since its segment before, for the other nodes of a fleet.

    magic "snapsegm", version u16 = 1, flags u8 (bit 0: made by a collection), length of the node's name u8, name
    number u64 (from 1, without gaps), the seal of the segment before (32 bytes; zero in the first)
    varint count, then each: name of a node (length u8), number u64         segments that this one builds upon
    varint count, then each: pack id (16)                                   packs that the rest names by their place here
    varint count, then each: pack, varint bytes, varint objects             packs added
    varint count, then each: id (32), kind u8 (bit 7: a base follows), pack, varint offset, stored, plain, base (32)
    varint count, then each: id (32), pack, time u64                        objects condemned, in milliseconds
    varint count, then each: id (32), pack                                  objects forgotten
    varint count, then each: pack, time u64                                 packs removed: their bytes go after the grace
    varint count, then each: pack                                           packs whose bytes are gone
    seal (32): keyed BLAKE3-256 of all bytes above

The seal's key is derived from the fleet's key, so a writer without that key cannot make a segment. Each segment names the
seal of the one before, so none can be exchanged. Depths of deltas are not stored: a reader may have other places for the
bases, and computes them.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import blake3

from snapshotd.errors import DataLoss, check_format
from snapshotd.repo.base import ObjectKind
from snapshotd.repo.format.index import IndexEntry, PackRow
from snapshotd.repo.format.pack import ID_BYTES, PACK_ID_BYTES, BadFrame, decode_varint, encode_varint

SEGMENT_VERSION = 1
_MAGIC = b"snapsegm"
_HEAD = struct.Struct("<8sHBB")
_U64 = struct.Struct("<Q")
SEAL_BYTES = 32
FIRST = bytes(SEAL_BYTES)
"""The seal before a node's first segment."""
_COLLECTION, _HAS_BASE = 1, 0x80
_MOST = 1 << 62


class Condemned(NamedTuple):
    """An object that nothing needed at a time: it is not built upon any more. `pack` holds the copy that is meant."""

    id: bytes
    pack: bytes
    at_ms: int


@dataclass(slots=True)
class Segment:
    """See the module's text. `after`: node and number of segments that a reader merges before this one. `depth` of the
    objects is without meaning."""

    node: str
    number: int
    before: bytes
    collection: bool = False
    after: list[tuple[str, int]] = field(default_factory=list)
    packs: list[PackRow] = field(default_factory=list)
    objects: list[IndexEntry] = field(default_factory=list)
    condemned: list[Condemned] = field(default_factory=list)
    forgotten: list[tuple[bytes, bytes]] = field(default_factory=list)
    removed: list[tuple[bytes, int]] = field(default_factory=list)
    gone: list[bytes] = field(default_factory=list)


class Sealer:
    """Seals and opens the segments of one fleet. Immutable."""

    def __init__(self, key: bytes) -> None:
        self._key = blake3.blake3(key, derive_key_context="snapshotd 1 index segment").digest()

    def seal(self, data: bytes) -> bytes:
        """The bytes that prove that a holder of the key wrote `data`."""
        return blake3.blake3(data, key=self._key).digest()

    def encode(self, segment: Segment) -> bytes:
        """The bytes of a segment, the same for the same value."""
        body = _encode(segment)
        return body + self.seal(body)

    def decode(self, data: bytes, node: str, number: int, before: bytes | None) -> Segment:
        """The segment of these bytes. DataLoss unless it is this one of this node, sealed with the fleet's key, behind the
        segment with the seal `before` (None: any). VersionMismatch when a newer version wrote it."""
        what = f"index segment {number} of node {node}"
        if data[: len(_MAGIC)] == _MAGIC and len(data) >= _HEAD.size:
            check_format(what, _HEAD.unpack_from(data)[1], SEGMENT_VERSION)
        body, seal = data[:-SEAL_BYTES], data[-SEAL_BYTES:]
        if not hmac.compare_digest(self.seal(body), seal):
            raise DataLoss(
                f"{what} is damaged, or was not made with the key of this fleet: look who writes to the bucket"
            )
        try:
            segment = _Decoder(body).segment()
        except (BadFrame, ValueError, IndexError, struct.error) as exc:
            raise DataLoss(f"{what} is damaged ({exc}): look who writes to the bucket") from None
        if (segment.node, segment.number) != (node, number) or before not in (None, segment.before):
            raise DataLoss(f"{what} was exchanged for another one: look who writes to the bucket")
        return segment


def seal_of(data: bytes) -> bytes:
    """The seal at the end of a segment's bytes."""
    return data[-SEAL_BYTES:]


def _encode(one: Segment) -> bytes:
    packs: dict[bytes, bytes] = {}

    def place(pack: bytes) -> bytes:
        return packs.setdefault(pack, encode_varint(len(packs)))

    rows: list[list[bytes]] = [
        [place(row.id) + encode_varint(row.bytes) + encode_varint(row.objects) for row in one.packs],
        [_encode_object(entry, place(entry.pack)) for entry in one.objects],
        [gone.id + place(gone.pack) + _U64.pack(gone.at_ms) for gone in one.condemned],
        [raw + place(pack) for raw, pack in one.forgotten],
        [place(pack) + _U64.pack(at_ms) for pack, at_ms in one.removed],
        [place(pack) for pack in one.gone],
    ]
    head = [
        _HEAD.pack(_MAGIC, SEGMENT_VERSION, _COLLECTION if one.collection else 0, len(one.node)),
        one.node.encode("ascii"),
        _U64.pack(one.number),
        one.before,
        encode_varint(len(one.after)),
        *(bytes((len(node),)) + node.encode("ascii") + _U64.pack(number) for node, number in one.after),
        encode_varint(len(packs)),
        *packs,
    ]
    return b"".join(head) + b"".join(part for some in rows for part in (encode_varint(len(some)), *some))


def _encode_object(entry: IndexEntry, place: bytes) -> bytes:
    kind = entry.kind | (_HAS_BASE if entry.base is not None else 0)
    numbers = encode_varint(entry.offset) + encode_varint(entry.stored) + encode_varint(entry.plain)
    return entry.id + bytes((kind,)) + place + numbers + (entry.base or b"")


class _Decoder:
    """Reads the parts of a segment in their order. BadFrame when it is cut off."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._packs: list[bytes] = []

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise BadFrame("it is cut off")
        self._at += count
        return part

    def _varint(self) -> int:
        value, self._at = decode_varint(self._data, self._at, _MOST)
        return value

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _name(self) -> str:
        return self._take(self._take(1)[0]).decode("ascii")

    def _pack(self) -> bytes:
        return self._packs[self._varint()]

    def segment(self) -> Segment:
        _, _, flags, length = _HEAD.unpack(self._take(_HEAD.size))
        one = Segment(
            self._take(length).decode("ascii"), self._u64(), self._take(SEAL_BYTES), bool(flags & _COLLECTION)
        )
        one.after = [(self._name(), self._u64()) for _ in range(self._varint())]
        self._packs = [self._take(PACK_ID_BYTES) for _ in range(self._varint())]
        one.packs = [PackRow(self._pack(), self._varint(), self._varint()) for _ in range(self._varint())]
        one.objects = [self._object() for _ in range(self._varint())]
        one.condemned = [Condemned(self._take(ID_BYTES), self._pack(), self._u64()) for _ in range(self._varint())]
        one.forgotten = [(self._take(ID_BYTES), self._pack()) for _ in range(self._varint())]
        one.removed = [(self._pack(), self._u64()) for _ in range(self._varint())]
        one.gone = [self._pack() for _ in range(self._varint())]
        if self._at != len(self._data):
            raise BadFrame("bytes are left over")
        return one

    def _object(self) -> IndexEntry:
        raw, kind, pack = self._take(ID_BYTES), self._take(1)[0], self._pack()
        offset, stored, plain = self._varint(), self._varint(), self._varint()
        base = self._take(ID_BYTES) if kind & _HAS_BASE else None
        return IndexEntry(raw, ObjectKind(kind & ~_HAS_BASE), pack, offset, stored, plain, base, 0)
