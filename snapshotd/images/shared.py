"""Images built from packages, kept once for all state directories of this machine: the next one that needs the same
recipe unpacks in seconds what took the first one minutes to build.

    <directory>/<recipe>-<sha256>.tar.zst    one build: digest of the recipe and its mirrors, digest of this very file
    <directory>/lock                         byte N is locked by whoever makes or reads the build that N stands for

The directory belongs to the user of the daemon alone (0700), and so does every file in it: what anybody else could have
written is never read. The digest in a name finds a damaged file, which is removed and built again. A build is used for
two weeks, since Debian's packages get security updates; of those together that take more than the limit, the ones that
were used least lately go.

Concurrency: processes and threads. The second of two that need the same build waits and finds it. Durability: none is
needed. A file is complete when it has its name, and a power cut may lose it or damage it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

import zstandard

from snapshotd.config import read_variables
from snapshotd.errors import NO_ROOM, OutOfSpace, UsageError
from snapshotd.images.base import Progress
from snapshotd.images.decompress import plain
from snapshotd.images.hashing import HashingReader
from snapshotd.kernel import files

LIMIT_BYTES = 4 << 30
_USED_FOR_S = 14 * 86400
_SUFFIX = ".tar.zst"
_PART = ".part"
_LOCK = "lock"
_LEVEL = 3
_PIECE_BYTES = 1 << 20
_TAR = ("tar", "--numeric-owner", "--xattrs", "--xattrs-include=*")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SharedBuilds:
    """The builds in a directory, which is made at the first use. `limit_bytes`: what all files may take together."""

    def __init__(self, directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
        self._path = directory
        self._limit_bytes = limit_bytes

    def fill(self, key: str, root: Path, build: Callable[[], None], progress: Progress) -> None:
        """Fill the empty directory `root` with the build `key` (a hexadecimal digest), or by `build`, whose result is
        kept then. Raises the errors of `build`, and OutOfSpace for `root`; nothing that is wrong with the directory of
        builds is an error."""
        with self._open(progress) as directory:
            if directory is None:
                build()
                return
            with _lock(directory, key, progress):
                if self._take(directory, key, root, progress):
                    return
                build()
                try:
                    self._keep(directory, key, root)
                except OSError as exc:
                    progress(f"the build is not kept for other state directories: {exc.strerror or exc}")

    @contextmanager
    def _open(self, progress: Progress) -> Iterator[int | None]:
        """A descriptor of the directory. None, with the reason told, if it is not ours alone."""
        try:
            fd = _own_directory(self._path)
        except OSError as exc:
            progress(f"builds in {self._path} are not used: {exc.strerror or exc}")
            yield None
            return
        with files.closing_fd(fd):
            yield fd

    def _take(self, directory: int, key: str, root: Path, progress: Progress) -> bool:
        """Unpack a build that is kept. False if there is none, or none that is whole."""
        for name in _names(directory, f"{key}-"):
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            except OSError:
                continue
            with open(fd, "rb", buffering=0) as file:
                found = os.fstat(fd)
                if _is_ours(found) and time.time() - found.st_mtime < _USED_FOR_S:
                    progress("unpacking the image, which this machine has built before")
                    if _unpack(file, name.removesuffix(_SUFFIX).partition("-")[2], root):
                        os.utime(fd, ns=(time.time_ns(), found.st_mtime_ns))
                        return True
                    progress("that build is damaged, so it is built again")
            os.unlink(name, dir_fd=directory)
        return False

    def _keep(self, directory: int, key: str, root: Path) -> None:
        part = f"{key}{_PART}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=directory)  # a process was killed that made it
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            with open(fd, "wb", buffering=0) as file:
                digest = _pack(root, file)
            os.rename(part, f"{key}-{digest}{_SUFFIX}", src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.unlink(part, dir_fd=directory)
            raise
        self._make_room(directory)

    def _make_room(self, directory: int) -> None:
        """Remove the builds that were used least lately, but for the newest use."""
        found = [(os.stat(name, dir_fd=directory, follow_symlinks=False), name) for name in _names(directory, "")]
        total = sum(st.st_size for st, _ in found)
        for st, name in sorted(found, key=lambda item: item[0].st_atime_ns)[:-1]:
            if total <= self._limit_bytes:
                return
            os.unlink(name, dir_fd=directory)  # a process that reads it has it open
            total -= st.st_size


def _own_directory(path: Path) -> int:
    """A descriptor of the directory, made with its parents if need be, each for its owner alone. PermissionError: it is
    another user's, or others may write there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, files.DIR_FLAGS)
    try:
        if not _is_ours(os.fstat(fd)):
            raise PermissionError(0, "it belongs to another user, or is open to others")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_ours(st: os.stat_result) -> bool:
    return st.st_uid == os.getuid() and not st.st_mode & _OTHERS


@contextmanager
def _lock(directory: int, key: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of one build. It belongs to the open file, so threads exclude each other, too."""
    with files.closing_fd(
        os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    ) as fd:
        wanted = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, int(key[:12], 16), 1, 0)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            progress("another daemon is building this image; waiting for it")
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, wanted)
        yield


def _names(directory: int, prefix: str) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(prefix) and name.endswith(_SUFFIX)]


def _pack(root: Path, target: RawIOBase) -> str:
    """Write a tree as a packed tar; the digest of what was written. OSError."""
    digest = hashlib.sha256()
    command = [*_TAR, "--sort=name", "-C", str(root), "-cf", "-", "."]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as tar:
        assert tar.stdout is not None
        packer = zstandard.ZstdCompressor(_LEVEL).compressobj()
        while piece := tar.stdout.read(_PIECE_BYTES):
            _write(target, digest, packer.compress(piece))
        _write(target, digest, packer.flush())
    if tar.returncode != 0:
        raise OSError(0, "tar failed")
    return digest.hexdigest()


def _write(target: RawIOBase, digest: Any, data: bytes) -> None:
    files.write_all(target.fileno(), data)
    digest.update(data)


def _unpack(source: RawIOBase, digest: str, root: Path) -> bool:
    """Fill the empty directory `root`. False, and `root` is empty again, if the file is damaged. OutOfSpace."""
    stream = HashingReader(source)
    # tar takes nobody but the user 0 for one who may give files away, and an ordinary user's daemon is another one.
    command = [*_TAR, "--same-owner", "-C", str(root), "-xpf", "-"]
    environment = {**read_variables(["PATH"]), "LC_ALL": "C"}
    with open(os.memfd_create("said"), "w+b", buffering=0) as said:  # tar would wait for the reader of a full pipe
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said, env=environment) as tar:
            assert tar.stdin is not None
            with contextlib.suppress(BrokenPipeError, UsageError):  # it ended early, which its exit code tells; damaged
                content = plain(stream, "the build")
                while not _lacks_room(said) and (piece := content.read(_PIECE_BYTES)):
                    tar.stdin.write(piece)
            if _lacks_room(said):
                tar.kill()  # it would try all files that are left
            with contextlib.suppress(BrokenPipeError):
                tar.stdin.close()
        if tar.returncode == 0 and stream.finish() == digest:
            return True
        if _lacks_room(said):
            raise OutOfSpace(
                f"the image cannot be unpacked to {root} because the disk is full: free some space and try again"
            )
    _empty(root)
    return False


def _lacks_room(said: RawIOBase) -> bool:
    """The messages of tar speak of a full disk."""
    text = os.pread(said.fileno(), _PIECE_BYTES, 0).decode("utf-8", "replace")
    return any(os.strerror(number) in text for number in NO_ROOM)


def _empty(root: Path) -> None:
    with files.closing_fd(os.open(root, files.DIR_FLAGS)) as fd:
        files.empty_dir(fd)
