"""A command of a sandbox, from its process to execve(2), with the confinement of runc's last stage. Runs in processes that
the starter (main.py) and its residents clone, and imports the standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import stat
import struct
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from snapshotd.kernel import passing
from snapshotd.kernel import syscalls as sc

ANSWER_FD = 100
_MASTER_SOCKET = 101
"""In a command's process, above all other descriptors."""
FILTER_BYTES = 8
NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET and NEWNS."""
CLONE_NEWUSER = 0x10000000
CLONE_PARENT = 0x00008000
_CLONE_INTO_CGROUP = 1 << 33
LIBRARY = ctypes.CDLL(None, use_errno=True)
Filters = list[tuple[bytes, int]]
"""The programs of system call filters, oldest first, with the flags of each."""


def answer(fd: int, **answer: object) -> None:
    """Write one line of the answer to a request."""
    with contextlib.suppress(BrokenPipeError):  # the daemon does not wait for it any more
        os.write(fd, json.dumps(answer).encode() + b"\n")


def write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def clone(cgroup: int | None = None) -> int:
    """fork(2), of a child of this process's parent; `cgroup`: a descriptor of the one to be born in, of version 2."""
    # Not os.fork: half of its time goes to what only threads need, and the child would be this process's own.
    if cgroup is None:
        return sc.call("clone", CLONE_PARENT | signal.SIGCHLD, None, None, None, None)
    order = struct.pack(
        "11Q", CLONE_PARENT | _CLONE_INTO_CGROUP, *[0] * 9, cgroup
    )  # the exit signal is this process's own
    return sc.call("clone3", order, len(order))


def load_filters(filters: Filters) -> None:
    """Load system call filters, which all processes inherit that come from here. All that this needs is made before: each
    filter holds for the next one."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    prepared = [(flags, Program(len(code) // FILTER_BYTES, code)) for code, flags in filters]
    for flags, program in prepared:
        sc.call("seccomp", 1, flags, ctypes.byref(program))  # SECCOMP_SET_MODE_FILTER


def become(fds: list[int]) -> NoReturn:
    """In a new command's process: become the command."""
    request_fd, answer_fd, *standard = fds
    os.dup2(answer_fd, ANSWER_FD, inheritable=False)

    def prepare() -> tuple[dict[str, Any], float]:
        request = passing.read_document(request_fd)
        process: dict[str, Any] = request["process"]
        if process["terminal"]:
            os.dup2(standard[0], _MASTER_SOCKET, inheritable=False)
        else:
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
        passing.close_all_but(ANSWER_FD, *([_MASTER_SOCKET] if process["terminal"] else []))
        return process, request["deadline"]

    execute(prepare)


def execute(prepare: Callable[[], tuple[dict[str, Any], float]]) -> NoReturn:
    """Become a program, once it is prepared, and until a time; or answer with the reason, in runc's words, why it cannot be
    run."""
    reason = ""
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        _execute(*prepare())
    except CannotRunError as exc:
        reason = str(exc)
    except BaseException as exc:  # noqa: BLE001 - nothing of this may run on in the sandbox
        reason = f"the starter failed: {exc!r}"
    answer(ANSWER_FD, error=reason[: 1 << 12])
    os._exit(1)


def _execute(process: dict[str, Any], deadline: float) -> NoReturn:
    """In the order of runc's last stage. CannotRunError, OSError."""
    os.setsid()
    cwd, user, held = process["cwd"], process["user"], process["capabilities"]
    entered = _enter(cwd, may_fail=True)
    sc.prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups(user["additionalGids"])
    os.setresgid(user["gid"], user["gid"], user["gid"])
    os.setresuid(user["uid"], user["uid"], user["uid"])
    sc.prctl(sc.PR_SET_DUMPABLE, 0)  # a change of ids may have made it dumpable (sysctl fs.suid_dumpable)
    if not entered:
        _enter(cwd, may_fail=False)
    if process["terminal"]:
        _open_terminal(process["consoleSize"])
    os.getcwd()  # FileNotFoundError: the directory is outside of the root
    sc.prctl(_PR_SET_KEEPCAPS, 0)
    _set_capabilities(held)
    environment = dict(item.split("=", 1) for item in process["env"])
    program = _find(process["args"][0], environment.get("PATH", ""))
    argv, env = process["args"], {name.encode(): value.encode() for name, value in environment.items()}
    if time.monotonic() > deadline:
        raise CannotRunError("the sandbox stood still for too long")  # the daemon has given up: nothing may run unseen
    try:
        os.execve(program, [word.encode() for word in argv], env)
    except OSError as exc:
        raise CannotRunError(f"exec {program}: {_words(exc)}") from exc


_PTMX = os.makedev(5, 2)
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
"""ioctl_tty(2); the same on all machines but a few old ones."""


def _open_terminal(size: dict[str, int]) -> None:
    """Make a terminal of the sandbox the controlling and standard one, and send its master to the daemon. As the user
    that it is to belong to. The master may be anything that the sandbox has put there: only a real one is taken, and the
    other side is opened through it, not by its name."""
    master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    about = os.fstat(master)
    if not stat.S_ISCHR(about.st_mode) or about.st_rdev != _PTMX:
        raise CannotRunError("the sandbox makes no terminals: its /dev/ptmx was replaced")
    fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
    terminal = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size["height"], size["width"], 0, 0))
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    with socket.socket(fileno=_MASTER_SOCKET) as connection:
        socket.send_fds(connection, [b"."], [master])
    for number in range(3):
        os.dup2(terminal, number)
    for fd in (terminal, master):
        os.close(fd)


def _words(exc: OSError) -> str:
    return (exc.strerror or "?").lower()


class CannotRunError(Exception):
    """The program cannot be run. Says why in runc's words."""


def _enter(cwd: str, *, may_fail: bool) -> bool:
    """Change the directory, first as root: it may be closed to the command's user. False: try again as that user."""
    try:
        os.chdir(cwd)
    except OSError as exc:
        if may_fail and isinstance(exc, PermissionError):
            return False
        raise CannotRunError(f'chdir to cwd ("{cwd}") set in config.json failed: {_words(exc)}') from exc
    return True


def _find(name: str, path: str) -> str:
    """The program's path, looked up as Go's exec.LookPath does. CannotRunError."""
    if "/" in name:
        if reason := _not_executable(name):
            raise CannotRunError(f'exec: "{name}": {reason}')
        return name
    for directory in path.split(":"):
        found = os.path.join(directory or ".", name)
        if not _not_executable(found):
            if found.startswith("/"):
                return found
            raise CannotRunError(f'exec: "{name}": permission denied')
    raise CannotRunError(f'exec: "{name}": executable file not found in $PATH')


def _not_executable(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except OSError as exc:
        return f"stat {path}: {_words(exc)}"
    if stat.S_ISDIR(mode):
        return "is a directory"
    return "" if mode & 0o111 and os.access(path, os.X_OK, effective_ids=True) else "permission denied"


# -- capabilities ------------------------------------------------------------------------------------------------------

_PR_SET_KEEPCAPS, _PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 8, 23, 24, 38
_CAPABILITIES = (
    "CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP LINUX_IMMUTABLE NET_BIND_SERVICE "
    "NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN "
    "SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE "
    "MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON BPF CHECKPOINT_RESTORE"
)
"""By number, capabilities(7)."""


def _mask(names: Sequence[str]) -> int:
    known = _CAPABILITIES.split()
    return sum(1 << known.index(name.removeprefix("CAP_")) for name in names)


def drop_rights(process: dict[str, Any]) -> None:
    """Give up all rights that no process of the sandbox gets: each capability that is not in its bounding set, also those
    that this list does not know, and new ones by execve(2). The sandbox may not look into this process."""
    wanted = _mask(process["capabilities"]["bounding"])
    for number in range(64):
        if LIBRARY.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) < 0:
            break  # the kernel knows no more
        if not wanted >> number & 1:
            sc.prctl(_PR_CAPBSET_DROP, number)
    sc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)


def _set_capabilities(held: dict[str, Sequence[str]]) -> None:
    sc.set_capabilities(*(_mask(held[kind]) for kind in ("effective", "permitted", "inheritable")))
    LIBRARY.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL
