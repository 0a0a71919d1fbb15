"""Hard links across layers. Overlayfs copies each name of a link group up on its own, so `chmod -R` or `chown -R` over
a tree that an earlier step made tears its hard links apart. Where both copies ended up the same, they are linked again
in the sealed layer.

Only copies that are equal in every byte and attribute are linked, and only if the parent tree has both names as one
file: a name that was written or replaced on its own stays on its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice

from snapshotd.kernel import files
from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.trees.lookup import Handles, Node, read_public_xattrs
from snapshotd.trees.view import View

MAX_NAMES = 512
"""Names looked at for one step; each costs an lstat while the sandbox waits. A tree with more keeps the rest as
overlayfs left it."""
MAX_CANDIDATES = 64 * MAX_NAMES
MAX_COMPARED_BYTES = 64 << 20
_PATH_MAX = 4096
_PIECE_BYTES = 1 << 20

Group = tuple[bytes, ...]


def groups(root_fd: int) -> list[Group]:
    """The link groups inside one layer: paths that are one file, sorted, at most `MAX_NAMES` of them altogether, none
    longer than the kernel takes. In a layer with more than `MAX_CANDIDATES` names of such files, some of the groups."""
    found: dict[tuple[int, int], list[bytes]] = defaultdict(list)
    with contextlib.closing(Handles()) as handles:
        for path, inode in islice(_find_linked(handles, root_fd), MAX_CANDIDATES):
            found[inode].append(path)
    result: list[Group] = []
    names = 0
    for group in found.values():
        if len(group) > 1 and names + len(group) <= MAX_NAMES:
            names += len(group)
            result.append(tuple(sorted(group)))
    return sorted(result)


def _find_linked(handles: Handles, root_fd: int) -> Iterator[tuple[bytes, tuple[int, int]]]:
    """Path and inode of every regular file that has more than one name anywhere."""
    pending = [handles.add_root(root_fd)]
    while pending:
        directory = pending.pop()
        with os.scandir(handles.fd(directory)) as entries:
            for entry in entries:
                st = entry.stat(follow_symlinks=False)
                inode = st.st_dev, st.st_ino
                if stat.S_ISDIR(st.st_mode):
                    pending.append(Node(directory, os.fsencode(entry.name), 0, inode))
                elif stat.S_ISREG(st.st_mode) and st.st_nlink > 1:
                    path = _path(directory, os.fsencode(entry.name))
                    if path is not None:
                        yield path, inode


def _path(directory: Node, name: bytes) -> bytes | None:
    """None: it is longer than the kernel takes."""
    parts, size = [name], len(name)
    at = directory
    while at.parent is not None:
        parts.append(at.name)
        size += len(at.name) + 1
        if size >= _PATH_MAX:
            return None
        at = at.parent
    return b"/".join(reversed(parts))


def find_torn(upper_fd: int, known: Iterable[Group]) -> list[Group]:
    """The groups with several names that the sealed layer holds as different files that look alike. Cost: an lstat per
    name."""
    found = []
    for group in known:
        alike: dict[tuple[int, ...], list[tuple[int, bytes]]] = defaultdict(list)
        for path in group:
            st = _lstat(upper_fd, path)
            if st is not None and stat.S_ISREG(st.st_mode):
                alike[st.st_size, st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns].append((st.st_ino, path))
        found += [
            tuple(path for _, path in names) for names in alike.values() if len({inode for inode, _ in names}) > 1
        ]
    return found


def relink(upper_fd: int, candidates: Iterable[Group], parent: View, marks: Marks = TRUSTED) -> int:
    """Link each candidate's names again that are one file in `parent` and equal in the sealed layer. Returns how many
    names were linked.

    The layer must be sealed, and no writer may use it. Directory times stay as they are.
    """
    linked = 0
    for group in candidates:
        first = group[0]
        for other in group[1:]:
            if _one_file(parent, first, other) and _equal(upper_fd, first, other, marks):
                _link_over(upper_fd, first, other)
                linked += 1
    return linked


def _lstat(root_fd: int, path: bytes) -> os.stat_result | None:
    try:
        fd = files.open_beneath(root_fd, path, os.O_PATH | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            return None
        raise
    with files.closing_fd(fd):
        return os.fstat(fd)


def _one_file(parent: View, first: bytes, other: bytes) -> bool:
    try:
        return parent.lstat(first).inode == parent.lstat(other).inode
    except (FileNotFoundError, NotADirectoryError):
        return False


def _equal(root_fd: int, first: bytes, other: bytes, marks: Marks) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.ExitStack() as opened:
        paths = (first, other)
        fds = [opened.enter_context(files.closing_fd(files.open_beneath(root_fd, path, flags))) for path in paths]
        if os.fstat(fds[0]).st_ino == os.fstat(fds[1]).st_ino or os.fstat(fds[0]).st_size > MAX_COMPARED_BYTES:
            return False
        attributes = [read_public_xattrs(fd, marks) for fd in fds]
        if attributes[0] != attributes[1]:
            return False
        while piece := os.read(fds[0], _PIECE_BYTES):
            if os.read(fds[1], _PIECE_BYTES) != piece:
                return False
        return not os.read(fds[1], 1)


def _link_over(root_fd: int, first: bytes, other: bytes) -> None:
    source_dir, _, source = first.rpartition(b"/")
    target_dir, _, target = other.rpartition(b"/")
    with contextlib.ExitStack() as opened:
        directories = (source_dir, target_dir)
        fds = [opened.enter_context(files.closing_fd(files.open_deep(root_fd, each))) for each in directories]
        before = os.fstat(fds[1])
        temporary = b".snapshotd-link-" + os.urandom(8).hex().encode()
        os.link(source, temporary, src_dir_fd=fds[0], dst_dir_fd=fds[1], follow_symlinks=False)
        os.rename(temporary, target, src_dir_fd=fds[1], dst_dir_fd=fds[1])
        os.utime(fds[1], ns=(before.st_atime_ns, before.st_mtime_ns))
