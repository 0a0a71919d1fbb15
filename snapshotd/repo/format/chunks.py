"""Large contents: the places of their cuts, and the bytes of the lists of their chunks.

List (`varint` = LEB128 in its shortest form):

    u8        bits 0-6 level (0: the parts are chunks, n: they are inner lists of level n - 1), bit 7 it is an inner list
    varint    plain length of all parts
    varint    number of parts (at least 1)
    varint    plain length of each part (at least 1)
    32 each   ids of the parts, in order

The top list of a content is known by the content's id, an inner one by the hash of its own bytes. A list has at most
16,384 parts, so a content of a terabyte needs two levels. The ids of the parts decide how a long list is grouped, so
that an insertion changes the groups around it only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pyfastcdc import FastCDC

from snapshotd.repo.base import Reader
from snapshotd.repo.format.pack import ID_BYTES, BadFrame, decode_varint, encode_varint

WHOLE_BYTES = 256 << 10
"""A content up to this length is one chunk."""
MIN_CHUNK_BYTES, AVERAGE_CHUNK_BYTES, MAX_CHUNK_BYTES = 64 << 10, 256 << 10, 1 << 20
MAX_PARTS = 16_384
MAX_LEVEL = 4
MAX_CONTENT_BYTES = 1 << 62
_BLOCK_BYTES = 8 << 20
_GROUP_MASK, _MIN_GROUP = 0x0FFF, 512
_INNER, _LEVEL_MASK = 0x80, 0x7F


class ChunkList(NamedTuple):
    """A decoded list. `parts` are (id, plain length)."""

    level: int
    inner: bool
    plain: int
    parts: list[tuple[bytes, int]]


def read_full(read: Reader, size: int) -> bytes:
    """Exactly `size` bytes, fewer only at the end."""
    first = read(size)
    if len(first) == size or not first:
        return first
    pieces, got = [first], len(first)
    while got < size and (piece := read(size - got)):
        pieces.append(piece)
        got += len(piece)
    return b"".join(pieces)


def cut_chunks(begin: bytes, read: Reader) -> Iterator[bytes]:
    """The chunks of a content whose first bytes have been read already. Constant memory (two blocks of 8 MiB)."""
    cutter = FastCDC(AVERAGE_CHUNK_BYTES, min_size=MIN_CHUNK_BYTES, max_size=MAX_CHUNK_BYTES, normalized_chunking=2)
    block = begin + read_full(read, _BLOCK_BYTES - len(begin))
    while block:
        more = read_full(read, _BLOCK_BYTES)
        last = None
        for chunk in cutter.cut_buf(block):
            if last is not None:
                yield last
            last = bytes(chunk.data)
        assert last is not None
        if more:  # the end of the block cut the last one
            block = last + more
        else:
            yield last
            return


def group(parts: list[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    """Parts of a list that is too long, in groups that become inner lists."""
    start = 0
    for position, (part_id, _length) in enumerate(parts):
        size = position + 1 - start
        if size == MAX_PARTS or (size >= _MIN_GROUP and int.from_bytes(part_id[:2], "little") & _GROUP_MASK == 0):
            yield parts[start : position + 1]
            start = position + 1
    if start < len(parts):
        yield parts[start:]


def encode_list(parts: list[tuple[bytes, int]], level: int, inner: bool) -> bytes:
    """The bytes of a list of at most MAX_PARTS parts."""
    total = sum(length for _, length in parts)
    out = [bytes((level | (_INNER if inner else 0),)), encode_varint(total), encode_varint(len(parts))]
    out += [encode_varint(length) for _, length in parts]
    out += [part_id for part_id, _ in parts]
    return b"".join(out)


def lists_of(
    content: bytes, parts: list[tuple[bytes, int]], inner_id: Callable[[bytes], bytes]
) -> Iterator[tuple[bytes, bytes]]:
    """(id, encoded list) of the lists of a content of `parts`: inner ones first, then its own."""
    level = 0
    while len(parts) > MAX_PARTS:
        above: list[tuple[bytes, int]] = []
        for some in group(parts):
            data = encode_list(some, level, True)
            above.append((inner_id(data), sum(length for _, length in some)))
            yield above[-1][0], data
        parts, level = above, level + 1
    yield content, encode_list(parts, level, False)


def decode_list(data: bytes) -> ChunkList:
    """BadFrame unless it is a well-formed list."""
    if not data:
        raise BadFrame("it is empty")
    level, inner = data[0] & _LEVEL_MASK, bool(data[0] & _INNER)
    limit = MAX_CHUNK_BYTES if level == 0 else MAX_CONTENT_BYTES
    total, at = decode_varint(data, 1, MAX_CONTENT_BYTES)
    count, at = decode_varint(data, at, MAX_PARTS)
    if level > MAX_LEVEL or not count:
        raise BadFrame("its level or number of parts is out of range")
    lengths = []
    for _ in range(count):
        length, at = decode_varint(data, at, limit)
        lengths.append(length)
    if len(data) != at + count * ID_BYTES or sum(lengths) != total or not all(lengths):
        raise BadFrame("its lengths do not add up")
    ids = [data[place : place + ID_BYTES] for place in range(at, len(data), ID_BYTES)]
    return ChunkList(level, inner, total, list(zip(ids, lengths, strict=True)))
