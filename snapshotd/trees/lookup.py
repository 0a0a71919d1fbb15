"""The lookup of a name in a stack of layers as overlayfs does it, in user space on directory descriptors.

Source: the kernel's fs/overlayfs/namei.c (ovl_lookup, ovl_lookup_layer, ovl_lookup_single) for the options of
`kernel.mounts`: redirect_dir=on (or off, and then no layer has any), metacopy=off, index=off. Marks are extended
attributes whose names begin as the host's `Marks` say. The rules, for a name in a merged directory:

- the directory's sources are asked newest first; the first that has the name decides what it is
- a whiteout (character device 0:0, or an empty regular file with the mark `whiteout`) and anything but a
  directory end the search
- the mark `opaque=y` ends the search after this directory
- the mark `redirect` changes the name that is looked for in what follows; if it is absolute, the search goes on
  from the roots of the layers below this one, component by component, and honours all marks on the way. It also undoes
  an `opaque` of a parent.
- the lowest layer's marks do not count, and neither do those on a layer's own root directory

Where listing and looking up differ in the kernel (an xattr whiteout outside of a directory marked `opaque=x` is listed
but cannot be found), looking up counts. Metacopy marks are not read: no layer has any.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from snapshotd.kernel import turns
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.kernel.files import DIR_FLAGS, SHADOWS, identity_of, open_dir
from snapshotd.trees.base import Child, Entry
from snapshotd.types import Kind

MAX_OPEN_DIRS = 128
"""Directory descriptors one tree holds at a time, besides its layers' roots. Two views and a target stay far below
1024."""
_KEPT_ON_THE_WAY = 4
_FEW_NAMES = 8
_NO_XATTR = (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_SUCH_NAME = (errno.ENOENT, errno.ENAMETOOLONG)


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One directory of one tree on disk: a name in a parent, verified by its inode whenever it is opened again."""

    parent: Node | None
    name: bytes
    layer: int
    inode: tuple[int, int]
    entered: Node | None = None
    """The child that was opened last: the cheap way back up when this node's own descriptor has been closed."""


class Handles:
    """Descriptors for any number of directories at any depth, at most `MAX_OPEN_DIRS` open at a time.

    A closed one is opened again on demand, from its last child by `..` or from its nearest open ancestor, and its inode
    is compared. The trees must not change meanwhile (sealed layers, or a target only we write). Not for use by two
    threads at once.
    """

    def __init__(self) -> None:
        self._roots: dict[Node, int] = {}
        self._open: OrderedDict[Node, int] = OrderedDict()

    def add_root(self, dir_fd: int, layer: int = 0) -> Node:
        """Take a tree by its root directory. The descriptor is opened anew, so its offset is not shared; the caller
        keeps its own."""
        fd = os.open(b".", DIR_FLAGS, dir_fd=dir_fd)
        node = Node(None, b"", layer, identity_of(os.fstat(fd)))
        self._roots[node] = fd
        return node

    def adopt(self, parent: Node, name: bytes, fd: int) -> Node:
        """Take over `fd`, the directory `name` of `parent`."""
        node = Node(parent, name, parent.layer, identity_of(os.fstat(fd)))
        self._keep(node, fd)
        return node

    def fd(self, node: Node) -> int:
        """The node's descriptor, valid until the next call of any method here. Raises OSError (ESTALE: the tree
        changed)."""
        missing: list[Node] = []
        at = node
        while (fd := self._find_open(at)) is None:
            missing.append(at)
            assert at.parent is not None, "a root is always open"
            at = at.parent
        return self._descend(fd, missing)

    def drop(self, node: Node) -> None:
        """Close a node's descriptor now (not a root's): the directory may change from here on. Not an error when it is
        closed."""
        fd = self._open.pop(node, None)
        if fd is not None:
            os.close(fd)
        if node.parent is not None and node.parent.entered is node:
            node.parent.entered = None

    def close(self) -> None:
        """Close everything. Idempotent."""
        for fds in (self._open, self._roots):
            while fds:
                os.close(fds.popitem()[1])

    def _find_open(self, node: Node) -> int | None:
        """The descriptor of a node that is open, or whose last child is."""
        fd = self._roots.get(node)
        if fd is not None:
            return fd
        fd = self._open.get(node)
        if fd is not None:
            self._open.move_to_end(node)
            return fd
        child = node.entered
        below = None if child is None else self._open.get(child)
        if below is None:
            return None
        fd = open_checked(below, b"..", node.inode, node.name)
        self._keep(node, fd)
        return fd

    def _descend(self, fd: int, missing: list[Node]) -> int:
        """Open `missing` (deepest first) from `fd` down. Only the last few are kept: a long way down must not push out
        all others."""
        passing = -1
        try:
            for left in range(len(missing) - 1, -1, -1):
                fd = open_checked(fd, missing[left].name, missing[left].inode)
                if passing >= 0:
                    os.close(passing)
                passing = fd if left >= _KEPT_ON_THE_WAY else -1
                if passing < 0:
                    self._keep(missing[left], fd)
        except BaseException:
            if passing >= 0:
                os.close(passing)
            raise
        return fd

    def _keep(self, node: Node, fd: int) -> None:
        self._open[node] = fd
        if node.parent is not None:
            node.parent.entered = node
        while len(self._open) > MAX_OPEN_DIRS:
            os.close(self._open.popitem(last=False)[1])


def open_checked(dir_fd: int, name: bytes, inode: tuple[int, int], known_as: bytes | None = None) -> int:
    """Open the directory `name`, which was (device, inode number) when it was listed. `known_as`: its name for people.
    Raises OSError (ENOTDIR, ESTALE: replaced since)."""
    fd = open_dir(dir_fd, name)
    if identity_of(os.fstat(fd)) != inode:
        os.close(fd)
        shown = os.fsdecode(name if known_as is None else known_as)
        raise OSError(errno.ESTALE, "a directory was replaced while it was read", shown)
    return fd


@dataclass(frozen=True, slots=True, eq=False)
class Directory:
    """A merged directory: the layers' directories it is made of, newest first, and where the search for more of it
    ended.

    `stopped`: nothing below the last layer can belong to it. Otherwise `rest` is the name of its lower part there: one
    name (in the parent's lower part), or with `absolute` a path from the root.
    """

    parent: Directory | None
    sources: tuple[Node, ...]
    stopped: bool = False
    absolute: bool = True
    rest: tuple[bytes, ...] = ()

    def path_below(self) -> tuple[bytes, ...]:
        """The path of its lower part from the root of the layers below. Meaningless if `stopped`."""
        tail: list[bytes] = []
        at: Directory = self
        while not at.absolute:
            tail.append(at.rest[0])
            assert at.parent is not None
            at = at.parent
        return at.rest + tuple(reversed(tail))


@dataclass(slots=True)
class _Search:
    """The state that a lookup carries from layer to layer (the kernel's struct ovl_lookup_data)."""

    parts: tuple[bytes, ...]
    absolute: bool = False
    stop: bool = False


class Lookup:
    """Finds names in a stack. With `complete` the last layer is the lowest there is; else more layers lie below,
    unknown."""

    def __init__(self, layer_fds: Sequence[int], *, complete: bool, marks: Marks = TRUSTED) -> None:
        self._marks = marks
        self.handles = Handles()
        try:
            self.roots = tuple(self.handles.add_root(fd, layer) for layer, fd in enumerate(layer_fds))
        except BaseException:
            self.handles.close()
            raise
        self.root = Directory(None, self.roots)
        self._lowest = len(self.roots) - 1 if complete else -1

    def find(self, directory: Directory, name: bytes) -> Child:
        """The entry `name`. Raises FileNotFoundError."""
        if name not in (b"", b".", b"..") and b"\0" not in name and b"/" not in name:
            for source in directory.sources:
                fd = self.handles.fd(source)
                try:
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except OSError as exc:
                    if exc.errno in _NO_SUCH_NAME:
                        continue
                    raise
                if is_whiteout(fd, name, st, self._marks):
                    break
                return Child(name, Entry.of(st), source)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(name))

    def scan(self, directory: Directory, only: Collection[bytes] | None = None) -> tuple[list[Child], list[bytes]]:
        """All entries, or those with one of the names `only`, sorted by the bytes of their names; and the names that
        whiteouts hide."""
        found: dict[bytes, Child] = {}
        hidden: set[bytes] = set()
        for source in directory.sources:
            if only is not None and len(found) + len(hidden) == len(only):
                break
            fd = self.handles.fd(source)
            for name in _present(fd, only):
                turns.give_way()
                if name in found or name in hidden:
                    continue
                try:
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                except FileNotFoundError:
                    if only is None:
                        raise
                    continue
                if is_whiteout(fd, name, st, self._marks):
                    hidden.add(name)
                else:
                    found[name] = Child(name, Entry.of(st), source)
        return [found[name] for name in sorted(found)], sorted(hidden)

    def enter(self, parent: Directory, name: bytes) -> Directory:
        """The merged directory `name`. Raises FileNotFoundError, NotADirectoryError, OSError (EINVAL, EACCES: a
        malformed redirect)."""
        if self.find(parent, name).entry.kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fsdecode(name))
        search = _Search((name,))
        found: list[Node] = []
        bases, i = parent.sources, 0
        while i < len(bases) and not search.stop:
            node = self._in_layer(bases[i], search)
            i += 1
            if node is None:
                continue
            found.append(node)
            if search.absolute and bases is not self.roots:
                bases, i = self.roots, node.layer + 1
        stopped = search.stop or (parent.stopped and not search.absolute)
        return Directory(parent, tuple(found), stopped, search.absolute, search.parts)

    def _in_layer(self, base: Node, search: _Search) -> Node | None:
        """Walk the searched parts below `base`: one name, or all components of a path."""
        node: Node | None = base
        left = len(search.parts)  # counted from the end: a redirect on the way may change how many come before
        while left and node is not None:
            node = self._component(node, search, left)
            left -= 1
        return node

    def _component(self, base: Node, search: _Search, left: int) -> Node | None:
        at = len(search.parts) - left
        name = search.parts[at]
        if name in (b".", b".."):
            raise OSError(errno.EACCES, "an overlay redirect leaves its layer", os.fsdecode(name))
        try:
            fd = open_dir(self.handles.fd(base), name)
        except OSError as exc:
            if exc.errno in (errno.ENOTDIR, errno.ELOOP):  # a whiteout, a link or a file: hides everything below
                search.stop = True
            elif exc.errno not in _NO_SUCH_NAME:
                raise
            return None
        node = self.handles.adopt(base, name, fd)
        if node.layer != self._lowest:
            self._read_marks(fd, search, at)
        return node

    def _read_marks(self, fd: int, search: _Search, at: int) -> None:
        if get_xattr(fd, self._marks.opaque) == b"y":
            search.stop = True
            return
        value = get_xattr(fd, self._marks.redirect)
        if value is None:
            return
        value = value.split(b"\0", 1)[0]  # the kernel reads it as a C string
        before, after = search.parts[:at], search.parts[at + 1 :]
        target = tuple(value.removeprefix(b"/").split(b"/"))
        absolute = value.startswith(b"/")
        if b"" in target or (not absolute and len(target) > 1):
            raise OSError(errno.EINVAL, "malformed overlay redirect", os.fsdecode(value))
        if absolute:
            search.parts, search.absolute, search.stop = target + after, True, False
        else:
            search.parts = before + target + after


def _present(fd: int, only: Collection[bytes] | None) -> Iterable[bytes]:
    """The names in a directory that count, and perhaps a few that are not there: asking for few is cheaper than listing
    many."""
    if only is not None and len(only) <= _FEW_NAMES:
        return only
    listed = map(os.fsencode, os.listdir(fd))
    return listed if only is None else [name for name in listed if name in only]


def get_xattr(target: int | bytes, name: str) -> bytes | None:
    """One extended attribute of a descriptor, or of a path without following its last component; None if there is
    none."""
    try:
        return (
            os.getxattr(target, name) if isinstance(target, int) else os.getxattr(target, name, follow_symlinks=False)
        )
    except OSError as exc:
        if exc.errno in _NO_XATTR:
            return None
        raise


def entry_path(dir_fd: int, name: bytes) -> bytes:
    """A path that names the entry `name` of `dir_fd`, for calls without a dir_fd (xattrs); never follow its last
    component."""
    return b"/proc/self/fd/%d/%b" % (dir_fd, name)


def is_whiteout(dir_fd: int, name: bytes, st: os.stat_result, marks: Marks = TRUSTED) -> bool:
    """True if the entry `name` (its status is `st`) says that the name does not exist."""
    if stat.S_ISCHR(st.st_mode):
        return st.st_rdev == 0
    if stat.S_ISREG(st.st_mode) and st.st_size == 0:
        return get_xattr(entry_path(dir_fd, name), marks.whiteout) is not None
    return False


def make_whiteout(dir_fd: int, name: bytes, marks: Marks = TRUSTED) -> None:
    """Delete `name` of the layers below, in a directory of a half-made layer. OSError.

    The kernel filters whiteouts from listings of directories that it merges, and of directories that were copied up. A
    layer may come to stand where nothing below has its directory, so the directory gets the mark of a copy whose origin
    is unknown: an empty value (fs/overlayfs/util.c, ovl_path_check_origin_xattr).
    """
    os.setxattr(dir_fd, marks.origin, b"")
    try:
        os.mknod(name, stat.S_IFCHR, 0, dir_fd=dir_fd)
    except PermissionError:  # the layers lie on an overlay themselves, as in a container: no overlay is mounted of them
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd))
        os.setxattr(entry_path(dir_fd, name), marks.whiteout, b"")


def public_xattrs(names: Iterable[str], marks: Marks = TRUSTED) -> list[str]:
    """The names that belong to the tree rather than to overlayfs or to the file system below."""
    return [name for name in names if not os.fsencode(name).startswith(marks.prefix) and name not in SHADOWS]


def read_public_xattrs(target: int | str | bytes, marks: Marks, *, follow: bool = True) -> dict[bytes, bytes]:
    """The extended attributes of a descriptor or path that belong to the tree (`public_xattrs`); none where the file
    system has none. OSError (E2BIG: more than the kernel lists)."""
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as exc:
        if exc.errno in _NO_XATTR:
            return {}
        raise
    return {
        os.fsencode(name): os.getxattr(target, name, follow_symlinks=follow) for name in public_xattrs(names, marks)
    }
