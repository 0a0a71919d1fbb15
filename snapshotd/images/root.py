"""An image's root directory: making it fit to be a sandbox's lowest layer, and counting its files.

The files are foreign. Nothing here follows a symbolic link: the container's mount points must be real directories,
because root mounts on them later.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from snapshotd.errors import UsageError
from snapshotd.kernel import files

MADE_AT_NS = 1_735_689_600 * 10**9
"""The time of everything we add to an image (2025-01-01), so that one source always gives one tree."""
_MOUNT_POINTS: tuple[tuple[bytes, int], ...] = (
    (b"proc", 0o555),
    (b"sys", 0o555),
    (b"dev", 0o755),
    (b"run", 0o755),
    (b"run/snapshotd", 0o755),
)
_DIRECTORIES: tuple[tuple[bytes, int], ...] = ((b"tmp", 0o1777), (b"workspace", 0o755), (b"etc", 0o755))
_FILES = (b"etc/hosts", b"etc/hostname", b"etc/resolv.conf")


def prepare_root(root_fd: int) -> None:
    """Make sure that everything a container mounts on is there: directories, and three files in /etc.

    Existing entries stay as they are, times of changed directories included. UsageError when a mount point is a link or
    a file. A /etc/resolv.conf that is a link is left alone: the container driver then leaves it alone too.
    """
    for path, mode in _MOUNT_POINTS:
        _directory(root_fd, path, mode, "a sandbox mounts its own there")
    for path, mode in _DIRECTORIES:
        _directory(root_fd, path, mode, "every sandbox has one")
    with files.closing_fd(files.open_dir(root_fd, b"etc")) as etc, _keep_times(etc):
        for path in _FILES:
            _file(etc, path.rpartition(b"/")[2])


def _directory(root_fd: int, path: bytes, mode: int, why: str) -> None:
    parent_path, _, name = path.rpartition(b"/")
    with files.closing_fd(files.open_beneath(root_fd, parent_path, files.DIR_FLAGS)) as parent:
        try:
            os.close(files.open_dir(parent, name))
            return
        except FileNotFoundError:
            pass
        except OSError as exc:
            if exc.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            message = (
                f"/{path.decode()} of the image is not a real directory but a link or file, and {why}; repair the image"
            )
            raise UsageError(message) from exc
        with _keep_times(parent):
            os.mkdir(name, 0o700, dir_fd=parent)
            with files.closing_fd(files.open_dir(parent, name)) as made:
                files.give(made, 0, 0)  # an ordinary user's daemon is another user in its namespace
                os.fchmod(made, mode)
                os.utime(made, ns=(MADE_AT_NS, MADE_AT_NS))


def _file(etc: int, name: bytes) -> None:
    try:
        kind = stat.S_IFMT(os.stat(name, dir_fd=etc, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        with files.closing_fd(
            os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=etc)
        ) as fd:
            files.give(fd, 0, 0)
            os.fchmod(fd, 0o644)
            os.utime(fd, ns=(MADE_AT_NS, MADE_AT_NS))
        return
    if kind != stat.S_IFREG and not (kind == stat.S_IFLNK and name == b"resolv.conf"):
        raise UsageError(
            f"/etc/{name.decode()} of the image is not a regular file, and a sandbox mounts its own there; repair the image"
        )


@contextmanager
def _keep_times(dir_fd: int) -> Iterator[None]:
    before = os.fstat(dir_fd).st_mtime_ns
    yield
    os.utime(dir_fd, ns=(before, before))


def walk(root_fd: int) -> Iterator[tuple[int, bytes, os.stat_result]]:
    """Every entry below a root that does not change: descriptor of its directory, name, stat; a directory comes after
    its entries.

    Iterative, two descriptors at a time, any depth.
    """
    fd = os.open(".", files.DIR_FLAGS, dir_fd=root_fd)
    stack: list[tuple[bytes, list[bytes]]] = []
    try:
        pending = yield from _flat(fd)
        while True:
            if pending:
                name = pending.pop()
                stack.append((name, pending))
                fd = _move(fd, name)
                pending = yield from _flat(fd)
            elif stack:
                name, pending = stack.pop()
                fd = _move(fd, b"..")
                yield fd, name, os.stat(name, dir_fd=fd, follow_symlinks=False)
            else:
                return
    finally:
        os.close(fd)


def _flat(fd: int) -> Generator[tuple[int, bytes, os.stat_result], None, list[bytes]]:
    """The non-directories of one directory; its generator's value is the names of the directories."""
    directories = []
    for entry in os.listdir(fd):
        name = os.fsencode(entry)
        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
        if stat.S_ISDIR(st.st_mode):
            directories.append(name)
        else:
            yield fd, name, st
    return sorted(directories, reverse=True)


def _move(fd: int, name: bytes) -> int:
    moved = files.open_dir(fd, name)
    os.close(fd)
    return moved


def measure(root_fd: int) -> tuple[int, int]:
    """Bytes on disk and number of entries but directories. A hard-linked file counts once in bytes."""
    size = count = 0
    seen: set[int] = set()
    for _, _, st in walk(root_fd):
        if stat.S_ISDIR(st.st_mode):
            continue
        count += 1
        if st.st_nlink > 1:
            if st.st_ino in seen:
                continue
            seen.add(st.st_ino)
        size += st.st_blocks * 512
    return size, count


def settle_times(root_fd: int, since_ns: int, to_ns: int) -> None:
    """Set the modification time of everything changed since `since_ns` (by a build) to `to_ns`; files of packages keep
    their own."""
    for fd, name, st in walk(root_fd):
        if st.st_mtime_ns >= since_ns:
            os.utime(name, ns=(to_ns, to_ns), dir_fd=fd, follow_symlinks=False)
    if os.fstat(root_fd).st_mtime_ns >= since_ns:
        os.utime(root_fd, ns=(to_ns, to_ns))
