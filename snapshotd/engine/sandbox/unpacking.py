"""A tar from outside into a live root, member by member (`placing.py`). Devices and other entries that a sandbox should
not get that way are left out with a warning."""

from __future__ import annotations

import contextlib
import errno
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice

from snapshotd.engine.sandbox import placing
from snapshotd.errors import UsageError
from snapshotd.formats.tar_reader import Member, MemberKind, TarReader
from snapshotd.kernel import files

_MOST_WARNINGS = 100


@dataclass(slots=True)
class Unpacked:
    """The files put in place so far."""

    files: int = 0
    directories: int = 0
    paths: list[bytes] = field(default_factory=list)
    """The first files, as many as `most_paths`."""
    bytes: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Unpacker:
    """`root` opens the live root for a moment; `owner` gets what is new. With `attributes`, modes and times are the
    archive's, else they are those of any new file. `take` is told how many bytes and files
    more are about to be written, and raises when they are not to be."""

    root: Callable[[], AbstractContextManager[int]]
    owner: placing.Owner
    attributes: bool
    most_paths: int
    take: Callable[[int, int], None]
    done: Unpacked = field(default_factory=Unpacked)

    def unpack(self, path: bytes, read: Callable[[int], bytes]) -> None:
        """Put every member below the directory `path`. After an error, `done` says what is in place already. SnapshotdError,
        and the errors of `read`."""
        reader = TarReader(_Stream(read))
        for member in reader:
            self.take(0, 1)
            self._take(path, member, reader)
        if not reader.ended_by_marker:
            raise UsageError("the archive has no end marker, so it may be cut off; send it again")
        while read(1 << 16):
            self.take(0, 0)  # the padding of the archive

    def _take(self, top: bytes, member: Member, reader: TarReader) -> None:
        path = _below(top, member.path)
        mode = member.mode if self.attributes else None
        with placing.explain_errors("write", path):
            self._check_way(top, path)
            match member.kind:
                case MemberKind.FILE:
                    self._file(path, member, reader, mode, follow=not top)
                case MemberKind.DIRECTORY:
                    with self.root() as root:
                        self.done.directories += placing.make_dir(root, path, self.owner, mode)
                case MemberKind.SYMLINK:
                    with self.root() as root:
                        placing.put_symlink(root, path, member.link, self.owner)
                    self._count(path, 0)
                case MemberKind.HARD_LINK:
                    self._hard_link(top, path, _below(top, member.link))
                case _:
                    self._warn(f"{'/' + os.fsdecode(path)!r} was left out, because it is a {member.kind}")

    def _check_way(self, top: bytes, path: bytes) -> None:
        """Check that no directory on the way from `top` is a link, which would lead elsewhere. Below the root nothing is
        elsewhere. UsageError."""
        above = path[len(top) :].strip(b"/").rpartition(b"/")[0] if top else b""
        if not above:
            return
        with (
            self.root() as root,
            contextlib.suppress(FileNotFoundError),
            files.closing_fd(files.open_in_root(root, top, os.O_PATH | os.O_DIRECTORY)) as top_fd,
        ):
            while above:
                try:
                    os.close(files.open_beneath(top_fd, above, os.O_PATH))
                    return
                except FileNotFoundError:
                    above = above.rpartition(b"/")[0]
                except OSError as exc:
                    if exc.errno != errno.ELOOP:
                        raise
                    raise UsageError(
                        f"the archive's member {_quote(path)} lies behind a symbolic link, which may lead out of {_quote(top)}; "
                        "leave it out, or unpack it where the link leads to"
                    ) from None

    def _hard_link(self, top: bytes, path: bytes, to: bytes) -> None:
        self._check_way(top, to)
        try:
            with self.root() as root:
                placing.put_link(root, path, to, self.owner)
        except FileNotFoundError:
            raise UsageError(
                f"the archive's member {_quote(path)} is a hard link to {_quote(to)}, and there is no such file: the paths of links "
                f"begin at {_quote(top)}, too; put the file into the archive before its link"
            ) from None
        self._count(path, 0)

    def _file(self, path: bytes, member: Member, reader: TarReader, mode: int | None, *, follow: bool) -> None:
        with self.root() as root:
            fd = placing.open_unnamed(root)
        with files.closing_fd(fd):
            spans = iter([(0, member.size)]) if member.extents is None else _pairs(member.extents)
            offset = left = 0
            for piece in reader.pieces():
                self.take(len(piece), 0)
                rest = memoryview(piece)
                while rest:
                    while not left:
                        offset, left = next(spans)
                    count = files.write_all(fd, rest[:left], offset)
                    rest, offset, left = rest[count:], offset + count, left - count
            os.ftruncate(fd, member.size)
            with self.root() as root:
                mtime_ns = member.mtime_ns if self.attributes else None
                placing.put(root, path, fd, self.owner, mode, mtime_ns, follow=follow)
        self._count(path, member.size)

    def _count(self, path: bytes, size: int) -> None:
        self.done.files += 1
        self.done.bytes += size
        if len(self.done.paths) < self.most_paths:
            self.done.paths.append(path)

    def _warn(self, sentence: str) -> None:
        if len(self.done.warnings) < _MOST_WARNINGS:
            self.done.warnings.append(sentence)


@dataclass(frozen=True, slots=True)
class _Stream:
    """The source that a `TarReader` reads."""

    read: Callable[[int], bytes]


def _pairs(extents: array[int]) -> Iterator[tuple[int, int]]:
    return zip(islice(extents, 0, None, 2), islice(extents, 1, None, 2), strict=True)


def _quote(path: bytes) -> str:
    return repr("/" + os.fsdecode(path[:1000]))


def _below(top: bytes, name: bytes) -> bytes:
    """A member's path from the root. UsageError when it leads out of where the archive is unpacked."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts or b"\0" in name:
        raise UsageError(f"the archive has a member {os.fsdecode(name[:200])!r}, which leads elsewhere; leave it out")
    return b"/".join([*filter(None, [top]), *parts])
