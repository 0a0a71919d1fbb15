"""Extended attributes of a layer's entries, within bounds, and warnings about the ones that cannot be recorded.

Source: xattr(7). An agent can give a file so many attributes that the kernel refuses to list them (E2BIG over 64 KiB of
names, seen on XFS and btrfs), and on XFS each listed name may have a value of 64 KiB: gigabytes in one entry of a tree
that is held in memory.
"""

from __future__ import annotations

import errno
import os

from snapshotd.kernel.abilities import Marks
from snapshotd.trees.lookup import get_xattr, public_xattrs

MOST_BYTES = 1 << 20
"""Names and values kept of one entry."""
MOST_BYTES_PER_DIRECTORY = 64 << 20
"""The same of all entries of one directory."""

Xattrs = tuple[tuple[bytes, bytes], ...]

_UNLISTABLE = (errno.E2BIG, errno.ERANGE)
_NO_XATTRS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA)


def list_xattrs(target: int | bytes) -> list[str] | None:
    """Names, or None when there are more than the kernel lists. A path is not followed."""
    try:
        return os.listxattr(target) if isinstance(target, int) else os.listxattr(target, follow_symlinks=False)
    except OSError as exc:
        if exc.errno in _UNLISTABLE:
            return None
        if exc.errno in _NO_XATTRS:
            return []
        raise


def read_xattrs(
    target: int | bytes, names: list[str] | None, most_bytes: int, marks: Marks
) -> tuple[Xattrs, int, list[str]]:
    """The members of `names` (from `list_xattrs`) that belong to the tree and are none of overlayfs's `marks`, sorted; their
    size in bytes; and the missing ones, as parts of sentences."""
    if names is None:
        return (), 0, ["has more extended attributes than the kernel lists; none of them is recorded"]
    found, problems, total = [], [], 0
    for name in public_xattrs(names, marks):
        raw = os.fsencode(name)
        value = get_xattr(target, name)
        if value is None:
            problems.append(f"the extended attribute {name!a} is listed but cannot be read; it is not recorded")
            continue
        total += len(raw) + len(value)
        if total > most_bytes:
            return (), 0, [f"has more than {most_bytes} bytes of extended attributes; none of them is recorded"]
        found.append((raw, value))
    return tuple(sorted(found)), total, problems
