"""The bytes of packs and frames: encoded, decoded and scanned here. Knows one pack at a time, not the repository.

Pack (integers little-endian, `varint` = LEB128 in its shortest form, checksums big-endian as xxhash gives them):

    head     26 bytes   magic "snappack", version u16 = 2, the pack's id (16 bytes: 1 random, milliseconds since the epoch
                        in 6 (big-endian), 9 random; so that age and order of packs are known without an index)
    frames              one after the other
    end      13 bytes   0x00, number of frames u32, XXH3-64 of everything before it

Frame:

    1         bits 0-2 kind (ObjectKind), bit 3 delta, bit 4 zstd, bit 5 one block, bit 6 dictionary, bit 7 zero
    varint    plain length
    varint    payload length
    0, 8, 32  the first bytes of the id: none of a chunk or tree, 8 of a record, all of a list
    4         only if delta: the first bytes of the id of the object that the payload is compressed against
    -         payload: the plain bytes, or the blocks of a zstd frame (compress.py)
    4         first bytes of the XXH3-64 of all of the frame above

A frame's first byte is never zero (there is no kind 0), so the end is told from a frame. Four bytes of checksum tell
damage early; what an object is, its id proves.

Ids are not stored because every byte of a delta counts: the index has them, and without it they follow from the plain
bytes. Only a list's does not (it is that of the content), and a record must prove that it was made with the key,
because records are believed without anything that refers to them: a frame may lie in a content. Four bytes name a
delta's base: if several objects begin with them, decoding with the wrong one gives at worst an unreferenced object,
under its true id. A pack is
written once, as a whole, under the key `packs/<first two characters of the id>/<id>`; it never changes.
"""

from __future__ import annotations

import re
import secrets
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from snapshotd.errors import DataLoss, check_format
from snapshotd.repo.base import ObjectKind

PACK_VERSION = 2
_MAGIC = b"snappack"
_HEAD = struct.Struct("<8sH16s")
HEAD_BYTES = _HEAD.size
_END = struct.Struct("<BI")
END_BYTES = _END.size + 8
PACK_ID_BYTES = 16
ID_BYTES = 32
Part = bytes | memoryview
"""Bytes on their way into a pack."""
BASE_BYTES = 4
STORED_ID_BYTES: dict[ObjectKind, int] = {
    ObjectKind.CHUNK: 0,
    ObjectKind.LIST: 32,
    ObjectKind.TREE: 0,
    ObjectKind.RECORD: 8,
}
"""Length of the part of an object's id that is in its frame."""
CHECKSUM_BYTES = 4
_KIND_MASK, _DELTA, _ZSTD, _ONE_BLOCK, _DICTIONARY = 0x07, 0x08, 0x10, 0x20, 0x40
MAX_HEADER_BYTES = 1 + 5 + 5 + ID_BYTES + BASE_BYTES
_FLAGS = (
    0,
    *(
        _ZSTD | delta | block | words
        for delta in (0, _DELTA)
        for block in (0, _ONE_BLOCK)
        for words in (0, _DICTIONARY)
    ),
)
_FIRST_BYTES = re.compile(
    b"[" + b"".join(re.escape(bytes((kind | flags,))) for kind in ObjectKind for flags in _FLAGS) + b"]"
)
_SEARCH_FACTOR = 1024
"""Limit for finding frames in a damaged pack: bytes hashed, in multiples of its length. Measured: in 16 MiB of
incompressible bytes, some 375 are hashed for each one searched, since chance bytes look like the head of a long
frame."""
PREFIX = "packs/"
PACK_BYTES = 16 << 20
"""A pack that has reached this length is complete."""
_KEY = re.compile(r"packs/([0-9a-f]{2})/(\1[0-9a-f]{30})")

MAX_PLAIN_BYTES: dict[ObjectKind, int] = {
    ObjectKind.CHUNK: 1 << 20,
    ObjectKind.LIST: 4 << 20,
    ObjectKind.TREE: 128 << 20,
    ObjectKind.RECORD: 64 << 20,
}
"""The longest plain object of each kind. A frame that declares more is damage; nothing is allocated for it."""
MAX_DICTIONARY_BYTES = 128 << 10
"""The longest plain object that is compressed with the dictionary: it makes no difference to longer ones."""


class Frame(NamedTuple):
    """A frame's header, and the frame's place in its pack. `stored` is the length of the whole frame; `id` is the part
    of the object's id that the frame holds (b"" for most kinds); `base` the first bytes of its base's id."""

    kind: ObjectKind
    id: bytes
    base: bytes | None
    zstd: bool
    one_block: bool
    dictionary: bool
    plain: int
    offset: int
    stored: int
    payload: memoryview


class BadFrame(Exception):  # noqa: N818
    """The bytes are no intact frame; the text says why. Becomes DataLoss where object and pack are known."""


def new_pack_id(made_at_s: float | None = None) -> bytes:
    """An id for a new pack, made now or at the given time (a pack that takes over the frames of older ones takes over
    their age)."""
    milliseconds = int((time.time() if made_at_s is None else made_at_s) * 1000)
    return secrets.token_bytes(1) + milliseconds.to_bytes(6, "big") + secrets.token_bytes(PACK_ID_BYTES - 7)


def made_at_s(pack_id: bytes) -> float:
    """When a pack was made, in seconds since the epoch."""
    return int.from_bytes(pack_id[1:7], "big") / 1000


def pack_key(pack_id: bytes) -> str:
    """Key of a pack in the store."""
    name = pack_id.hex()
    return f"{PREFIX}{name[:2]}/{name}"


def pack_id_of(key: str) -> bytes | None:
    """The id of the pack under a key of the store; None if the key is no pack's."""
    match = _KEY.fullmatch(key)
    return bytes.fromhex(match[2]) if match else None


def encode_head(pack_id: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, PACK_VERSION, pack_id)


def encode_end(frames: int, checksum: xxhash.xxh3_64) -> bytes:
    """The end of a pack. `checksum` has seen everything so far; it is changed."""
    end = _END.pack(0, frames)
    checksum.update(end)
    return end + checksum.digest()


def encode_varint(value: int) -> bytes:
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def decode_varint(data: bytes | memoryview, at: int, limit: int) -> tuple[int, int]:
    """(value, position after it). BadFrame when it is cut, longer than it need be, or larger than `limit`."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise BadFrame("a number in it is cut off or too long")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if (byte == 0 and shift) or value > limit:
        raise BadFrame("a number in it is too large or not in its shortest form")
    return value, at


def encode_frame(
    kind: ObjectKind,
    object_id: bytes,
    plain: int,
    payload: Part,
    zstd: bool,
    base: bytes | None = None,
    *,
    one_block: bool = False,
    dictionary: bool = False,
) -> list[Part]:
    """A frame as its parts: header, payload, checksum. `base` is the whole id of the object that it is a delta against;
    `one_block` and `dictionary`: how compress.py made the payload."""
    first = kind | (_DELTA if base is not None else 0) | (_ZSTD if zstd else 0)
    first |= (_ONE_BLOCK if one_block else 0) | (_DICTIONARY if dictionary else 0)
    proof = object_id[: STORED_ID_BYTES[kind]]
    header = b"".join(
        (bytes((first,)), encode_varint(plain), encode_varint(len(payload)), proof, base[:BASE_BYTES] if base else b"")
    )
    checksum = xxhash.xxh3_64(header)
    checksum.update(payload)
    return [header, payload, checksum.digest()[:CHECKSUM_BYTES]]


def decode_frame(data: bytes | memoryview, at: int = 0) -> Frame:
    """The intact frame at a position. BadFrame otherwise. Nothing of the payload is decompressed."""
    view = memoryview(data)
    return _verify(view, _decode_header(view, at))


def _verify(view: memoryview, frame: Frame) -> Frame:
    """The frame, if its checksum is right. BadFrame."""
    end = frame.offset + frame.stored - CHECKSUM_BYTES
    if xxhash.xxh3_64_digest(view[frame.offset : end])[:CHECKSUM_BYTES] != view[end : end + CHECKSUM_BYTES]:
        raise BadFrame("its checksum is wrong")
    return frame


def _decode_header(view: memoryview, at: int) -> Frame:
    """The header of a frame, before its checksum is checked. BadFrame if it is impossible, or goes beyond the end."""
    if at >= len(view):
        raise BadFrame("it is cut off")
    first = view[at]
    try:
        kind = ObjectKind(first & _KIND_MASK)
    except ValueError:
        raise BadFrame(f"it is of kind {first & _KIND_MASK}, which does not exist") from None
    if first & ~(_KIND_MASK | _DELTA | _ZSTD | _ONE_BLOCK | _DICTIONARY) or (first & ~_KIND_MASK and not first & _ZSTD):
        raise BadFrame("it has flags that do not exist")
    most = min(MAX_PLAIN_BYTES[kind], MAX_DICTIONARY_BYTES) if first & _DICTIONARY else MAX_PLAIN_BYTES[kind]
    plain, pos = decode_varint(view, at + 1, most)
    length, pos = decode_varint(view, pos, plain)  # an object that does not shrink is stored plain
    if not first & _ZSTD and length != plain:
        raise BadFrame("its lengths differ though it is not compressed")
    base_at = pos + STORED_ID_BYTES[kind]
    body = base_at + (BASE_BYTES if first & _DELTA else 0)
    end = body + length + CHECKSUM_BYTES
    if end > len(view):
        raise BadFrame("it is cut off")
    base = bytes(view[base_at:body]) if first & _DELTA else None
    payload = view[body : body + length]
    zstd, one_block, dictionary = bool(first & _ZSTD), bool(first & _ONE_BLOCK), bool(first & _DICTIONARY)
    return Frame(kind, bytes(view[pos:base_at]), base, zstd, one_block, dictionary, plain, at, end - at, payload)


def check_head(data: bytes | memoryview, pack_id: bytes) -> None:
    """DataLoss unless it is the head of this pack; VersionMismatch when it is of another version."""
    where = f"pack {pack_id.hex()}"
    if len(data) < HEAD_BYTES:
        raise DataLoss(f"{where} is cut off in its head: run `snapshotd check`")
    magic, version, own_id = _HEAD.unpack_from(data)
    if magic != _MAGIC or own_id != pack_id:
        raise DataLoss(f"{where} is damaged or another file lies in its place: run `snapshotd check`")
    check_format(where, version, PACK_VERSION)


def end_problem(data: bytes | memoryview) -> str | None:
    """The fault in a pack's end; None if the pack is complete and intact. Hashes the whole pack (some GB/s)."""
    view = memoryview(data)
    if len(view) < HEAD_BYTES + END_BYTES:
        return "it is cut off"
    end = len(view) - END_BYTES
    if xxhash.xxh3_64_digest(view[: len(view) - 8]) != view[len(view) - 8 :]:
        return "it is cut off or damaged (the checksum at its end is wrong)"
    zero, _count = _END.unpack_from(view, end)
    return None if zero == 0 else "it has no end mark"


def frames(data: bytes | memoryview, start: int = HEAD_BYTES) -> Iterator[Frame | BadFrame]:
    """Every frame of a whole pack in order, also of one that is damaged or cut.

    Bytes that are no intact frame give one BadFrame. The search then goes on where the frame should end, and if no
    intact frame is there, at the next position that holds one, known by its checksum. A frame found that way may have
    been planted in a content. That is harmless for objects that something must refer to by their keyed hash; lists and
    records must be verified. Ends silently at the end mark, with a BadFrame when that is missing.
    """
    view = memoryview(data)
    at, count, whole = start, 0, True
    search = _Search(view)
    while at < len(view):
        if _is_end(view, at):
            if whole and _END.unpack_from(view, at)[1] != count:
                yield BadFrame("frames are missing")
            return
        try:
            frame = search.decode(at)
        except BadFrame as exc:
            yield BadFrame(f"at byte {at}: {exc}")
            at = search.next_intact(at)
            whole = False
            continue
        yield frame
        count += 1
        at += frame.stored
    yield BadFrame("its end is missing")


def _is_end(view: memoryview, at: int) -> bool:
    return at + END_BYTES == len(view) and view[at] == 0


class _Search:
    """Frames of one pack, with a bound on the bytes that are hashed for them all.

    A content can be made so that every fourth byte looks like the head of a long frame, and hashing all of them would
    take days. When the bound is reached, the rest of the pack is taken for lost. Frames that follow each other take a
    thousandth of it.
    """

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._left = _SEARCH_FACTOR * len(view)

    def decode(self, at: int) -> Frame:
        """As `decode_frame`."""
        frame = _decode_header(self._view, at)
        self._left -= frame.stored
        if self._left < 0:
            raise BadFrame("too much looks like frames here to look at all of it")
        return _verify(self._view, frame)

    def next_intact(self, at: int) -> int:
        """Place of the next intact frame or of the end, after a damaged frame."""
        view = self._view
        try:
            end = at + _decode_header(view, at).stored
            if _is_end(view, end):
                return end
            self.decode(end)
            return end
        except BadFrame:
            pass
        for match in _FIRST_BYTES.finditer(view, at + 1):
            try:
                self.decode(match.start())
            except BadFrame:
                if self._left < 0:
                    break
                continue
            return match.start()
        end = len(view) - END_BYTES
        return end if end > at and _is_end(view, end) else len(view)
