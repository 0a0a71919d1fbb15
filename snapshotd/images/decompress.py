"""Undo gzip, zstd or xz on a stream, whichever its first bytes say, in bounded memory."""

from __future__ import annotations

import gzip
import lzma
import zlib
from typing import Any, cast

import zstandard

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.formats.tar_reader import ByteSource

_XZ_MEMORY_BYTES = 256 << 20
_ZSTD_WINDOW_BYTES = 128 << 20
"""The window of `zstd --long=27`; a hostile frame can ask for 2 GiB."""
_STEP_BYTES = 1 << 18
_ZSTD_STEP_BYTES = 1 << 10
"""A block of 4 bytes can stand for 128 KiB, so this much can become 32 MiB in memory."""


def plain(stream: ByteSource, what: str) -> ByteSource:
    """The uncompressed content of `stream`. `what` names it in errors. UsageError on reading damaged or unknown
    data."""
    head = _exactly(stream, 6)
    joined = _Joined(head, stream)
    if head.startswith(b"\x1f\x8b"):
        return _Checked(
            gzip.GzipFile(fileobj=cast(Any, joined), mode="rb"), what
        )  # the cast: it asks for more than it uses
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _Checked(_Zstd(joined), what)
    if head == b"\xfd7zXZ\x00":
        return _Checked(_Xz(joined), what)
    if head.startswith(b"BZh"):
        raise UsageError(f"{what} is compressed with bzip2, which is not supported; unpack it first with `bunzip2`")
    return joined


def drain(stream: ByteSource, limit: int, what: str) -> None:
    """Read the rest of a stream: a tar ends before its file does. LimitExceeded when the rest is longer than `limit`
    bytes."""
    while data := stream.read(_STEP_BYTES):
        limit -= len(data)
        if limit < 0:
            raise LimitExceeded(f"{what} does not stop after the end of its content; it is damaged or hostile")


def _exactly(stream: ByteSource, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            break
        data += more
    return data


class _Joined:
    """Bytes that were read already, then the rest of the stream."""

    def __init__(self, head: bytes, stream: ByteSource) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int = -1, /) -> bytes:
        if not self._head:
            return self._stream.read(size if size >= 0 else _STEP_BYTES)
        data = self._head if size < 0 else self._head[:size]
        self._head = self._head[len(data) :]
        return data


class _Xz:
    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream
        self._decoder = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)

    def read(self, size: int, /) -> bytes:
        while not self._decoder.eof:
            data = self._stream.read(_STEP_BYTES) if self._decoder.needs_input else b""
            if self._decoder.needs_input and not data:
                raise EOFError("it is cut off")
            out = self._decoder.decompress(data, size)
            if out:
                return out
        return b""


class _Zstd:
    """Frame after frame. Not the library's own stream reader: that one takes a frame that is cut off for a complete
    one."""

    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream
        self._decoder: zstandard.ZstdDecompressionObj | None = None
        self._packed = b""
        self._plain = b""
        self._taken = 0

    def read(self, size: int, /) -> bytes:
        while self._taken == len(self._plain):
            if not self._packed:
                self._packed = self._stream.read(_ZSTD_STEP_BYTES)
            if not self._packed:
                if self._decoder:
                    raise EOFError("it is cut off")
                return b""
            self._decode()
        data = self._plain[self._taken : self._taken + size]
        self._taken += len(data)
        return data

    def _decode(self) -> None:
        if self._decoder is None:
            self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
        self._plain, self._taken = self._decoder.decompress(self._packed), 0
        self._packed = b""
        if self._decoder.eof:
            self._packed, self._decoder = self._decoder.unused_data, None


class _Checked:
    """Errors of the decoders as sentences."""

    def __init__(self, stream: ByteSource, what: str) -> None:
        self._stream, self._what = stream, what

    def read(self, size: int, /) -> bytes:
        try:
            return self._stream.read(size)
        except (gzip.BadGzipFile, zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError) as exc:
            raise UsageError(
                f"{self._what} cannot be decompressed: {exc}; it is damaged, fetch or save it again"
            ) from exc
