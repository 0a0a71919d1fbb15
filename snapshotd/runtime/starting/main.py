"""The starter's process: makes sandboxes, and starts commands in them, with the confinement of `runc run` and `runc exec`
and without their 20 ms. Started by starter.py, which is also the only one to speak to it. The rest of it: command.py, the
process of a command, and sandbox.py, the making of a sandbox.

    python -I -S starting/main.py SOCKET

    daemon                                            sandbox: cgroups    namespaces           pid namespace
      |-- starter     clones a resident                        the host's    the host's           the host's
      |-- resident    one a sandbox, loads the system call     the sandbox's the sandbox's        the host's
      |               filter, clones its commands
      '-- command     drops privileges, execve(2)              the sandbox's the sandbox's        the sandbox's

SOCKET is an inherited descriptor. Each packet carries descriptors: a file with the request (JSON), a pipe for the answer,
and the rest. The starter's requests bring the socket of a new resident, which enters a sandbox or makes one, or of a
process that makes a user namespace and waits until its socket closes, and the cgroup (version 2) that it is to be born
in; a resident's bring a command's standard input,
output and error, or a socket that gets its terminal. Both clone (CLONE_PARENT: the new process is a child of the daemon),
write the new process's id to the pipe, and are ready for the next request. A new resident writes that it is ready, or
why not; a command why it cannot run. The
pipe's end tells that a command has gone through execve(2). The starter ends when its socket
closes, a resident when its socket closes or the sandbox's init ends.

A new resident that makes a sandbox says that its user namespace has no map, and waits until the daemon has written it.

A resident enters once, because the first write to a `cgroup.procs` waits for an RCU grace period (5 to 15 ms, measured).
One that is born in its cgroup does not wait.
No process of the sandbox can see it or send it a signal. It takes one place of the sandbox's limit of processes.

A sandbox sees the command's process before execve, and owns every file that it touches. So at once it has no descriptor
but its three standard ones and a pipe, it is not dumpable (nobody inside may trace it, read its descriptors or open its
/proc/PID/exe), and the interpreter that it runs lies on a read-only mount of its own: a sandbox that executes
`#!/proc/self/exe` cannot write the host's program afterwards (CVE-2016-9962, CVE-2019-5736, CVE-2024-21626).
"""

from __future__ import annotations

import base64
import ctypes
import gc
import math
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

if __name__ == "__main__":  # -I and -S leave nothing but the standard library to import from
    sys.path.append(os.path.abspath(os.path.join(os.path.realpath(__file__), *[os.pardir] * 4)))

from snapshotd.kernel import passing
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.processes import is_ending, stat_fields
from snapshotd.runtime.starting import sandbox
from snapshotd.runtime.starting.command import (
    CLONE_NEWUSER,
    FILTER_BYTES,
    LIBRARY,
    NAMESPACES,
    Filters,
    answer,
    become,
    clone,
    drop_rights,
    load_filters,
)

_DESCRIPTORS_MAX = 5
_BIRTHPLACE = 3
"""Number of the descriptor of the new process's cgroup among those that the starter gets."""


def main(socket_fd: int) -> None:
    """Serve until the daemon closes the socket or ends."""
    sc.prctl(sc.PR_SET_DUMPABLE, 0)
    LIBRARY.prctl(15, b"starter", 0, 0, 0)  # PR_SET_NAME
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)  # the daemon may ignore some; every command inherits these
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.setsid()  # a Ctrl-C in the daemon's terminal is for the daemon
    passing.close_all_but(socket_fd)
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
            pid = clone(*fds[_BIRTHPLACE:] if init is None else ())
            if pid == 0:
                try:
                    action(fds)
                finally:
                    os._exit(1)
            answer(fds[1], pid=pid)
        except OSError as exc:  # no more processes for the sandbox, or its init is just ending
            answer(fds[1], unable=str(exc))
        for fd in fds:
            os.close(fd)


# -- a user namespace --------------------------------------------------------------------------------------------------


def _begin(fds: list[int]) -> NoReturn:
    """Runs in a new process of the starter: become the resident, or the holder of a user namespace, that the request
    asks for."""
    request_fd, answer_fd, socket_fd = fds[:_BIRTHPLACE]
    request = passing.read_document(request_fd)
    if request.keys() == {"owner"}:
        _own_user_namespace(request["owner"], answer_fd, socket_fd)
    else:
        _reside(request, answer_fd, socket_fd)
    os._exit(0)


def _own_user_namespace(owner: int, answer_fd: int, socket_fd: int) -> None:
    """Make a user namespace that belongs to a user of the host, and hold it until the socket closes."""
    passing.close_all_but(answer_fd, socket_fd)
    try:
        sandbox.own_user_namespace(owner)
    except OSError as exc:
        answer(answer_fd, refused=exc.errno)
    else:
        answer(answer_fd, ready=True)
        os.close(answer_fd)
        os.read(socket_fd, 1)


# -- a resident --------------------------------------------------------------------------------------------------------


def _reside(request: dict[str, Any], answer_fd: int, socket_fd: int) -> None:
    """In a new resident: make the sandbox or enter it, and serve."""
    try:
        if "config" in request:
            filters = [(base64.b64decode(code), flags) for code, flags in request["filters"]]
            init = sandbox.make(request, answer_fd, socket_fd, filters)
            more = {}
        else:
            init, filters = _enter_sandbox(request, answer_fd, socket_fd)
            more = {"filters": [(base64.b64encode(code).decode(), flags) for code, flags in filters]}
        load_filters(filters)
    except ProcessLookupError:
        answer(answer_fd, gone=True)
    except (OSError, ValueError, KeyError) as exc:
        answer(answer_fd, unable=str(exc))
    else:
        answer(answer_fd, ready=True, **more)
        os.close(answer_fd)
        _serve(socket.socket(fileno=socket_fd), init, become)


def _enter_sandbox(request: dict[str, Any], answer_fd: int, socket_fd: int) -> tuple[int, Filters]:
    """Take on all that the sandbox's commands have in common. With the host's rights first: a user namespace has none
    of them. Returns a pidfd of the sandbox's init, and its filters."""
    init = os.pidfd_open(request["init"])
    passing.close_all_but(answer_fd, socket_fd, init)
    _check(request["init"], init, request["name"])
    filters = _filters(request["init"])
    process = request["process"]
    own_user = os.stat("/proc/self/ns/user").st_ino
    user = CLONE_NEWUSER if os.stat(f"/proc/{request['init']}/ns/user").st_ino != own_user else 0
    sandbox.enter_limits(process, request["cgroups"])
    sc.call("setns", init, NAMESPACES | user)
    drop_rights(process)
    return init, filters


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
_ANSWER_FILTERS_MAX = 16
_WALL = 0x40000000


def _filters(pid: int) -> Filters:
    """The programs and flags of the filters of the sandbox's init, oldest first, as the kernel has them: the runtime's,
    which commands get too.

    The kernel tells them a tracer only. It stops the init for less than a millisecond.
    """
    trace = LIBRARY.ptrace
    trace.restype, trace.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def ptrace(request: int, first: int = 0, second: Any = None) -> int:
        result: int = trace(request, pid, first, second)
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")
        return result

    ptrace(_PTRACE_SEIZE)
    ptrace(_PTRACE_INTERRUPT)
    _wait_for_stop(pid)
    found = []
    try:
        for number in range(_ANSWER_FILTERS_MAX):
            try:
                count = ptrace(_PTRACE_GET_FILTER, number)
            except FileNotFoundError:
                break
            program = ctypes.create_string_buffer(count * FILTER_BYTES)
            ptrace(_PTRACE_GET_FILTER, number, program)
            about = ctypes.create_string_buffer(struct.pack("QQ", number, 0))
            ptrace(_PTRACE_GET_METADATA, len(about.raw) - 1, about)
            found.append((program.raw, struct.unpack_from("QQ", about.raw)[1]))
    finally:
        ptrace(_PTRACE_DETACH)
    if not found:
        raise ValueError("the sandbox has no system call filter")
    return found


def _wait_for_stop(pid: int) -> None:
    """Wait until a traced init has stopped. ProcessLookupError: it is ending.

    An init that ends tells its tracer only when all processes of its sandbox are reaped. The daemon may wait for this
    process before it reaps the last of them.
    """
    for _ in attempts(math.inf):
        if os.waitpid(pid, _WALL | os.WNOHANG)[0]:
            return
        if is_ending(stat_fields(pid)):
            raise ProcessLookupError(f"process {pid} is ending")


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
