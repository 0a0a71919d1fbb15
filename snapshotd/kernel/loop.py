"""Loop devices: which one holds a file, and their nodes in /dev, which a container that was started earlier does not
have."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path

from snapshotd.kernel.files import closing_fd

_CONTROL = "/dev/loop-control"
_LOOP_CTL_GET_FREE = 0x4C82
_LOOP_GET_STATUS64 = 0x4C05
_STATUS = struct.Struct("=QQ")
"""The head of struct loop_info64 (232 bytes, linux/loop.h): device and inode of the file behind it."""
_STATUS_BYTES = 232


def device_of(image: Path) -> str | None:
    """The loop device whose file is `image`, with its node made if it was missing; None when there is none. Raises
    OSError.

    By identity: the path that sysfs shows is one of the mount namespace that attached it, such as of a container that
    was killed. Its last part is the file's name everywhere, as long as the file is not renamed.
    """
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        name = backing.parts[3]
        try:
            if not backing.read_text().strip().endswith(f"/{image.name}"):
                continue  # a foreign device is not opened: opening one delays its release
        except OSError:
            continue  # detached meanwhile
        if _holds(name, image):
            return f"/dev/{name}"
    return None


def is_mounted_from(directory: Path, image: Path) -> bool:
    """True if the file system that is mounted at a directory lies on a loop device whose file is `image`. Raises OSError.

    A device that was seen to hold a file may be detached, and given to another file, before it is mounted; a mounted one
    stays what it is.
    """
    number = os.stat(directory).st_dev
    name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}"))
    return _holds(name, image)


def ensure_free_node() -> None:
    """Make sure that the node of the device which is attached next is there. Raises OSError.

    The kernel adds devices when all are taken; their nodes appear in the host's /dev, not in one that a container got
    at its start. Another process may take the device before the caller does: then the caller's attempt fails and it
    tries again.
    """
    with closing_fd(os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)) as control:
        number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
    ensure_node(f"loop{number}")


def ensure_node(name: str) -> None:
    """Make /dev/`name` unless it is there. Not an error when the device is gone. Raises OSError."""
    try:
        major, minor = Path(f"/sys/block/{name}/dev").read_text().split(":")
        os.mknod(f"/dev/{name}", stat.S_IFBLK | 0o600, os.makedev(int(major), int(minor)))
    except (FileExistsError, FileNotFoundError):
        pass


def _holds(name: str, image: Path) -> bool:
    """True if the file of a loop device, whose node is made where it is missing, is `image`."""
    ensure_node(name)
    try:
        fd = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return False  # gone meanwhile; or of another container, whose devices we may not open
    try:
        status = fcntl.ioctl(fd, _LOOP_GET_STATUS64, b"\0" * _STATUS_BYTES)
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return False  # detached meanwhile
        raise
    finally:
        os.close(fd)
    st = os.stat(image)
    major, minor = os.major(st.st_dev), os.minor(st.st_dev)
    device = (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)  # as the kernel's huge_encode_dev writes a number
    return _STATUS.unpack_from(status) == (device, st.st_ino)
