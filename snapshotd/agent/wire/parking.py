"""Parking: get out of the way while the daemon switches the sandbox's root, and come back to the same place.

The daemon can switch the root in milliseconds only if nothing holds on to the old one (design.md section 3, "Live
processes"). So before the request that ends a call this process leaves its working directory and puts `/dev/null` under
the number of every file and directory it has open on the root mount; after the answer it opens them again in the new
root, with the same flags, at the same offset, under the same number, and returns to its working directory.

Parking must never change what the program does, so it happens only when no thread or process can notice.
`park` declines, with a reason, when
  - the root is not an overlay mount, or /proc does not say so (not a sandbox, or a chroot in one);
  - another process lives besides init: it may share our file offsets, and the daemon cannot switch its root anyway;
  - another thread could run. Every other thread has to sleep in a futex wait without a timeout: then only a thread of
    this process could wake it, and none runs. That covers waiting for our own lock, idle pool workers, `join()` and
    `queue.get()`;
  - something open cannot be closed and had again: locks, deleted files, inotify watches, fifos, a file whose path leads
    elsewhere or may not be opened (each is opened once on trial first), a standard stream on the root mount (inherited:
    whoever started us may go on with its offset).
Then the snapshot is taken the slower way that needs nothing of us.

Numbers: proc(5) for fdinfo and task/*/syscall, futex(2) for its operations.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from typing import Dict, List, Optional, Tuple

_STANDARD_FDS = 2
_FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_FUTEX_OPTIONS = 128 | 256  # FUTEX_PRIVATE_FLAG, FUTEX_CLOCK_REALTIME
_IDLE_ATTEMPTS = 5
_IDLE_PAUSE_S = 0.0002
_ONLY_AT_OPEN = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOCTTY | os.O_CLOEXEC | os.O_ASYNC
_FDINFO_BYTES = 64 << 10


class Declined(Exception):  # noqa: N818 - a decision, not an error: it never leaves this module
    """This process cannot be parked now; the text says why."""


class _File:
    """One open file or directory of the root mount."""

    __slots__ = ("cloexec", "fd", "flags", "kind", "offset", "path", "shared", "status")

    def __init__(self, fd: int, path: bytes, flags: int, offset: int, status: os.stat_result) -> None:
        self.fd = fd
        self.path = path
        self.status = status
        self.kind = stat.S_IFMT(status.st_mode)
        self.cloexec = bool(flags & os.O_CLOEXEC)
        self.flags = flags & ~_ONLY_AT_OPEN
        self.offset = offset
        self.shared: Optional[int] = None
        """The number of an earlier file that this one is a dup() of: they share one offset."""


class Place:
    """The place where a parked process was. `unpark` empties it as it goes, so that it can be called again if it is
    interrupted."""

    __slots__ = ("cwd", "files")

    def __init__(self, cwd: Optional[bytes]) -> None:
        self.cwd = cwd
        self.files: List[_File] = []


def park() -> Tuple[Optional[Place], str]:
    """Let go of the root mount. Returns the place to give to `unpark`, or None and the reason; then nothing has
    changed.

    The caller must make sure that this thread runs no foreign code until `unpark`. About 0.1 ms, and 0.03 ms per open
    file.
    """
    try:
        mount = _overlay_root()
        _others_asleep()
        _alone()
        cwd = _working_directory()
        files = _open_files(mount)
        _find_shared(files)
        for entry in files:
            _try_reopening(entry)
    except Declined as declined:
        return None, str(declined)
    except OSError as exc:
        return None, "cannot look at this process: {}".format(exc)
    place = Place(cwd)
    try:
        _let_go(place, files)
    except OSError as exc:
        unpark(place)
        return None, "cannot let go of the root: {}".format(exc)
    return place, ""


def unpark(place: Place) -> List[str]:
    """Return to where `park` left. Returns a sentence for each thing that could not be had again; never raises
    OSError."""
    warnings: List[str] = []
    while place.files:
        entry = place.files[0]
        try:
            _reopen(entry)
        except OSError as exc:
            warnings.append(
                "file descriptor {} ({}) could not be opened again after the snapshot and leads to /dev/null now: {}".format(
                    entry.fd, os.fsdecode(entry.path), exc.strerror or exc
                )
            )
        place.files.pop(0)
    if place.cwd is not None:
        try:
            os.chdir(place.cwd)
        except OSError as exc:
            warnings.append(
                "the working directory {} could not be entered again after the snapshot; it is / now: {}".format(
                    os.fsdecode(place.cwd), exc.strerror or exc
                )
            )
        place.cwd = None
    return warnings


def _let_go(place: Place, files: List[_File]) -> None:
    if place.cwd is not None:
        os.chdir("/")
    if not files:
        return
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not stat.S_ISCHR(os.fstat(null).st_mode):
            raise OSError("/dev/null is not a device")
        for entry in files:
            os.dup2(null, entry.fd, inheritable=False)
            place.files.append(entry)
    finally:
        os.close(null)


def _reopen(entry: _File) -> None:
    if entry.shared is not None:
        os.dup2(entry.shared, entry.fd, inheritable=not entry.cloexec)
        return
    fd = os.open(entry.path, entry.flags | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if stat.S_IFMT(os.fstat(fd).st_mode) != entry.kind:
            raise OSError("it has become another type of file")
        if entry.offset and not entry.flags & os.O_PATH:
            os.lseek(fd, entry.offset, os.SEEK_SET)
        os.dup2(fd, entry.fd, inheritable=not entry.cloexec)
    finally:
        os.close(fd)


# -- may we? -----------------------------------------------------------------------------------------------------------


def _overlay_root() -> bytes:
    """The id of the mount that is this process's root, if that is a whole overlay mount."""
    fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        mount = _fdinfo(fd)[b"mnt_id"]
    finally:
        os.close(fd)
    for line in _read(b"/proc/self/mountinfo").splitlines():
        if line.startswith(mount + b" "):
            before, _, after = line.partition(b" - ")
            if before.split(b" ", 5)[4] == b"/" and after.startswith(b"overlay "):
                return mount
    raise Declined("the root is not an overlay")


def _others_asleep() -> None:
    own = threading.get_native_id()
    awake = ""
    for attempt in range(_IDLE_ATTEMPTS):
        if attempt:
            time.sleep(_IDLE_PAUSE_S)  # a thread that is about to wait gets there; others stay awake
        tasks = [task for task in os.listdir("/proc/self/task") if int(task) != own]
        awake = next((task for task in tasks if not _asleep(task)), "")
        if not awake:
            return
    raise Declined("thread {} may run meanwhile".format(awake))


def _asleep(task: str) -> bool:
    """True if a thread sleeps in futex(FUTEX_WAIT) without a timeout."""
    try:
        fields = _read(b"/proc/self/task/" + task.encode() + b"/syscall").split()
    except FileNotFoundError:
        return True  # it has ended
    if len(fields) < 5 or not fields[0].isdigit():
        return False  # "running", or no system call
    operation = int(fields[2], 16) & 0xFFFFFFFF & ~_FUTEX_OPTIONS
    return (
        int(fields[0]) == _FUTEX_CALL.get(os.uname().machine) and operation in _FUTEX_WAITS and int(fields[4], 16) == 0
    )


def _alone() -> None:
    own = os.getpid()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) in (1, own):
            continue
        try:
            state = _read(b"/proc/" + name.encode() + b"/stat").rpartition(b") ")[2][:1]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        if state not in (b"Z", b"X"):
            raise Declined("process {} runs besides this one".format(name))


def _working_directory() -> Optional[bytes]:
    """The path of the working directory, tried out; None for the root itself."""
    cwd = os.getcwdb()
    if cwd == b"/":
        return None
    if not os.path.samestat(os.stat(cwd), os.stat(b".")):
        raise Declined("the path of the working directory leads elsewhere")
    os.chdir(cwd)
    return cwd


def _open_files(mount: bytes) -> List[_File]:
    """Everything open on the root mount that has to be let go. Declined if something there cannot be."""
    found: List[_File] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(b"/proc/self/fd/" + name.encode())
        except FileNotFoundError:
            continue  # the descriptor that listdir had
        if path.startswith(b"/"):
            entry = _root_file(int(name), path, mount)
            if entry is not None:
                found.append(entry)
        elif path.endswith((b"notify", b"notify]")):
            raise Declined("file descriptor {} watches files (inotify)".format(name))
    return found


def _root_file(fd: int, path: bytes, mount: bytes) -> Optional[_File]:
    try:
        info = _fdinfo(fd)
    except FileNotFoundError:
        return None
    if info[b"mnt_id"] != mount:
        return None
    entry = _File(fd, path, int(info[b"flags"], 8), int(info[b"pos"]), os.fstat(fd))
    what = "file descriptor {} ({})".format(fd, os.fsdecode(path))
    if b"lock" in info:
        raise Declined(what + " holds a lock")
    if fd <= _STANDARD_FDS or path.endswith(b" (deleted)"):
        raise Declined(what + " cannot be opened again")
    if entry.kind not in (stat.S_IFREG, stat.S_IFDIR):
        raise Declined(what + " is neither a file nor a directory")
    return entry


def _find_shared(files: List[_File]) -> None:
    """Find descriptors that are dup()s of each other: the offset of one moves with the other's."""
    seen: Dict[Tuple[int, int, int, int], List[_File]] = {}
    for entry in files:
        if entry.kind != stat.S_IFREG or entry.flags & os.O_PATH:
            continue
        alike = seen.setdefault((entry.status.st_dev, entry.status.st_ino, entry.flags, entry.offset), [])
        for first in alike:
            os.lseek(first.fd, first.offset + 1, os.SEEK_SET)
            moved = os.lseek(entry.fd, 0, os.SEEK_CUR)
            os.lseek(first.fd, first.offset, os.SEEK_SET)
            if moved != entry.offset:
                entry.shared = first.fd
                break
        else:
            alike.append(entry)


def _try_reopening(entry: _File) -> None:
    """Open the file once as it will be afterwards, to be sure that it can be and is the same one."""
    if entry.shared is not None:
        return
    fd = os.open(entry.path, entry.flags | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        if not os.path.samestat(os.fstat(fd), entry.status):
            raise Declined(
                "the path of file descriptor {} ({}) leads elsewhere".format(entry.fd, os.fsdecode(entry.path))
            )
    finally:
        os.close(fd)


def _fdinfo(fd: int) -> Dict[bytes, bytes]:
    lines = (line.partition(b":") for line in _read(b"/proc/self/fdinfo/%d" % fd).splitlines())
    return {key: value.strip() for key, _, value in lines}


def _read(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, _FDINFO_BYTES)
        if len(data) < 4096:  # procfs hands out a short file whole; longer ones in pages
            return data
        pieces = [data]
        while data:
            data = os.read(fd, _FDINFO_BYTES)
            pieces.append(data)
        return b"".join(pieces)
    finally:
        os.close(fd)
