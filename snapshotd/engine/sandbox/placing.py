"""Changing the files below a live root: what the daemon does itself, as root outside of a tree that hostile processes
change meanwhile.

Paths are bytes from the root, without a leading slash. The kernel resolves them as for a process in the sandbox: links
are followed and stay inside, mounts are not entered (openat2, RESOLVE_IN_ROOT and RESOLVE_NO_XDEV). The last name is
looked at through a descriptor (O_PATH), so nothing is opened that could block or act. A file is filled where it has no
name (O_TMPFILE) and then put in place with a rename: whoever looks sees the old one or the new one, whole.

Errors are OSErrors; `explain_errors` makes sentences of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from snapshotd.errors import NO_ROOM, Conflict, NotFound, OutOfSpace, SnapshotdError, UsageError
from snapshotd.kernel import files

FILE_MODE, DIR_MODE = 0o644, 0o755
_MOST_LINKS = 40
"""As many as the kernel follows in one path."""
_HOLD = os.O_PATH | os.O_NOFOLLOW
_HOLD_DIR = os.O_PATH | os.O_DIRECTORY


@dataclass(frozen=True, slots=True)
class Owner:
    """Owner and group of new files and directories, by number."""

    user: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class LivePlace:
    """A name in a directory that is held (`dir_fd`), and what is there, links not followed. None: nothing."""

    dir_fd: int
    name: bytes
    there: os.stat_result | None


def open_unnamed(root_fd: int) -> int:
    """A descriptor for writing a file that has no name yet. It goes when it is closed, unless `put` gives it one. Where the
    root's file system has no such files (NFS), it is one of the machine's temporary files, and `put` copies it."""
    try:
        return os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=root_fd)
    except OSError as exc:
        if exc.errno != errno.EOPNOTSUPP:
            raise
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def put(
    root_fd: int,
    path: bytes,
    fd: int,
    owner: Owner,
    mode: int | None = None,
    mtime_ns: int | None = None,
    *,
    follow: bool = True,
) -> None:
    """Give the file of `fd` (`open_unnamed`) the name `path`, in place of the file that is there. That one's owner stays,
    and its mode unless `mode` is given. A link is followed, or without `follow` replaced. Missing directories are made."""
    with _place(root_fd, path, follow=follow, make=owner) as place:
        there = None if place.there is not None and stat.S_ISLNK(place.there.st_mode) else place.there
        if there is not None and not stat.S_ISREG(there.st_mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(there.st_mode) else errno.EINVAL, "not a regular file")
        if there is not None:
            owner = Owner(there.st_uid, there.st_gid)
            mode = stat.S_IMODE(there.st_mode) if mode is None else mode
        os.fchown(fd, owner.user, owner.group)
        os.fchmod(fd, FILE_MODE if mode is None else mode)
        if mtime_ns is not None:
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        _name(place, lambda name: _link(fd, place.dir_fd, name))


def _link(fd: int, dir_fd: int, name: bytes) -> None:
    """Give the file of `fd` a name, or that name a copy where the file lies elsewhere (`open_unnamed`)."""
    try:
        os.link(files.fd_path(fd), name, dst_dir_fd=dir_fd, follow_symlinks=True)
        return
    except OSError as exc:
        if exc.errno != errno.EXDEV:
            raise
    with files.closing_fd(
        os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    ) as copy:
        try:
            made = os.fstat(fd)
            files.copy_data(fd, copy, made.st_size)
            files.copy_metadata(made, {}, copy)
        except BaseException:
            os.unlink(name, dir_fd=dir_fd)
            raise


def put_symlink(root_fd: int, path: bytes, target: bytes, owner: Owner) -> None:
    """Make a symbolic link in place of what is there, unless that is a directory."""

    with _place(root_fd, path, make=owner) as place:
        _check_replaceable(place)

        def make(name: bytes) -> None:
            os.symlink(target, name, dir_fd=place.dir_fd)
            os.chown(name, owner.user, owner.group, dir_fd=place.dir_fd, follow_symlinks=False)

        _name(place, make)


def put_link(root_fd: int, path: bytes, to: bytes, owner: Owner) -> None:
    """Give the file `to` another name, in place of what is there, unless that is a directory."""
    with _place(root_fd, to) as source, _place(root_fd, path, make=owner) as place:
        if source.there is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        _check_replaceable(place)
        if place.there is not None and os.path.samestat(source.there, place.there):
            return  # rename(2) does nothing then, and would leave the other name behind
        _name(
            place,
            lambda name: os.link(
                source.name, name, src_dir_fd=source.dir_fd, dst_dir_fd=place.dir_fd, follow_symlinks=False
            ),
        )


def make_dir(root_fd: int, path: bytes, owner: Owner, mode: int | None = None) -> bool:
    """Make the directory `path`, and those above it that are missing. Existing directories stay as they are. False: it was
    there."""
    made = False
    missing: list[bytes] = []
    at = path
    while True:
        try:
            fd = files.open_in_root(root_fd, at, _HOLD_DIR)
            break
        except FileNotFoundError:
            at, _, name = at.rstrip(b"/").rpartition(b"/")
            missing.append(name)
    try:
        while missing:
            name = missing.pop()
            own_mode = DIR_MODE if missing or mode is None else mode
            try:
                os.mkdir(name, 0o700, dir_fd=fd)
            except FileExistsError:
                own_mode = -1  # it has come meanwhile, or is a link that leads nowhere
            deeper = files.open_in_root(fd, name, _HOLD_DIR | os.O_NOFOLLOW)
            os.close(fd)
            fd = deeper
            if own_mode >= 0:
                os.chown(files.fd_path(fd), owner.user, owner.group)
                os.chmod(files.fd_path(fd), own_mode)
                made = True
    finally:
        os.close(fd)
    return made


def remove(root_fd: int, path: bytes) -> None:
    """Remove the entry of that name, and everything in it; a link itself. Nothing of the sandbox may run meanwhile."""
    with _place(root_fd, path) as place:
        if place.there is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        files.remove_tree(place.dir_fd, place.name, one_device=True)


def rename(root_fd: int, path: bytes, to: bytes) -> None:
    """As rename(2): a file in place of a file, a directory in place of an empty one."""
    with _place(root_fd, path) as source, _place(root_fd, to) as target:
        if source.there is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        os.rename(source.name, target.name, src_dir_fd=source.dir_fd, dst_dir_fd=target.dir_fd)


@contextlib.contextmanager
def _place(root_fd: int, path: bytes, *, follow: bool = False, make: Owner | None = None) -> Iterator[LivePlace]:
    """The place that `path` leads to. With `follow` a link at its end is followed; with `make` the directories above are made.
    OSError: EXDEV (something is mounted there), EISDIR (no name in a directory)."""
    for _ in range(_MOST_LINKS):
        above, _, name = path.rstrip(b"/").rpartition(b"/")
        if name in (b"", b".", b".."):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if make is not None:
            make_dir(root_fd, above, make)
        with files.closing_fd(files.open_in_root(root_fd, above, _HOLD_DIR)) as dir_fd:
            there, target = _look(dir_fd, name)
            if target is None or not follow:
                yield LivePlace(dir_fd, name, there)
                return
        path = target if target.startswith(b"/") else above + b"/" + target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _look(dir_fd: int, name: bytes) -> tuple[os.stat_result | None, bytes | None]:
    """The entry of that name, and the target if it is a link."""
    try:
        held = files.open_in_root(dir_fd, name, _HOLD)
    except FileNotFoundError:
        return None, None
    with files.closing_fd(held):
        st = os.fstat(held)
        return st, os.readlink(b"", dir_fd=held) if stat.S_ISLNK(st.st_mode) else None


def _check_replaceable(place: LivePlace) -> None:
    if place.there is not None and stat.S_ISDIR(place.there.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))


def _name(place: LivePlace, make: Callable[[bytes], None]) -> None:
    """Make something under another name and rename it into its place."""
    name = b".snapshotd-new-" + os.urandom(8).hex().encode()
    make(name)
    try:
        os.rename(name, place.name, src_dir_fd=place.dir_fd, dst_dir_fd=place.dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=place.dir_fd)
        raise


@contextlib.contextmanager
def explain_errors(what: str, path: bytes) -> Iterator[None]:
    """Raise an OSError of the block as an error with a sentence. `what` is the verb of that sentence, such as "write".
    Errors that need no sentence stay as they are."""
    try:
        yield
    except OSError as exc:
        raise _failure(what, path, exc) from exc


_WHY = {
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EISDIR: "it is a directory",
    errno.EINVAL: "it is not a regular file, or lies in itself",
    errno.ELOOP: "it leads through too many links",
    errno.EXDEV: "something is mounted there, or it is a directory of the image, which is renamed only with root",
    errno.ENAMETOOLONG: "the path or a name in it is too long",
    errno.EPERM: "the file, or its directory, is marked immutable",
    errno.EMLINK: "there are too many links to it",
}
_WHY_NOT_NOW = {
    errno.EBUSY: "something is mounted in it",
    errno.ENOTEMPTY: "a directory that is not empty is there",
    errno.EEXIST: "something else is there",
    errno.EWOULDBLOCK: "a process holds a lease on it",
    errno.ESTALE: "it was replaced meanwhile; try again",
    errno.ETXTBSY: "it is being executed",
}


def _failure(what: str, path: bytes, exc: OSError) -> SnapshotdError | OSError:
    shown = repr("/" + os.fsdecode(path[:1000]))
    if exc.errno == errno.ENOENT:
        return NotFound(f"cannot {what} {shown}: it does not exist; list its directory to see what does")
    if exc.errno in _WHY:
        return UsageError(f"cannot {what} {shown}: {_WHY[exc.errno]}; name another path")
    if exc.errno in _WHY_NOT_NOW:
        return Conflict(f"cannot {what} {shown}: {_WHY_NOT_NOW[exc.errno]}")
    if exc.errno in NO_ROOM:
        return OutOfSpace(
            f"cannot {what} {shown}: there is no room for it ({exc.strerror}); remove files in the sandbox, or give it a larger disk"
        )
    return exc
