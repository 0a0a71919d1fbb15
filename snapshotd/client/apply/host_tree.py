"""A folder of this machine that snapshots are compared with and applied to: read through directory descriptors, never
through a link.

Paths are bytes relative to the folder, and come from a sandbox. Each is resolved one component at a time with
O_NOFOLLOW, so that no link in the folder leads out of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import Conflict, UsageError
from snapshotd.trees.three_way import InTheWay, Present

DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20
_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char-device",
    stat.S_IFBLK: "block-device",
}


@dataclass(frozen=True, slots=True)
class Stamp:
    """By these an entry of the folder is known again after it was renamed. A directory's size and time are 0: they
    change with what is in it. No device number: it need not survive a reboot, and nothing is renamed to another file
    system."""

    mode: int
    inode: int
    size: int
    mtime_ns: int

    @staticmethod
    def of(st: os.stat_result) -> Stamp:
        if stat.S_ISDIR(st.st_mode):
            return Stamp(st.st_mode, st.st_ino, 0, 0)
        return Stamp(st.st_mode, st.st_ino, st.st_size, st.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class HostEntry(Present):
    """An entry of the folder."""

    stamp: Stamp
    owner: tuple[int, int]
    links: int = 1
    """Number of a file's names, wherever they are."""


class HostTree:
    """The folder `where`, held by a descriptor and by a lock that keeps another apply out. UsageError when it is no
    folder that can be opened, Conflict when somebody else is applying to it."""

    def __init__(self, where: Path) -> None:
        self.where = where
        try:
            self.fd = os.open(where, DIR_FLAGS & ~os.O_NOFOLLOW)  # the user's own path may be a link
        except OSError as exc:
            raise UsageError(
                f"the folder {where} cannot be opened: {exc.strerror}; name one that exists, "
                "or write all files into a new one with `snapshotd restore`"
            ) from exc
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(self.fd)
            raise Conflict(f"something else is just being applied to {where}; wait for it and repeat this") from exc
        except OSError:
            pass  # some network file systems lock no directories

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> HostTree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def parent(self, path: bytes) -> Iterator[int]:
        """The directory that holds `path`, as a descriptor. FileNotFoundError; InTheWay for a component that is no
        directory."""
        fd = os.dup(self.fd)
        try:
            names = path.split(b"/")[:-1]
            for number, name in enumerate(names):
                try:
                    deeper = os.open(name, DIR_FLAGS, dir_fd=fd)
                except FileNotFoundError:
                    raise
                except OSError:
                    found = os.lstat(name, dir_fd=fd) if name else None
                    if found is None or stat.S_ISDIR(found.st_mode):
                        raise
                    raise InTheWay(b"/".join(names[: number + 1]), _kind(found)) from None
                os.close(fd)
                fd = deeper
            yield fd
        finally:
            os.close(fd)

    def look(self, path: bytes) -> HostEntry | None:
        """The entry at `path`, links not followed; None if there is none. InTheWay."""
        try:
            with self.parent(path) as fd:
                name = base_name(path)
                found = os.lstat(name, dir_fd=fd)
                target = os.readlink(name, dir_fd=fd) if stat.S_ISLNK(found.st_mode) else None
        except FileNotFoundError:
            return None
        permissions = stat.S_IMODE(found.st_mode) & 0o777
        return HostEntry(
            _kind(found),
            permissions,
            found.st_size,
            target,
            Stamp.of(found),
            (found.st_uid, found.st_gid),
            found.st_nlink,
        )

    def names(self, path: bytes) -> list[bytes]:
        """The names in a directory."""
        with self.parent(path) as fd:
            directory = os.open(base_name(path), DIR_FLAGS, dir_fd=fd)
        try:
            return [os.fsencode(name) for name in os.listdir(directory)]
        finally:
            os.close(directory)

    def read(self, path: bytes) -> Iterator[bytes]:
        """A regular file's content in pieces. UsageError when it cannot be read."""
        try:
            with self.parent(path) as parent:
                fd = os.open(base_name(path), _FILE_FLAGS, dir_fd=parent)
            with open(fd, "rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    yield piece
        except OSError as exc:
            raise UsageError(
                f"{os.fsdecode(path)!r} in {self.where} cannot be read: {exc.strerror}; nothing was changed"
            ) from exc


def base_name(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _kind(found: os.stat_result) -> str:
    return _KINDS[stat.S_IFMT(found.st_mode)]
