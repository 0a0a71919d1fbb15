"""A file that is there whole or not at all: written beside its place, then renamed to it. It replaces a regular
file and nothing else."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotd.errors import NO_ROOM, Conflict, OutOfSpace, SnapshotdError, UsageError

PART_SUFFIX = ".part"


@contextmanager
def part_file(path: Path) -> Iterator[Callable[[bytes], object]]:
    """Give a function that writes to `path` + ".part". At the end of the block the file is durable and has its name, in
    place of an older one; when the block raises, it is removed. Mode 0600: files of agents are no business of other
    users.

    A special file is written to as it is, see `open_special`. UsageError when the file cannot be made, Conflict when
    another process is writing it, OutOfSpace.
    """
    special = open_special(path)
    if special is not None:
        with open(special, "wb", buffering=0):
            yield _writer(special, path)
        return
    part = path.with_name(path.name + PART_SUFFIX)
    fd = _open(part)
    whole = False
    try:
        yield _writer(fd, part)
        with _raise_ours(path):
            os.fsync(fd)
            os.rename(part, path)
            whole = True
            _flush_folder(path.parent)
    finally:
        if not whole:
            part.unlink(missing_ok=True)  # before its lock goes, so that it cannot be another's by now
        os.close(fd)


def open_special(path: Path) -> int | None:
    """A descriptor for writing to what lies at `path` as it is: a device, a pipe, or one of this process's own
    descriptors under its name (/dev/stdout). None: there is a regular file or nothing, to be replaced.

    A pipe waits for its reader. UsageError for a directory, a socket, and any other symbolic link: whoever made it may
    mean a file that the user does not.
    """
    with _raise_ours(path):
        own = own_descriptor(path)
        if own is not None:
            return os.dup(own)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return None
        if stat.S_ISREG(mode):
            return None
        for is_kind, what in (
            (stat.S_ISDIR, "a directory; name a file in it"),
            (stat.S_ISLNK, "a symbolic link; name the file that it leads to"),
            (stat.S_ISSOCK, "a socket; name a file"),
        ):
            if is_kind(mode):
                raise UsageError(f"{path} is {what}")
        return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)


def own_descriptor(path: Path) -> int | None:
    """The number, if the path is a name of one of this process's descriptors: /dev/stdin, /dev/fd/3, /proc/self/fd/3."""
    folder, name = os.path.realpath(path.parent), path.name
    if folder == "/dev" and name in ("stdin", "stdout", "stderr"):
        return ("stdin", "stdout", "stderr").index(name)
    return int(name) if folder == f"/proc/{os.getpid()}/fd" and name.isdecimal() else None


def _open(part: Path) -> int:
    """The file, empty and locked. One that a killed writer left is taken over; a lock dies with its process."""
    while True:
        with _raise_ours(part):
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(fd, part):
                    os.ftruncate(fd, 0)
                    return fd
            except BlockingIOError as exc:
                os.close(fd)
                raise Conflict(f"another process is writing {part}; wait for it, or name another file") from exc
            except BaseException:
                os.close(fd)
                raise
            os.close(
                fd
            )  # its writer finished between our open and our lock: it has its final name and is not ours to touch


def _is_at(fd: int, path: Path) -> bool:
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    own = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _writer(fd: int, path: Path) -> Callable[[bytes], object]:
    def write(data: bytes) -> None:
        view = memoryview(data)
        with _raise_ours(path):
            while view:
                view = view[os.write(fd, view) :]

    return write


@contextmanager
def _raise_ours(path: Path) -> Iterator[None]:
    """The system's errors as ours. BrokenPipeError (a pipe's reader is gone) passes through unchanged."""
    try:
        yield
    except (SnapshotdError, BrokenPipeError):
        raise
    except OSError as exc:
        if exc.errno in (*NO_ROOM, errno.EFBIG):
            raise OutOfSpace(
                f"{path} cannot be written to its end: {exc.strerror}; free some space or name a file elsewhere"
            ) from exc
        raise UsageError(f"{path} cannot be written: {exc.strerror}; name another file") from exc


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
