"""Folders of this machine as a tar, and back. Data that comes out of a sandbox is hostile: it is written by directory
descriptors, one component at a time, and no link is followed."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

from snapshotd.client.feeding import Readable
from snapshotd.client.local.part_file import open_special, own_descriptor
from snapshotd.client.results import RestoreInfo
from snapshotd.errors import NO_ROOM, InternalError, OutOfSpace, UsageError

_PIECE_BYTES = 1 << 20
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_END = bytes(2 * tarfile.BLOCKSIZE)
_MOST_WARNINGS = 1000

Sink = Callable[[bytes], object]


class Reader:
    """Pieces of bytes as something with `read`."""

    def __init__(
        self, pieces: Iterator[bytes], moved: Callable[[int], object] | None = None, *, in_memory: bool = False
    ) -> None:
        """`moved` hears how many bytes have been read so far. `in_memory`: no piece is read from a file."""
        self._pieces, self._moved, self.in_memory = pieces, moved, in_memory
        self._rest = memoryview(b"")
        self._count = 0

    def read(self, count: int) -> bytes:
        """At most `count` bytes; nothing at the end."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._rest = memoryview(piece)
        taken, self._rest = bytes(self._rest[:count]), self._rest[count:]
        self._count += len(taken)
        if self._moved is not None:
            self._moved(self._count)
        return taken


def read_pieces(source: Readable) -> Iterator[bytes]:
    while piece := source.read(_PIECE_BYTES):
        yield piece


def pack(path: Path, warnings: list[str]) -> Iterator[bytes]:
    """A local folder as a tar of what is in it; a file, as a tar of one member with its name. Links are links; what is
    neither file, directory nor link is left out, and `warnings` says so. UsageError: it cannot be read."""
    with _raise_ours(path):
        st = path.stat()
        if stat.S_ISDIR(st.st_mode):
            yield from _pack_folder(path, "", warnings)
        else:
            check_readable(path)
            yield from _pack_file(path, path.name)
        yield _END


def check_readable(path: Path) -> None:
    """UsageError: a fifo or socket, which may never end."""
    mode = path.stat().st_mode
    if own_descriptor(path) is None and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        kind = "fifo" if stat.S_ISFIFO(mode) else "socket"
        raise UsageError(f"{path} is a {kind}; send what comes out of it through a pipe, and name /dev/stdin")


def pack_bytes(files: Iterator[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """A tar of these paths with these contents."""
    for path, data in files:
        item = tarfile.TarInfo(path.decode(errors="surrogateescape"))
        item.size = len(data)
        yield _header(item)
        yield data
        yield bytes(-item.size % tarfile.BLOCKSIZE)
    yield _END


def _pack_folder(folder: Path, prefix: str, warnings: list[str]) -> Iterator[bytes]:
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        name, path = prefix + entry.name, folder / entry.name
        if entry.is_symlink():
            item = _item(name, path.lstat(), tarfile.SYMTYPE)
            item.linkname = os.readlink(path)
            yield _header(item)
        elif entry.is_dir():
            yield _header(_item(name, path.stat(), tarfile.DIRTYPE))
            yield from _pack_folder(path, name + "/", warnings)
        elif entry.is_file():
            yield from _pack_file(path, name)
        elif len(warnings) < _MOST_WARNINGS:
            warnings.append(f"{path} was left out, because it is neither a file nor a folder nor a link")


def _pack_file(path: Path, name: str) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        item = _item(name, os.fstat(file.fileno()), tarfile.REGTYPE)
        yield _header(item)
        left = item.size
        while left:
            piece = file.read(min(left, _PIECE_BYTES))
            if not piece:
                raise UsageError(f"{path} became shorter while it was read; repeat the command when it is complete")
            left -= len(piece)
            yield piece
    yield bytes(-item.size % tarfile.BLOCKSIZE)


def _item(name: str, st: os.stat_result, kind: bytes) -> tarfile.TarInfo:
    item = tarfile.TarInfo(name)
    item.type, item.mode, item.mtime = kind, stat.S_IMODE(st.st_mode), int(st.st_mtime)
    item.size = st.st_size if kind == tarfile.REGTYPE else 0
    return item


def _header(item: tarfile.TarInfo) -> bytes:
    return item.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


@dataclass(slots=True)
class TarUnpacker:
    """Writes a tar whose members' paths begin with one name (which is left out) to a local place: a file there, or
    a folder, into which it is merged. Files become this user's, without the bits that give others' rights; one that is
    there is replaced whole, and so is a link by a link. Nothing else is replaced; a special file that is the place is
    written to as it is (`open_special`). The folder itself is not counted, as in a restore."""

    to: Path
    files: int = 0
    directories: int = 0
    written_bytes: int = 0
    warnings: list[str] = field(default_factory=list)
    _top: int | None = None
    """How many names the members' paths begin with that they lose: none where all of a root was asked for."""

    def unpack(self, pieces: Iterator[bytes]) -> RestoreInfo:
        """UsageError, OutOfSpace: the place cannot hold it; then a part of it may be there."""
        stream = cast(BinaryIO, Reader(pieces))
        with (
            _raise_ours(self.to),
            tarfile.open(
                fileobj=stream, mode="r|", encoding="utf-8", errors="surrogateescape", bufsize=_PIECE_BYTES
            ) as tar,
        ):
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # else one for each file stays
                self._take(tar, member)
        for _ in pieces:
            pass  # to its end, where the daemon says whether it was all
        return RestoreInfo(self.files, self.directories, self.written_bytes, tuple(self.warnings))

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = self._parts(member.name)
        if not parts and not member.isdir():  # a file, and not a folder, was asked for
            special = open_special(self.to)
            if special is not None:
                self._write_special(tar, member, special)
                return
            parent, name = _open_local(self.to.parent), self.to.name
        elif not parts:
            self.to.mkdir(parents=True, exist_ok=True)
            return
        else:
            parent, name = self._parent(parts), parts[-1]
        try:
            self._put(tar, member, parent, name)
        finally:
            os.close(parent)

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, name: str) -> None:
        if member.isdir():
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, member.mode & 0o777 | 0o700, dir_fd=parent)
            os.close(os.open(name, _DIR_FLAGS, dir_fd=parent))
            self.directories += 1
            return
        if member.isreg():
            self._replace(parent, name, lambda new: self._file(tar, member, parent, new))
            self.written_bytes += member.size
        elif member.issym():
            self._replace(parent, name, lambda new: os.symlink(member.linkname, new, dir_fd=parent), is_link=True)
        elif member.islnk():
            source = self._parent(target := self._parts(member.linkname))
            try:
                self._replace(
                    parent,
                    name,
                    lambda new: os.link(target[-1], new, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False),
                )
            finally:
                os.close(source)
        else:
            if len(self.warnings) < _MOST_WARNINGS:
                self.warnings.append(f"{member.name!a} was left out, because it is a device or a pipe")
            return
        self.files += 1

    def _parts(self, name: str) -> list[str]:
        """Where a member goes, below `to`. InternalError for what leads elsewhere."""
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if self._top is None:
            self._top = len(parts)
        if ".." in parts or len(parts) < self._top:
            raise InternalError(f"the daemon sent an archive with the path {name!a}, which leads elsewhere")
        return parts[self._top :]

    def _parent(self, parts: list[str]) -> int:
        """The folder that holds a member, opened from the top."""
        fd = _open_local(self.to)
        for part in parts[:-1]:
            try:
                deeper = os.open(part, _DIR_FLAGS, dir_fd=fd)
            finally:
                os.close(fd)
            fd = deeper
        return fd

    def _write_special(self, tar: tarfile.TarFile, member: tarfile.TarInfo, fd: int) -> None:
        with open(fd, "wb", buffering=0) as file:
            if not member.isreg():
                raise UsageError(f"{self.to} is a special file, to which only a file's content can be copied")
            at = 0
            for offset, piece in _content(tar, member):
                for data in (*_zeros(offset - at), piece):
                    _write_all(file, data)
                at = offset + len(piece)
            for data in _zeros(member.size - at):
                _write_all(file, data)
        self.files += 1
        self.written_bytes += member.size

    def _replace(self, parent: int, name: str, make: Callable[[str], object], *, is_link: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(name, dir_fd=parent).st_mode
            if not stat.S_ISREG(there) and not stat.S_ISDIR(there) and not (is_link and stat.S_ISLNK(there)):
                raise UsageError(
                    f"{name!a} is no regular file there, and is not replaced; move it away, or copy elsewhere"
                )
        new = f".snapshotd-{os.urandom(8).hex()}.part"
        try:
            make(new)
            os.rename(new, name, src_dir_fd=parent, dst_dir_fd=parent)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new, dir_fd=parent)
            raise

    def _file(self, tar: tarfile.TarFile, member: tarfile.TarInfo, parent: int, new: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(new, flags, 0o600, dir_fd=parent), "wb", buffering=0) as file:
            for offset, piece in _content(tar, member):
                file.seek(offset)
                _write_all(file, piece)
            file.truncate(member.size)
            os.fchmod(file.fileno(), member.mode & 0o777)
            os.utime(file.fileno(), (member.mtime, member.mtime))


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> Iterator[tuple[int, bytes]]:
    """A file's data, piece by piece, each with its place in the file; without its holes."""
    found = tar.extractfile(member)
    assert found is not None
    source = cast(io.RawIOBase, cast(io.BufferedReader, found).raw)  # its buffer refuses to seek in a stream
    for offset, length in cast("list[tuple[int, int]] | None", member.sparse) or [(0, member.size)]:
        source.seek(offset)
        end = offset + length
        while offset < end:
            piece = source.read(min(end - offset, _PIECE_BYTES))
            if not piece:
                raise InternalError("the archive that the daemon sent is damaged; see its daemon.log")
            yield offset, piece
            offset += len(piece)


def _write_all(file: io.FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _zeros(count: int) -> Iterator[bytes]:
    while count > 0:
        yield bytes(min(count, _PIECE_BYTES))
        count -= _PIECE_BYTES


def _open_local(folder: Path) -> int:
    """The place that the user has named: links on the way to it are the user's own."""
    return os.open(folder, _DIR_FLAGS & ~os.O_NOFOLLOW)


@contextlib.contextmanager
def _raise_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise  # the reader of a pipe that is written to is gone
    except OSError as exc:
        where = os.fsdecode(exc.filename) if isinstance(exc.filename, str | bytes) else str(path)
        if exc.errno in NO_ROOM:
            raise OutOfSpace(f"{path} cannot be written to its end: {exc.strerror}; free some space") from exc
        raise UsageError(f"{path} cannot be copied ({where}: {exc.strerror}); name another place") from exc
