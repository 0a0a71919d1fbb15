"""The daemon's side of the starter (starting/main.py), which makes sandboxes without `runc run` and starts commands without
`runc exec`.

A sandbox whose confinement the starter cannot copy in full (a security module's profile, a kernel that does not tell
its system call filter) is left to runc.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from snapshotd.config import read_variables
from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts, passing
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding.cgroup import Cgroup, GroupSettings, all_of_process
from snapshotd.kernel.namespaces import map_and_open, user_namespace_error, write_map
from snapshotd.kernel.processes import wait_readable
from snapshotd.runtime import _oci
from snapshotd.runtime._process import CHILDREN, ChildProcess, kill_and_reap
from snapshotd.runtime.base import Container, ExecSpec
from snapshotd.runtime.starting import main as starting
from snapshotd.types import ContainerID, IdMap, short

_log = logging.getLogger(__name__)
_START_DEADLINE_S = 60.0
"""A frozen sandbox keeps a start waiting until it is thawed; after this it does not begin any more. A sandbox can make
execve(2) take for ever, too (a program on files that a dead process serves)."""
_ANSWER_DEADLINE_S = 70.0
_RESIDENTS_MAX = 128
"""Each has some 2 MiB of its own, on its sandbox's account."""


Filters = list[tuple[str, int]]


class _Resident:
    """The process that starts the commands of one sandbox. Thread-safe."""

    def __init__(self, connection: socket.socket, filters: Filters) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self.filters = filters
        """The system call filters of the sandbox's init, as `Starter.make` takes them in an order."""

    def send(self, fds: Sequence[int]) -> None:
        """ConnectionError: it has ended or was let go of."""
        with self._lock:
            if self._connection.fileno() < 0:
                raise ConnectionResetError
            socket.send_fds(self._connection, [b"."], fds)

    def let_go(self) -> None:
        """Let it end once it has started the commands that were sent."""
        with self._lock:
            self._connection.close()


class _Entry(contextlib.ExitStack):
    """The ways into a sandbox's cgroups: files to write to, and descriptors, open until the end, to be cloned into.
    FileNotFoundError: it is gone."""

    def __init__(self, groups: Sequence[Cgroup]) -> None:
        super().__init__()
        self.doors = [door for group in groups for door in group.doors()]
        self.fds = [fd for group in groups if (fd := group.birthplace()) is not None]
        for fd in self.fds:
            self.callback(os.close, fd)


class RefusedError(Exception):
    """The command cannot be run. The reason is in runc's words."""


class Starter:
    """The starter's process, made with the first container or command, and its residents. Thread-safe."""

    def __init__(self, *, used: bool = True) -> None:
        self.used = used
        """False: runc makes every sandbox and starts every command."""
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._residents: OrderedDict[ContainerID, _Resident | None] = OrderedDict()
        """None: the sandbox is not for the starter."""

    def start(self, container: Container, name: str, process: dict[str, Any], standard: Sequence[int]) -> int | None:
        """Start a command in the sandbox whose cgroup has `name` in its path; its process id once it runs. It is a child
        of this process.

        `process` is the OCI specification of it, `standard` its standard input, output and error. None: this sandbox is
        not for the starter, and nothing was started. Raises RefusedError, and SandboxFailed when the sandbox is gone.
        """
        request = {"process": process, "deadline": time.monotonic() + _START_DEADLINE_S}
        for _ in range(2):
            resident = self.enter(container, name)
            if resident is None:
                return None
            try:
                answer = _ask(container.id, resident.send, request, standard)
                break
            except ConnectionError:  # it was killed, or has just been let go of
                self.forget(container.id, resident)
        else:
            raise SandboxFailed(
                f"the process that starts commands in container {short(container.id)} is killed again and again"
            )
        if "error" in answer:
            _end(answer)
            raise RefusedError(answer["error"])
        if "pid" not in answer:
            _log.warning("a command of container %s is left to runc: %s", short(container.id), answer)
            return None
        pid: int = answer["pid"]
        return pid

    def enter(self, container: Container, name: str) -> _Resident | None:
        """The sandbox's resident, made where there is none. None: the sandbox is not for the starter. Raises SandboxFailed when
        the sandbox is gone."""
        if not self.used:
            return None
        with self._lock:
            if container.id in self._residents:
                self._residents.move_to_end(container.id)
                return self._residents[container.id]
        try:
            entry = _Entry(all_of_process(container.pid))
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise SandboxFailed(f"container {short(container.id)} is gone") from exc
        with entry:
            process = _oci.process(ExecSpec(argv=("true",), env={}))  # any command's: it is confined as all are
            request = {"init": container.pid, "name": name, "process": process}
            found, answer = self._new_resident(container.id, request, entry)
        if found is None:
            _log.warning("commands of container %s are started by runc: %s", short(container.id), answer)
        return self._know(container.id, found)

    def _new_resident(
        self, container: ContainerID, request: dict[str, Any], entry: _Entry, id_map: IdMap | None = None
    ) -> tuple[_Resident | None, dict[str, Any]]:
        """Have the starter clone a resident, which carries out the request, and all that was answered. None: it could not, and
        has ended. `id_map`: of the sandbox that it makes. SandboxFailed; OSError when that is refused, or it was killed."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(_ANSWER_DEADLINE_S)

        def write_map_when_asked(line: dict[str, Any]) -> None:
            if "unmapped" in line and id_map is not None:
                write_map(line["unmapped"], f"0 {id_map.base} {id_map.count}\n")
                ours.send(b".")

        found = None
        try:
            with theirs:
                request = {**request, "cgroups": entry.doors}
                answer = _ask(container, self._send, request, [theirs.fileno(), *entry.fds], write_map_when_asked)
            if "ready" in answer and "error" not in answer:
                CHILDREN.add(container, ChildProcess(answer["pid"], os.pidfd_open(answer["pid"]), -1, -1))
                found = _Resident(ours, answer.get("filters", []))
            else:
                _end(answer)
        finally:
            if found is None:
                ours.close()
        return found, answer

    def _know(self, container: ContainerID, found: _Resident | None) -> _Resident | None:
        """Remember a sandbox's resident, and let those go that were used longest ago; the one that is there already if
        there is one."""
        with self._lock:
            known = self._residents.setdefault(container, found)
            oldest = list(self._residents)[: max(0, len(self._residents) - _RESIDENTS_MAX)]
            gone = [self._residents.pop(key) for key in oldest]
        for resident in (*gone, *([found] if known is not found else [])):
            if resident is not None:
                resident.let_go()
        return known

    def make(
        self, container: ContainerID, order: dict[str, Any], group: Cgroup, settings: GroupSettings, id_map: IdMap
    ) -> int | None:
        """Make a sandbox, with its cgroup and its resident: the process id of its init, a child of this process, once
        it runs. None: it could not be made, and all of its processes that there are are in its cgroup. Raises
        SandboxFailed."""
        if not self.used:
            return None
        try:
            group.make(settings)
            with _Entry([group]) as entry:
                resident, answer = self._new_resident(container, order, entry, id_map)
        except OSError as exc:  # the map is refused, or the process was killed
            resident, answer = None, {"unable": str(exc)}
        if resident is None:
            if "init" in answer:
                kill_and_reap(answer["init"])
            _log.warning("container %s is left to runc: %s", short(container), answer)
            return None
        self._know(container, resident)
        init: int = answer["init"]
        return init

    def user_namespace(self, container: ContainerID, id_map: IdMap, owner: int) -> int:
        """A file descriptor of a user namespace for a container to live in, which belongs to the host's user `owner`.

        The kernel also counts resources per user (inotify, pending signals, message queues, locked memory) in every
        namespace above, for that namespace's owner. So a process in a namespace that root has made takes from root of
        the host: 128 inotify instances, and systemd has none. The starter's process makes it, because a fork of the
        daemon itself costs some 10 ms of a processor. Raises OSError, SandboxFailed.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answer: dict[str, Any] = {}
        with ours:
            try:
                with theirs:
                    answer = _ask(container, self._send, {"owner": owner}, [theirs.fileno()])
                if "ready" not in answer:
                    raise user_namespace_error(answer.get("refused", errno.EPERM))
                return map_and_open(answer["pid"], f"0 {id_map.base} {id_map.count}\n")
            finally:
                _end(answer)

    def forget(self, container_id: ContainerID, resident: _Resident | None = None) -> None:
        """Forget a container that is destroyed, or a resident of it that is of no use. Idempotent."""
        with self._lock:
            known = self._residents.get(container_id)
            if resident in (None, known):
                self._residents.pop(container_id, None)
        if found := resident or known:
            found.let_go()

    def close(self) -> None:
        """End its processes, once they have started the commands that were sent. Idempotent; a later command begins
        anew."""
        with self._lock:
            residents = list(self._residents)
            if self._connection is not None:
                self._connection.close()
                self._connection = None
        for container_id in residents:
            self.forget(container_id)

    def _send(self, fds: Sequence[int]) -> None:
        with self._lock:
            for _ in range(2):
                if self._connection is None:
                    self._connection = _spawn()
                try:
                    socket.send_fds(self._connection, [b"."], fds)
                    return
                except (BrokenPipeError, ConnectionResetError):  # it was killed
                    self._connection.close()
                    self._connection = None
        raise SandboxFailed("the process that starts commands is killed again and again; see the daemon's log")


def _ask(
    container: ContainerID,
    send: Callable[[Sequence[int]], None],
    request: dict[str, Any],
    more: Sequence[int],
    hear: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Have a process started, and return the whole answer. `hear` gets each line of the answer as it comes.
    ConnectionError: nobody has taken the request. SandboxFailed: the sandbox is gone, or nothing came of it in time."""
    answer_r, answer_w = os.pipe2(os.O_CLOEXEC)
    answer: dict[str, Any] = {}
    rest = b""
    deadline = time.monotonic() + _ANSWER_DEADLINE_S
    try:
        with closing_fd(answer_w), passing.in_memory(request) as request_fd:
            send([request_fd, answer_w, *more])
        complete = False
        while not complete and wait_readable(answer_r, deadline - time.monotonic()):
            data = os.read(answer_r, 1 << 16)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                answer.update(one := json.loads(line))
                hear(one)
            complete = not data
    except OSError:  # `hear` failed
        _end(answer)
        raise
    finally:
        os.close(answer_r)
    if not complete:
        _end(answer)
        raise SandboxFailed(f"a command did not start in container {short(container)} in time; stop it")
    if "gone" in answer or not answer:
        _end(answer)
        raise SandboxFailed(f"container {short(container)} is gone")
    return answer


def _end(answer: dict[str, Any]) -> None:
    """End the process that was started after all, a child of this one."""
    if "pid" in answer:
        kill_and_reap(answer["pid"])


def _spawn() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The program lies on a mount of its own that is read-only and that nobody can reach or change.
    program_fd = mounts.clone(sc.AT_FDCWD, os.path.realpath(sys.executable), attributes=sc.MOUNT_ATTR_RDONLY)
    with theirs, closing_fd(program_fd) as program:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", starting.__file__, str(theirs.fileno())],
            executable=f"/proc/self/fd/{program}",
            stdin=subprocess.DEVNULL,
            cwd="/",
            pass_fds=(theirs.fileno(), program),
            env=read_variables(["PATH"]),
        )
    child.returncode = 0  # the object has no further use: the process ends with the connection, or with the daemon
    return ours
