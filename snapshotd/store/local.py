"""Values as files of one directory.

    <directory>/<key>                         a value, mode 0600; the parts of its key are folders, mode 0700
    <directory>/@tmp/<pid>.<start>.<random>   a value being written (`@` is in no key); <start> tells later processes of its pid apart

A value is complete and synced under its temporary name before it gets its final one, and the folder is synced after
that; so at any instant the key has nothing or the whole value. An fsync that failed is not tried again: the kernel may
have dropped the data that it could not write, and would report success. The file is removed and the caller gets the
error.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from snapshotd.errors import NO_ROOM, Conflict, DataLoss, NotFound, OutOfSpace
from snapshotd.kernel import files
from snapshotd.kernel.processes import stat_fields
from snapshotd.store.base import Store
from snapshotd.store.keys import as_views, check_range, check_store_key, is_key, is_part

_TMP = "@tmp"
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # not to hang on a fifo that another process put there
_MAX_PARTS = 1024
"""IOV_MAX of Linux: how many parts one writev takes."""
_LARGE_BYTES, _DONTCACHE = 4 << 20, 0x80
"""From here on a value does not stay in memory when it is on the disk (RWF_DONTCACHE of Linux 6.14): it is not read
soon, and would take the place of files that sandboxes work with."""
_COMPARE_BYTES = 1 << 20


class LocalStore(Store):
    """Any number of these, in any number of processes, may use one directory at the same time."""

    def __init__(self, directory: Path) -> None:
        """Open the store in `directory`, creating it (with its parents, mode 0700) if there is none. Removes
        half-written values of dead processes. Errors: OutOfSpace, OSError (not a directory, not permitted)."""
        self.directory = directory
        self._lock = threading.Lock()
        self._synced: set[str] = set()
        """Folders whose own entry is known to be durable. Another process may have died between making one and syncing
        it."""
        self._fds: list[int] = []
        try:
            with _disk(f"the store {directory}"):
                _make_durable(directory)
                self._root = self._open(directory)
                (directory / _TMP).mkdir(mode=0o700, exist_ok=True)
                self._tmp = self._open(directory / _TMP)
                self.remove_leftovers()
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> int:
        self._fds.append(os.open(path, files.DIR_FLAGS))
        return self._fds[-1]

    def close(self) -> None:
        with self._lock:
            for fd in self._fds:
                os.close(fd)
            self._fds.clear()
            self._root = self._tmp = -1  # a late user must not meet new files under these numbers

    def remove_leftovers(self) -> None:
        for name in os.listdir(self._tmp):
            owner = name.split(".")
            if len(owner) == 3 and owner[0].isdecimal() and _start_of(int(owner[0])) == owner[1]:
                continue  # its process is alive and may be writing
            with suppress(FileNotFoundError):  # another process cleans up too
                os.unlink(name, dir_fd=self._tmp)

    def put(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        folder, _, name = check_store_key(key).rpartition("/")
        with _disk(self._where(key)):
            temporary = f"{os.getpid()}.{_start_of(os.getpid())}.{secrets.token_hex(8)}"
            try:
                self._write(temporary, parts)
                self._adopt(key, folder, name, temporary, parts)
            finally:
                with suppress(FileNotFoundError):  # after success it has its final name
                    os.unlink(temporary, dir_fd=self._tmp)

    def _write(self, temporary: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        with files.closing_fd(os.open(temporary, _CREATE, 0o600, dir_fd=self._tmp)) as fd:
            _write_all(fd, as_views(parts))
            os.fsync(fd)

    def _adopt(
        self, key: str, folder: str, name: str, temporary: str, parts: Sequence[bytes | bytearray | memoryview]
    ) -> None:
        """Give a complete, durable temporary file its final name. Conflict if that is taken by something else."""
        try:
            folder_fd = self._open_folder(folder)
        except NotADirectoryError as exc:
            raise Conflict(
                f"a part of the key {key} is itself a key in the store {self.directory}; use another key"
            ) from exc
        try:
            try:
                files.rename_no_replace(self._tmp, temporary.encode(), folder_fd, name.encode())
            except FileExistsError:
                self._compare(key, parts)
                os.fsync(folder_fd)
                return
            try:
                os.fsync(folder_fd)
            except OSError:  # the name may not be durable: take it back rather than let a retry believe in it
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder_fd)
                raise
        finally:
            os.close(folder_fd)

    def _open_folder(self, folder: str) -> int:
        """The folder, made where it is missing, with every entry on the way to it durable. NotADirectoryError."""
        fd, path = os.dup(self._root), ""
        for part in folder.split("/") if folder else ():
            path = f"{path}/{part}"
            try:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=fd)
                deeper = files.open_dir(fd, part.encode())
                if path not in self._synced:
                    self._sync_entry(fd, path, deeper)
            finally:
                os.close(fd)
            fd = deeper
        return fd

    def _sync_entry(self, parent: int, path: str, folder: int) -> None:
        try:
            os.fsync(parent)
        except OSError:
            os.close(folder)
            raise
        with self._lock:
            self._synced.add(path)

    def _compare(self, key: str, parts: Sequence[bytes | bytearray | memoryview]) -> None:
        """Return if the key has just these bytes, and they are durable. Conflict."""
        conflict = Conflict(
            f"there is another value under {key} in the store {self.directory}; values never change, use a new key"
        )
        try:
            fd = self._open_value(key)
        except NotFound:
            raise conflict from None  # a folder
        try:
            views = as_views(parts)
            if os.fstat(fd).st_size != sum(view.nbytes for view in views):
                raise conflict
            offset = 0
            for view in views:
                for start in range(0, view.nbytes, _COMPARE_BYTES):
                    piece = view[start : start + _COMPARE_BYTES]
                    if _read_all(fd, offset, piece.nbytes) != piece:
                        raise conflict
                    offset += piece.nbytes
            os.fsync(fd)
        finally:
            os.close(fd)

    def get(self, key: str, offset: int = 0, length: int | None = None) -> bytes:
        check_range(offset, length)
        with _disk(self._where(key)), files.closing_fd(self._open_value(key)) as fd:
            left = max(0, os.fstat(fd).st_size - offset)
            return _read_all(fd, offset, left if length is None else min(left, length))

    def size_bytes(self, key: str) -> int:
        with _disk(self._where(key)), files.closing_fd(self._open_value(key)) as fd:
            return os.fstat(fd).st_size

    def _open_value(self, key: str) -> int:
        """The value's file. NotFound; DataLoss when something that no store makes lies there."""
        missing = NotFound(f"there is no value under {key} in the store {self.directory}")
        try:
            fd = files.open_beneath(self._root, check_store_key(key).encode(), _READ)
        except (FileNotFoundError, NotADirectoryError):
            raise missing from None
        except OSError as exc:
            if exc.errno in (errno.ELOOP, errno.ENXIO):
                raise DataLoss(
                    f"{self._where(key)} is not a regular file, so another program has replaced it; run `snapshotd check`"
                ) from exc
            raise
        kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind):
            os.close(fd)
            if stat.S_ISDIR(kind):
                raise missing
            raise DataLoss(
                f"{self._where(key)} is not a regular file, so another program has replaced it; run `snapshotd check`"
            )
        return fd

    def keys(self, prefix: str = "") -> Iterator[str]:
        with _disk(f"the store {self.directory}"):
            yield from self._walk(prefix)

    def _walk(self, prefix: str) -> Iterator[str]:
        """Depth first, the names of one folder in memory at a time per level."""
        folder = prefix.rpartition("/")[0]
        if folder and not is_key(folder):
            return
        waiting = [f"{folder}/" if folder else ""]
        while waiting:
            path = waiting.pop()
            if path and not path.endswith("/"):
                yield path
            else:
                waiting += reversed(
                    [child for child in self._children(path) if child.startswith(prefix) or _leads_to(child, prefix)]
                )

    def _children(self, path: str) -> list[str]:
        """Keys and folders (with a slash at the end) right below a folder, in the order of their bytes. Names that no
        store makes are left out."""
        try:
            fd = files.open_beneath(self._root, path.encode().rstrip(b"/"), files.DIR_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            return []  # nothing was ever put there
        try:
            with os.scandir(fd) as entries:
                found = [
                    (e.name, e.is_dir(follow_symlinks=False), e.is_file(follow_symlinks=False))
                    for e in entries
                    if is_part(e.name)
                ]
        finally:
            os.close(fd)
        return sorted(
            f"{path}{name}/" if is_dir else f"{path}{name}" for name, is_dir, is_file in found if is_dir or is_file
        )

    def delete(self, key: str) -> None:
        folder, _, name = check_store_key(key).rpartition("/")
        with _disk(self._where(key)):
            try:
                folder_fd = files.open_beneath(self._root, folder.encode(), files.DIR_FLAGS)
            except (FileNotFoundError, NotADirectoryError):
                return
            try:
                with suppress(FileNotFoundError, IsADirectoryError):
                    os.unlink(name, dir_fd=folder_fd)
                os.fsync(folder_fd)  # also when it is gone: the process that removed it may have died before syncing
            finally:
                os.close(folder_fd)

    def _where(self, key: str) -> str:
        return f"the value {key} of the store {self.directory}"


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """Name the failed operation; a full disk is OutOfSpace, a medium that cannot be read or written DataLoss or
    OSError."""
    try:
        yield
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(f"the disk is full, so {what} cannot be written; free some space and try again") from exc
        if exc.filename is None:
            raise OSError(exc.errno, f"{what}: {exc.strerror}") from exc
        raise


def _start_of(pid: int) -> str | None:
    """Start of a process, in clock ticks since boot. None if there is none that runs: a zombie writes nothing more."""
    try:
        fields = stat_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == b"Z" else fields[19].decode()


def _leads_to(child: str, prefix: str) -> bool:
    """True if `child` is a folder on the way to the keys that begin with `prefix`."""
    return child.endswith("/") and prefix.startswith(child)


def _make_durable(directory: Path) -> None:
    """Make the directory and its parents, and sync every entry that was made (its own in any case)."""
    made = [directory]
    while not made[-1].parent.exists():
        made.append(made[-1].parent)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in reversed(made):
        files.sync_dir(path.parent)


def _write_all(fd: int, views: list[memoryview]) -> None:
    write = _write_large if sum(view.nbytes for view in views) >= _LARGE_BYTES else os.writev
    first = 0
    while first < len(views):
        written = write(fd, views[first : first + _MAX_PARTS])
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]


def _write_large(fd: int, views: list[memoryview]) -> int:
    try:
        return os.pwritev(fd, views, -1, _DONTCACHE)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
    return os.writev(fd, views)  # an older kernel, or a file system that cannot


def _read_all(fd: int, offset: int, length: int) -> bytes:
    """Read `length` bytes, fewer only at the end of the file. DataLoss when the medium fails."""
    try:
        data = os.pread(fd, length, offset)
        while len(data) < length:
            more = os.pread(fd, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data
    except OSError as exc:
        if exc.errno == errno.EIO:
            path = os.readlink(f"/proc/self/fd/{fd}")
            raise DataLoss(
                f"the disk cannot read {path} at offset {offset}; check the disk, then run `snapshotd repair`"
            ) from exc
        raise
