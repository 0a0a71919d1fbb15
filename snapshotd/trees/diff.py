"""Compare two views: which paths were added, changed or deleted.

Subtrees that the same layers or objects back are skipped without being read, and of a directory that two stacks share
in part only what their own layers hold is looked at; so the cost follows what changed, not the size of the trees or
their directories.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from snapshotd.kernel import turns
from snapshotd.kernel.files import closing_fd
from snapshotd.trees.base import Change, ChangeKind, Child, Entry
from snapshotd.trees.view import Directory, View, join, pair_by_name
from snapshotd.types import FileChanges, Kind

_BLOCK_BYTES = 1 << 20
_DEVICES = (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One name in both trees; a side is None where the tree has no such name."""

    path: bytes
    a: Child | None
    b: Child | None


def diff(a: View, b: View, path: bytes = b"", *, times: bool = False) -> Iterator[Change]:
    """The changes from `a` to `b` at and below `path`, parents before children, siblings by the bytes of their names.

    `times`: another time is a change, too.

    Paths are from the views' roots. One change per path: a directory that became a file (or the reverse) is one
    CHANGED, followed by a DELETED (or ADDED) for each entry that was (or is) in it. `Change` defines the changes that
    count. Raises FileNotFoundError if neither view has `path`, and the errors of `View`. Extended attributes that the
    kernel cannot list (more than 64 KiB of names) count as changed unless the same file backs both sides. Memory: the
    listings on the way to the current entry.
    """
    parts = [part for part in path.split(b"/") if part]
    if not parts:
        yield from _diff_roots(a, b, times)
        return
    parent_a, child_a = _look(a, parts)
    parent_b, child_b = _look(b, parts)
    if child_a is None and child_b is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
    yield from _diff_pairs(a, b, parent_a, parent_b, iter([_Pair(b"/".join(parts), child_a, child_b)]), times)


def count(changes: Iterable[Change]) -> FileChanges:
    """Numbers of files, links and special nodes that changed; directories do not count.

    A directory that became a file is one added file, the reverse one deleted. `bytes`: size of added and changed
    regular files.
    """
    added = changed = deleted = size = 0
    for change in changes:
        before = change.before is not None and change.before.kind is not Kind.DIRECTORY
        after = change.after is not None and change.after.kind is not Kind.DIRECTORY
        added += after and not before
        changed += after and before
        deleted += before and not after
        if change.after is not None and change.after.kind is Kind.FILE:
            size += change.after.size
    return FileChanges(added, changed, deleted, size)


def _look(view: View, parts: list[bytes]) -> tuple[Directory | None, Child | None]:
    try:
        parent = view.directory(b"/".join(parts[:-1]))
        return parent, view.find(parent, parts[-1])
    except (FileNotFoundError, NotADirectoryError):
        return None, None


def _diff_roots(a: View, b: View, times: bool) -> Iterator[Change]:
    root_a, root_b = a.directory(), b.directory()
    if a.identity(root_a) == b.identity(root_b):
        return
    before, after = a.entry_of(root_a), b.entry_of(root_b)
    if before.inode != after.inode and (
        _metadata(before, times) != _metadata(after, times)
        or _xattrs(a, root_a) != _xattrs(b, root_b)
        or _xattrs(a, root_a) is None
    ):
        yield Change(b"", ChangeKind.CHANGED, before, after)
    yield from _diff_pairs(a, b, root_a, root_b, _pairs(a, b, root_a, root_b, b""), times)


def _diff_pairs(
    a: View, b: View, dir_a: Directory | None, dir_b: Directory | None, pairs: Iterator[_Pair], times: bool
) -> Iterator[Change]:
    """Compare `pairs`, entries of `dir_a` and `dir_b`, and everything below them."""
    stack = [(dir_a, dir_b, pairs)]
    while stack:
        dir_a, dir_b, pairs = stack[-1]
        turns.give_way()
        pair = next(pairs, None)
        if pair is None:
            stack.pop()
            continue
        below_a, below_b = _enter(a, dir_a, pair.a), _enter(b, dir_b, pair.b)
        if below_a is not None and below_b is not None and a.identity(below_a) == b.identity(below_b):
            continue
        change = _compare(a, b, pair, times)
        if change is not None:
            yield change
        if below_a is not None or below_b is not None:
            stack.append((below_a, below_b, _pairs(a, b, below_a, below_b, pair.path)))


def _enter(view: View, directory: Directory | None, child: Child | None) -> Directory | None:
    if directory is None or child is None or child.entry.kind is not Kind.DIRECTORY:
        return None
    return view.enter(directory, child.name)


def _pairs(a: View, b: View, dir_a: Directory | None, dir_b: Directory | None, prefix: bytes) -> Iterator[_Pair]:
    """The names of two directories side by side, sorted; without names that are known to be the same."""
    names = a.unlike(dir_a, b, dir_b) if dir_a is not None and dir_b is not None else None
    for name, left, right in pair_by_name(_children(a, dir_a, names), _children(b, dir_b, names)):
        yield _Pair(join(prefix, name), left, right)


def _children(view: View, directory: Directory | None, names: Collection[bytes] | None) -> tuple[Child, ...]:
    if directory is None:
        return ()
    return view.children(directory) if names is None else view.some(directory, names)


def _compare(a: View, b: View, pair: _Pair, times: bool) -> Change | None:
    """The change of one name, not of the entries below it."""
    if pair.a is None or pair.b is None:
        kind = ChangeKind.ADDED if pair.a is None else ChangeKind.DELETED
        return Change(pair.path, kind, pair.a.entry if pair.a else None, pair.b.entry if pair.b else None)
    if pair.a.entry.inode == pair.b.entry.inode:  # layers do not change: the same file is the same file
        return None
    same = _metadata(pair.a.entry, times) == _metadata(pair.b.entry, times) and _same_rest(a, b, pair.a, pair.b)
    return None if same else Change(pair.path, ChangeKind.CHANGED, pair.a.entry, pair.b.entry)


def _metadata(entry: Entry, times: bool) -> tuple[object, ...]:
    """The part of an entry's status that counts. A link's mode means nothing, a directory's size is the file system's
    affair."""
    mode = 0 if entry.kind is Kind.SYMLINK else entry.mode
    size = entry.size if entry.kind is Kind.FILE else 0
    rdev = entry.rdev if entry.kind in _DEVICES else 0
    return entry.kind, mode, entry.uid, entry.gid, size, rdev, entry.mtime_ns if times else 0


def _same_rest(a: View, b: View, left: Child, right: Child) -> bool:
    """Compare what takes more calls: attributes, link targets, contents."""
    xattrs = _xattrs(a, left)
    if xattrs is None or xattrs != _xattrs(b, right):
        return False
    if left.entry.kind is Kind.SYMLINK:
        return a.readlink_of(left) == b.readlink_of(right)
    if left.entry.kind is not Kind.FILE:
        return True
    content = a.content_of(left)
    if content is not None and (other := b.content_of(right)) is not None:
        return content == other
    with closing_fd(a.open_child(left)) as fd_a, closing_fd(b.open_child(right)) as fd_b:
        return _same_content(fd_a, fd_b, left.entry.size)


def _xattrs(view: View, what: Directory | Child) -> dict[bytes, bytes] | None:
    """None if there are more than the kernel lists; two such files cannot be compared."""
    try:
        return view.xattrs_of(what) if isinstance(what, Child) else view.directory_xattrs(what)
    except OSError as exc:
        if exc.errno == errno.E2BIG:
            return None
        raise


def _same_content(fd_a: int, fd_b: int, size: int) -> bool:
    """Compare two files of `size` bytes. Holes that both have are skipped, so time follows data, not size."""
    at = 0
    while (at := min(_next_data(fd_a, at, size), _next_data(fd_b, at, size))) < size:
        block = os.pread(fd_a, _BLOCK_BYTES, at)
        if not block or block != os.pread(fd_b, _BLOCK_BYTES, at):
            return False
        at += len(block)
    return True


def _next_data(fd: int, at: int, size: int) -> int:
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return size
        raise
