"""Read a stack of layers as one tree, without mounting it.

Equal to what the kernel shows through a mount (tests/model/test_overlay_view.py compares the two), except: `trusted.overlay.*`
attributes never show, and a merged directory's inode number is that of its topmost source.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from types import TracebackType

from snapshotd.kernel.files import fd_path
from snapshotd.layers.base import Entry, Kind
from snapshotd.layers.lookup import Child, Directory, Lookup, entry_path, public_xattrs

_KEPT_PATHS = 256
_LONG_PATH_BYTES = 4096
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class View:
    """A stack of sealed layers as one read-only tree. `layer_fds`: directories, newest first, the image's root last.

    Paths are bytes relative to the root; b"" is the root, surplus slashes do not count, `.` and `..` are not followed (they do not
    exist), links are never followed. Every method raises OSError: FileNotFoundError, NotADirectoryError (a component is not a
    directory), EIO, ESTALE (a layer changed, which nobody may do).
    Paths and directories of any length: at most `lookup.MAX_OPEN_DIRS` descriptors plus one per layer are held. The descriptors given
    stay the caller's. One thread at a time. Cost: a lookup asks each source of the parent directory; a listing stats every entry once.
    """

    def __init__(self, layer_fds: Sequence[int]) -> None:
        self._lookup = Lookup(layer_fds, complete=True)
        self._paths: OrderedDict[bytes, Directory] = OrderedDict()
        self._last: tuple[tuple[bytes, ...], Directory] = ((), self._lookup.root)
        roots = tuple(node.inode for node in self._lookup.roots)
        self._stacks = [roots[i:] for i in range(len(roots))]

    def __enter__(self) -> View:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release every descriptor. Idempotent."""
        self._paths.clear()
        self._lookup.handles.close()

    # -- by path ---------------------------------------------------------------------------------------------------------------

    def lstat(self, path: bytes) -> Entry:
        """The entry at `path`, links not followed."""
        parts = _parts(path)
        if not parts:
            return self.entry_of(self._lookup.root)
        return self.find(self._directory(parts[:-1]), parts[-1]).entry

    def list(self, path: bytes) -> list[tuple[bytes, Entry]]:
        """The entries of a directory, sorted by the bytes of their names."""
        return [(child.name, child.entry) for child in self.children(self.directory(path))]

    def open(self, path: bytes) -> int:
        """A descriptor for reading the regular file at `path`; the caller closes it. Raises IsADirectoryError, OSError (ELOOP: a link;
        EINVAL: a device, fifo or socket)."""
        return self.open_child(self._child(path))

    def readlink(self, path: bytes) -> bytes:
        """A symbolic link's target. OSError EINVAL if it is something else."""
        return self.readlink_of(self._child(path))

    def xattrs(self, path: bytes) -> dict[bytes, bytes]:
        """Extended attributes but overlayfs's own. Raises OSError (E2BIG: more than the kernel lists)."""
        parts = _parts(path)
        if not parts:
            return self.directory_xattrs(self._lookup.root)
        return self.xattrs_of(self._child(path))

    def walk(self, path: bytes = b"") -> Iterator[tuple[bytes, Entry]]:
        """Every entry below the directory `path` (itself not), parents first, siblings sorted; paths from the view's root.

        Memory: the listings on the way to the current entry.
        """
        top = self.directory(path)
        stack = [(b"/".join(_parts(path)), top, iter(self.children(top)))]
        while stack:
            prefix, directory, children = stack[-1]
            child = next(children, None)
            if child is None:
                stack.pop()
                continue
            child_path = join(prefix, child.name)
            yield child_path, child.entry
            if child.entry.kind is Kind.DIRECTORY:
                deeper = self.enter(directory, child.name)
                stack.append((child_path, deeper, iter(self.children(deeper))))

    # -- by handle, for walks that must not resolve paths again and again -------------------------------------------------------

    def directory(self, path: bytes = b"") -> Directory:
        """The handle of a directory. Handles stay valid until the view is closed."""
        return self._directory(_parts(path))

    def children(self, directory: Directory) -> tuple[Child, ...]:
        """The directory's entries, sorted by the bytes of their names."""
        return tuple(self._lookup.scan(directory)[0])

    def find(self, directory: Directory, name: bytes) -> Child:
        """The entry `name` of a directory."""
        return self._lookup.find(directory, name)

    def enter(self, directory: Directory, name: bytes) -> Directory:
        """The handle of a sub-directory."""
        return self._lookup.enter(directory, name)

    def entry_of(self, directory: Directory) -> Entry:
        """A directory's own entry: that of its topmost source."""
        return Entry.of(os.fstat(self._lookup.handles.fd(directory.sources[0])))

    def identity(self, directory: Directory) -> tuple[object, ...]:
        """Equal for two directories (of any two views) whose whole trees are equal because the same layers back them.

        Different identities say nothing. The layers below the topmost source belong to it: a redirect deeper down may lead there.
        """
        return tuple(node.inode for node in directory.sources), self._stacks[directory.sources[0].layer]

    def open_child(self, child: Child) -> int:
        """Like `open`."""
        if child.entry.kind is Kind.DIRECTORY:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fsdecode(child.name))
        if child.entry.kind is not Kind.FILE:  # opening a fifo or a device would act on it
            code = errno.ELOOP if child.entry.kind is Kind.SYMLINK else errno.EINVAL
            raise OSError(code, "not a regular file", os.fsdecode(child.name))
        fd = os.open(child.name, _FILE_FLAGS, dir_fd=self._lookup.handles.fd(child.source))
        st = os.fstat(fd)
        if not stat.S_ISREG(st.st_mode) or (st.st_dev, st.st_ino) != child.entry.inode:
            os.close(fd)
            raise OSError(errno.ESTALE, "a file was replaced while it was read", os.fsdecode(child.name))
        return fd

    def readlink_of(self, child: Child) -> bytes:
        return os.readlink(child.name, dir_fd=self._lookup.handles.fd(child.source))

    def xattrs_of(self, child: Child) -> dict[bytes, bytes]:
        """Like `xattrs`."""
        path = entry_path(self._lookup.handles.fd(child.source), child.name)
        try:
            names = os.listxattr(path, follow_symlinks=False)
        except OSError as exc:
            if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return {}
            raise
        return {os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in public_xattrs(names)}

    def directory_xattrs(self, directory: Directory) -> dict[bytes, bytes]:
        """Like `xattrs`."""
        path = fd_path(self._lookup.handles.fd(directory.sources[0]))
        try:
            names = os.listxattr(path)
        except OSError as exc:
            if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
                return {}
            raise
        return {os.fsencode(name): os.getxattr(path, name) for name in public_xattrs(names)}

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _child(self, path: bytes) -> Child:
        parts = _parts(path)
        if not parts:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), "")
        return self.find(self._directory(parts[:-1]), parts[-1])

    def _directory(self, parts: Sequence[bytes]) -> Directory:
        """Resolve from the nearest ancestor that is remembered: the last ones of ordinary length, and the last one of any length.

        A walk that asks for every path it sees costs one step per directory this way, however deep it goes.
        """
        short = sum(map(len, parts)) + len(parts) <= _LONG_PATH_BYTES
        at, done = self._lookup.root, 0
        if short:
            for count in range(len(parts), 0, -1):
                ancestor = self._known(b"/".join(parts[:count]))
                if ancestor is not None:
                    at, done = ancestor, count
                    break
        else:
            at, done = self._common_ancestor(parts)
        for name in parts[done:]:
            at = self.enter(at, name)
        if short:
            self._paths[b"/".join(parts)] = at
            if len(self._paths) > _KEPT_PATHS:
                self._paths.popitem(last=False)
        else:
            self._last = (tuple(parts), at)
        return at

    def _common_ancestor(self, parts: Sequence[bytes]) -> tuple[Directory, int]:
        last, at = self._last
        common = 0
        for one, other in zip(last, parts, strict=False):
            if one != other:
                break
            common += 1
        for _ in range(len(last) - common):
            assert at.parent is not None
            at = at.parent
        return at, common

    def _known(self, key: bytes) -> Directory | None:
        known = self._paths.get(key)
        if known is not None:
            self._paths.move_to_end(key)
        return known


def join(prefix: bytes, name: bytes) -> bytes:
    """A path below `prefix`, which may be the root (b"")."""
    return prefix + b"/" + name if prefix else name


def _parts(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part]
