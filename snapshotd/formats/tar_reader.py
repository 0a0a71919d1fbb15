"""Read a tar stream member by member with bounds on everything, as bytes.

Why not the standard library's `tarfile`: it reads a header record of any claimed size into memory, recurses once per
extension header, keeps every member, decodes names to text, and its header parsing has needed denial-of-service fixes
(CVE-2024-6232, CVE-2025-8194) that older releases of Python 3.11 lack.
This reader takes ustar, GNU long names, GNU base-256 numbers, pax records, attributes as star and libarchive write them
and GNU's sparse files of version 1.0, and refuses, by name, forms that it does not know.
Source: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Basic Tar Format" and
"Storing Sparse Files"; libarchive's tar(5).
"""

from __future__ import annotations

import base64
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.formats.ingest_nodes import printable

BLOCK = 512
MAX_PATH_BYTES = 4 << 20
"""Far beyond what a system call takes: a tree can be deeper than that. 6,000 levels of long names come to 1.2 MB."""
MAX_HEADER_BYTES = 32 << 20
"""All extension headers of one member together: a path, a link target and the extended attributes (XFS holds 64 KiB in
each)."""
MAX_EXTENTS = 1 << 20
"""Pieces of data in one sparse file; a map of this size takes 16 MiB."""
MAX_EXTENSIONS = 16
PIECE_BYTES = 1 << 20
_SECOND_NS = 10**9
_TIME_LIMIT_S = 1 << 62
"""Times beyond are cut to that. The kernel cuts others to the file system's range (ext4: the years 1901 to 2446)."""
_ZERO_BLOCK = bytes(BLOCK)
_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ([^=\n]{1,1024})=")
_DECIMAL = re.compile(rb"(-?)([0-9]{1,20})(?:\.([0-9]{0,32}))?")
_OCTAL = re.compile(rb"[ \0]*([0-7]*)[ \0]*")
_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_MAP_LINE = re.compile(rb"([0-9]{1,19})\n")
_SPARSE = b"GNU.sparse."
_STAR_XATTR, _LIBARCHIVE_XATTR = b"SCHILY.xattr.", b"LIBARCHIVE.xattr."


class ByteSource(Protocol):
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
    b"0": MemberKind.FILE,
    b"\0": MemberKind.FILE,
    b"7": MemberKind.FILE,
    b"1": MemberKind.HARD_LINK,
    b"2": MemberKind.SYMLINK,
    b"3": MemberKind.CHAR_DEVICE,
    b"4": MemberKind.BLOCK_DEVICE,
    b"5": MemberKind.DIRECTORY,
    b"6": MemberKind.FIFO,
}


@dataclass(frozen=True, slots=True)
class Member:
    """One entry. `path` and `link` are as the archive says, unchecked; `size` is 0 but for files; `mode` is 12 bits.

    `offset` is where its content begins in the stream, `stored` how much of it there is there. `extents` is None, or
    for a sparse file offset and length, by turns, of its data: in order, within `size`, and as much together as
    `pieces` gives.
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
    stored: int = 0
    extents: array[int] | None = None


class TarReader:
    """Iterate over the members; while at a file, `pieces()` gives its content (the untaken rest is skipped).

    Errors: UsageError (damaged, truncated or of a kind we refuse, naming the member), LimitExceeded. Memory: about 2
    MiB.
    """

    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream
        self._offset = 0
        self._left = 0
        self._padding = 0
        self.ended_by_marker = False
        """True if the archive's end marker was read; without one it may have been cut off between two members."""

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
            what = f"byte {self._offset - BLOCK} of the archive is not a tar header"
            raise UsageError(f"{what}: it is damaged, or not a tar at all; fetch or save it again")
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
                raise LimitExceeded(
                    f"the headers before byte {self._offset} of the archive claim more than {MAX_HEADER_BYTES} bytes"
                )
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
        raise LimitExceeded(
            f"more than {MAX_EXTENSIONS} extension headers in a row before byte {self._offset} of the archive"
        )

    def _member(
        self, block: bytes, records: dict[bytes, bytes], long_name: bytes | None, long_link: bytes | None
    ) -> Member:
        path = records.get(b"path", long_name if long_name is not None else _ustar_path(block))
        kind = _KINDS.get(block[156:157])
        sparse = any(key.startswith(_SPARSE) for key in records)
        if kind is None or (
            sparse and (records.get(_SPARSE + b"major"), records.get(_SPARSE + b"minor")) != (b"1", b"0")
        ):
            letter = block[156:157]
            what = (
                "a GNU sparse file of an old format"
                if kind or letter == b"S"
                else f"of unknown type {printable(letter)!r}"
            )
            raise UsageError(
                f"{printable(path)} in the archive is {what}; make the archive again in pax format, and not as a sparse one"
            )
        if sparse:
            path = records.get(_SPARSE + b"name", path)
        if path.endswith(b"/") and kind is MemberKind.FILE:
            kind = MemberKind.DIRECTORY  # how archives before POSIX said it
        size = _pax_int(records, b"size", block[124:136], path, self._offset)
        if kind is not MemberKind.FILE:
            size = 0  # as GNU tar and Go read it: no data follow such a header, even if it gives a size
        stored, extents = size, None
        mtime = records.get(b"mtime")
        seconds = _number(block[136:148], self._offset) * _SECOND_NS if mtime is None else _pax_time(mtime, path)
        self._left, self._padding = size, -size % BLOCK
        if sparse and kind is MemberKind.FILE:
            size = _pax_int(records, _SPARSE + b"realsize", b"-1", path, self._offset)
            extents = self._map(path, size)
            stored = self._left
        return Member(
            path,
            kind,
            _number(block[100:108], self._offset) & 0o7777,
            _pax_int(records, b"uid", block[108:116], path, self._offset),
            _pax_int(records, b"gid", block[116:124], path, self._offset),
            size,
            max(-_TIME_LIMIT_S * _SECOND_NS, min(seconds, _TIME_LIMIT_S * _SECOND_NS)),
            records.get(b"linkpath", long_link if long_link is not None else block[157:257].split(b"\0", 1)[0]),
            (_number(block[329:337], self._offset), _number(block[337:345], self._offset))
            if "device" in kind.value
            else (0, 0),
            self._offset,
            _xattrs(records),
            stored,
            extents,
        )

    def _map(self, path: bytes, size: int) -> array[int]:
        """The map that a sparse file's content begins with: decimal lines (how many pieces; offset and length of each),
        in whole blocks."""
        numbers = array("q")
        wanted, text = 1, b""
        while len(numbers) < wanted:
            match = _MAP_LINE.match(text)
            if match is None:
                if self._left < BLOCK or len(text) > 20:
                    raise UsageError(
                        f"{printable(path)} in the archive has a damaged map of its data; the archive is damaged or hostile"
                    )
                text += self._read(BLOCK)
                self._left -= BLOCK
                continue
            value, text = int(match[1]), text[match.end() :]
            if not numbers:
                if value > MAX_EXTENTS:
                    raise LimitExceeded(
                        f"{printable(path)} in the archive has its data in {value} pieces, more than {MAX_EXTENTS}"
                    )
                wanted = 1 + 2 * value
            numbers.append(min(value, (1 << 63) - 1))
        end = data = 0
        for at in range(1, len(numbers), 2):
            if not end <= numbers[at] <= numbers[at] + numbers[at + 1] <= size:
                break
            end, data = numbers[at] + numbers[at + 1], data + numbers[at + 1]
        else:
            if data == self._left:
                return numbers[1:]
        raise UsageError(
            f"{printable(path)} in the archive has data where none can be; the archive is damaged or hostile"
        )


def _xattrs(records: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """The extended attributes: names as they are with plain values, or url-encoded names with base64 values."""
    found = {}
    for key, value in records.items():
        if key.startswith(_LIBARCHIVE_XATTR):
            name = _ESCAPE.sub(lambda match: bytes((int(match[1], 16),)), key[len(_LIBARCHIVE_XATTR) :])
            try:
                found[name] = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
            except ValueError as exc:
                raise UsageError(
                    f"the extended attribute {printable(name)} in the archive is damaged: it is not base64"
                ) from exc
    found.update({key[len(_STAR_XATTR) :]: value for key, value in records.items() if key.startswith(_STAR_XATTR)})
    if any(b"\0" in name for name in found):
        raise UsageError(
            "the name of an extended attribute in the archive contains a zero byte; the archive is hostile or damaged"
        )
    return found


def _ustar_path(block: bytes) -> bytes:
    name = block[:100].split(b"\0", 1)[0]
    prefix = (
        block[345:500].split(b"\0", 1)[0] if block[257:263] == b"ustar\0" else b""
    )  # GNU's own format keeps times there
    return prefix + b"/" + name if prefix else name


def _number(text: bytes, offset: int) -> int:
    """A header's number: octal digits, or base 256 when the first bit is set (negative when the first byte is 0xff)."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big", signed=text[0] == 0xFF)
        return value if text[0] == 0xFF else value - (0x80 << 8 * (len(text) - 1))
    match = _OCTAL.fullmatch(text)
    if not match:
        raise UsageError(
            f"the tar header before byte {offset} of the archive holds {printable(text)!r} where a number belongs"
        )
    return int(match[1] or b"0", 8)


def _pax_int(records: dict[bytes, bytes], key: bytes, header: bytes, path: bytes, offset: int) -> int:
    """A count or id: from the pax record if there is one. Never negative, below 2^63."""
    text = records.get(key)
    value = _number(header, offset) if text is None else int(text) if text.isdigit() and len(text) < 20 else -1
    if not 0 <= value < 1 << 63:
        raise UsageError(
            f"{printable(path)} in the archive has an impossible {key.decode()}; the archive is damaged or hostile"
        )
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
    """Global records are comments in practice (git writes its commit there); ones that would change members are
    refused."""
    for key in records:
        if key in (b"path", b"linkpath", b"size") or key.startswith((_SPARSE, _STAR_XATTR, _LIBARCHIVE_XATTR)):
            raise UsageError(
                f"the archive sets {printable(key)} for all its members at once, which no root file system needs"
            )
