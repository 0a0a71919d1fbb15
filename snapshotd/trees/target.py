"""The directory that a view is written to: metadata of its entries, and warnings for those that it cannot hold."""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from snapshotd.errors import NO_ROOM, OutOfSpace
from snapshotd.kernel.abilities import Marks
from snapshotd.trees.base import Entry, Warnings, printable_path
from snapshotd.trees.lookup import Node
from snapshotd.types import Kind

_CANNOT_HOLD = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EILSEQ,
    errno.EFBIG,
    errno.EMLINK,
    errno.EEXIST,
    errno.E2BIG,
    errno.ERANGE,
    errno.EOVERFLOW,
)
UNMAPPED_ID = 0xFFFFFFFE
"""The id that stands for any id without a place above the shift: no container maps it, so it shows as nobody there."""

ACL_NAMES = (b"system.posix_acl_access", b"system.posix_acl_default")
_ACL_VERSION = 2
_ACL_USER, _ACL_GROUP = 0x02, 0x08
_ACL_HEADER = struct.Struct("<I")
_ACL_ENTRY = struct.Struct("<HHI")
_T = TypeVar("_T")
Owner = tuple[int, int]
"""User and group."""


class WrittenTree:
    """Gives entries of a target their metadata, and turns what it cannot hold into warnings. Thread-safe.

    `owner`: as in `materialise`; `shift`: the number by which ids are higher in the target; `marks`: those of overlayfs if
    the target is a layer."""

    def __init__(self, owner: Owner | None, shift: int, marks: Marks | None) -> None:
        self._owner, self._shift = owner, shift
        self._marked = () if marks is None else (marks.prefix,)
        self.warnings = Warnings()

    def read_xattrs(self, directory: Node, name: bytes, read: Callable[[], dict[bytes, bytes]]) -> dict[bytes, bytes]:
        """The extended attributes of an entry, without those that would be overlayfs's marks in a layer."""
        try:
            return {key: value for key, value in read().items() if not key.startswith(self._marked)}
        except OSError as exc:
            if exc.errno != errno.E2BIG:
                raise
            self.warn(directory, name, "lost its extended attributes, which are more than can be listed")
            return {}

    def apply(
        self, directory: Node, name: bytes, what: int | str | bytes, entry: Entry, xattrs: dict[bytes, bytes]
    ) -> None:
        """Give `what`, a descriptor or a path, its metadata: the entry `name` of `directory`, or the directory itself if the
        name is empty.

        Owner, mode, attributes, time, in this order: chown clears set-user-id and capabilities, all of them change the
        ctime only. Metadata that are right already are left alone: most files have the owner and mode that they were
        made with.
        """
        follow = entry.kind is not Kind.SYMLINK  # a link's mode means nothing
        uid, gid = self._owner or (entry.uid + self._shift, entry.gid + self._shift)
        if not xattrs and _is_as_made(what, entry, (uid, gid), follow):
            return
        st = os.stat(what, follow_symlinks=follow)
        if (st.st_uid, st.st_gid) != (uid, gid):
            self._try(directory, name, "owner", lambda: os.chown(what, uid, gid, follow_symlinks=follow))
            st = os.stat(what, follow_symlinks=follow)
        first = entry.mode | stat.S_IWUSR if xattrs else entry.mode  # as `files.copy_metadata`
        if follow and stat.S_IMODE(st.st_mode) != first:
            self._try(directory, name, "mode", lambda: os.chmod(what, first))
        for key, value in xattrs.items():
            shown = f"extended attribute {os.fsdecode(key)!r}"
            if self._shift and key in ACL_NAMES:
                value = shift_acl(value, self._shift)
            self._try(directory, name, shown, partial(os.setxattr, what, key, value, follow_symlinks=follow), *NO_ROOM)
        if follow and first != entry.mode:
            self._try(directory, name, "mode", lambda: os.chmod(what, entry.mode))
        times = (entry.mtime_ns, entry.mtime_ns)
        self._try(directory, name, "time", lambda: os.utime(what, ns=times, follow_symlinks=follow))
        st = os.stat(what, follow_symlinks=follow)
        got = (st.st_uid, st.st_gid, st.st_mtime_ns, stat.S_IMODE(st.st_mode) if follow else entry.mode)
        if got != (uid, gid, entry.mtime_ns, entry.mode):
            self.warn(
                directory,
                name,
                "has another owner, mode or time than in the snapshot, because the target cannot hold it",
            )

    def _try(self, directory: Node, name: bytes, what: str, action: Callable[[], object], *more: int) -> None:
        """Set one piece of metadata, or warn that it is lost. `more`: errors that also mean "cannot hold" (a full disk,
        where one value is too big)."""
        try:
            action()
        except OSError as exc:
            if exc.errno not in (*_CANNOT_HOLD, *more):
                raise
            self.warn(directory, name, f"lost its {what} ({exc.strerror})")

    def attempt(self, directory: Node, name: bytes, action: Callable[[], _T]) -> _T | None:
        """The result of `action`, which makes the entry `name` of `directory`; None and a warning if the target cannot
        hold it."""
        try:
            return action()
        except OSError as exc:
            if exc.errno in NO_ROOM:
                path = printable_path(directory, name)
                raise OutOfSpace(
                    f"cannot restore {path}: the target's disk is full; free space or choose another target"
                ) from exc
            if exc.errno not in _CANNOT_HOLD:
                raise
            self.warn(directory, name, f"was left out, because the target cannot hold it ({exc.strerror})")
            return None

    def warn(self, directory: Node, name: bytes, what: str) -> None:
        """Note something about an entry that could not be written."""
        self.warnings.add(f"{printable_path(directory, name)} {what}.")


def shift_id(value: int, shift: int) -> int:
    """An owner id (0 to 2^32-2) as a host id."""
    moved = value + shift
    return moved if moved < 0xFFFFFFFF else UNMAPPED_ID


def shift_acl(value: bytes, shift: int) -> bytes:
    """An access list with its users and groups `shift` higher. A malformed one stays as it is: the kernel refuses it."""
    if len(value) < 4 or (len(value) - 4) % _ACL_ENTRY.size or _ACL_HEADER.unpack_from(value)[0] != _ACL_VERSION:
        return value
    out = [value[:4]]
    for tag, perm, owner in _ACL_ENTRY.iter_unpack(value[4:]):
        out.append(_ACL_ENTRY.pack(tag, perm, shift_id(owner, shift) if tag in (_ACL_USER, _ACL_GROUP) else owner))
    return b"".join(out)


def _is_as_made(what: int | str | bytes, entry: Entry, owner: tuple[int, int], follow: bool) -> bool:
    """Set the time of a new file, and return True if its other metadata are right already, as in nearly every file."""
    try:
        os.utime(what, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=follow)
    except OSError:
        return False  # the long way reports the error
    st = os.stat(what, follow_symlinks=follow)
    right = (st.st_uid, st.st_gid) == owner and st.st_mtime_ns == entry.mtime_ns
    return right and (not follow or stat.S_IMODE(st.st_mode) == entry.mode)
