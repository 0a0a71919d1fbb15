"""Apply one sealed layer to a stored tree: the stored tree that the overlay shows.

The rules are those of `lookup`, for one layer over a lower tree that is resolved already: whiteouts remove a name,
directories merge with the lower directory that their name or redirect leads to, everything else replaces. Names that
the layer does not mention are not looked at: an unchanged sub-directory is the same object, and a layer of one file
costs the directories on that file's path.

A layer never changes while it is read, but everything in it was made by an attacker who is root in a container: the
walk descends only from held descriptors, follows no link, opens only regular files and directories, and compares each
opened file with the listing.

    archive.py          the walk and the entries
    archive_data.py     sparse files
    archive_links.py    hard links
    archive_xattrs.py   extended attributes
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from operator import attrgetter

from snapshotd.errors import LimitExceeded
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.kernel.files import closing_fd
from snapshotd.repo.base import PlainFile, RepositoryWriter, Tree, TreeEntry
from snapshotd.trees.archive_data import DataReader, Extents, find_extents, holes_of
from snapshotd.trees.archive_links import Group, find_groups, stat_within
from snapshotd.trees.archive_xattrs import MOST_BYTES, MOST_BYTES_PER_DIRECTORY, Xattrs, list_xattrs, read_xattrs
from snapshotd.trees.base import Entry
from snapshotd.trees.lookup import Handles, Node, entry_path, get_xattr, open_checked
from snapshotd.types import BlobID, Kind, TreeID

_SMALL_FILE_BYTES = 1 << 20
_MOST_ZERO_BYTES = 64 << 30
"""Zeros of holes that one layer may have stored as data (see `archive_data.MOST_EXTENTS`). Without a bound, some
megabytes of data spread over an 8 EiB file are years of reading."""
_MOST_UNFINISHED, _MOST_UNFINISHED_ENTRIES = 128, 16_384
"""Directories, with all their entries in memory."""
_MOST_FILES = 1024
"""Number of files that are offered to other processes at once."""
_MOST_WARNINGS = 100
_MOST_WARNED_PATH_BYTES = 1000
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_name_of = attrgetter("name")

Files = list[tuple[bytes, os.stat_result]]
"""Names in a directory, as they were listed."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The result of `apply`.

    `entries`: names in the layer, whiteouts included. `bytes`: what the layer occupies on disk, an inode with several
    names once. `warnings`: one sentence for everything that could not be recorded (at most 100, and one that counts the
    others).
    """

    tree: TreeID
    entries: int
    bytes: int
    warnings: tuple[str, ...] = ()


def apply(
    writer: RepositoryWriter,
    layer_fd: int,
    parent: TreeID | None,
    *,
    salt: bytes,
    marks: bool = True,
    names: Marks = TRUSTED,
) -> Applied:
    """Save the tree that shows when the layer `layer_fd` (a directory) lies over the tree `parent` (None: over
    nothing).

    `salt`: makes the numbers of the layer's hard link groups its own: the same for the same layer, another for any
    other, and unknown to the agent that filled the layer. `marks=False`: the directory is an image's root, where
    nothing is overlayfs's mark; `parent` must be None then (ValueError). `names`: what the marks are called.

    Not durable on return: `writer.flush` is the caller's. Errors leave objects that nothing refers to. Raises OSError
    (ESTALE, ENOTDIR, EXDEV: the layer changed while it was read, or something is mounted in it; EINVAL, EACCES: a
    malformed redirect), DataLoss (a file is shorter than its size), LimitExceeded (a file with too many, too wide
    holes), and the writer's errors. Cost: every entry of the layer once, a second lstat of each if any has several
    names; the parent's trees on the way. Descriptors: at most `lookup.MAX_OPEN_DIRS` and a few.
    """
    if not marks and parent is not None:
        raise ValueError("a root without overlay marks lies over nothing, so it has no parent")
    with closing(_Archiver(writer, layer_fd, parent, salt, marks, names)) as archiver:
        tree = archiver.run()
    return Applied(tree, archiver.entries, archiver.bytes, archiver.warnings.sentences())


class _Warnings:
    def __init__(self) -> None:
        self._sentences: list[str] = []
        self._more = 0

    def add(self, what: str, parts: Iterable[bytes]) -> None:
        if len(self._sentences) >= _MOST_WARNINGS:
            self._more += 1
            return
        path = b"/".join(parts) or b"/"
        if len(path) > _MOST_WARNED_PATH_BYTES:
            path = b"..." + path[-_MOST_WARNED_PATH_BYTES:]
        self._sentences.append(f"{os.fsdecode(path)!a}: {what}")

    def sentences(self) -> tuple[str, ...]:
        more = (f"and {self._more} more like these",) if self._more else ()
        return (*self._sentences, *more)


@dataclass(slots=True, eq=False)
class _Directory:
    """A directory of the layer on the way down."""

    name: bytes
    node: Node
    own: TreeEntry
    previous: TreeID | None
    """The lower directory, or an earlier one at this path; a hint."""
    known: Mapping[bytes, TreeEntry]
    """The entries of `previous`, for hints."""
    merged: bool
    """True if `previous` shows through."""
    result: dict[bytes, TreeEntry]
    xattr_bytes_left: int
    above: _Directory | None
    pending: list[tuple[bytes, tuple[int, int]]] | None = None
    """Sub-directories of the layer still to be done, last first: name and inode."""
    saving: list[tuple[Files, Callable[[], list[BlobID | None]]]] = field(default_factory=list)
    """Files that other processes save, and the function that returns their contents' ids."""
    entries: int = 0
    """When it was wholly looked at, but for its sub-directories."""

    def path(self) -> list[bytes]:
        """The names that lead here from the root."""
        names = []
        at = self
        while at.above is not None:
            names.append(at.name)
            at = at.above
        return names[::-1]


class _Unfinished:
    """Directories that were read to the end, each after everything in it; the first one waits for its files."""

    def __init__(self) -> None:
        self._directories: deque[_Directory] = deque()
        self._entries = 0

    def add(self, directory: _Directory) -> None:
        directory.entries = len(directory.result) + sum(len(files) for files, _ in directory.saving)
        self._directories.append(directory)
        self._entries += directory.entries

    def take(self, *, everything: bool) -> Iterator[_Directory]:
        """The first ones that wait for no files, or that are too many; `everything`: all of them."""
        while self._directories and (everything or not self._directories[0].saving or self._too_many()):
            done = self._directories.popleft()
            self._entries -= done.entries
            yield done

    def _too_many(self) -> bool:
        return len(self._directories) > _MOST_UNFINISHED or self._entries > _MOST_UNFINISHED_ENTRIES


class _Archiver:
    def __init__(
        self, writer: RepositoryWriter, layer_fd: int, parent: TreeID | None, salt: bytes, marks: bool, names: Marks
    ) -> None:
        self.entries = 0
        self.bytes = 0
        self.warnings = _Warnings()
        self._writer = writer
        self._parent = parent
        self._salt = salt
        self._marks, self._names = marks, names
        self._zeros_left = _MOST_ZERO_BYTES
        self._groups: dict[int, Group] | None = None
        self._stack: list[_Directory] = []
        self._unfinished = _Unfinished()
        self._handles = Handles()
        self._root = self._handles.add_root(layer_fd)

    @property
    def _device(self) -> int:
        return self._root.inode[0]

    def close(self) -> None:
        self._handles.close()

    def run(self) -> TreeID:
        self._begin(b"", self._root, None)
        while True:
            directory = self._stack[-1]
            if directory.pending:
                name, inode = directory.pending.pop()
                fd = open_checked(self._handles.fd(directory.node), name, inode)
                self._begin(name, self._handles.adopt(directory.node, name, fd), directory)
                continue
            self._unfinished.add(self._stack.pop())
            for done in self._unfinished.take(everything=not self._stack):
                tree = self._finish(done)
                if done.above is None:
                    return tree
                done.above.result[done.name] = TreeEntry(done.name, Kind.DIRECTORY, 0, 0, 0, 0, tree=tree)

    # -- directories ---------------------------------------------------------------------------------------------------

    def _begin(self, name: bytes, node: Node, parent: _Directory | None) -> None:
        """Read a directory's own entries, without its sub-directories' entries, and put it on the stack."""
        fd = self._handles.fd(node)
        st = os.fstat(fd)
        xattr_names = list_xattrs(fd)
        previous, merged = self._lower(name, fd, xattr_names, parent)
        known = {} if previous is None else {entry.name: entry for entry in self._writer.load_tree(previous).entries}
        own = TreeEntry(b"", Kind.DIRECTORY, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns)
        result = dict(known) if merged else {}
        directory = _Directory(name, node, own, previous, known, merged, result, MOST_BYTES_PER_DIRECTORY, parent)
        self._stack.append(directory)
        self.bytes += st.st_blocks * 512
        xattrs = self._xattrs(directory, fd, xattr_names, b"")
        if xattrs:
            directory.own = own._replace(xattrs=xattrs)
        self._scan(fd, directory)

    def _lower(
        self, name: bytes, fd: int, xattr_names: list[str] | None, parent: _Directory | None
    ) -> tuple[TreeID | None, bool]:
        """The lower directory that shows through; else the best hint for an earlier version. Marks on the root do not
        count."""
        if parent is None:
            return self._parent, self._parent is not None
        lower = self._find_lower(name, fd, xattr_names, parent) if self._marks else None
        if lower is not None:
            return lower, True
        return _subtree(parent.known.get(name)), False

    def _find_lower(self, name: bytes, fd: int, xattr_names: list[str] | None, parent: _Directory) -> TreeID | None:
        def mark(attribute: str) -> bytes | None:
            return get_xattr(fd, attribute) if xattr_names is None or attribute in xattr_names else None

        if mark(self._names.opaque) == b"y":
            return None
        redirect = mark(self._names.redirect)
        if redirect is None:
            return _subtree(parent.known.get(name)) if parent.merged else None
        redirect = redirect.split(b"\0", 1)[0]  # the kernel reads it as a C string
        absolute = redirect.startswith(b"/")
        parts = redirect.removeprefix(b"/").split(b"/")
        if b"" in parts or (not absolute and len(parts) > 1):
            raise OSError(errno.EINVAL, "malformed overlay redirect", os.fsdecode(redirect))
        at = self._parent if absolute else parent.previous if parent.merged else None
        for part in parts:
            if at is None:
                return None
            if part in (b".", b".."):
                raise OSError(errno.EACCES, "an overlay redirect leaves its layer", os.fsdecode(redirect))
            entries = self._writer.load_tree(at).entries
            index = bisect_left(entries, part, key=_name_of)
            at = _subtree(entries[index]) if index < len(entries) and entries[index].name == part else None
        return at

    def _scan(self, fd: int, directory: _Directory) -> None:
        """Read a directory of the layer. `fd` stays valid: nothing here asks for another directory's descriptor."""
        known, device, pending = directory.known, self._device, []
        files: Files = []
        for name in sorted(map(os.fsencode, os.listdir(fd))):
            st = stat_within(fd, name, device)
            self.entries += 1
            if stat.S_ISDIR(st.st_mode):
                pending.append((name, (st.st_dev, st.st_ino)))
            elif stat.S_ISREG(st.st_mode) and st.st_size and st.st_nlink == 1 and name not in known:
                files.append((name, st))
                if len(files) >= _MOST_FILES:
                    self._save_files(directory, fd, files)
                    files = []
            else:
                self._put(directory, fd, name, st)
        self._save_files(directory, fd, files)
        pending.reverse()
        directory.pending = pending

    def _save_files(self, directory: _Directory, fd: int, files: Files) -> None:
        """Save files that are new here, have one name, and are not empty: in other processes, where the writer has
        some."""
        saved = self._writer.save_files(
            fd, [PlainFile(name, self._device, st.st_ino, st.st_size) for name, st in files]
        )
        if saved is not None:
            directory.saving.append((files, saved))
            return
        for name, st in files:
            self._put(directory, fd, name, st)

    def _put(self, directory: _Directory, fd: int, name: bytes, st: os.stat_result) -> None:
        """Note one entry, or that a whiteout takes it away."""
        entry = self._entry(directory, fd, name, st)
        if entry is None:
            directory.result.pop(name, None)
        else:
            directory.result[name] = entry

    def _put_saved(self, directory: _Directory, files: Files, contents: list[BlobID | None]) -> None:
        """Note the files that other processes have saved, and save the others."""
        for (name, st), content in zip(files, contents, strict=True):
            if content is None:
                self._put(directory, self._handles.fd(directory.node), name, st)
                continue
            directory.result[name] = _file_entry(name, st, content)
            self.bytes += st.st_blocks * 512

    def _finish(self, directory: _Directory) -> TreeID:
        for files, saved in directory.saving:
            self._put_saved(directory, files, saved())
        entries = tuple(sorted(directory.result.values(), key=_name_of))
        return self._writer.save_tree(Tree(directory.own, entries), directory.previous)

    # -- entries -------------------------------------------------------------------------------------------------------

    def _entry(self, directory: _Directory, fd: int, name: bytes, st: os.stat_result) -> TreeEntry | None:
        """The entry of anything but a directory; None for a whiteout."""
        if self._marks and stat.S_ISCHR(st.st_mode) and st.st_rdev == 0:
            return None
        group = self._group(st) if st.st_nlink > 1 else None
        if group is not None and group.entry is not None:
            return group.entry._replace(name=name)
        if stat.S_ISREG(st.st_mode):
            entry = self._file(directory, fd, name, st)
            if entry is None:
                return None
        else:
            entry = self._special(directory, fd, name, st)
        self.bytes += st.st_blocks * 512
        if group is not None:
            entry = group.entry = entry._replace(link=group.link, nlink=group.names)
        return entry

    def _group(self, st: os.stat_result) -> Group | None:
        if self._groups is None:
            self._groups = find_groups(self._handles.fd(self._root), self._salt)
        return self._groups.get(st.st_ino)

    def _special(self, directory: _Directory, fd: int, name: bytes, st: os.stat_result) -> TreeEntry:
        seen = Entry.of(st)
        path = entry_path(fd, name)
        xattrs = self._xattrs(directory, path, list_xattrs(path), name)
        target = os.readlink(name, dir_fd=fd) if seen.kind is Kind.SYMLINK else b""
        rdev = st.st_rdev if seen.kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE) else 0
        return TreeEntry(
            name, seen.kind, seen.mode, st.st_uid, st.st_gid, st.st_mtime_ns, target=target, rdev=rdev, xattrs=xattrs
        )

    def _file(self, directory: _Directory, dir_fd: int, name: bytes, st: os.stat_result) -> TreeEntry | None:
        with closing_fd(os.open(name, _FILE_FLAGS, dir_fd=dir_fd)) as fd:
            now = os.fstat(fd)
            if (
                now.st_ino != st.st_ino
                or now.st_dev != st.st_dev
                or now.st_size != st.st_size
                or not stat.S_ISREG(now.st_mode)
            ):
                raise OSError(errno.ESTALE, "a file was replaced while it was read", os.fsdecode(name))
            size = st.st_size
            xattr_names = list_xattrs(fd)
            if size == 0 and self._marks and xattr_names != [] and get_xattr(fd, self._names.whiteout) is not None:
                return None
            xattrs = self._xattrs(directory, fd, xattr_names, name) if xattr_names != [] else ()
            before = directory.known.get(name)
            if before is not None and before.kind is not Kind.FILE:
                before = None
            previous = before.content if before is not None else None
            holes = holes_of(before.extents, before.size) if before is not None else ()
            extents, zeros = find_extents(fd, size, holes)
            if zeros:
                self._spend_zeros(zeros, name)
            content = self._save(fd, name, size, extents, previous)
        return _file_entry(name, st, content, extents, xattrs)

    def _save(self, fd: int, name: bytes, size: int, extents: Extents | None, previous: BlobID | None) -> BlobID | None:
        data_bytes = size if extents is None else sum(length for _, length in extents)
        if data_bytes == 0:
            return None
        if extents is None and size <= _SMALL_FILE_BYTES:
            data = os.pread(fd, size, 0)
            if len(data) == size:  # nearly always; otherwise the reader reports the error
                return self._writer.save_bytes(data, previous, name)
        reader = DataReader(fd, name, ((0, size),) if extents is None else extents)
        if data_bytes <= _SMALL_FILE_BYTES:
            return self._writer.save_bytes(reader.read_all(), previous, name)
        return self._writer.save_content(reader, previous)

    def _spend_zeros(self, zeros: int, name: bytes) -> None:
        self._zeros_left -= zeros
        if self._zeros_left < 0:
            raise LimitExceeded(
                f"cannot store file {os.fsdecode(name)!a}: its data lies in too many pieces too far from each other; copy it to a file"
                " without holes, or delete it"
            )

    # -- attributes ----------------------------------------------------------------------------------------------------

    def _xattrs(self, directory: _Directory, target: int | bytes, names: list[str] | None, name: bytes) -> Xattrs:
        """The attributes of an entry of the directory (b"": of that directory itself)."""
        if names == []:
            return ()
        xattrs, size, problems = read_xattrs(target, names, min(MOST_BYTES, directory.xattr_bytes_left), self._names)
        directory.xattr_bytes_left -= size
        for problem in problems:
            self.warnings.add(problem, [*directory.path(), name] if name else directory.path())
        return xattrs


def _file_entry(
    name: bytes, st: os.stat_result, content: BlobID | None, extents: Extents | None = None, xattrs: Xattrs = ()
) -> TreeEntry:
    mode = stat.S_IMODE(st.st_mode)
    return TreeEntry(
        name, Kind.FILE, mode, st.st_uid, st.st_gid, st.st_mtime_ns, st.st_size, content, extents, xattrs=xattrs
    )


def _subtree(entry: TreeEntry | None) -> TreeID | None:
    return entry.tree if entry is not None and entry.kind is Kind.DIRECTORY else None
