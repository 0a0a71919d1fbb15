"""The prefix of the attributes in which layers keep what is not their files': overlayfs's marks and the daemon's notes.

Overlayfs reads its marks from `trusted.overlay.*`, which only a process with CAP_SYS_ADMIN over the whole machine may
write. Any other process keeps them as `user.overlay.*`, which overlayfs reads when it is mounted with `userxattr`. Tried
once in each process, on a file in memory, so children of a daemon need not be told. Source: xattr(7), overlayfs.rst.
"""

from __future__ import annotations

import errno
import os


def _class() -> str:
    fd = os.memfd_create("snapshotd-probe", os.MFD_CLOEXEC)
    try:
        os.setxattr(fd, "trusted.snapshotd.probe", b"")
    except OSError as exc:
        if exc.errno == errno.EPERM:
            return "user."
    finally:
        os.close(fd)
    return "trusted."


CLASS = _class()
"""`trusted.` or `user.`."""
OVERLAY = f"{CLASS}overlay."
OVERLAY_BYTES = OVERLAY.encode()
