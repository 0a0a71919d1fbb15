"""The copy path: capture a live upper while processes go on using it.

Taken when the root cannot be pivoted (live processes, open writers). The result is a layer that holds everything the
upper holds, so it stands on the same stack as the upper does; the upper stays where it is. The first pass copies while
processes run. The second pass, with the processes frozen, checks every entry again and copies only the ones that
changed meanwhile. Files that did not change since the last capture are hard-linked from that capture's layer, which is
immutable. The pause is a walk of the upper (a few microseconds an entry) plus the copies of the second pass.

A file counts as unchanged if its inode, size, ctime and mtime are the same as at its last copy. Its status is read
before the copy, and a change after that gives a new ctime: always where times are fine (`Abilities.fine_times`), else if
the clock has ticked since the ctime. A file whose ctime is the present tick's counts as changed until it is copied again.
(A write under way has set the ctime already; the copy's search for holes waits for its end, inode_lock in the kernel.)
Files under a shared writable mapping can change without a new ctime: `volatile` names them and they are copied every
time, whichever of a file's names it gives.

The same walk captures a plain folder (`capture_folder`): there the live directory holds all files, and the layer only what
changed since the last capture, with whiteouts for what is gone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from snapshotd.errors import NO_ROOM, LimitExceeded
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.abilities import Marks
from snapshotd.layers.store import LayerStore
from snapshotd.trees.lookup import get_xattr, make_whiteout
from snapshotd.types import LayerID

MAX_PATHS_BYTES = 128 << 20
"""The paths of everything in the upper are remembered, and each is a walk from the root: a deep tree would take memory
and time without end."""

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2); Python has no name for it."""
Signature = tuple[int, int, int, int, int, int, int]


def signature_of(st: os.stat_result, *, settled: bool = True) -> Signature:
    """The fields that a change of the entry changes. Not `settled`: it may change again without a new ctime, so this is a
    signature that no entry has."""
    return st.st_ino, st.st_mode, st.st_uid, st.st_gid, st.st_size, st.st_ctime_ns if settled else -1, st.st_mtime_ns


def _tick_ns() -> int:
    """The clock that the kernel takes a file's times from: it stands still between two ticks."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)


Seen = dict[bytes, Signature]
"""Path in an upper to the signature of the entry there."""


@dataclass(slots=True)
class FinishedCapture:
    """A finished capture: its layer, and the status of every entry of the upper when it was copied."""

    layer: LayerID
    seen: Seen


def capture(
    store: LayerStore,
    upper: LayerID,
    previous: FinishedCapture | None,
    frozen: AbstractContextManager[object],
    volatile: Callable[[], set[bytes]],
) -> FinishedCapture:
    """Copy the live `upper` into a new layer. `frozen` stops the sandbox's processes while it is entered; `volatile` is
    called inside it.

    Returns the new mirror; the caller unpins its layer when a catalog row refers to it. On any error the new layer is
    removed and the sandbox goes on. Raises OSError (ENOSPC), SandboxFailed, LimitExceeded (`MAX_PATHS_BYTES`).
    """
    with store.making() as layer:
        with contextlib.ExitStack() as opened:
            source, target = (opened.enter_context(files.closing_fd(store.read_upper(each))) for each in (upper, layer))
            old, earlier = -1, {}
            if previous is not None:
                old, earlier = opened.enter_context(files.closing_fd(store.read_upper(previous.layer))), previous.seen
            copier = Copier(source, target, store.marks, store.host.fine_times, old=old, old_seen=earlier)
            copier.run(tolerant=True, always=set())
            with frozen:
                copier.run(tolerant=False, always=volatile())
        store.drop_work(layer)
        hit("layers.capture.copied")
        return FinishedCapture(layer, copier.seen)


def scan_folder(store: LayerStore, upper: LayerID) -> Seen:
    """The status of every entry of a live folder, to be given to the next `capture_folder`. OSError, LimitExceeded.
    Cost: some microseconds an entry."""
    with files.closing_fd(store.read_upper(upper)) as source:
        copier = _FolderCopier(store, source, {})
        copier.find_changes(set())
        return copier.seen


def folder_changed(store: LayerStore, upper: LayerID, seen: Seen, volatile: set[bytes]) -> bool:
    """True if a live folder is not as it was `seen`. Cost and errors as `scan_folder`."""
    with files.closing_fd(store.read_upper(upper)) as source:
        copier = _FolderCopier(store, source, seen)
        return bool(copier.find_changes(volatile)) or seen.keys() != copier.seen.keys()


def capture_folder(store: LayerStore, upper: LayerID, seen: Seen, volatile: set[bytes]) -> FinishedCapture | None:
    """Copy what has changed in a live folder since it was `seen` into a new layer, for the top of the stack that it
    equalled then. None: nothing has. The caller has stopped the sandbox's processes; what others change meanwhile is in
    the next capture. Errors as `capture`; the caller unpins the layer likewise."""
    with files.closing_fd(store.read_upper(upper)) as source:
        copier = _FolderCopier(store, source, seen)
        changed = copier.find_changes(volatile)
        if not changed and seen.keys() == copier.seen.keys():
            return None
        with store.making() as layer:
            with files.closing_fd(store.read_upper(layer)) as target:
                copier.copy(target, changed)
            store.drop_work(layer)
            hit("layers.capture.copied")
            return FinishedCapture(layer, copier.seen)


class Copier:
    """Makes `target` equal to `source`; `run` may be called again and then copies only changed entries."""

    def __init__(
        self, source: int, target: int, marks: Marks, fine_times: bool, *, old: int = -1, old_seen: Seen | None = None
    ) -> None:
        """`old`: a layer in which the files that have not changed since `old_seen` can be linked."""
        self._source, self._target, self._marks, self._fine_times = source, target, marks, fine_times
        self._old, self._old_seen = old, old_seen or {}
        self.seen: Seen = {}
        """The entries of the source, in the last run."""
        self.made: Seen = {}
        """The entries of them that are in the target."""
        self._links: dict[tuple[int, int], bytes] = {}

    def run(self, *, tolerant: bool, always: set[bytes]) -> None:
        """One pass. `tolerant`: entries that vanish or change type under our hands are left to the next pass."""
        before, self.made, self.seen, self._links = self.made, {}, {}, {}
        forced = self._inodes(always)
        for path, st, settled in self.walk(tolerant=tolerant):
            force = (st.st_dev, st.st_ino) in forced
            signature = signature_of(st, settled=settled and not force)
            try:
                wanted = self._is_wanted(path, signature, before)
                if wanted:
                    self._one(path, st, before, force=force)
            except OSError as exc:
                if not tolerant or exc.errno in (*NO_ROOM, errno.EIO):
                    raise
                if path not in self.seen:  # a directory that changes while it is listed may show a name twice
                    self._remove(path)  # a half-made copy; the next pass takes unknown names for absent
                continue
            self.seen[path] = signature
            if wanted:
                self.made[path] = signature
        for path in sorted(before.keys() - self.made.keys(), reverse=True):
            self._remove(path)
        if tolerant:
            return  # entries that the next pass makes in a directory would inherit its default access control list
        self._finish()
        self._dress_directories()

    def _is_wanted(self, path: bytes, signature: Signature, before: Seen) -> bool:
        """True for an entry that belongs into the target, and whose directory is there now."""
        return True

    def _finish(self) -> None:
        """Called when everything was looked at, and no process writes."""

    def _inodes(self, paths: set[bytes]) -> set[tuple[int, int]]:
        """Inodes of the files that the names hold, if they hold one: every other name of the same file has changed with
        it."""
        found: set[tuple[int, int]] = set()
        for path in paths:
            try:
                with open_parent(self._source, path) as (fd, name):
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
                    raise
                continue  # in a layer below, on another mount, or deleted
            found.add((st.st_dev, st.st_ino))
        return found

    def walk(self, *, tolerant: bool) -> Iterator[tuple[bytes, os.stat_result, bool]]:
        """Path, status, and False for an entry that may change after this without a new ctime."""
        # Before the status of each; one for all, or only some names of a file would change with it.
        tick = sys.maxsize if self._fine_times else _tick_ns()
        pending, size = [b""], 0
        yield b"", os.fstat(self._source), True  # a directory is compared with nothing
        while pending:
            path = pending.pop()
            try:
                fd = files.open_deep(self._source, path)
            except OSError:
                if tolerant:
                    continue
                raise
            with files.closing_fd(fd):
                with os.scandir(fd) as entries:
                    found = [os.fsencode(entry.name) for entry in entries]
                for name in found:
                    try:
                        st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    except FileNotFoundError:
                        if tolerant:
                            continue
                        raise
                    child = path + b"/" + name if path else name
                    size += len(child)
                    if size > MAX_PATHS_BYTES:
                        raise LimitExceeded(
                            f"a step cannot be taken while processes live in the sandbox and the paths of what changed take more than "
                            f"{MAX_PATHS_BYTES >> 20} MiB: end what runs in the background, or make less deep folders"
                        )
                    if stat.S_ISDIR(st.st_mode):
                        pending.append(child)
                    yield child, st, st.st_ctime_ns < tick

    def _one(self, path: bytes, st: os.stat_result, before: Seen, *, force: bool) -> None:
        signature = signature_of(st)
        known = before.get(path)
        if stat.S_ISDIR(st.st_mode):
            if known is None or not stat.S_ISDIR(known[1]):
                self._replace(path, known)
                if path:
                    with open_parent(self._target, path) as (fd, name):
                        os.mkdir(name, 0o700, dir_fd=fd)
            return
        key = (st.st_dev, st.st_ino)
        if known == signature and not force:
            self._links.setdefault(key, path)
            return
        self._replace(path, known)
        if st.st_nlink > 1 and key in self._links:
            self._link(self._target, self._links[key], path)
            return
        if not force and self._old_seen.get(path) == signature:
            self._link(self._old, path, path)
        else:
            self._copy(path, st)
        self._links[key] = path

    def _replace(self, path: bytes, known: Signature | None) -> None:
        if known is not None and path:
            self._remove(path)
            prefix = path + b"/"
            if stat.S_ISDIR(known[1]):
                for gone in [p for p in self.seen if p.startswith(prefix)]:
                    del self.seen[gone]
                    self.made.pop(gone, None)

    def _remove(self, path: bytes) -> None:
        try:
            with open_parent(self._target, path) as (fd, name):
                files.remove_tree(fd, name)
        except (FileNotFoundError, NotADirectoryError):
            pass  # went with its directory

    def _link(self, from_root: int, source: bytes, path: bytes) -> None:
        with open_parent(from_root, source) as (source_fd, source_name), open_parent(self._target, path) as (fd, name):
            os.link(source_name, name, src_dir_fd=source_fd, dst_dir_fd=fd, follow_symlinks=False)

    def _copy(self, path: bytes, st: os.stat_result) -> None:
        with open_parent(self._source, path) as (source_fd, name), open_parent(self._target, path) as (fd, _):
            if stat.S_ISREG(st.st_mode):
                _copy_file(source_fd, fd, name, st, self._marks)
                return
            if stat.S_ISLNK(st.st_mode):
                os.symlink(os.readlink(name, dir_fd=source_fd), name, dir_fd=fd)
                files.give(name, st.st_uid, st.st_gid, dir_fd=fd, follow_symlinks=False)
            else:
                # Fifos, sockets, and whiteouts (character device 0:0).
                os.mknod(name, st.st_mode, st.st_rdev, dir_fd=fd)
                files.give(name, st.st_uid, st.st_gid, dir_fd=fd, follow_symlinks=False)
                os.chmod(name, stat.S_IMODE(st.st_mode), dir_fd=fd)
            _copy_xattrs(source_fd, fd, name, self._marks)
            os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=fd, follow_symlinks=False)

    def _dress_directories(self) -> None:
        for path in sorted(self.made, reverse=True):  # children first: writing them changes their parent's times
            if stat.S_ISDIR(self.made[path][1]):
                self._dress_directory(path)

    def _dress_directory(self, path: bytes) -> None:
        with (
            files.closing_fd(files.open_deep(self._source, path)) as source,
            files.closing_fd(files.open_deep(self._target, path)) as target,
        ):
            for mark in files.read_xattrs(target):
                os.removexattr(target, mark)
            xattrs = self._set_marks(path, _xattrs(source, path, self._marks))
            if self._had_origin(source, path):  # as `make_whiteout`: its handle means nothing in a lower layer
                xattrs[os.fsencode(self._marks.origin)] = b""
            files.copy_metadata(os.fstat(source), xattrs, target)

    def _set_marks(self, path: bytes, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
        """The attributes of a directory in the target, given those of the source."""
        return xattrs

    def _had_origin(self, source: int, path: bytes) -> bool:
        return get_xattr(source, self._marks.origin) is not None


class ChangeCopier(Copier):
    """A copier whose target is a layer of changes: it has the directories above each of them, and whiteouts for names
    that are gone."""

    def __init__(self, source: int, target: int, marks: Marks, fine_times: bool) -> None:
        super().__init__(source, target, marks, fine_times)
        self._hiding: set[bytes] = set()
        """Directories of the target with whiteouts."""

    def _make_parents(self, path: bytes, before: Seen) -> None:
        """Make the directories above an entry that are not there."""
        missing = []
        while (path := parent_of(path)) not in self.made:
            missing.append(path)
        for each in reversed(missing):
            if each not in before:
                with open_parent(self._target, each) as (fd, name):
                    os.mkdir(name, 0o700, dir_fd=fd)
            self.made[each] = self.seen[each]

    def _hide(self, path: bytes) -> None:
        """Make a whiteout."""
        self._make_parents(path, {})
        with open_parent(self._target, path) as (fd, name):
            make_whiteout(fd, name, self._marks)
        self._hiding.add(parent_of(path))

    def _had_origin(self, source: int, path: bytes) -> bool:
        return path in self._hiding or super()._had_origin(source, path)


@dataclass(frozen=True, slots=True)
class _OfContent(Marks):
    """Marks of a tree in which none means anything, since no overlay was mounted of it."""

    @property
    def kept(self) -> frozenset[bytes]:
        return frozenset()


class _FolderCopier(ChangeCopier):
    """Copies changes of a folder that holds all files, and in which no overlay marks mean anything: `find_changes`, then
    `copy`."""

    def __init__(self, store: LayerStore, source: int, before: Seen) -> None:
        super().__init__(source, -1, _OfContent(store.marks.prefix), store.host.fine_times)
        self._before = before

    def find_changes(self, always: set[bytes]) -> list[tuple[bytes, os.stat_result]]:
        """The entries that are not as before, parents first; `seen` is what all are like now."""
        forced, changed = self._inodes(always), []
        for path, st, settled in self.walk(tolerant=True):
            st = self._make_readable(path, st)
            self.seen[path] = signature_of(st, settled=settled)
            if self._before.get(path) != signature_of(st) or (st.st_dev, st.st_ino) in forced:
                changed.append((path, st))
        return changed

    def _make_readable(self, path: bytes, st: os.stat_result) -> os.stat_result:
        """Let the owner read a file or directory, where no other right does: a snapshot has to be read, too. Returns the
        entry's status then."""
        needed = {stat.S_IFDIR: 0o500, stat.S_IFREG: 0o400}.get(stat.S_IFMT(st.st_mode), 0)
        if st.st_mode & needed == needed:
            return st
        with (
            contextlib.suppress(OSError),
            open_parent(self._source, path) as (fd, name),
            files.closing_fd(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)) as held,
        ):
            if not os.access(files.fd_path(held), needed >> 6, effective_ids=True):
                os.chmod(files.fd_path(held), stat.S_IMODE(st.st_mode) | needed)
                return os.fstat(held)
        return st

    def copy(self, target: int, changed: list[tuple[bytes, os.stat_result]]) -> None:
        """Fill an empty layer with the changed entries, and with whiteouts for those that are gone."""
        self._target, self.made = target, {b"": self.seen[b""]}
        for path, st in changed:
            if not path:
                continue
            self._make_parents(path, {})
            if stat.S_ISDIR(st.st_mode):
                self._one(path, st, {}, force=False)
                self.made[path] = signature_of(st)
                continue
            try:
                self._one(path, st, {}, force=False)
            except OSError as exc:
                if exc.errno in (*NO_ROOM, errno.EIO):
                    raise
                self._remove(path)  # it is gone, or has become something else: so it will be in the next capture
                del self.seen[path]
        for path in sorted(self._before.keys() - self.seen.keys()):
            parent = self.seen.get(parent_of(path))
            if parent is not None and stat.S_ISDIR(parent[1]):  # else it went with its directory
                self._hide(path)
        self._dress_directories()

    def _had_origin(self, source: int, path: bytes) -> bool:
        return path in self._hiding


def parent_of(path: bytes) -> bytes:
    """The directory of a path."""
    return path.rpartition(b"/")[0]


@contextlib.contextmanager
def open_parent(root: int, path: bytes) -> Iterator[tuple[int, bytes]]:
    """The descriptor of a path's directory, and the last component. The path may have any length. OSError."""
    directory, _, name = path.rpartition(b"/")
    with files.closing_fd(files.open_deep(root, directory)) as fd:
        yield fd, name


def _xattrs(source: int, name: bytes, marks: Marks) -> dict[bytes, bytes]:
    """The extended attributes to copy. LimitExceeded: the kernel does not list them."""
    try:
        found = files.read_xattrs(source)
        return {k: v for k, v in found.items() if not k.startswith(marks.prefix) or k in marks.kept}
    except OSError as exc:
        if exc.errno not in (errno.E2BIG, errno.ERANGE):
            raise
        raise LimitExceeded(
            f"{os.fsdecode(name)!a} has more extended attributes than the kernel lists (64 KiB of names), so it cannot be copied while "
            "processes run in the sandbox: remove some of them, or end the processes"
        ) from exc


def _copy_file(source_dir: int, target_dir: int, name: bytes, st: os.stat_result, marks: Marks) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with files.closing_fd(os.open(name, flags, dir_fd=source_dir)) as source:
        now = os.fstat(source)
        if (now.st_ino, stat.S_IFMT(now.st_mode)) != (st.st_ino, stat.S_IFMT(st.st_mode)):
            raise OSError(errno.ESTALE, "changed while it was being copied", os.fsdecode(name))
        with files.closing_fd(
            os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=target_dir)
        ) as target:
            files.copy_data(source, target, now.st_size)
            files.copy_metadata(st, _xattrs(source, name, marks), target)


def _copy_xattrs(source_dir: int, target_dir: int, name: bytes, marks: Marks) -> None:
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    with files.closing_fd(os.open(name, flags, dir_fd=source_dir)) as source:
        # /proc/self/fd follows to exactly what the descriptor holds, a link included; user.* is not allowed on these
        # types
        xattrs = _xattrs(source, name, marks)
        if xattrs:
            with files.closing_fd(os.open(name, flags, dir_fd=target_dir)) as target:
                for key, value in xattrs.items():
                    os.setxattr(files.fd_path(target), key, value)
