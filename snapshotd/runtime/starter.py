"""The daemon's side of the starter (starter_main.py), which starts commands without `runc exec`.

A sandbox whose confinement the starter cannot copy in full (a security module's profile, a kernel that does not tell
its system call filter) is left to runc.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.config import passed_on
from snapshotd.errors import SandboxFailed
from snapshotd.kernel import mounts
from snapshotd.kernel import syscalls as sc
from snapshotd.runtime import _cgroups, starter_main
from snapshotd.runtime._process import poll_fd
from snapshotd.runtime.base import Container
from snapshotd.types import ContainerID, short

_log = logging.getLogger(__name__)
_START_DEADLINE_S = 60.0
"""A frozen sandbox keeps a start waiting until it is thawed; after this it does not begin any more."""
_ANSWER_DEADLINE_S = 70.0
_HELPER_END_S = 10.0
_KNOWN_MAX = 4096
"""Sandboxes whose filter is remembered."""


@dataclass(frozen=True, slots=True)
class _Sandbox:
    """The parts of a sandbox's confinement that no specification has."""

    filters: list[dict[str, Any]]
    cgroups: list[str]
    """Paths of `cgroup.procs`, one per hierarchy."""


class RefusedError(Exception):
    """The command cannot be run. The reason is in runc's words."""


class Starter:
    """The starter's process, made with the first command. Thread-safe."""

    def __init__(self, *, used: bool = True) -> None:
        self.used = used
        """False: runc starts every command."""
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._known: dict[ContainerID, _Sandbox | None] = {}

    def start(self, container: Container, name: str, process: dict[str, Any], standard: Sequence[int]) -> int | None:
        """Start a command in the sandbox whose cgroup has `name` in its path; its process id once it runs. It is a child
        of this process, which must be a child subreaper.

        `process` is the OCI specification of it, `standard` its standard input, output and error. None: this sandbox is
        not for the starter, and nothing was started. Raises RefusedError, and SandboxFailed when the sandbox is gone.
        """
        if not self.used:
            return None
        about = {"init": container.pid, "name": name}
        sandbox = self._sandbox(container, about)
        if sandbox is None:
            return None
        confinement = {"filters": sandbox.filters, "cgroups": sandbox.cgroups}
        deadline = time.monotonic() + _START_DEADLINE_S
        answer = self._ask(container, {**about, **confinement, "process": process, "deadline": deadline}, standard)
        if "error" in answer:
            raise RefusedError(answer["error"])
        if "pid" not in answer:
            _log.warning("container %s is left to runc: %s", short(container.id), answer)
            return None
        with contextlib.suppress(ProcessLookupError):
            helper = os.pidfd_open(answer["helper"])
            try:
                poll_fd(helper, _HELPER_END_S)  # with its end the command becomes a child of this process
            finally:
                os.close(helper)
        pid: int = answer["pid"]
        return pid

    def _sandbox(self, container: Container, about: dict[str, Any]) -> _Sandbox | None:
        """None: not for the starter."""
        with self._lock:
            if container.id in self._known:
                return self._known[container.id]
        answer = self._ask(container, about, ())
        found = None
        if "filters" in answer:
            found = _Sandbox(answer["filters"], _cgroup_files(container.pid))
        else:
            _log.warning("commands of container %s are started by runc: %s", short(container.id), answer)
        with self._lock:
            while len(self._known) >= _KNOWN_MAX:
                del self._known[next(iter(self._known))]
            self._known[container.id] = found
        return found

    def _ask(self, container: Container, request: dict[str, Any], standard: Sequence[int]) -> dict[str, Any]:
        gone = SandboxFailed(f"container {short(container.id)} is gone")
        request_fd = os.memfd_create("request")
        answer_r, answer_w = os.pipe2(os.O_CLOEXEC)
        try:
            with open(request_fd, "wb", closefd=False) as f:
                f.write(json.dumps(request).encode())
            try:
                self._send([request_fd, answer_w, *standard])
            finally:
                os.close(answer_w)
            if not poll_fd(answer_r, _ANSWER_DEADLINE_S):
                raise SandboxFailed(f"container {short(container.id)} could not be entered; stop it")
            with open(answer_r, "rb", closefd=False) as f:
                said = f.read()
        finally:
            os.close(request_fd)
            os.close(answer_r)
        if not said:
            raise gone  # the helper was killed with it
        answer: dict[str, Any] = json.loads(said)
        if "gone" in answer:
            raise gone
        if "late" in answer:
            raise SandboxFailed(f"a command did not start in container {short(container.id)} in time; stop it")
        return answer

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


def _spawn() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = _read_only(os.path.realpath(sys.executable))
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", starter_main.__file__, str(theirs.fileno())],
                executable=f"/proc/self/fd/{program}",
                stdin=subprocess.DEVNULL,
                cwd="/",
                pass_fds=(theirs.fileno(), program),
                env=passed_on(["PATH"]),
            )
        finally:
            os.close(program)
    child.returncode = 0  # the object has no further use: the process ends with the connection, or with the daemon
    return ours


def _read_only(path: str) -> int:
    """A descriptor of a program on a mount of its own that is read-only and that nobody can reach or change."""
    tree = mounts.clone(sc.AT_FDCWD, path)
    try:
        mounts.set_attributes(tree, attr_set=sc.MOUNT_ATTR_RDONLY)
    except OSError:
        os.close(tree)
        raise
    return tree


def _cgroup_files(pid: int) -> list[str]:
    """Where processes are put into the cgroups of a sandbox's init."""
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    paths = dict.fromkeys(line.split(":", 2)[2] for line in lines)
    found = [directory for path in paths for directory in _cgroups.directories(path) if path != "/"]
    return [str(directory / "cgroup.procs") for directory in found]
