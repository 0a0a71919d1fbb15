"""Knowing that nothing of a folder has changed, without a look at its files: the kernel tells (`kernel/fanotify.py`).

A scan that finds nothing begins a quiet time, if every file and directory that it saw was marked before it began: a later
change is an event. Events are all that the next hook reads. Any of them but the opening of a file is answered by a scan,
so an event never has to say what changed. Where anything is in doubt there is a scan, too:

  - a file has a writer, who may write through a mapping: it stays in doubt until the writer has gone
  - a path could not be read, or a file changed within the clock's resolution before it was captured
  - another inode than the marked one is at a directory's path: something was mounted there, which is no event
  - the folder itself has no mark any more: its file system was unmounted meanwhile, which is no event
  - the file system is a network's, or an overlay; the folder has more than `MOST_MARKS` paths; events were lost

Over a single file only root can mount another one; the scan that the next event brings sees it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Protocol

from snapshotd.engine.folders.scan import FolderIndex, FolderScan, open_file
from snapshotd.kernel import fanotify, files
from snapshotd.kernel.identity import HostUser, acting_as

MOST_MARKS = 20_000
"""Paths of one folder. The kernel keeps a marked inode in memory, 1 KiB each."""
MOST_WATCHED = 8
"""Folders of one user that are watched at once."""
_MOST_DOUBTS = 300
"""Files that are asked for a writer at one hook: more would cost as much as a scan."""
_ROUNDS = 4
_LINK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderWatch:
    """The marks of one folder. Thread-safe; the caller has the folder's lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._marks: fanotify.InodeMarks | None = None
        self._marked: dict[str, int] = {}
        """Path to the inode that is marked: of a file, once no process had it open for writing."""
        self._directories: dict[str, tuple[int, int]] = {}
        """Path to device and inode of each marked directory."""
        self._doubts: set[bytes] = set()
        """Handles of files that may have a writer."""
        self._user: HostUser | None = None
        self._quiet = False

    def close(self) -> None:
        """Give the marks back; the next scan makes others. Idempotent."""
        with self._lock:
            self._drop()

    def scan(self, root: int, user: HostUser, index: FolderIndex) -> FolderScan:
        """Scan as `FolderIndex.scan` does, with the rights of `user`. Returns at once if a scan has found nothing and
        the kernel has told of no change since. LimitExceeded."""
        with self._lock:
            began_ns = time.time_ns()
            if self._check_quiet(root, user):
                index.note_look(began_ns)
                return FolderScan()
            racy = index.racy_paths()
            with acting_as(user):
                found = index.scan(root)
            if not found:
                index.note_look(began_ns)
            try:
                self._mark_scan(root, user, index, found, racy)
            except (OSError, NotImplementedError):
                self._drop()
            return found

    def _check_quiet(self, root: int, user: HostUser) -> bool:
        try:
            if self._marks is not None and not self._marks.has(root):
                self._drop()
            quiet = self._settle(root) and user == self._user and self._in_place(root, user)
        except OSError:
            quiet = False
        self._quiet &= quiet
        return self._quiet

    def _mark_scan(self, root: int, user: HostUser, index: FolderIndex, found: FolderScan, racy: set[str]) -> None:
        """Mark what the scan saw and has no mark yet. `racy`: as the index had them before it."""
        there = {"": (stat.S_IFDIR,), **index.rule_files(), **index.known, **found.changed}
        for path in found.deleted:
            there.pop(path, None)
        if len(there) > MOST_MARKS or not fanotify.is_local(root):
            self._drop()
            return
        if self._marks is None:
            self._marks = fanotify.InodeMarks()
        again = {*found.changed, *racy}  # the number of an inode that is gone may be that of another one by now
        missing = [path for path, mark in there.items() if path in again or not self._is_marked(path, mark)]
        self._quiet = not missing and not found and index.is_sure()
        self._user = user
        self._mark(root, user, missing)

    def _drop(self) -> None:
        if self._marks is not None:
            self._marks.close()
        self._marks, self._quiet = None, False
        self._marked.clear()
        self._directories.clear()
        self._doubts.clear()

    def _settle(self, root: int) -> bool:
        """Read the kernel's events. True if there are none but those of files that were opened and have no writer."""
        changed = asked = False
        for _ in range(_ROUNDS):
            if self._marks is None:
                return False
            told = self._marks.read()
            if told.lost:
                self._drop()
                return False
            if told.names:
                self._directories.clear()  # marked again: the number of an inode is soon that of another one, without a mark
            changed |= told.changed
            self._doubts |= told.opened
            if not told.opened and (asked or not self._doubts):
                return not changed and not self._doubts
            for handle in list(self._doubts)[:_MOST_DOUBTS]:
                if not _may_be_written(root, handle):
                    self._doubts.discard(handle)
            asked = True  # a writer that has gone meanwhile is an event: they are read once more
        return False

    def _in_place(self, root: int, user: HostUser) -> bool:
        """True if each marked directory is what its path leads to."""
        with acting_as(user):
            for path, inode in self._directories.items():
                st = os.stat(path or ".", dir_fd=root, follow_symlinks=False)
                if (st.st_dev, st.st_ino) != inode:
                    self._directories.clear()
                    return False
        return True

    def _is_marked(self, path: str, mark: tuple[int, ...]) -> bool:
        if stat.S_ISDIR(mark[0]):
            return path in self._directories
        return self._marked.get(path) == mark[4]

    def _mark(self, root: int, user: HostUser, paths: list[str]) -> None:
        """Mark the files and directories at these paths. One that cannot be opened, or has a writer, stays without."""
        for path in paths:
            with acting_as(user):
                fd = _open(root, path)
            if fd is not None:
                try:
                    self._mark_one(path, fd)
                finally:
                    os.close(fd)

    def _mark_one(self, path: str, fd: int) -> None:
        assert self._marks is not None
        st = os.fstat(fd)
        if stat.S_ISDIR(st.st_mode):
            self._marks.add(fd, fanotify.OF_DIRECTORY)
            self._directories[path] = (st.st_dev, st.st_ino)
            return
        regular = stat.S_ISREG(st.st_mode)
        self._marks.add(fd, fanotify.OF_FILE if regular else fanotify.OF_LINK)
        if not regular or not fanotify.has_writer(fd):
            self._marked[path] = st.st_ino


class Closable(Protocol):
    """A thing with marks of the kernel."""

    def close(self) -> None: ...


class Watches:
    """The watches that were used last keep their marks: so many of each user, and of all users but root. One user's take
    those of no other who has fewer. Thread-safe; a caller holds the lock of no watch."""

    def __init__(self, most: int = MOST_WATCHED) -> None:
        self._lock = threading.Lock()
        self._most = most
        self._used: OrderedDict[Closable, int] = OrderedDict()

    def use(self, watch: Closable, uid: int) -> None:
        """Note a use by a user; close the watches that were not used for the longest time."""
        with self._lock:
            self._used[watch] = uid
            self._used.move_to_end(watch)
            surplus = list(self._surplus())
        for one in surplus:
            one.close()

    def _surplus(self) -> Iterator[Closable]:
        while True:
            counts = Counter(self._used.values())
            others = counts.total() - counts[0]
            uid, count = max(counts.items(), key=lambda one: one[1] if one[0] or one[1] > MOST_WATCHED else 0)
            if count <= MOST_WATCHED and others <= self._most:
                return
            watch = next(one for one, owner in self._used.items() if owner == uid)
            del self._used[watch]
            yield watch

    def close(self) -> None:
        """Close all. Idempotent."""
        with self._lock:
            watches = list(self._used)
            self._used.clear()
        for watch in watches:
            watch.close()


def _open(root: int, path: str) -> int | None:
    parent, _, name = path.rpartition("/")
    try:
        directory = files.open_deep(root, os.fsencode(parent), one_device=True)
        try:
            st = os.stat(name or ".", dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                return files.open_dir(directory, os.fsencode(name or "."))
            if stat.S_ISREG(st.st_mode):
                return open_file(directory, name)
            return os.open(name, _LINK, dir_fd=directory)
        finally:
            os.close(directory)
    except OSError:
        return None


def _may_be_written(root: int, handle: bytes) -> bool:
    try:
        fd = fanotify.open_handle(root, handle)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return fanotify.has_writer(fd)
    except OSError:
        return True
    finally:
        os.close(fd)
