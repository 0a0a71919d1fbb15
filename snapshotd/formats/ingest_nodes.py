"""The parts that both ways of bringing in foreign content share: the report, the rules for attributes, and the texts of
errors."""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snapshotd.errors import NO_ROOM, LimitExceeded, NotPermitted, OutOfSpace, SnapshotdError, UsageError
from snapshotd.kernel import files
from snapshotd.terms import number_of
from snapshotd.trees.base import Warnings
from snapshotd.trees.target import ACL_NAMES

ID_LIMIT = 65536
"""Ids from here on do not exist inside a sandbox (its user namespace has 65,536); overlayfs would show them as the user
nobody."""
_KEPT_XATTRS = frozenset({b"security.capability", *ACL_NAMES})
_WARNINGS_LIMIT = 100


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The result of bringing content in. `files` counts everything but directories; `bytes` is logical content. One
    sentence per warning."""

    files: int
    directories: int
    bytes: int
    warnings: tuple[str, ...] = ()


class Tally:
    """Counts while content comes in, and gathers warnings about parts that were left out. Repeated reasons become one
    warning with a count."""

    def __init__(self) -> None:
        self.files = self.directories = self.bytes = 0
        self._warnings = Warnings(_WARNINGS_LIMIT)
        self._repeated: Counter[str] = Counter()
        self.warn = self._warnings.add

    def count(self, reason: str) -> None:
        """Count something that may happen to every entry. `reason` reads well after "N entries: "."""
        if len(self._repeated) < _WARNINGS_LIMIT or reason in self._repeated:
            self._repeated[reason] += 1
        else:
            self.warn(f"an entry: {reason}")

    def report(self) -> IngestReport:
        repeated = (f"{number_of(n, 'entry')}: {reason}" for reason, n in self._repeated.items())
        return IngestReport(self.files, self.directories, self.bytes, (*self._warnings.all(), *repeated))


def printable(path: bytes) -> str:
    """A foreign path for a message: control and undecodable bytes escaped, at most 200 characters."""
    text = path.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= 200 else text[:197] + "..."


@contextmanager
def writing(path: bytes) -> Iterator[None]:
    """Turn an OSError of bringing in the entry `path` into the sentence a user can act on."""
    try:
        yield
    except OSError as exc:
        raise _sentence(path, exc) from exc


def _sentence(path: bytes, exc: OSError) -> SnapshotdError:
    name, reason = printable(path) or ".", exc.strerror or str(exc)
    if exc.errno in NO_ROOM:
        return OutOfSpace(
            f"cannot write {name}: the disk of the state directory is full; free some space and try again"
        )
    if exc.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
        return NotPermitted(f"cannot write {name}: {reason}; the daemon needs full root rights on its state directory")
    if exc.errno in (errno.EFBIG, errno.EMLINK, errno.E2BIG):
        return LimitExceeded(f"cannot write {name}: {reason}; the state directory's file system cannot hold it")
    return UsageError(f"cannot write {name}: {reason}; leave it out and try again")


def keep_xattr(name: bytes) -> bool:
    """True if an attribute is content. Overlay marks would forge deletions and renames; labels are the host's matter.

    `user.overlay.*` is left out too: an unprivileged program can set it, and an overlay mounted with `userxattr` would
    obey it.
    """
    return name in _KEPT_XATTRS or (name.startswith(b"user.") and not name.startswith(b"user.overlay."))


def set_xattrs(fd: int, path: bytes, xattrs: dict[bytes, bytes], tally: Tally) -> None:
    """Give the file of `fd` (not a symbolic link; O_PATH is fine) the attributes that `keep_xattr` allows; count the
    others."""
    is_content = stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFREG, stat.S_IFDIR)
    for name, value in xattrs.items():
        if not keep_xattr(name) or (name.startswith(b"user.") and not is_content):
            if name != b"security.selinux":  # every file of such a host has one, and no sandbox can use it
                tally.count(f"the extended attribute {printable(name)} was left out")
            continue
        try:
            os.setxattr(files.fd_path(fd), name, value)
        except OSError as exc:
            if exc.errno not in (errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG):
                raise
            # ENOSPC is also how ext4 says that an attribute exceeds its block
            tally.warn(f"{printable(path)}: the extended attribute {printable(name)} was left out: {exc.strerror}")


def allowed_ids(uid: int, gid: int, tally: Tally) -> tuple[int, int]:
    """The owner an entry gets: its own, or root for ids that no sandbox has."""
    if uid < ID_LIMIT and gid < ID_LIMIT:
        return uid, gid
    tally.count(f"an owner or group id of {ID_LIMIT} or more does not exist in a sandbox and became 0")
    return (uid if uid < ID_LIMIT else 0), (gid if gid < ID_LIMIT else 0)


def set_metadata(
    fd: int, path: bytes, *, owner: tuple[int, int], mode: int, mtime_ns: int, xattrs: dict[bytes, bytes], tally: Tally
) -> None:
    """Set owner, mode, attributes and modification time of the file of `fd` (O_PATH is fine; not a symbolic link).

    Order matters: chown clears setuid and file capabilities; times come last.
    """
    target = files.fd_path(fd)
    files.give(target, *owner)
    os.chmod(target, mode & 0o7777)
    if xattrs:
        set_xattrs(fd, path, xattrs, tally)
    os.utime(target, ns=(mtime_ns, mtime_ns))


def set_link_metadata(dir_fd: int, name: bytes, owner: tuple[int, int], mtime_ns: int) -> None:
    """Owner and time of the symbolic link `name`; it has no mode, and attributes of links are not content."""
    files.give(name, *owner, dir_fd=dir_fd, follow_symlinks=False)
    os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=dir_fd, follow_symlinks=False)


def writable_root(target_fd: int) -> int:
    """A readable descriptor of the directory that `target_fd` (O_PATH is fine) holds. The caller closes it."""
    return os.open(".", files.DIR_FLAGS, dir_fd=target_fd)
