"""Facts about single processes, from /proc. Standard library only: the keeper's process imports it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import struct
from collections.abc import Iterable

MARK = "SNAPSHOTD_COMMAND"
"""Environment name of a command's id. A process that has left the command's session and its parent (a daemon) still has
it, if no program took it away. It tells about processes of one sandbox only, which could all end each other anyway."""
SANDBOX = "SNAPSHOTD_SANDBOX"
"""Environment name of the container's id, where containers are plain folders (runtime/folder.py)."""
_ENVIRONMENT_BYTES = 4 << 20
"""execve(2) takes no longer one where the stack may have 16 MiB; 2 MiB is usual."""
_PF_EXITING = 0x4
_PF_FORKNOEXEC = 0x40
"""linux/sched.h: forked, but no execve since."""
_DEEPEST = 1000
_PIDFD_GET_INFO = 3 << 30 | 64 << 16 | 0xFF << 8 | 11
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("Q52xi")
"""linux/pidfd.h: `mask` and `exit_code` of struct pidfd_info in its first size, 64 bytes."""


def allow_files(wanted: int) -> None:
    """Raise the limit of open files of this process, and of those that it starts, to `wanted`, or to the hard limit.
    Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def wait_readable(fd: int, timeout_s: float | None) -> bool:
    """Wait until `fd` is readable (a pidfd: until the process has ended). False when `timeout_s` passed first."""
    poller = select.poll()  # not select(2), which knows no descriptor above 1023
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def stat_fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third (`state`) on, proc_pid_stat(5). Raises FileNotFoundError or
    ProcessLookupError when the process is gone, or is being reaped."""
    with open(f"/proc/{pid}/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()  # the name before it may hold anything
    # the kernel says 0 for the parent of one that is being reaped, and -1 for its group, whatever state it told: it would
    # seem to come from nobody
    if fields[0] == b"X" or fields[2] == b"-1":
        raise ProcessLookupError(pid)
    return fields


def never_executed(fields: list[bytes]) -> bool:
    """True if a process has not gone through execve(2) since it was forked; for ever true of one that ended before it.

    The kernel's mark PF_FORKNOEXEC (field 9, `flags`) tells that and, unlike names, cannot be set by a program.
    """
    return bool(int(fields[6]) & _PF_FORKNOEXEC)


def is_ending(fields: list[bytes]) -> bool:
    """True if a process is on its way out (the kernel's mark PF_EXITING), although it may not have ended yet."""
    return bool(int(fields[6]) & _PF_EXITING)


def in_own_namespace(pid: int) -> bool:
    """True if a process is in this process's own pid namespace; False for one of another, and for one that is gone. No
    process of a container can get out of the container's."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino == os.stat("/proc/self/ns/pid").st_ino
    except (FileNotFoundError, ProcessLookupError):
        return False


def start_time(pid: int) -> int:
    """When a process was started, in ticks since boot; 0 when it is gone. With its number it names one process for
    good."""
    try:
        return int(stat_fields(pid)[19])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def runs(process: tuple[int, int]) -> bool:
    """False once the process with this number and `start_time` has ended."""
    try:
        fields = stat_fields(process[0])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == process[1] and fields[0] != b"Z"


def ancestry(pid: int) -> list[tuple[int, int]]:
    """A process and those that it comes from, each as its number and `start_time`, up to init. FileNotFoundError,
    ProcessLookupError: it, or one of them, went meanwhile."""
    found: list[tuple[int, int]] = []
    while pid > 0 and len(found) < _DEEPEST:
        fields = stat_fields(pid)
        found.append((pid, int(fields[19])))
        pid = int(fields[1])
    return found


def wait_status(pid: int, pidfd: int) -> int | None:
    """The exit status of another process's child, as wait(2) gives it. None when the kernel does not tell: it still
    runs, or its parent has reaped it and the kernel is older than 6.15. The caller may look into any process
    (CAP_SYS_PTRACE)."""
    info = bytearray(_PIDFD_INFO.size)
    _PIDFD_INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, 0)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        mask, status = _PIDFD_INFO.unpack(info)
        if mask & _PIDFD_INFO_EXIT:
            return int(status)
    except OSError:
        pass  # the kernel is older than that
    try:
        fields = stat_fields(pid)
        signal.pidfd_send_signal(pidfd, 0)  # it was not reaped, so the number was still its own
    except OSError:
        return None
    return int(fields[49]) if fields[0] == b"Z" else None


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, parents first."""
    found, todo = [], [pid]
    while todo:
        parent = todo.pop()
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{task}/children", "rb") as f:
                    children = [int(word) for word in f.read().split()]
                found += children
                todo += children
        except OSError:
            continue  # it has ended meanwhile: its children are known already or not its any more
    return found


def started_by(command: int, pids: Iterable[int], mark: str = "") -> set[int]:
    """The processes among `pids` that a command (a session leader) started, and itself: those in its session, those whose
    environment has `MARK` with this value, and those below one that is such, however they called setsid(2)."""
    parents, found, known = dict[int, int](), {command}, set(pids)
    for pid in known:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = stat_fields(pid)
            parents[pid] = int(fields[1])
            if int(fields[3]) == command or (mark and variable_of(pid, MARK) == mark):
                found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found & known


def variable_of(pid: int, name: str) -> str:
    """The value of a variable in the environment that a process was started with; "" if it has none, or is gone."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            environment = f.read(_ENVIRONMENT_BYTES)
    except OSError:
        return ""
    prefix = f"{name}=".encode()
    found = (item for item in environment.split(b"\0") if item.startswith(prefix))
    return os.fsdecode(next(found, prefix)[len(prefix) :])


def in_group_of(command: int, pids: Iterable[int]) -> set[int]:
    """The processes among `pids` in the process group that a command leads."""
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat_fields(pid)[2]) == command:
                found.add(pid)
    return found
