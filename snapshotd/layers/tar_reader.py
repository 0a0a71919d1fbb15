"""Read a tar stream member by member with bounds on everything, as bytes.

Why not the standard library's `tarfile`: it reads a header record of any claimed size into memory, recurses once per extension
header, keeps every member, decodes names to text, and its header parsing has needed denial-of-service fixes (CVE-2024-6232,
CVE-2025-8194) that older releases of Python 3.11 lack.
This reader takes ustar, GNU long names, GNU base-256 numbers and pax records, and refuses by name what it does not know.
Source: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.layers.ingest_nodes import printable

BLOCK = 512
MAX_HEADER_BYTES = 1 << 20
"""All extension headers of one member together: a path, a link target and the extended attributes."""
MAX_EXTENSIONS = 16
PIECE_BYTES = 1 << 20
_SECOND_NS = 10**9
_TIME_LIMIT_S = 1 << 33
"""Times beyond the year 2242 or as far before 1970 are cut to that: no file system we use holds them."""
_ZERO_BLOCK = bytes(BLOCK)
_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ([^=\n]{1,1024})=")
_DECIMAL = re.compile(rb"(-?)([0-9]{1,20})(?:\.([0-9]{0,32}))?")
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class MemberKind(StrEnum):
    FILE = "file"
    HARD_LINK = "hard link"
    SYMLINK = "symbolic link"
    CHAR_DEVICE = "character device"
    BLOCK_DEVICE = "block device"
    DIRECTORY = "directory"
    FIFO = "fifo"


_KINDS = {
    b"0": MemberKind.FILE, b"\0": MemberKind.FILE, b"7": MemberKind.FILE, b"1": MemberKind.HARD_LINK, b"2": MemberKind.SYMLINK,
    b"3": MemberKind.CHAR_DEVICE, b"4": MemberKind.BLOCK_DEVICE, b"5": MemberKind.DIRECTORY, b"6": MemberKind.FIFO,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `path` and `link` are as the archive says, unchecked; `size` is 0 but for files; `mode` is 12 bits.

    `offset` is where its content begins in the stream.
    """

    path: bytes
    kind: MemberKind
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes
    device: tuple[int, int]
    offset: int
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


class TarReader:
    """Iterate over the members; while at a file, `pieces()` gives its content (what is not taken is skipped).

    Errors: UsageError (damaged, truncated or of a kind we refuse, naming the member), LimitExceeded. Memory: about 2 MiB.
    """

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._offset = 0
        self._left = 0
        self._padding = 0
        self.ended_by_marker = False
        """Whether the archive's end marker was there; without one it may have been cut off between two members."""

    def __iter__(self) -> Iterator[Member]:
        while True:
            for _ in self.pieces():
                pass
            member = self._next()
            if member is None:
                return
            yield member

    def pieces(self) -> Iterator[bytes]:
        """The content of the current file in pieces of at most 1 MiB."""
        while self._left:
            piece = self._read(min(self._left, PIECE_BYTES))
            self._left -= len(piece)
            yield piece
        if self._padding:
            padding, self._padding = self._padding, 0
            self._read(padding)

    def _read(self, size: int) -> bytes:
        """Exactly `size` bytes."""
        parts = []
        while size:
            part = self._stream.read(min(size, PIECE_BYTES))
            if not part:
                raise UsageError(f"the archive is cut off at byte {self._offset}; fetch or save it again")
            parts.append(part)
            size -= len(part)
            self._offset += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _header(self) -> bytes | None:
        first = self._stream.read(BLOCK)
        if not first:
            return None
        self._offset += len(first)
        block = first if len(first) == BLOCK else first + self._read(BLOCK - len(first))
        if block == _ZERO_BLOCK:
            self.ended_by_marker = True
            return None
        stored = _OCTAL.fullmatch(block[148:156])
        total = sum(block[:148]) + 8 * 32 + sum(block[156:])
        if not stored or int(stored[1] or b"0", 8) != total:
            raise UsageError(f"byte {self._offset - BLOCK} of the archive is not a tar header: it is damaged, or not a tar at all")
        return block

    def _next(self) -> Member | None:
        records: dict[bytes, bytes] = {}
        long_name = long_link = None
        budget = MAX_HEADER_BYTES
        for _ in range(MAX_EXTENSIONS):
            block = self._header()
            if block is None:
                if records or long_name is not None or long_link is not None:
                    raise UsageError("the archive ends in the middle of a member's headers; fetch or save it again")
                return None
            kind = block[156:157]
            if kind not in b"xgXLK":
                return self._member(block, records, long_name, long_link)
            size = _number(block[124:136], self._offset)
            budget -= size
            if size < 0 or budget < 0:
                raise LimitExceeded(f"the headers before byte {self._offset} of the archive claim more than {MAX_HEADER_BYTES} bytes")
            data = self._read(size)
            self._read(-size % BLOCK)
            if kind == b"L":
                long_name = data.rstrip(b"\0")
            elif kind == b"K":
                long_link = data.rstrip(b"\0")
            elif kind == b"g":
                _check_global(_records(data, self._offset))
            else:
                records.update(_records(data, self._offset))
        raise LimitExceeded(f"more than {MAX_EXTENSIONS} extension headers in a row before byte {self._offset} of the archive")

    def _member(self, block: bytes, records: dict[bytes, bytes], long_name: bytes | None, long_link: bytes | None) -> Member:
        path = records.get(b"path", long_name if long_name is not None else _ustar_path(block))
        kind = _KINDS.get(block[156:157])
        if kind is None or any(key.startswith(b"GNU.sparse.") for key in records):
            what = "a GNU sparse file" if kind or block[156:157] == b"S" else f"of unknown type {printable(block[156:157])!r}"
            raise UsageError(f"{printable(path)} in the archive is {what}; make the archive again in pax format without --sparse")
        if path.endswith(b"/") and kind is MemberKind.FILE:
            kind = MemberKind.DIRECTORY  # how archives before POSIX said it
        size = _pax_int(records, b"size", block[124:136], path, self._offset)
        if kind is not MemberKind.FILE:
            size = 0  # as GNU tar and Go read it: no data follow such a header whatever it says
        mtime = records.get(b"mtime")
        seconds = _number(block[136:148], self._offset) * _SECOND_NS if mtime is None else _pax_time(mtime, path)
        self._left, self._padding = size, -size % BLOCK
        return Member(
            path, kind, _number(block[100:108], self._offset) & 0o7777,
            _pax_int(records, b"uid", block[108:116], path, self._offset), _pax_int(records, b"gid", block[116:124], path, self._offset),
            size, max(-_TIME_LIMIT_S * _SECOND_NS, min(seconds, _TIME_LIMIT_S * _SECOND_NS)),
            records.get(b"linkpath", long_link if long_link is not None else block[157:257].split(b"\0", 1)[0]),
            (_number(block[329:337], self._offset), _number(block[337:345], self._offset)) if "device" in kind.value else (0, 0),
            self._offset, {k[13:]: v for k, v in records.items() if k.startswith(b"SCHILY.xattr.")},
        )  # fmt: skip


def _ustar_path(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    prefix = block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""  # GNU's own format keeps times there
    return prefix + b"/" + name if prefix else name


def _number(text: bytes, offset: int) -> int:
    """A header's number: octal digits, or base 256 when the first bit is set (negative when the first byte is 0xff)."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big", signed=text[0] == 0xFF)
        return value if text[0] == 0xFF else value - (0x80 << 8 * (len(text) - 1))
    match = _OCTAL.fullmatch(text)
    if not match:
        raise UsageError(f"the tar header before byte {offset} of the archive holds {printable(text)!r} where a number belongs")
    return int(match[1] or b"0", 8)


def _pax_int(records: dict[bytes, bytes], key: bytes, header: bytes, path: bytes, offset: int) -> int:
    """A count or id: from the pax record if there is one. Never negative, below 2^63."""
    text = records.get(key)
    value = _number(header, offset) if text is None else int(text) if text.isdigit() and len(text) < 20 else -1
    if not 0 <= value < 1 << 63:
        raise UsageError(f"{printable(path)} in the archive has an impossible {key.decode()}; the archive is damaged or hostile")
    return value


def _pax_time(text: bytes, path: bytes) -> int:
    match = _DECIMAL.fullmatch(text)
    if not match:
        raise UsageError(f"{printable(path)} in the archive has an impossible time; the archive is damaged or hostile")
    value = int(match[2]) * _SECOND_NS + int((match[3] or b"").ljust(9, b"0")[:9])
    return -value if match[1] else value


def _records(data: bytes, offset: int) -> dict[bytes, bytes]:
    """The "LENGTH KEY=VALUE\\n" records of a pax header."""
    result: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        match = _RECORD.match(data, position)
        end = position + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise UsageError(f"the pax header before byte {offset} of the archive is damaged")
        result[match[2]] = data[match.end() : end - 1]
        position = end
    return result


def _check_global(records: dict[bytes, bytes]) -> None:
    """Global records are comments in practice (git writes its commit there); ones that would change members are refused."""
    for key in records:
        if key in (b"path", b"linkpath", b"size") or key.startswith((b"GNU.sparse.", b"SCHILY.xattr.")):
            raise UsageError(f"the archive sets {printable(key)} for all its members at once, which no root file system needs")
