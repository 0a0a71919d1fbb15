"""The mark of directories that hold whiteouts, for layers that were made without it.

Earlier versions merged layers without setting it: where such a directory lies in one layer of a stack alone, the kernel lists deleted
names. See `base.py` for the rule, `lookup.make_whiteout` for what keeps it now.
"""

from __future__ import annotations

import os
import stat

from snapshotd.kernel import turns
from snapshotd.layers.lookup import ORIGIN, Handles, Node, get_xattr


def mark_whiteouts(layer_fd: int) -> int:
    """Mark every directory of a layer that holds whiteouts and has no mark. Returns how many were marked.

    A mounted stack shows it when the kernel looks the directory up anew, at the latest in the next overlay. Raises OSError
    (FileNotFoundError, ESTALE: the layer is being removed). Cost: one listing per directory.
    """
    handles = Handles()
    try:
        pending, marked = [handles.add_root(layer_fd)], 0
        while pending:
            turns.give_way()
            directory = pending.pop()
            fd = handles.fd(directory)
            with os.scandir(fd) as found:
                entries = list(found)
            pending += [
                Node(directory, os.fsencode(entry.name), 0, (directory.inode[0], entry.inode()))
                for entry in entries if entry.is_dir(follow_symlinks=False)
            ]  # fmt: skip
            if any(map(_is_whiteout, entries)) and get_xattr(fd, ORIGIN) is None:
                os.setxattr(fd, ORIGIN, b"")
                marked += 1
        return marked
    finally:
        handles.close()


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return False  # the listing says so: no stat
    st = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(st.st_mode) and st.st_rdev == 0
