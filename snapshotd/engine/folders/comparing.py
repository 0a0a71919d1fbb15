"""The first scan of a folder by a daemon: the files are compared with those of the head, byte by byte."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

from snapshotd.engine.folders.capture import TOP
from snapshotd.engine.folders.scan import FolderIndex, FolderScan, Mark, open_file, settled_mark
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.trees.base import Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind

_PIECE_BYTES = 1 << 20


def listing(view: View) -> dict[str, Entry]:
    """The paths of a folder as a snapshot has them."""
    try:
        return {os.fsdecode(inside[len(TOP) + 1 :]): entry for inside, entry in view.walk(TOP)}
    except FileNotFoundError:
        return {}


def compare(
    view: View, there: dict[str, Entry], root: int, user: HostUser, index: FolderIndex, scan: FolderScan
) -> FolderScan:
    """The scan of an index that knew nothing, less what is as `view` has it. The index learns that. `there`: the
    view's `listing`."""
    same = {
        path: _same(view, root, user, path, mark, there[path]) if path in there else None
        for path, mark in scan.changed.items()
    }
    # a name that came makes the others of its file change: the snapshot has them as one file
    torn = {id(names) for path, names in scan.names.items() if same[path] is None}
    changed: dict[str, Mark] = {}
    for path, mark in scan.changed.items():
        found = same[path]
        if found is None or id(scan.names.get(path)) in torn:
            changed[path] = mark
        else:
            index.note_captured(path, *found)
    gone = [path for path in there if path not in scan.changed and not index.is_ignored(path)]
    return replace(scan, changed=changed, deleted=sorted(gone))


def _same(
    view: View, root: int, user: HostUser, path: str, mark: Mark, entry: Entry
) -> tuple[Mark, bytes | None] | None:
    """Compare a path with the view. Returns the facts for the index if mode and content or target are equal; None: they
    differ."""
    mode = mark[0]
    if stat.S_IMODE(mode) != entry.mode and not stat.S_ISLNK(mode):
        return None
    if stat.S_ISDIR(mode):
        return (mark, None) if entry.kind is Kind.DIRECTORY else None
    parent, _, name = path.rpartition("/")
    try:
        with acting_as(user):
            directory = files.open_deep(root, os.fsencode(parent), one_device=True)
            try:
                if stat.S_ISLNK(mode):
                    target = os.readlink(name, dir_fd=directory)
                else:
                    fd = open_file(directory, name)
            finally:
                os.close(directory)
    except OSError:
        return None
    inside = TOP + b"/" + os.fsencode(path)
    if stat.S_ISLNK(mode):
        same = entry.kind is Kind.SYMLINK and view.readlink(inside) == os.fsencode(target)
        return (mark, None) if same else None
    try:
        if entry.kind is not Kind.FILE or entry.size != mark[1] or not _same_bytes(view, inside, fd, entry.size):
            return None
        return settled_mark(fd, os.fstat(fd))
    finally:
        os.close(fd)


def _same_bytes(view: View, path: bytes, fd: int, size: int) -> bool:
    child = view.child(path)
    for offset in range(0, size, _PIECE_BYTES):
        if view.read_child(child, offset, _PIECE_BYTES) != os.pread(fd, _PIECE_BYTES, offset):
            return False
    return True
