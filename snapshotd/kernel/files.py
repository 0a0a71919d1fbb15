"""File operations on directory descriptors that never follow a link out of the tree they were given.

The trees are an attacker's. Rules: a path is resolved with openat2(RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS), or one
component at a time from a held descriptor; anything but a regular file or directory is held with O_PATH only (a fifo
would block, a device acts). Names and paths are bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshotd.errors import NO_ROOM
from snapshotd.kernel import syscalls as sc

_FICLONE = 0x40049409
_BENEATH = sc.RESOLVE_BENEATH | sc.RESOLVE_NO_SYMLINKS | sc.RESOLVE_NO_MAGICLINKS
_IN_ROOT = sc.RESOLVE_IN_ROOT | sc.RESOLVE_NO_XDEV | sc.RESOLVE_NO_MAGICLINKS
_COPY_STEP_BYTES = 64 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """A descriptor for a block, which closes it at its end."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_beneath(dir_fd: int, path: bytes, flags: int) -> int:
    """Open `path` (relative, b"" or b"." is the directory itself) below `dir_fd` without following any symbolic link.

    Raises OSError: ELOOP (a component is a link), EXDEV (`..` out of the tree), ENAMETOOLONG over 4095 bytes, and
    open's own.
    """
    return _open(dir_fd, path, flags, _BENEATH)


def open_in_root(root_fd: int, path: bytes, flags: int) -> int:
    """Open `path` as a process would whose root is `root_fd`: links are followed and stay inside. Mounts below are not
    entered.

    Raises OSError: ELOOP, EXDEV (a mount), and open's own. The file may be a fifo or a device: hold it with O_PATH
    first.
    """
    return _open(root_fd, path, flags, _IN_ROOT)


def _open(dir_fd: int, path: bytes, flags: int, resolve: int) -> int:
    how = sc.OpenHow(flags | os.O_CLOEXEC | (0 if flags & os.O_PATH else os.O_NOCTTY), 0, resolve)
    while True:
        try:
            return sc.call("openat2", dir_fd, path or b".", ctypes.byref(how), ctypes.sizeof(how))
        except OSError as exc:
            if exc.errno != errno.EAGAIN:  # the kernel asks to retry when a rename raced with the walk
                raise


def open_dir(dir_fd: int, name: bytes) -> int:
    """Open the directory `name` (one component) of `dir_fd` for reading, never through a link."""
    return os.open(name, DIR_FLAGS, dir_fd=dir_fd)


def open_deep(dir_fd: int, path: bytes, *, one_device: bool = False) -> int:
    """Like `open_beneath` for a directory, but for paths of any length: one component at a time. `one_device`: another
    file system on the way is EXDEV."""
    device = os.fstat(dir_fd).st_dev if one_device else None
    fd = os.dup(dir_fd)
    for name in path.split(b"/"):
        if not name:
            continue
        with closing_fd(fd):
            deeper = open_dir(fd, name)
        fd = deeper
        if device is not None and os.fstat(fd).st_dev != device:
            os.close(fd)
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), os.fsdecode(path))
    return fd


def list_ancestors(dir_fd: int) -> list[tuple[int, int]]:
    """Device and inode of a directory (O_PATH is fine) and of each that it lies in, up to the root. OSError."""
    found: list[tuple[int, int]] = []
    fd = os.dup(dir_fd)
    try:
        while (here := identity_of(os.fstat(fd))) not in found[-1:]:
            found.append(here)
            up = os.open("..", DIR_FLAGS | os.O_PATH, dir_fd=fd)
            os.close(fd)
            fd = up
    finally:
        os.close(fd)
    return found


def identity_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode: a file or directory is known by them under any name."""
    return status.st_dev, status.st_ino


def make_dirs(dir_fd: int, path: bytes) -> int:
    """Open the directory `path` below `dir_fd`, creating missing directories, which are root's (an ordinary user's daemon is
    another user in its namespace). Returns a descriptor for reading.

    Raises OSError (ENOTDIR or ELOOP where a component is not a directory).
    """
    fd = os.dup(dir_fd)
    for name in path.split(b"/"):
        if name in (b"", b"."):
            continue
        if name == b"..":
            os.close(fd)
            raise OSError(errno.EXDEV, "path leaves its tree", os.fsdecode(path))
        with closing_fd(fd):
            try:
                os.mkdir(name, 0o755, dir_fd=fd)
                give(name, 0, 0, dir_fd=fd, follow_symlinks=False)
            except FileExistsError:
                pass  # open_dir below refuses anything but a directory
            deeper = open_dir(fd, name)
        fd = deeper
    return fd


def reflink(source_fd: int, target_fd: int) -> bool:
    """Share all of `source_fd`'s extents with the empty file `target_fd`. False where the file systems cannot."""
    try:
        fcntl.ioctl(target_fd, _FICLONE, source_fd)
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ETXTBSY):
            return False
        raise
    return True


def copy_data(source_fd: int, target_fd: int, size: int) -> int:
    """Copy up to `size` bytes from offset 0 to the empty file `target_fd`: reflink, else data extents only (holes
    stay).

    Returns the logical size of the copy, which is less than `size` if the source was cut meanwhile.
    Time and space are proportional to data, not to holes.
    """
    if reflink(source_fd, target_fd):
        return min(os.fstat(target_fd).st_size, size) if size else 0
    offset = 0
    while offset < size:
        try:
            start = os.lseek(source_fd, offset, os.SEEK_DATA)
            end = min(os.lseek(source_fd, start, os.SEEK_HOLE), size)
        except OSError as exc:
            if exc.errno == errno.ENXIO:
                break  # only a hole is left
            raise
        while start < end:
            done = _copy_range(source_fd, target_fd, start, min(end - start, _COPY_STEP_BYTES))
            if done == 0:
                os.ftruncate(target_fd, start)
                return start
            start += done
        offset = end
    final = min(size, os.fstat(source_fd).st_size)
    os.ftruncate(target_fd, final)
    return final


def _copy_range(source_fd: int, target_fd: int, offset: int, length: int) -> int:
    try:
        return os.copy_file_range(source_fd, target_fd, length, offset, offset)
    except OSError as exc:
        if exc.errno not in (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
    data = os.pread(source_fd, min(length, 1 << 20), offset)
    written = 0
    while written < len(data):
        written += os.pwrite(target_fd, data[written:], offset + written)
    return written


def fd_path(fd: int) -> str:
    """A path that names exactly the file of `fd`, for calls that take no O_PATH descriptor (xattrs of links, chmod)."""
    return f"/proc/self/fd/{fd}"


SHADOWS = ("trusted.SGI_ACL_FILE", "trusted.SGI_ACL_DEFAULT", "system.nfs4_acl", "system.nfs4_dacl", "system.nfs4_sacl")
"""Under the first two names XFS lists its stored form of system.posix_acl_access and _default once more, for root
(fs/xfs/xfs_xattr.c); under the others NFS lists owner and mode once more, and they cannot be removed (fs/nfs/nfs4proc.c).
They are no attributes of the file: on another file system they would appear as foreign ones."""


def read_xattrs(path_fd: int) -> dict[bytes, bytes]:
    """Extended attributes of the file of `path_fd` (O_PATH is fine), but `SHADOWS`. Raises OSError (E2BIG: more than
    the kernel lists)."""
    path = fd_path(path_fd)
    try:
        names = os.listxattr(path)
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return {}
        raise
    return {os.fsencode(name): os.getxattr(path, name) for name in names if name not in SHADOWS}


def drop_xattrs(fd: int, names: Iterable[bytes | str]) -> None:
    """Remove attributes from the file of `fd`; not an error where they are missing or not supported. OSError."""
    for name in names:
        try:
            os.removexattr(fd_path(fd), name)
        except OSError as exc:
            if exc.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS):
                raise


def free_bytes(fd: int) -> int:
    """Space that users other than root can still take on the file system that holds `fd`. OSError."""
    st = os.fstatvfs(fd)
    return st.f_bavail * st.f_frsize


def give(
    what: int | str | bytes, uid: int, gid: int, *, dir_fd: int | None = None, follow_symlinks: bool = True
) -> None:
    """chown(2). An id that this process's user namespace does not have (an ordinary user's daemon has few) stays what it
    is: that of the daemon's root. Where this process may give nothing away, it stays the daemon's own. OSError."""
    try:
        os.chown(what, uid, gid, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
    except PermissionError:
        return
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        for owner, group in ((uid, -1), (-1, gid)):
            try:
                os.chown(what, owner, group, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
            except OSError as other:
                if other.errno != errno.EINVAL:
                    raise


def copy_metadata(source: os.stat_result, xattrs: dict[bytes, bytes], target_fd: int) -> None:
    """Give `target_fd` (O_PATH is fine; not a symbolic link) the owner, mode, xattrs and times of `source`.

    Order matters: chown clears setuid and file capabilities, writing xattrs changes ctime only, times come last.
    """
    path, mode = fd_path(target_fd), stat.S_IMODE(source.st_mode)
    give(path, source.st_uid, source.st_gid)
    # An ordinary user adds no attribute to a file of theirs that is read-only.
    os.chmod(path, mode | stat.S_IWUSR if xattrs else mode)
    for name, value in xattrs.items():
        os.setxattr(path, name, value)
    if xattrs and not mode & stat.S_IWUSR:
        os.chmod(path, mode)
    os.utime(path, ns=(source.st_atime_ns, source.st_mtime_ns))


def is_empty_dir(dir_fd: int) -> bool:
    """True if the directory holds nothing. One getdents call for an empty one."""
    with os.scandir(dir_fd) as entries:
        return next(entries, None) is None


def remove_tree(dir_fd: int, name: bytes | str, *, one_device: bool = False) -> None:
    """Delete `name` below `dir_fd` and everything in it, of any depth, never leaving it and never following a link.

    `one_device`: something may be mounted in it; raises OSError EBUSY then, and the mount is not touched (the rest may
    be gone). Not an error when it is missing, or when another thread removes it too. Iterative, one descriptor per level
    up to 200 levels, then it flattens: deeper entries are moved up before they are removed, so that neither recursion nor
    descriptors grow with an attacker's tree.
    """
    name = os.fsencode(name)
    try:
        os.unlink(name, dir_fd=dir_fd)
        return
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        pass
    top = _open_to_empty(dir_fd, name)
    device = os.fstat(dir_fd).st_dev if one_device else None
    stack: list[tuple[int, bytes, list[bytes]]] = [(top, b"", [])]  # with the names of sub-directories that are left
    try:
        _check_device(top, device)
        while stack:
            fd, own_name, left = stack[-1]
            if not left:
                left += _remove_files(fd)  # once more: for entries that came meanwhile, or were moved up
            if not left:
                stack.pop()
                os.close(fd)
                if stack:
                    with contextlib.suppress(FileNotFoundError):
                        os.rmdir(own_name, dir_fd=stack[-1][0])
                continue
            child = left.pop()
            try:
                if len(stack) < 200:
                    stack.append((_open_to_empty(fd, child), child, []))
                    _check_device(stack[-1][0], device)
                else:
                    # The tree cannot have a directory of that name waiting.
                    aside = b".snapshotd-deep-" + os.urandom(8).hex().encode()
                    os.rename(child, aside, src_dir_fd=fd, dst_dir_fd=top)
            except (FileNotFoundError, NotADirectoryError):
                continue  # changed since it was listed; the next listing tells
    finally:
        for fd, _, _ in stack:
            os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=dir_fd)


def empty_dir(dir_fd: int) -> None:
    """Delete everything in a directory, as `remove_tree` does."""
    for name in os.listdir(dir_fd):
        remove_tree(dir_fd, name)


def _open_to_empty(dir_fd: int, name: bytes) -> int:
    """Open a directory that is to be removed. An ordinary user's own may forbid that, and what is needed next."""
    with closing_fd(os.open(name, DIR_FLAGS | os.O_PATH, dir_fd=dir_fd)) as held:
        if not os.access(fd_path(held), os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            os.chmod(fd_path(held), 0o700)
        return os.open(fd_path(held), DIR_FLAGS & ~os.O_NOFOLLOW)


def _check_device(fd: int, device: int | None) -> None:
    if device is not None and os.fstat(fd).st_dev != device:
        raise OSError(errno.EBUSY, "something is mounted there")


def _remove_files(fd: int) -> list[bytes]:
    """Unlink every non-directory of `fd` and remove every empty directory; return the names of the others."""
    left: list[bytes] = []
    for name in [os.fsencode(name) for name in os.listdir(fd)]:
        try:
            os.unlink(name, dir_fd=fd)
        except (IsADirectoryError, PermissionError):
            try:
                os.rmdir(name, dir_fd=fd)  # most directories of a layer are small; empty ones go at once
            except OSError as exc:
                if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                left.append(name)
        except FileNotFoundError:
            continue
    return left


def rename_no_replace(source_fd: int, source: bytes, target_fd: int, target: bytes) -> None:
    """Rename, failing with FileExistsError instead of replacing. A file system that is not able to it (NFS) gets a second
    name for a file before the first goes; for a directory a look and a plain rename, which leaves others a moment."""
    try:
        sc.call("renameat2", source_fd, source, target_fd, target, sc.RENAME_NOREPLACE)
        return
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    try:
        os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
    except PermissionError:  # a directory
        with contextlib.suppress(FileNotFoundError):
            os.stat(target, dir_fd=target_fd, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)
    else:
        os.unlink(source, dir_fd=source_fd)


def exchange(a_fd: int, a: bytes, b_fd: int, b: bytes) -> None:
    """Let two names change places, in one instant. Raises OSError: ENOENT (one is missing), EINVAL (the file system
    cannot)."""
    sc.call("renameat2", a_fd, a, b_fd, b, sc.RENAME_EXCHANGE)


def punch_hole(fd: int, begin: int, size: int) -> None:
    """Give the space of a part of a file back; it reads as zeros. The file's size stays. OSError."""
    if size > 0:
        sc.call("fallocate", fd, sc.FALLOC_FL_KEEP_SIZE | sc.FALLOC_FL_PUNCH_HOLE, begin, size)


def allocate(fd: int, begin: int, size: int) -> None:
    """Have the blocks of a part of a file allocated; what it holds and its size stay. OSError."""
    sc.call("fallocate", fd, sc.FALLOC_FL_KEEP_SIZE, begin, size)


def sync_filesystem(fd: int) -> None:
    """syncfs(2): returns when everything written to the file system that holds `fd` is durable. Raises OSError (EIO,
    ENOSPC)."""
    sc.call("syncfs", fd)


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable, one that is the daemon's own. OSError."""
    with closing_fd(os.open(path, DIR_FLAGS)) as fd:
        os.fsync(fd)


def create_file(path: Path, data: bytes) -> None:
    """A small new file of the daemon's own, for its owner alone: durable with its name on return, and never half there.
    Replaces an existing file. OSError."""
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)  # left by a creation that was cut off
    fd = os.open(new, _CREATE, 0o600)
    try:
        write_all(fd, data)
        os.fsync(fd)
    except OSError:
        new.unlink()
        raise
    finally:
        os.close(fd)
    new.rename(path)
    sync_dir(path.parent)


def reserve_file(path: Path, size: int) -> None:
    """A file of the daemon's own that does nothing but hold `size` bytes of the disk. No file where there is no room,
    or the file system cannot do it. OSError."""
    fd = os.open(path, _CREATE & ~os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        path.unlink()
        if exc.errno not in (*NO_ROOM, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)


def allocated_bytes(path: Path) -> int:
    """The space that a file takes on its disk, which a copy without its holes does not; 0 where there is none."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def write_all(fd: int, data: bytes | memoryview, offset: int | None = None) -> int:
    """Write all of it, at an offset or where the descriptor stands. Returns its length."""
    size = len(data)
    while data:
        done = os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
        data = data[done:]
        offset = None if offset is None else offset + done
    return size
