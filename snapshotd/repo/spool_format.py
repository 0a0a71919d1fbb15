"""The bytes of a blob file: written, read and checked here. Knows single files, not the repository.

Blob file (integers little-endian, checksums big-endian as xxhash gives them):

    offset  bytes
         0      8   magic "snapblob"
         8      2   version of this format: 1
        10      2   compression: 1 = zstd
        12      4   zero
        16      8   plain size
        24      8   length of the frame
        32     16   XXH3-128 of the frame
        48      8   XXH3-64 of the 48 bytes above
        56      -   the frame: one zstd frame with a window of at most 8 MiB, to the end of the file

Magic, version and the place of the header's checksum stay the same in later versions, so that a damaged version number
is told from a newer one.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import xxhash
import zstandard

from snapshotd.errors import DataLoss, check_format

FORMAT_VERSION = 1
_MAGIC = b"snapblob"
_FIELDS = struct.Struct("<8sHHIQQ16s")
HEADER_BYTES = _FIELDS.size + 8
_ZSTD = 1
_LEVEL = 3
_MAX_WINDOW_BYTES = 8 << 20
PIECE_BYTES = 1 << 20


class Header(NamedTuple):
    plain_bytes: int
    frame_bytes: int
    checksum: bytes

    def encode(self) -> bytes:
        fields = _FIELDS.pack(_MAGIC, FORMAT_VERSION, _ZSTD, 0, self.plain_bytes, self.frame_bytes, self.checksum)
        return fields + xxhash.xxh3_64_digest(fields)


class FrameError(Exception):
    """The frame does not match its header."""


class _Source:
    """The frame of an open blob file as a source for the decompressor; hashes the bytes on their way."""

    def __init__(self, fd: int, length: int) -> None:
        self._fd, self._offset, self._left = fd, HEADER_BYTES, length
        self._hash = xxhash.xxh3_128()

    def read(self, size: int = -1) -> bytes:
        data = os.pread(self._fd, min(PIECE_BYTES if size < 0 else size, self._left), self._offset)
        self._offset += len(data)
        self._left -= len(data)
        self._hash.update(data)
        return data

    def drain(self) -> None:
        while self.read(PIECE_BYTES):
            pass

    def digest(self) -> bytes:
        return self._hash.digest()


def read_header(fd: int, where: str) -> Header:
    """DataLoss, naming `where`, unless the header is intact and the file exactly as long as it says."""
    data = os.pread(fd, HEADER_BYTES, 0)
    if len(data) != HEADER_BYTES or xxhash.xxh3_64_digest(data[: _FIELDS.size]) != data[_FIELDS.size :]:
        raise damage_error(where, "its header is damaged")
    magic, version, compression, zero, plain_bytes, frame_bytes, checksum = _FIELDS.unpack_from(data)
    if magic != _MAGIC:
        raise damage_error(where, "it is no blob file")
    check_format(where, version, FORMAT_VERSION)
    if (compression, zero) != (_ZSTD, 0):
        raise damage_error(where, "its header is of no known kind")
    if os.fstat(fd).st_size != HEADER_BYTES + frame_bytes:
        raise damage_error(
            where, f"it should be {HEADER_BYTES + frame_bytes} bytes long and has {os.fstat(fd).st_size}"
        )
    return Header(plain_bytes, frame_bytes, checksum)


def unpack(fd: int, header: Header) -> Iterator[bytes]:
    """The plain bytes of an open blob file in pieces of at most 1 MiB, never more than the header declares.

    Raises FrameError, possibly only after the last piece, when size or checksum of the frame do not match the header:
    no piece is good before the end. ZstdError where the frame does not decompress. Memory: the window and one piece.
    """
    frame = _Source(fd, header.frame_bytes)
    left = header.plain_bytes
    source: Any = frame  # all that is used of a file is read()
    with zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES).stream_reader(source, closefd=False) as reader:
        # One byte more than declared is enough to know that it is too much: a bomb is not unpacked.
        while left >= 0 and (piece := reader.read(min(PIECE_BYTES, left + 1))):
            left -= len(piece)
            if left >= 0:
                yield piece
    frame.drain()
    if left or frame.digest() != header.checksum:
        raise FrameError


def check_frame(fd: int, header: Header) -> None:
    """FrameError when the frame's checksum is wrong. Reads only (about 10 GB/s from the page cache)."""
    source = _Source(fd, header.frame_bytes)
    source.drain()
    if source.digest() != header.checksum:
        raise FrameError


def compress(data: bytes | bytearray) -> bytes:
    """The frame of one blob, in memory that follows its length."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(data)


def compressor() -> zstandard.ZstdCompressionObj:
    """A compressor for the frame of one blob of any length. It takes some MiB from the first piece on."""
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compressobj()


@contextmanager
def readable(where: str) -> Iterator[None]:
    """Turns every sign of damage inside into DataLoss that names `where`."""
    try:
        yield
    except FrameError as exc:
        raise damage_error(where, "its content does not match its checksum") from exc
    except zstandard.ZstdError as exc:
        raise damage_error(where, f"its content does not decompress ({exc})") from exc
    except OSError as exc:
        if exc.errno == errno.EIO:
            raise damage_error(where, "the disk reports an error") from exc
        raise


def damage_error(where: str, why: str) -> DataLoss:
    return DataLoss(
        f"{where} cannot be read because {why}: restore it from a backup, or give it up with `snapshotd repair`"
    )
