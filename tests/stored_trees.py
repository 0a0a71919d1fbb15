"""Stored trees for tests: saved from directories on disk, or written down."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from typing import Any, TypeAlias

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.repo.base import RepositoryWriter, Tree, TreeEntry
from snapshotd.trees.base import Entry
from snapshotd.types import BlobID, Kind, TreeID

OWN = TreeEntry(b"", Kind.DIRECTORY, 0o755, 0, 0, 1_000_000_007)
Plan: TypeAlias = "Mapping[bytes, bytes | TreeEntry | Plan]"
"""Name to a file's bytes, to an entry (its name does not count), or to what is in a sub-directory. b"": the directory's
own entry."""


def file(repository: RepositoryWriter, data: bytes, **more: Any) -> TreeEntry:
    content = repository.save_bytes(data) if data else None
    return TreeEntry(
        **{
            **dict(name=b"", kind=Kind.FILE, mode=0o644, uid=0, gid=0, mtime_ns=5, size=len(data), content=content),
            **more,
        }
    )


def save(repository: RepositoryWriter, plan: Plan) -> TreeID:
    own, entries = OWN, []
    for name, what in sorted(plan.items()):
        if isinstance(what, bytes):
            what = file(repository, what)
        if isinstance(what, TreeEntry):
            if name:
                entries.append(what._replace(name=name))
            else:
                own = what
        else:
            entries.append(TreeEntry(name, Kind.DIRECTORY, 0, 0, 0, 0, tree=save(repository, what)))
    return repository.save_tree(Tree(own, tuple(entries)))


def save_deep(repository: RepositoryWriter, depth: int, name: bytes, bottom: Plan) -> TreeID:
    """`bottom` under a chain of `depth` directories called `name`."""
    tree = save(repository, bottom)
    for _ in range(depth):
        tree = repository.save_tree(Tree(OWN, (TreeEntry(name, Kind.DIRECTORY, 0, 0, 0, 0, tree=tree),)))
    return tree


def save_directory(repository: RepositoryWriter, path: str | bytes | int) -> TreeID:
    """A directory on disk with everything in it. The number of a link group is its inode number: it stays when names
    move."""
    fd = os.open(path, DIR_FLAGS) if not isinstance(path, int) else os.dup(path)
    try:
        entries = []
        for name in sorted(os.fsencode(name) for name in os.listdir(fd)):
            st = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                below = os.open(name, DIR_FLAGS, dir_fd=fd)
                try:
                    entries.append(TreeEntry(name, Kind.DIRECTORY, 0, 0, 0, 0, tree=save_directory(repository, below)))
                finally:
                    os.close(below)
            else:
                entries.append(_entry(repository, fd, name, st))
        own = Entry.of(os.fstat(fd))
        xattrs = _xattrs(f"/proc/self/fd/{fd}")
        return repository.save_tree(
            Tree(TreeEntry(b"", own.kind, own.mode, own.uid, own.gid, own.mtime_ns, xattrs=xattrs), tuple(entries))
        )
    finally:
        os.close(fd)


def _entry(repository: RepositoryWriter, dir_fd: int, name: bytes, st: os.stat_result) -> TreeEntry:
    entry, path = Entry.of(st), b"/proc/self/fd/%d/%b" % (dir_fd, name)
    content: BlobID | None = None
    extents: tuple[tuple[int, int], ...] | None = None
    if entry.kind is Kind.FILE:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=dir_fd)
        try:
            found = _data(fd, entry.size)
            data = b"".join(os.pread(fd, length, start) for start, length in found)
        finally:
            os.close(fd)
        content = repository.save_bytes(data) if data else None
        extents = None if len(data) == entry.size else found
    special = entry.kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE)
    return TreeEntry(
        name,
        entry.kind,
        0o777 if entry.kind is Kind.SYMLINK else entry.mode,
        entry.uid,
        entry.gid,
        entry.mtime_ns,
        entry.size if entry.kind is Kind.FILE else 0,
        content,
        extents,
        os.readlink(path) if entry.kind is Kind.SYMLINK else b"",
        entry.rdev if special else 0,
        None,
        st.st_ino if st.st_nlink > 1 else 0,
        st.st_nlink,
        _xattrs(path),
    )


def _data(fd: int, size: int) -> tuple[tuple[int, int], ...]:
    found, at = [], 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno != errno.ENXIO:
                raise
            break
        at = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        found.append((start, at - start))
    return tuple(found)


def _xattrs(path: str | bytes) -> tuple[tuple[bytes, bytes], ...]:
    link = not isinstance(path, str)  # a string is a descriptor's
    names = [name for name in os.listxattr(path, follow_symlinks=not link) if not name.startswith("trusted.overlay.")]
    return tuple(sorted((os.fsencode(name), os.getxattr(path, name, follow_symlinks=not link)) for name in names))
