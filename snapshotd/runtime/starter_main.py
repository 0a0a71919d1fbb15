"""The starter's process: starts commands in sandboxes, with the confinement of `runc exec` and without its 20 ms.
Started by starter.py, which is also the only one to speak to it.

    python -I -S starter_main.py SOCKET

    daemon                                            sandbox: cgroups    namespaces           pid namespace
      |-- starter     clones a resident                        the host's    the host's           the host's
      |-- resident    one a sandbox, loads the system call     the sandbox's the sandbox's        the host's
      |               filter, clones its commands
      '-- command     drops privileges, execve(2)              the sandbox's the sandbox's        the sandbox's

SOCKET is an inherited descriptor. Each packet carries descriptors: a file with the request (JSON), a pipe for the answer,
and the rest. The starter's requests bring the socket of a new resident, or of a process that makes a user namespace and
waits until its socket closes; a resident's bring a command's standard input,
output and error, or a socket that gets its terminal. Both clone (CLONE_PARENT: the new process is a child of the daemon),
write the new process's id to the pipe, and are ready for the next request. A new resident writes that it is ready, or
why not; a command why it cannot run. The
pipe's end tells that a command has gone through execve(2). The starter ends when its socket
closes, a resident when its socket closes or the sandbox's init ends.

A resident enters once, because the first write to a `cgroup.procs` waits for an RCU grace period (5 to 15 ms, measured).
No process of the sandbox can see it or send it a signal. It takes one place of the sandbox's limit of processes.

A sandbox sees the command's process before execve, and owns every file that it touches. So at once it has no descriptor
but its three standard ones and a pipe, it is not dumpable (nobody inside may trace it, read its descriptors or open its
/proc/PID/exe), and the interpreter that it runs lies on a read-only mount of its own: a sandbox that executes
`#!/proc/self/exe` cannot write the host's program afterwards (CVE-2016-9962, CVE-2019-5736, CVE-2024-21626).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

if __name__ == "__main__":  # -I and -S leave nothing but the standard library to import from
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.realpath(__file__)))))

from snapshotd.kernel import passing
from snapshotd.kernel import syscalls as sc

_DESCRIPTORS_MAX = 5
_ANSWER_FD = 100
_MASTER_SOCKET = 101
"""In a command's process, above all other descriptors."""
_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000 | 0x00020000
"""CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWPID, NEWNET and NEWNS."""
_CLONE_NEWUSER = 0x10000000
_CLONE_PARENT = 0x00008000
_LIBRARY = ctypes.CDLL(None, use_errno=True)


def main(socket_fd: int) -> None:
    """Serve until the daemon closes the socket or ends."""
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    _LIBRARY.prctl(15, b"starter", 0, 0, 0)  # PR_SET_NAME
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)  # the daemon may ignore some; every command inherits these
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.setsid()  # a Ctrl-C in the daemon's terminal is for the daemon
    os.closerange(3, socket_fd)
    os.closerange(socket_fd + 1, 1 << 20)
    os.chdir("/")
    gc.disable()  # no collection writes to the pages that clones share
    _serve(socket.socket(fileno=socket_fd), None, _begin)


def _serve(connection: socket.socket, init: int | None, action: Callable[[list[int]], NoReturn]) -> None:
    """Clone a process for each request, until the socket closes or `init` (a pidfd) ends."""
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if init is not None:
        poller.register(init, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poller.poll()]
        if init in ready:
            return
        data, fds = passing.receive(connection, 1, _DESCRIPTORS_MAX)
        if not data:
            return
        try:
            # Not os.fork: half of its time goes to what only threads need, and the child would be this process's own.
            pid = sc.call("clone", _CLONE_PARENT | signal.SIGCHLD, None, None, None, None)
            if pid == 0:
                try:
                    action(fds)
                finally:
                    os._exit(1)
            _answer(fds[1], pid=pid)
        except OSError as exc:  # no more processes for the sandbox, or its init is just ending
            _answer(fds[1], unable=str(exc))
        for fd in fds:
            os.close(fd)


def _request(fd: int) -> dict[str, Any]:
    request: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
    return request


def _answer(fd: int, **answer: object) -> None:
    """One of the lines that a request is answered with."""
    with contextlib.suppress(BrokenPipeError):  # the daemon does not wait for it any more
        os.write(fd, json.dumps(answer).encode() + b"\n")


# -- a user namespace --------------------------------------------------------------------------------------------------


def _begin(fds: list[int]) -> NoReturn:
    """In a new process of the starter's: be what the request says."""
    request_fd, answer_fd, socket_fd = fds
    request = _request(request_fd)
    if "owner" in request:
        _close_all_but(answer_fd, socket_fd)
        _own_user_namespace(request["owner"], answer_fd, socket_fd)
    else:
        _reside(request, answer_fd, socket_fd)
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    for low, high in zip((2, *sorted(kept)), (*sorted(kept), 1 << 20), strict=True):
        os.closerange(low + 1, high)


def _own_user_namespace(owner: int, answer_fd: int, socket_fd: int) -> None:
    """Make a user namespace that belongs to a user of the host, and hold it until the socket closes."""
    try:
        # With all capabilities if that is allowed: without them, some machines forbid making user namespaces.
        _LIBRARY.prctl(sc.PR_SET_SECUREBITS, sc.SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
        sc.call("unshare", _CLONE_NEWUSER)
    except OSError as exc:
        _answer(answer_fd, refused=exc.errno)
    else:
        _answer(answer_fd, ready=True)
        os.close(answer_fd)
        os.read(socket_fd, 1)


# -- a resident --------------------------------------------------------------------------------------------------------


def _reside(request: dict[str, Any], answer_fd: int, socket_fd: int) -> None:
    """In a new resident: enter the sandbox and serve."""
    try:
        init = os.pidfd_open(request["init"])
        _close_all_but(answer_fd, socket_fd, init)
        _check(request["init"], init, request["name"])
        filters = _filters(request["init"])
        _enter_sandbox(request, init)
        _load(filters)
    except ProcessLookupError:
        _answer(answer_fd, gone=True)
    except (OSError, ValueError, KeyError) as exc:
        _answer(answer_fd, unable=str(exc))
    else:
        _answer(answer_fd, ready=True)
        os.close(answer_fd)
        _serve(socket.socket(fileno=socket_fd), init, _become)


def _enter_sandbox(request: dict[str, Any], init: int) -> None:
    """Take on all that the sandbox's commands have in common. With the host's rights first: a user namespace has none
    of them."""
    process = request["process"]
    own_user = os.stat("/proc/self/ns/user").st_ino
    user = _CLONE_NEWUSER if os.stat(f"/proc/{request['init']}/ns/user").st_ino != own_user else 0
    _write("/proc/self/oom_score_adj", str(process["oomScoreAdj"]))
    for limit in process["rlimits"]:
        resource.setrlimit(getattr(resource, limit["type"]), (limit["soft"], limit["hard"]))
    for path in request["cgroups"]:
        _write(path, "0")
    sc.call("setns", init, _NAMESPACES | user)
    _keep_bounding(process["capabilities"]["bounding"])
    sc.prctl(_PR_SET_NO_NEW_PRIVS, 1)
    sc.prctl(sc.PR_SET_DUMPABLE, 0)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _check(pid: int, pidfd: int, name: str) -> None:
    """Make sure that the process is the sandbox's init: it is in a cgroup of that name, and it lives. The kernel may
    have given the number to another process. ValueError when commands get a profile of a security module, which only
    runc can set."""
    with open(f"/proc/{pid}/cgroup") as f:
        if name not in f.read():
            raise ProcessLookupError(name)
    try:
        with open(f"/proc/{pid}/attr/current") as f:
            profile = f.read().strip("\0\n ")
    except OSError:
        profile = ""  # there is no such module
    if profile not in ("", "unconfined", "kernel"):
        raise ValueError(f"a security module confines the sandbox: {profile}")
    signal.pidfd_send_signal(pidfd, 0)


# -- the system call filter --------------------------------------------------------------------------------------------

_PTRACE_SEIZE, _PTRACE_INTERRUPT, _PTRACE_DETACH = 0x4206, 0x4207, 17
_PTRACE_GET_FILTER, _PTRACE_GET_METADATA = 0x420C, 0x420D
_FILTER_BYTES = 8
_ANSWER_FILTERS_MAX = 16


def _filters(pid: int) -> list[tuple[bytes, int]]:
    """The programs and flags of the filters of the sandbox's init, oldest first, as the kernel has them: the runtime's,
    which commands get too.

    The kernel tells them a tracer only. It stops the init for less than a millisecond.
    """
    trace = _LIBRARY.ptrace
    trace.restype, trace.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def traced(request: int, first: int = 0, second: Any = None) -> int:
        result: int = trace(request, pid, first, second)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")
        return result

    traced(_PTRACE_SEIZE)
    traced(_PTRACE_INTERRUPT)
    os.waitpid(pid, 0x40000000)  # __WALL
    found = []
    try:
        for number in range(_ANSWER_FILTERS_MAX):
            try:
                count = traced(_PTRACE_GET_FILTER, number)
            except FileNotFoundError:
                break
            program = ctypes.create_string_buffer(count * _FILTER_BYTES)
            traced(_PTRACE_GET_FILTER, number, program)
            about = ctypes.create_string_buffer(struct.pack("QQ", number, 0))
            traced(_PTRACE_GET_METADATA, len(about.raw) - 1, about)
            found.append((program.raw, struct.unpack_from("QQ", about.raw)[1]))
    finally:
        traced(_PTRACE_DETACH)
    if not found:
        raise ValueError("the sandbox has no system call filter")
    return found


def _load(filters: Sequence[tuple[bytes, int]]) -> None:
    """Load the filters, which every command inherits. All that this needs is made before: each filter holds for the next
    one."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    prepared = [(flags, Program(len(code) // _FILTER_BYTES, code)) for code, flags in filters]

    for flags, program in prepared:
        sc.call("seccomp", 1, flags, ctypes.byref(program))  # SECCOMP_SET_MODE_FILTER


# -- a command ---------------------------------------------------------------------------------------------------------


def _become(fds: list[int]) -> NoReturn:
    """In a new command's process: become the command. In the order of runc's last stage."""
    request_fd, answer_fd, *standard = fds
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        request = _request(request_fd)
        process = request["process"]
        os.dup2(answer_fd, _ANSWER_FD, inheritable=False)
        if process["terminal"]:
            os.dup2(standard[0], _MASTER_SOCKET, inheritable=False)
        else:
            for number, fd in enumerate(standard):
                os.dup2(fd, number)
        os.closerange(3, _ANSWER_FD)
        os.closerange(_MASTER_SOCKET + 1 if process["terminal"] else _ANSWER_FD + 1, 1 << 20)
        reason = _execute(process, request["deadline"])
    except CannotEnterError as exc:
        reason = str(exc)
    except BaseException as exc:  # noqa: BLE001 - nothing of this may run on in the sandbox
        reason = f"the starter failed: {exc!r}"
    _answer(_ANSWER_FD, error=reason[: 1 << 12] or "?")
    os._exit(1)


def _execute(process: dict[str, Any], deadline: float) -> str:
    """Returns the reason, in runc's words, if the program cannot be run."""
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
    program, reason = _find(process["args"][0], environment.get("PATH", ""))
    if not program:
        return reason
    argv, env = process["args"], {name.encode(): value.encode() for name, value in environment.items()}
    if time.monotonic() > deadline:
        return "the sandbox stood still for too long"  # the daemon has given up: nothing may run unseen
    try:
        os.execve(program, [word.encode() for word in argv], env)
    except OSError as exc:
        return f"exec {program}: {_words(exc)}"


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
        raise CannotEnterError("the sandbox makes no terminals: its /dev/ptmx was replaced")
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


class CannotEnterError(Exception):
    """The working directory cannot be entered. Says so in runc's words."""


def _enter(cwd: str, *, may_fail: bool) -> bool:
    """Change the directory, first as root: it may be closed to the command's user. False: try again as that user."""
    try:
        os.chdir(cwd)
    except OSError as exc:
        if may_fail and isinstance(exc, PermissionError):
            return False
        raise CannotEnterError(f'chdir to cwd ("{cwd}") set in config.json failed: {_words(exc)}') from exc
    return True


def _find(name: str, path: str) -> tuple[str, str]:
    """The program's path, looked up as Go's exec.LookPath does; or "" and the reason."""
    if "/" in name:
        reason = _not_executable(name)
        return ("", f'exec: "{name}": {reason}') if reason else (name, "")
    for directory in path.split(":"):
        found = os.path.join(directory or ".", name)
        if not _not_executable(found):
            return (found, "") if found.startswith("/") else ("", f'exec: "{name}": permission denied')
    return "", f'exec: "{name}": executable file not found in $PATH'


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
_CAPABILITIES_VERSION = 0x20080522
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


def _keep_bounding(names: Sequence[str]) -> None:
    """Drop every capability from the bounding set but these, also those that this list does not know."""
    wanted = _mask(names)
    for number in range(64):
        if _LIBRARY.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) < 0:
            return  # the kernel knows no more
        if not wanted >> number & 1:
            sc.prctl(_PR_CAPBSET_DROP, number)


def _set_capabilities(held: dict[str, Sequence[str]]) -> None:
    effective, permitted, inheritable = (_mask(held[kind]) for kind in ("effective", "permitted", "inheritable"))
    header = struct.pack("Ii", _CAPABILITIES_VERSION, 0)
    low, high = (
        struct.pack("III", *(value >> shift & 0xFFFFFFFF for value in (effective, permitted, inheritable)))
        for shift in (0, 32)
    )
    sc.call("capset", header, low + high)
    _LIBRARY.prctl(47, 4, 0, 0, 0)  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
