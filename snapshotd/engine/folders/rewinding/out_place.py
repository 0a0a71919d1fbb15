"""A directory in the user's folder for the files that a rewind takes out or makes. A file's number is that of its change.

Everything is done as the folder's user, by descriptors from the folder down.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.scan import open_file
from snapshotd.kernel import fanotify, files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.trees.base import Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind

PLACE = b".snapshotd-rewind-"
"""How the name of the directory begins in which the files lie that came out."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20
CHANGED = "it was changed while the rewind ran"
NO_SUCH_RENAME = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""File systems of networks know no exchange, and no renaming without replacing."""
_NO_SUCH_LINK = (errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
"""A file system has no hard links, or not so many of one file."""

Facts = tuple[int, ...]
"""Mode, size, modification time and number of a file: it is the same one, and was not written to."""


def facts_of(st: os.stat_result) -> Facts:
    """See `Facts`. A directory has its mode alone."""
    return (st.st_mode,) if stat.S_ISDIR(st.st_mode) else (st.st_mode, st.st_size, st.st_mtime_ns, st.st_ino)


def new_place() -> bytes:
    """A name for the directory of a rewind."""
    return PLACE + secrets.token_hex(8).encode()


def file_name(number: int) -> bytes:
    """The name of the file of this change in the place."""
    return b"n%d" % number


@dataclass(slots=True)
class OutPlace:
    """The directory `name` of the folder `folder`."""

    folder: int
    user: HostUser
    name: bytes
    fd: int = -1
    unused: set[int] = field(default_factory=set)
    """New files that have got no name in the folder yet."""

    @contextlib.contextmanager
    def parent(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        above, _, name = path.rpartition(b"/")
        with acting_as(self.user):
            fd = files.open_deep(self.folder, above, one_device=True)
        try:
            yield fd, name
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def reading(self, name: bytes, directory: int) -> Iterator[int]:
        with acting_as(self.user):
            fd = open_file(directory, os.fsdecode(name))
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def hold_open(self) -> Iterator[None]:
        """Open the place, and remove it at the end unless something in it could not be brought back."""
        with acting_as(self.user):
            self.fd = files.open_dir(self.folder, self.name)
        try:
            yield
        finally:
            with contextlib.suppress(OSError), acting_as(self.user):
                for number in self.unused:
                    os.unlink(file_name(number), dir_fd=self.fd)
                for name in os.listdir(self.fd):
                    if name.startswith("w"):
                        os.unlink(name, dir_fd=self.fd)
                os.rmdir(self.name, dir_fd=self.folder)
            os.close(self.fd)

    def give(self, parent: int, name: bytes, number: int, kind: bytes = b"n") -> None:
        """Give a file in the place its name. FileExistsError: something is there."""
        here = kind + b"%d" % number
        with acting_as(self.user):
            try:
                files.rename_no_replace(self.fd, here, parent, name)
            except OSError as exc:
                if exc.errno not in NO_SUCH_RENAME:
                    raise
                os.link(here, name, src_dir_fd=self.fd, dst_dir_fd=parent, follow_symlinks=False)
                os.unlink(here, dir_fd=self.fd)

    def difference(
        self, name: bytes, path: bytes, view: View, directory: int | None = None, *, whole_mode: bool
    ) -> str | None:
        """Why a file in the place (or in `directory`) is not what a view has at its path. None: it is. Without `whole_mode` the
        nine bits count."""
        directory = self.fd if directory is None else directory
        try:
            wanted = view.child(TOP + b"/" + path)
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            entry = Entry.of(st)
            if entry.kind is not wanted.entry.kind:
                return "something else is there by now"
            if entry.kind is Kind.SYMLINK:
                with acting_as(self.user):
                    target = os.readlink(name, dir_fd=directory)
                return None if os.fsencode(target) == view.readlink_of(wanted) else CHANGED
            bits = 0o7777 if whole_mode else 0o777
            if entry.mode & bits != wanted.entry.mode & bits or entry.size != wanted.entry.size:
                return CHANGED
            with self.reading(name, directory) as fd:
                if is_written(fd):
                    return "a program has it open for writing; end it, and rewind again"
                for offset in range(0, entry.size, _PIECE_BYTES):
                    if view.read_child(wanted, offset, _PIECE_BYTES) != os.pread(fd, _PIECE_BYTES, offset):
                        return CHANGED
                return None if os.fstat(fd).st_ctime_ns == st.st_ctime_ns else CHANGED
        except (FileNotFoundError, NotADirectoryError):
            return "something else is there by now"
        except OSError as exc:
            return f"it cannot be compared: {exc.strerror}"


class NewFiles:
    """Makes files as the view `to` has them, in the place. Names of one file there become names of one file."""

    def __init__(self, place: OutPlace, to: View) -> None:
        self._place, self._user, self._to = place, place.user, to
        self._new: dict[tuple[int, int], tuple[bytes, Facts]] = {}
        """Inode of a file with several names in `to`, to another name in the place of the one that was made for it."""

    def write(self, number: int, path: bytes, entry: Entry) -> Facts:
        """Make the new file in the place, whole under its number."""
        half = b"w%d" % number
        if entry.inode in self._new:
            first, facts = self._new[entry.inode]
            try:
                with acting_as(self._user):
                    os.link(first, half, src_dir_fd=self._place.fd, dst_dir_fd=self._place.fd, follow_symlinks=False)
                    os.rename(half, file_name(number), src_dir_fd=self._place.fd, dst_dir_fd=self._place.fd)
            except OSError as exc:
                if exc.errno not in _NO_SUCH_LINK:
                    raise
            else:
                self._place.unused.add(number)
                return facts
        if entry.kind is Kind.SYMLINK:
            target = self._to.readlink(TOP + b"/" + path)
            with acting_as(self._user):
                os.symlink(target, half, dir_fd=self._place.fd)
        else:
            with acting_as(self._user):
                fd = os.open(half, _NEW, 0o600, dir_fd=self._place.fd)
            try:
                self._to.copy_child(self._to.child(TOP + b"/" + path), fd)
                with acting_as(self._user):
                    os.fchmod(fd, entry.mode & 0o777)
            finally:
                os.close(fd)
        self._give_to_owner(half, entry)
        with acting_as(self._user):
            os.rename(half, file_name(number), src_dir_fd=self._place.fd, dst_dir_fd=self._place.fd)
        self._place.unused.add(number)
        facts = facts_of(os.stat(file_name(number), dir_fd=self._place.fd, follow_symlinks=False))
        if entry.kind is Kind.FILE and entry.nlink > 1:
            self._keep_for_links(number, entry, facts)
        return facts

    def _keep_for_links(self, number: int, entry: Entry, facts: Facts) -> None:
        """Give a new file another name in the place, which its further names are made from."""
        other = b"w-%d" % number
        try:
            with acting_as(self._user):
                os.link(
                    file_name(number),
                    other,
                    src_dir_fd=self._place.fd,
                    dst_dir_fd=self._place.fd,
                    follow_symlinks=False,
                )
        except OSError as exc:
            if exc.errno not in _NO_SUCH_LINK:
                raise
        else:
            self._new[entry.inode] = other, facts

    def _give_to_owner(self, name: bytes, entry: Entry) -> None:
        """Give a new file in the place the owner and group that it had, as far as the user may."""
        uid = entry.uid if self._user.uid == 0 else -1
        with contextlib.suppress(OSError), acting_as(self._user):
            os.chown(name, uid, entry.gid, dir_fd=self._place.fd, follow_symlinks=False)


def is_written(fd: int) -> bool:
    """True if a process may write to the file. A file system that does not tell counts as one without writers."""
    try:
        return fanotify.has_writer(fd)
    except OSError:
        return False
