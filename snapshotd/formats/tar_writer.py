"""Write a view as a pax tar stream, in constant memory but for one name per hard link group.

Every attribute that a view has is in the stream: modes, ids, times to the nanosecond on either side of 1970, extended
attributes (access lists and capabilities among them), raw names of any length, links, devices, holes. One tree always
gives the same bytes.

Sources: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Header Block"; GNU tar manual, "Storing Sparse Files"
(1.0); libarchive's tar(5) for LIBARCHIVE.xattr. OCI image specification 1.1, layer.md, for whiteouts.
"""

from __future__ import annotations

import base64
import errno
import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import islice

from snapshotd.errors import DataLoss
from snapshotd.formats.ingest_nodes import printable
from snapshotd.formats.tar_reader import BLOCK, MAX_EXTENTS, MAX_HEADER_BYTES, MAX_PATH_BYTES
from snapshotd.kernel import turns
from snapshotd.kernel.files import closing_fd
from snapshotd.trees.base import Child, Entry, Warnings
from snapshotd.trees.patch import Gather
from snapshotd.trees.view import Directory, View
from snapshotd.types import Kind

_PIECE_BYTES = 1 << 20
_NAME_BYTES = 100
_OCTAL_8, _OCTAL_12 = 0o7777777, 0o77777777777
_SECOND_NS = 10**9
_PATH_MAX = 4095
_WHITEOUT = b".wh."
_GAPS_BYTES = (0, 64 << 10, 1 << 20)
"""Holes shorter than this are written as zeros: the second and third value where a file is in more pieces than a reader
takes."""
_TYPES = {
    Kind.FILE: b"0",
    Kind.SYMLINK: b"2",
    Kind.CHAR_DEVICE: b"3",
    Kind.BLOCK_DEVICE: b"4",
    Kind.DIRECTORY: b"5",
    Kind.FIFO: b"6",
}
_HARD_LINK, _PAX = b"1", b"x"
_PAX_NAME = b"PaxHeader"
END = bytes(2 * BLOCK)
"""The end marker of an archive."""


class ArchiveMarks(Enum):
    """The meaning of a character device 0:0, and of a name that begins with `.wh.`, in the stream."""

    NONE = "none"
    """The view is a whole tree: there are no such devices (one is left out), names are names."""
    OCI = "oci"
    """The view is an image's layer: the device is written as the empty file `.wh.NAME`; an entry that has such a name
    is left out, and so is a path that no container engine could make."""
    OVERLAY = "overlay"
    """The view is a layer for our own use: the device is written as it is, names are names. `ingest_tar` reads it with
    `overlay_marks`."""


def write_tree(
    view: View, write: Callable[[bytes], object], *, marks: ArchiveMarks = ArchiveMarks.NONE, top: bytes = b""
) -> tuple[str, ...]:
    """Write the tree as a tar with its end marker. The root is the member `./`, parents come before children, siblings
    sorted. With `top`, write only what that path names and all below it: its last name begins the members' paths.

    `write` gets pieces of up to some MiB. Returns warnings, one sentence for each thing the format cannot hold:
    sockets, attributes or a path beyond the bounds of our own reader (`tar_reader`). Raises the errors of the view and
    of `write`, and DataLoss for a file that is shorter than recorded; the stream is cut off then.
    """
    writer = _Writer(view, write, marks)
    writer.run(top)
    return writer.warnings.all()


def file_header(name: bytes, size: int) -> bytes:
    """The header of a plain file (0644, root's, of 1970) in an archive that is not a tree. `name` has at most 100
    bytes. After the content follow zeros up to a whole block."""
    extension = b""
    if size > _OCTAL_12:
        data = _record(b"size", b"%d" % size)
        extension = _block(_PAX_NAME, _PAX, mode=0o644, size=len(data)) + data + bytes(-len(data) % BLOCK)
    return extension + _block(name, _TYPES[Kind.FILE], mode=0o644, size=size)


class _Frame:
    """A directory on the way. Paths are made of frames when they are needed: a deep tree's paths are far longer than
    its names."""

    __slots__ = ("children", "directory", "length", "name", "parent")

    def __init__(self, parent: _Frame | None, name: bytes, directory: Directory) -> None:
        self.parent, self.name, self.directory = parent, name, directory
        self.length: int = (parent.length if parent is not None else 0) + (len(name) + 1 if name else 0)
        self.children: Iterator[Child] = iter(())

    def path_to(self, name: bytes) -> bytes:
        names, at = [name], self
        while at.parent is not None:
            names.append(at.name)
            at = at.parent
        if at.name:
            names.append(at.name)
        return b"/".join(reversed(names))


class _Writer:
    def __init__(self, view: View, write: Callable[[bytes], object], marks: ArchiveMarks) -> None:
        self._view, self._marks = view, marks
        self._out = Gather(write)
        self._links: dict[tuple[int, int], tuple[_Frame, bytes]] = {}
        self.warnings = Warnings()
        self._path_limit = _PATH_MAX if marks is ArchiveMarks.OCI else MAX_PATH_BYTES

    def run(self, top: bytes) -> None:
        child = self._view.child(top) if top else None
        if child is not None and child.entry.kind is not Kind.DIRECTORY:
            self._node(_Frame(None, b"", None), child)
        else:
            self._tree(_Frame(None, b"" if child is None else child.name, self._view.directory(top)))
        self._out.write(END)
        self._out.flush()

    def _tree(self, root: _Frame) -> None:
        name = root.name or b"."
        xattrs = self._read_xattrs(name, lambda: self._view.directory_xattrs(root.directory))
        self._header(name + b"/", self._view.entry_of(root.directory), xattrs=xattrs)
        root.children = iter(self._view.children(root.directory))
        stack = [root]
        while stack:
            turns.give_way()
            frame = stack[-1]
            child = next(frame.children, None)
            if child is None:
                stack.pop()
            elif not self._fits(frame, child):
                continue
            else:
                try:
                    if child.entry.kind is Kind.DIRECTORY:
                        stack.append(self._directory(frame, child))
                    else:
                        self._node(frame, child)
                except FileNotFoundError:  # nothing of it is in the stream yet
                    if not self._view.live:
                        raise
                    self._links.pop(child.entry.inode, None)

    # -- entries -------------------------------------------------------------------------------------------------------

    def _fits(self, frame: _Frame, child: Child) -> bool:
        """True if the entry's name can be in the stream; otherwise a warning says why."""
        if frame.length + len(child.name) > self._path_limit:
            self._warn(
                frame.path_to(child.name), f"was left out, because its path is longer than {self._path_limit} bytes"
            )
            return False
        if self._marks is ArchiveMarks.OCI and child.name.startswith(_WHITEOUT):
            self._warn(frame.path_to(child.name), "was left out, because in an image its name would mean a deletion")
            return False
        return True

    def _directory(self, frame: _Frame, child: Child) -> _Frame:
        directory = self._view.enter(frame.directory, child.name)
        path = frame.path_to(child.name)
        xattrs = self._read_xattrs(path, lambda: self._view.directory_xattrs(directory))
        deeper = _Frame(frame, child.name, directory)
        deeper.children = iter(self._view.children(directory))
        self._header(path + b"/", self._view.entry_of(directory), xattrs=xattrs)
        return deeper

    def _node(self, frame: _Frame, child: Child) -> None:
        path, entry = frame.path_to(child.name), child.entry
        if entry.kind is Kind.SOCKET:
            self._warn(path, "was left out, because it is a socket, which an archive cannot hold")
            return
        if entry.kind is Kind.CHAR_DEVICE and entry.rdev == 0:
            self._deletion(frame, child.name, path)
            return
        if entry.nlink > 1:
            first = self._links.setdefault(entry.inode, (frame, child.name))
            if first != (frame, child.name):
                self._header(path, entry, kind=_HARD_LINK, link=first[0].path_to(first[1]))
                return
        xattrs = self._read_xattrs(path, lambda: self._view.xattrs_of(child))
        if entry.kind is Kind.FILE:
            written = self._file(path, child, xattrs)
            if not written:
                self._links.pop(entry.inode, None)
            return
        target = self._view.readlink_of(child) if entry.kind is Kind.SYMLINK else b""
        self._header(path, entry, link=target, xattrs=xattrs)

    def _deletion(self, frame: _Frame, name: bytes, path: bytes) -> None:
        if self._marks is ArchiveMarks.OCI:
            if len(name) + len(_WHITEOUT) > 255 or frame.length + len(name) + len(_WHITEOUT) > _PATH_MAX:
                self._warn(path, "is not deleted, because the name of the mark for that would be too long")
                return
            none = Entry(Kind.FILE, 0o600, 0, 0, 0, 0, 0, 1, (0, 0), 0)
            self._header(frame.path_to(_WHITEOUT + name), none)
        elif self._marks is ArchiveMarks.OVERLAY:
            self._header(path, Entry(Kind.CHAR_DEVICE, 0, 0, 0, 0, 0, 0, 1, (0, 0), 0))
        else:
            self._warn(path, "was left out, because it is a device 0:0, which means a deletion")

    # -- files ---------------------------------------------------------------------------------------------------------

    def _file(self, path: bytes, child: Child, xattrs: dict[bytes, bytes]) -> bool:
        """Write a file. False: it cannot be in the stream."""
        entry = child.entry
        if not entry.size:
            self._header(path, entry, xattrs=xattrs)
            return True
        with closing_fd(self._view.open_child(child)) as fd:
            st = os.fstat(fd)
            if self._view.live:
                entry = replace(entry, size=st.st_size)
            if st.st_size != entry.size:
                raise DataLoss(
                    f"file {printable(path)} has {st.st_size} bytes where {entry.size} are recorded; check the disk"
                )
            if st.st_blocks * 512 < entry.size:
                return self._sparse(path, entry, xattrs, fd)
            self._header(path, entry, xattrs=xattrs, size=entry.size)
            self._data(path, fd, 0, entry.size)
            self._out.write(bytes(-entry.size % BLOCK))
        return True

    def _sparse(self, path: bytes, entry: Entry, xattrs: dict[bytes, bytes], fd: int) -> bool:
        """A file that may have holes. Its map is made twice rather than held: it may have a million lines."""
        for gap in _GAPS_BYTES:
            count = digits = data = 0
            extents = self._extents(fd, entry.size, gap)
            for offset, length in extents():
                count, data = count + 1, data + length
                digits += len(b"%d\n%d\n" % (offset, length))
            if count <= MAX_EXTENTS:
                break
        else:
            self._warn(path, f"was left out, because its data are in more than {MAX_EXTENTS} pieces")
            return False
        lines = digits + len(b"%d\n" % count)
        padding = -lines % BLOCK
        stored = lines + padding + data
        if stored >= entry.size:
            self._header(path, entry, xattrs=xattrs, size=entry.size)
            self._data(path, fd, 0, entry.size)
            self._out.write(bytes(-entry.size % BLOCK))
            return True
        self._header(path, entry, xattrs=xattrs, size=stored, sparse=True)
        self._out.write(b"%d\n" % count)
        for offset, length in extents():
            self._out.write(b"%d\n%d\n" % (offset, length))
        self._out.write(bytes(padding))
        for offset, length in extents():
            self._data(path, fd, offset, length)
        self._out.write(bytes(-stored % BLOCK))
        return True

    def _extents(self, fd: int, size: int, gap: int) -> Callable[[], Iterator[tuple[int, int]]]:
        """Makes the map of a file's data as often as it is needed: the same one each time, also of a live file."""
        if not self._view.live:
            return lambda: _extents(fd, size, gap)
        held = array("q")
        for pair in islice(_extents(fd, size, gap), MAX_EXTENTS + 1):
            held.extend(pair)
        return lambda: zip(islice(held, 0, None, 2), islice(held, 1, None, 2), strict=True)

    def _data(self, path: bytes, fd: int, offset: int, length: int) -> None:
        while length:
            turns.give_way()
            piece = os.pread(fd, min(length, _PIECE_BYTES), offset)
            if not piece and self._view.live:  # cut off since its header was written
                piece = bytes(min(length, _PIECE_BYTES))
            if not piece:
                raise DataLoss(f"file {printable(path)} ended while it was read; check the disk")
            self._out.write(piece)
            offset, length = offset + len(piece), length - len(piece)

    # -- headers -------------------------------------------------------------------------------------------------------

    def _header(
        self,
        path: bytes,
        entry: Entry,
        *,
        kind: bytes = b"",
        link: bytes = b"",
        size: int = 0,
        sparse: bool = False,
        xattrs: dict[bytes, bytes] | None = None,
    ) -> None:
        records: list[tuple[bytes, bytes]] = []
        if _must_escape(path) or _must_escape(link):
            records.append((b"hdrcharset", b"BINARY"))
        name = path
        if sparse:
            name = b"GNUSparseFile.0/" + path.rpartition(b"/")[2][: _NAME_BYTES - 16]
            records += [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", path)]
            records.append((b"GNU.sparse.realsize", b"%d" % entry.size))
        elif len(path) > _NAME_BYTES:
            records.append((b"path", path))
        if len(link) > _NAME_BYTES:
            records.append((b"linkpath", link))
        for key, value, limit in (
            (b"uid", entry.uid, _OCTAL_8),
            (b"gid", entry.gid, _OCTAL_8),
            (b"size", size, _OCTAL_12),
        ):
            if value > limit:
                records.append((key, b"%d" % value))
        if entry.mtime_ns % _SECOND_NS or not 0 <= entry.mtime_ns // _SECOND_NS <= _OCTAL_12:
            records.append((b"mtime", _decimal_time(entry.mtime_ns)))
        records += self._xattr_records(path, xattrs or {}, sum(len(value) + 64 for _, value in records))
        if records:
            data = b"".join([_record(key, value) for key, value in records])
            self._out.write(_block(_PAX_NAME, _PAX, mode=0o644, size=len(data)) + data + bytes(-len(data) % BLOCK))
        device = (
            (os.major(entry.rdev), os.minor(entry.rdev))
            if entry.kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE)
            else (0, 0)
        )
        self._out.write(
            _block(
                name,
                kind or _TYPES[entry.kind],
                mode=entry.mode,
                uid=entry.uid,
                gid=entry.gid,
                size=size,
                mtime=entry.mtime_ns // _SECOND_NS,
                link=link,
                device=device,
            )
        )

    def _xattr_records(self, path: bytes, xattrs: dict[bytes, bytes], used: int) -> list[tuple[bytes, bytes]]:
        """The attributes by name; a plain name in the common form, any other in libarchive's."""
        found = []
        for name in sorted(xattrs):
            value = xattrs[name]
            if _is_plain(name):
                record = (b"SCHILY.xattr." + name, value)
            else:
                record = (b"LIBARCHIVE.xattr." + _url_encode(name), base64.b64encode(value).rstrip(b"="))
            used += len(record[0]) + len(record[1]) + 16
            if used > MAX_HEADER_BYTES:
                self._warn(
                    path, f"lost its extended attribute {printable(name)}, because all of them together are too long"
                )
                continue
            found.append(record)
        return found

    def _read_xattrs(self, path: bytes, read: Callable[[], dict[bytes, bytes]]) -> dict[bytes, bytes]:
        try:
            return read()
        except OSError as exc:
            if exc.errno != errno.E2BIG:
                raise
            self._warn(path, "lost its extended attributes, which are more than can be listed")
            return {}

    # -- warnings ------------------------------------------------------------------------------------------------------

    def _warn(self, path: bytes, what: str) -> None:
        self.warnings.add(f"{printable(path)} {what}")


def _extents(fd: int, size: int, gap: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of a file's data, in order; pieces less than `gap` apart are joined. A hole at the end is
    followed by (size, 0), which makes GNU tar give the file its length."""
    seek = partial(os.lseek, fd)
    start = end = position = 0
    while position < size:
        try:
            data = seek(position, os.SEEK_DATA)
            position = min(seek(data, os.SEEK_HOLE), size)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            break  # only a hole is left
        if data >= size:
            break  # a live file has grown
        if data - end >= gap and end:
            yield start, end - start
            start = data
        elif not end:
            start = data
        end = position
    if end:
        yield start, end - start
    if end != size:
        yield size, 0


def _block(
    name: bytes,
    kind: bytes,
    *,
    mode: int,
    size: int,
    uid: int = 0,
    gid: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    device: tuple[int, int] = (0, 0),
) -> bytes:
    """A ustar header. A value that does not fit is in the pax header and is 0 or cut here."""
    fields = b"".join(
        (
            name[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
            b"%07o\0" % mode,
            _octal(uid, _OCTAL_8, 7),
            _octal(gid, _OCTAL_8, 7),
            _octal(size, _OCTAL_12, 11),
            _octal(mtime, _OCTAL_12, 11),
            b" " * 8,
            kind,
            link[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0"),
            b"ustar\x0000",
            bytes(64),
            b"%07o\0%07o\0" % device,
            bytes(167),
        )
    )
    return fields[:148] + b"%06o\0 " % sum(fields) + fields[156:]


def _octal(value: int, limit: int, digits: int) -> bytes:
    return b"%0*o\0" % (digits, value if 0 <= value <= limit else 0)


def _record(key: bytes, value: bytes) -> bytes:
    """`LENGTH KEY=VALUE\\n`, where the length counts its own digits."""
    rest = len(key) + len(value) + 3
    length = rest + len(str(rest))
    if len(str(length)) + rest != length:
        length += 1
    return b"%d %b=%b\n" % (length, key, value)


def _decimal_time(time_ns: int) -> bytes:
    seconds, fraction = divmod(abs(time_ns), _SECOND_NS)
    text = f"{'-' if time_ns < 0 else ''}{seconds}"
    return (f"{text}.{fraction:09d}".rstrip("0") if fraction else text).encode()


def _must_escape(path: bytes) -> bool:
    """True if a long name is not UTF-8, the encoding of pax records unless they say otherwise."""
    if len(path) <= _NAME_BYTES:
        return False
    try:
        path.decode()
    except UnicodeDecodeError:
        return True
    return False


def _is_plain(name: bytes) -> bool:
    """True if an attribute's name means the same to every reader: GNU tar takes `%` for an escape, `=` ends the
    name."""
    try:
        return name.decode().isprintable() and not (b"=" in name or b"%" in name)
    except UnicodeDecodeError:
        return False


def _url_encode(name: bytes) -> bytes:
    return b"".join(bytes((c,)) if 33 <= c <= 126 and c not in b"%=" else b"%%%02X" % c for c in name)
