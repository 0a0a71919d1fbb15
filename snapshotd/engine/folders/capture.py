"""The changes of a folder as one layer. The folder's files are opened as its user, the layer's are the daemon's.

A file is copied once, however many names it has: the others become hard links in the layer, as they are in the folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from snapshotd.engine.folders import ignore
from snapshotd.engine.folders.scan import LONGEST_S as LONGEST_LOOK_S
from snapshotd.engine.folders.scan import FolderScan, Mark, mark_of, open_file, settled_mark
from snapshotd.errors import LimitExceeded
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as

TOP = b"workspace"
"""Where a folder lies in its snapshots: where a fork of one has its workspace, too."""
LONGEST_S = 300.0
"""The longest that one snapshot copies files of a folder."""
AGAIN_S = 600.0
"""So long after a refusal a folder is tried again, and at once after a change of the rules at its top."""
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EXDEV)
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Taken = tuple[Mark | None, bytes | None]
"""As `FolderIndex.note_captured` gets it."""


@dataclass(slots=True)
class Capture:
    """Writes the changes of a scan into the root of a layer. `took`: what the index is told once the snapshot exists;
    `unread`: the paths that the user may not read; `longest_s`: the time for all of it."""

    folder: int
    user: HostUser
    scan: FolderScan
    longest_s: float = LONGEST_S
    took: list[tuple[str, Mark | None, bytes | None]] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    _copies: dict[int, tuple[str, _Taken]] = field(default_factory=dict)
    """Inode of a file with several names, to the path of its copy in the layer."""

    def write(self, root: int) -> None:
        """Write the changes below `root`, the directory of the whole tree (`layers.amend`). LimitExceeded: it takes too
        long."""
        ends = time.monotonic() + self.longest_s
        top = files.make_dirs(root, TOP)
        try:
            for path in reversed(self.scan.deleted):
                self._remove(top, path)
                self.took.append((path, None, None))
            for count, (path, mark) in enumerate(self.scan.changed.items()):
                if time.monotonic() > ends:
                    raise LimitExceeded(
                        f"{count} of {len(self.scan.changed)} changed files of {os.readlink(files.fd_path(self.folder))} could "
                        f"be copied in {self.longest_s:g} s; name what needs no snapshot in a .snapshotdignore at its top"
                    )
                self.took.append((path, *self._take(top, path, mark)))
        finally:
            os.close(top)

    def _take(self, top: int, path: str, mark: Mark) -> _Taken:
        parent, _, name = path.rpartition("/")
        target = files.make_dirs(top, os.fsencode(parent))
        try:
            if stat.S_ISDIR(mark[0]):
                return self._copy_directory(target, name, mark), None
            files.remove_tree(target, name)
            with self._open_source(parent) as source:
                if source is None:
                    return None, None
                if stat.S_ISLNK(mark[0]):
                    return self._copy_link(source, target, name), None
                return self._copy_file(source, top, target, path)
        finally:
            os.close(target)

    @contextlib.contextmanager
    def _open_source(self, parent: str) -> Iterator[int | None]:
        """The folder's directory, opened as the user. None: it has gone."""
        try:
            with acting_as(self.user):
                fd = files.open_deep(self.folder, os.fsencode(parent), one_device=True)
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)

    def _copy_directory(self, target: int, name: str, mark: Mark) -> Mark:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=target, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=target)
        fd = files.make_dirs(target, os.fsencode(name))
        try:
            os.fchown(fd, self.user.uid, self.user.gid)
            os.fchmod(fd, stat.S_IMODE(mark[0]))
        finally:
            os.close(fd)
        return mark

    def _copy_link(self, source: int, target: int, name: str) -> Mark | None:
        try:
            with acting_as(self.user):
                st = os.stat(name, dir_fd=source, follow_symlinks=False)
                text = os.readlink(name, dir_fd=source)
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            return None
        os.symlink(text, name, dir_fd=target)
        os.chown(name, st.st_uid, st.st_gid, dir_fd=target, follow_symlinks=False)
        os.utime(name, ns=(st.st_mtime_ns, st.st_mtime_ns), dir_fd=target, follow_symlinks=False)
        return mark_of(st)

    def _copy_file(self, source: int, top: int, target: int, path: str) -> _Taken:
        name = path.rpartition("/")[2]
        try:
            with acting_as(self.user):
                read = open_file(source, name)
        except PermissionError as exc:
            self.scan.warnings.append(f"{path} cannot be read: {exc.strerror}")
            self.unread.append(path)
            return self.scan.changed[path], None
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            return None, None
        try:
            before = os.fstat(read)
            copied = self._link_copy(before, top, target, name) if before.st_nlink > 1 else None
            if copied is not None:
                return copied
            taken = _copy(read, before, target, name)
            if before.st_nlink > 1:
                self._copies[before.st_ino] = path, taken
            return taken
        finally:
            os.close(read)

    def _link_copy(self, st: os.stat_result, top: int, target: int, name: str) -> _Taken | None:
        """Give a file's copy in the layer this further name. None: there is no copy, or the file has changed since."""
        path, taken = self._copies.get(st.st_ino, ("", (None, None)))
        if taken[0] != mark_of(st):
            return None
        parent, _, first = path.rpartition("/")
        directory = files.open_deep(top, os.fsencode(parent))
        try:
            os.link(first, name, src_dir_fd=directory, dst_dir_fd=target, follow_symlinks=False)
        except OSError as exc:
            if exc.errno != errno.EMLINK:  # the layers' file system allows fewer names of one file
                raise
            return None
        finally:
            os.close(directory)
        return taken

    def _remove(self, top: int, path: str) -> None:
        parent, _, name = path.rpartition("/")
        try:
            target = files.open_deep(top, os.fsencode(parent))
        except OSError:
            return  # it went with its directory
        try:
            files.remove_tree(target, name)
        finally:
            os.close(target)


def _copy(read: int, before: os.stat_result, target: int, name: str) -> _Taken:
    write = os.open(name, _NEW, 0o600, dir_fd=target)
    try:
        files.copy_data(read, write, before.st_size)
        os.fchown(write, before.st_uid, before.st_gid)
        os.fchmod(write, stat.S_IMODE(before.st_mode))
        os.utime(write, ns=(before.st_mtime_ns, before.st_mtime_ns))
        return settled_mark(read, before)
    finally:
        os.close(write)


class Refusal:
    """The last refusal of a folder that took too long. It is not tried again at every hook, or an agent would wait each
    time for nothing. The caller has the folder's lock."""

    def __init__(self) -> None:
        self._sentence = ""
        self._until = 0.0
        self._rules: tuple[Mark | None, ...] = ()

    def check(self, root: int) -> None:
        """LimitExceeded: the folder was refused a short while ago, and its rules have not changed since."""
        if self._sentence and time.monotonic() < self._until and self._rules == _rules(root):
            raise LimitExceeded(self._sentence)
        self._sentence = ""

    @contextlib.contextmanager
    def note(self, root: int) -> Iterator[None]:
        """Note a refusal inside that came after a long time."""
        began, rules = time.monotonic(), _rules(root)
        try:
            yield
        except LimitExceeded as exc:
            ended = time.monotonic()
            if ended - began >= LONGEST_LOOK_S / 2:
                self._sentence, self._until, self._rules = exc.message, ended + AGAIN_S, rules
            raise


def _rules(root: int) -> tuple[Mark | None, ...]:
    """The marks of the files with rules at the top, as they lie there."""
    found: list[Mark | None] = []
    for name in ignore.RULES:
        try:
            found.append(mark_of(os.stat(name, dir_fd=root, follow_symlinks=False)))
        except OSError:
            found.append(None)
    return tuple(found)
