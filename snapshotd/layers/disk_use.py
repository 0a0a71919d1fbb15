"""Disk use of a live upper, for file systems that do not count it themselves. Its sandbox goes on writing meanwhile."""

from __future__ import annotations

import os
import stat
from contextlib import closing

from snapshotd.kernel import turns
from snapshotd.kernel.quota import Used
from snapshotd.trees.lookup import Handles, Node


def measure(root_fd: int, most: Used) -> Used:
    """Disk use of the tree, or a value above `most` as soon as it has more bytes or inodes than that. A file with
    several names counts once. A file that changes during the walk may or may not be counted. Memory and time: one entry
    for each inode up to `most`."""
    seen: set[int] = set()
    size = inodes = 0
    with closing(Handles()) as handles:
        pending = [handles.add_root(root_fd)]
        while pending and size <= most.bytes and inodes <= most.inodes:
            turns.give_way()
            directory = pending.pop()
            try:
                entries = os.scandir(handles.fd(directory))
            except OSError:
                continue  # removed or replaced meanwhile
            with entries:
                for entry in entries:
                    try:
                        st = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    if st.st_nlink > 1 and not stat.S_ISDIR(st.st_mode):
                        if st.st_ino in seen:
                            continue
                        seen.add(st.st_ino)
                    size += st.st_blocks * 512
                    inodes += 1
                    if inodes > most.inodes:
                        break
                    if stat.S_ISDIR(st.st_mode):
                        pending.append(Node(directory, os.fsencode(entry.name), 0, (st.st_dev, st.st_ino)))
    return Used(size, inodes)
