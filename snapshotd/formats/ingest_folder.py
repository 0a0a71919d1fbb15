"""Copy a host folder into a directory: a workspace, or an unpacked root file system.

The folder may change, also by an attacker, while it is read. So every entry is held by an O_PATH descriptor before its
status is read: the file that was checked is the one that is read, and no link is followed. The walk holds two
descriptors whatever the depth: it goes up by `..` and checks that it arrived where it came from.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from snapshotd.errors import Conflict, LimitExceeded, NotFound, NotPermitted, UsageError
from snapshotd.formats import ingest_nodes as nodes
from snapshotd.formats.ingest_nodes import IngestReport, printable
from snapshotd.kernel import files, turns
from snapshotd.kernel.namespaces import as_seen_by

MAX_ENTRIES = 10_000_000
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_TRIES = 3


def ingest_folder(source: Path, target_fd: int, namespace_pid: int = 0) -> IngestReport:
    """Copy everything in `source` (a link to a folder is followed, links inside are copied as links) into the empty
    directory `target_fd`. The path is meant as the process `namespace_pid` sees it (0: as this one does).

    Content by reflink where the file systems can, holes kept; owner, mode, times, hard links and extended attributes
    too. Left out, with a warning: sockets, device nodes, overlay marks, host labels, files that vanish meanwhile. A
    file that keeps changing is copied as it was last read, with a warning.

    Raises NotFound, UsageError (not a folder, or it holds the target), NotPermitted (naming the unreadable file),
    LimitExceeded, OutOfSpace. The target then holds part of the folder.
    """
    source_fd = _open_source(source, namespace_pid)
    try:
        _refuse_nesting(source, source_fd, target_fd)
        root = nodes.writable_root(target_fd)
    except BaseException:
        os.close(source_fd)
        raise
    return _FolderIngest(source, source_fd, root).run()


def _open_source(source: Path, namespace_pid: int) -> int:
    try:
        return as_seen_by(namespace_pid, lambda: os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except FileNotFoundError as exc:
        raise NotFound(f"there is no folder {source}; check the path (it is taken on the daemon's machine)") from exc
    except NotADirectoryError as exc:
        raise UsageError(f"{source} is not a folder; give the folder that holds it") from exc
    except PermissionError as exc:
        raise NotPermitted(
            f"the folder {source} cannot be read: {exc.strerror}; give the daemon's user access to it"
        ) from exc
    except (OSError, ValueError) as exc:
        raise UsageError(
            f"the folder {source!s} cannot be opened: {getattr(exc, 'strerror', None) or exc}; check the path"
        ) from exc


def _refuse_nesting(source: Path, source_fd: int, target_fd: int) -> None:
    """A folder that holds the layers would be copied into itself until the disk is full."""
    if files.identity_of(os.fstat(source_fd)) in files.list_ancestors(target_fd):
        raise UsageError(f"the folder {source} holds snapshotd's own state directory; choose a folder beside it")


def _stamp(st: os.stat_result) -> tuple[int, int, int]:
    return st.st_size, st.st_mtime_ns, st.st_ctime_ns


@dataclass(slots=True)
class _Level:
    """One directory of the walk, from the root down: its own facts, and the sub-directories that are still to be
    copied."""

    path: bytes
    st: os.stat_result
    target: tuple[int, int]
    xattrs: dict[bytes, bytes]
    pending: list[bytes] = field(default_factory=list)


class _FolderIngest:
    def __init__(self, source: Path, source_fd: int, target_fd: int) -> None:
        self._name = str(source)
        self._source, self._target = source_fd, target_fd
        self._root = os.dup(target_fd)
        self._target_identity = files.identity_of(os.fstat(target_fd))
        self._links: dict[tuple[int, int], tuple[bytes, tuple[int, int, int]]] = {}
        self._entries = 0
        self.tally = nodes.Tally()

    def run(self) -> IngestReport:
        try:
            levels = [self._enter(b"")]
            while levels:
                level = levels[-1]
                if level.pending:
                    deeper = self._descend(level, level.pending.pop())
                    if deeper:
                        levels.append(deeper)
                    continue
                levels.pop()
                self._dress(self._target, level.path, level.st, level.xattrs)
                if levels:
                    self._ascend(levels[-1])
        finally:
            for fd in (self._source, self._target, self._root):
                os.close(fd)
        return self.tally.report()

    # -- the walk ------------------------------------------------------------------------------------------------------

    def _enter(self, path: bytes) -> _Level:
        """Copy all but the directories of the directory we are in."""
        with self._reading(path):
            st = os.fstat(self._source)
            level = _Level(path, st, files.identity_of(os.fstat(self._target)), files.read_xattrs(self._source))
            with os.scandir(self._source) as entries:
                for entry in entries:
                    self._entry(level, os.fsencode(entry.name))
        level.pending.sort(reverse=True)
        return level

    def _entry(self, level: _Level, name: bytes) -> None:
        turns.give_way()
        self._entries += 1
        if self._entries > MAX_ENTRIES:
            raise LimitExceeded(f"the folder {self._name} holds more than {MAX_ENTRIES} entries; choose a smaller one")
        path = level.path + b"/" + name if level.path else name
        try:
            fd = os.open(name, _PATH_FLAGS, dir_fd=self._source)
        except FileNotFoundError:
            self.tally.warn(f"{printable(path)} vanished while the folder was copied")
            return
        with files.closing_fd(fd):
            with self._reading(path):
                st = os.fstat(fd)
            if stat.S_ISDIR(st.st_mode):
                level.pending.append(name)
            else:
                self._node(fd, st, path, name)

    def _descend(self, level: _Level, name: bytes) -> _Level | None:
        path = level.path + b"/" + name if level.path else name
        try:
            with self._reading(path):
                source = files.open_dir(self._source, name)
        except NotFound:
            self.tally.warn(f"{printable(path)} vanished or became something else while the folder was copied")
            return None
        os.close(self._source)
        self._source = source
        if files.identity_of(os.fstat(source)) == self._target_identity:
            raise UsageError(
                f"the folder {self._name} holds snapshotd's own state directory; choose a folder beside it"
            )
        with nodes.writing(path):
            os.mkdir(name, 0o700, dir_fd=self._target)
            target = files.open_dir(self._target, name)
        os.close(self._target)
        self._target = target
        self.tally.directories += 1
        return self._enter(path)

    def _ascend(self, level: _Level) -> None:
        with self._reading(level.path):
            up = os.open("..", files.DIR_FLAGS, dir_fd=self._source)
            os.close(self._source)
            self._source = up
        if files.identity_of(os.fstat(up)) != files.identity_of(level.st):
            raise Conflict(
                f"folders in {self._name} were moved while it was copied; stop the program that does it and try again"
            )
        with nodes.writing(level.path):
            up = os.open("..", files.DIR_FLAGS, dir_fd=self._target)
            os.close(self._target)
            self._target = up
        if files.identity_of(os.fstat(up)) != level.target:
            raise Conflict(
                "the state directory was changed by another program while a folder was copied into it; try again"
            )

    # -- entries -------------------------------------------------------------------------------------------------------

    def _node(self, fd: int, st: os.stat_result, path: bytes, name: bytes) -> None:
        kind = stat.S_IFMT(st.st_mode)
        if kind in (stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK):
            what = "a socket" if kind == stat.S_IFSOCK else "a device node"
            self.tally.warn(f"{printable(path)} is {what} and was left out: it means nothing in a sandbox")
            return
        if st.st_nlink > 1 and self._link_again(st, path, name):
            self.tally.files += 1
            return
        if kind == stat.S_IFREG:
            self._file(fd, st, path, name)
        elif kind == stat.S_IFLNK:
            with self._reading(path):
                link = os.readlink(b"", dir_fd=fd)
            with nodes.writing(path):
                os.symlink(link, name, dir_fd=self._target)
                nodes.set_link_metadata(
                    self._target, name, nodes.allowed_ids(st.st_uid, st.st_gid, self.tally), st.st_mtime_ns
                )
        else:
            with nodes.writing(path):
                os.mkfifo(name, 0o600, dir_fd=self._target)
                made = os.open(name, _PATH_FLAGS, dir_fd=self._target)
            with files.closing_fd(made):
                self._dress(made, path, st, {})
        self.tally.files += 1

    def _link_again(self, st: os.stat_result, path: bytes, name: bytes) -> bool:
        """True if another name of this file was copied before, and this one is now a link to it. The first name is
        remembered for later ones."""
        first = self._links.setdefault(files.identity_of(st), (path, _stamp(st)))
        if first[0] == path or first[1] != _stamp(st):
            return False
        parent, _, leaf = first[0].rpartition(b"/")
        with nodes.writing(path), files.closing_fd(files.open_deep(self._root, parent)) as fd:
            os.link(leaf, name, src_dir_fd=fd, dst_dir_fd=self._target, follow_symlinks=False)
        return True

    def _file(self, path_fd: int, st: os.stat_result, path: bytes, name: bytes) -> None:
        with self._reading(path):
            source = os.open(files.fd_path(path_fd), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with files.closing_fd(source):
            with nodes.writing(path):
                target = os.open(
                    name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self._target
                )
            with files.closing_fd(target):
                st = self._content(source, target, path)
                with self._reading(path):
                    xattrs = files.read_xattrs(source)
                self._dress(target, path, st, xattrs)

    def _content(self, source: int, target: int, path: bytes) -> os.stat_result:
        """Copy until the file looks the same before and after, at most three times. Returns its status."""
        for _ in range(_TRIES):
            before = os.fstat(source)
            with nodes.writing(path):
                os.ftruncate(target, 0)
                copied = files.copy_data(source, target, before.st_size)
            if _stamp(os.fstat(source)) == _stamp(before):
                self.tally.bytes += copied
                return before
        self.tally.warn(f"{printable(path)} kept changing while it was copied: the copy may mix old and new content")
        self.tally.bytes += copied
        return before

    def _dress(self, fd: int, path: bytes, st: os.stat_result, xattrs: dict[bytes, bytes]) -> None:
        with nodes.writing(path):
            nodes.set_metadata(
                fd,
                path,
                owner=nodes.allowed_ids(st.st_uid, st.st_gid, self.tally),
                mode=st.st_mode,
                mtime_ns=st.st_mtime_ns,
                xattrs=xattrs,
                tally=self.tally,
            )

    @contextmanager
    def _reading(self, path: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            where = f"{printable(path) or '.'} in {self._name}"
            if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
                raise NotFound(f"{where} vanished while the folder was copied; try again") from exc
            if exc.errno in (errno.EACCES, errno.EPERM):
                raise NotPermitted(
                    f"{where} cannot be read: {exc.strerror}; make it readable or move it out of the folder"
                ) from exc
            raise UsageError(f"{where} cannot be read: {exc.strerror}; repair or remove it") from exc
