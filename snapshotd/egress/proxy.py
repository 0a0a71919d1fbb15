"""The daemon's side of one proxy process: starts it, tells it rules, hears it, ends it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from snapshotd.config import read_variables
from snapshotd.egress.base import MESSAGE_MAX_BYTES, PROXY_PORT, REFUSAL_MAX, VERSION, printable
from snapshotd.egress.places import LinkedNamespace
from snapshotd.kernel import rootless
from snapshotd.kernel.namespaces import CONTAINER_IDS
from snapshotd.kernel.processes import wait_readable
from snapshotd.network import HostRules

_NOBODY = 65_534
_ANSWER_DEADLINE_S = 30.0
_END_DEADLINE_S = 5.0
_CONTROL, _PLACE, _PROCESS = "control", "place", "process"


class Holder(Protocol):
    """Holds descriptors beyond a daemon's life (`runtime.base.Keeper`)."""

    def hold(self, key: str, fd: int) -> None: ...
    def open_held(self, key: str) -> int | None: ...


class SandboxEnds:
    """Descriptors of a sandbox that mean it for as long as they are open, whatever becomes of its init's number."""

    def __init__(self, name: str, pid: int) -> None:
        """`name`: for people. OSError."""
        self.name = name
        self.init = os.pidfd_open(pid)
        try:
            self.network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            os.close(self.init)
            raise

    @property
    def has_ended(self) -> bool:
        """True if its init has."""
        return wait_readable(self.init, 0)

    def close(self) -> None:
        os.close(self.init)
        os.close(self.network)


@dataclass(slots=True)
class ProxyProcess:
    """A proxy, and the namespace in which it listens. Not thread-safe. `process` is a pidfd."""

    place: LinkedNamespace
    control: socket.socket
    process: int
    started_at: float = field(default_factory=time.monotonic)
    ports: frozenset[int] = frozenset()
    """The ports on which it listens, as far as this daemon knows."""
    applied: int = 0
    has_ended: bool = False
    version: int | None = None
    """The one that an earlier daemon's proxy has reported."""

    @classmethod
    def start(cls, sandbox: SandboxEnds) -> ProxyProcess:
        """A namespace linked to the sandbox's, and a proxy in it that allows nothing yet. OSError; nothing is left then."""
        with contextlib.ExitStack() as failed:
            place = LinkedNamespace.make(sandbox.network)
            failed.callback(place.close)
            control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failed.callback(control.close)
            with theirs:
                process = _spawn(theirs.fileno(), sandbox)
            failed.callback(_end, process)
            names = place.name_sockets()
            try:
                _send(control, {"names": True, "watch": len(names) > 2}, names)
            finally:
                _close(names)
            failed.pop_all()
        return cls(place, control, process)

    @classmethod
    def find(cls, holder: Holder, key: str) -> ProxyProcess | None:
        """The one that an earlier daemon has left to the holder; None: there is none any more."""
        place, control, process = held = [holder.open_held(f"{key}.{kind}") for kind in (_PLACE, _CONTROL, _PROCESS)]
        if place is None or control is None or process is None:
            for fd in held:
                if fd is not None:
                    os.close(fd)
            return None
        found = cls(LinkedNamespace(place), socket.socket(fileno=control), process)
        try:
            _send(found.control, {"report": True}, [])
            found._hear_until(lambda: found.version is not None)
        except OSError:
            found.kill()
        if found.version != VERSION:
            found.close()
            return None
        return found

    def keep(self, holder: Holder, key: str) -> list[str]:
        """Have it outlive this daemon. Returns the keys under which the holder has it. SandboxFailed."""
        parts = {_PLACE: self.place.fd, _CONTROL: self.control.fileno(), _PROCESS: self.process}
        for kind, fd in parts.items():
            holder.hold(f"{key}.{kind}", fd)
        return [f"{key}.{kind}" for kind in parts]

    def apply(self, rules: HostRules) -> list[str]:
        """Put rules in force. Returns sentences about what was refused meanwhile. OSError: it does not answer, and may have
        been killed."""
        wanted = rules.ports | {PROXY_PORT}
        listeners = self.place.listeners(ports := sorted(wanted - self.ports))
        expected = self.applied + 1
        try:
            _send(self.control, {"rules": rules.texts, "ports": ports}, listeners)
        finally:
            _close(listeners)
        self.ports = wanted
        return self._hear_until(lambda: self.applied >= expected)

    def _hear_until(self, done: Callable[[], bool]) -> list[str]:
        deadline, heard = time.monotonic() + _ANSWER_DEADLINE_S, []
        while not done():
            if not wait_readable(self.control.fileno(), deadline - time.monotonic()):
                raise TimeoutError("its proxy does not answer")
            heard += self.receive()
            if self.has_ended:
                raise ConnectionResetError("its proxy was killed")
        return heard

    def receive(self) -> list[str]:
        """Sentences about what was refused since the last time. Notices that it has ended."""
        heard = []
        while not self.has_ended:
            try:
                data = self.control.recv(MESSAGE_MAX_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.has_ended = not data
            try:
                heard += self._understand(json.loads(data)) if data else []
            except (ValueError, TypeError, LookupError, RecursionError):
                self.kill()  # it is not itself any more
        return heard

    def _understand(self, message: Any) -> list[str]:
        if not isinstance(message, dict):
            raise TypeError
        self.applied += "applied" in message
        if "version" in message:
            self.version, self.ports = message["version"], frozenset(message["ports"])
        return [printable(str(message["refused"]), REFUSAL_MAX)] if "refused" in message else []

    def kill(self) -> None:
        """End it at once. Not an error when it has ended."""
        self.has_ended = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, signal.SIGKILL)

    def close(self) -> None:
        """Have it end, and wait until it has."""
        self.place.close()
        with contextlib.suppress(OSError):  # so that it ends, whoever else holds this end
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        _end(self.process)


def _spawn(control: int, sandbox: SandboxEnds) -> int:
    """Start the process. A pidfd of it."""
    arguments = map(str, (control, sandbox.init, _user(), sandbox.name))
    child = subprocess.Popen(
        [sys.executable, "-m", "snapshotd.egress.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(control, sandbox.init),
        cwd="/",
        start_new_session=True,
        env={"LOCALDOMAIN": "", **read_variables(["PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SNAPSHOTD_FAILPOINT"])},
    )
    process = os.pidfd_open(child.pid)
    child.returncode = 0  # the object has no further use: the descriptor tells of the end
    return process


def _user() -> int:
    """The user that the proxy becomes: nobody else's."""
    if not rootless.in_own_namespace():
        return CONTAINER_IDS.base - 1
    return _NOBODY if rootless.ids_here() > _NOBODY else os.geteuid()


def _end(process: int) -> None:
    """Wait for a process that is about to end, kill it if it does not, and reap it if it is a child. Closes the
    descriptor."""
    try:
        if not wait_readable(process, _END_DEADLINE_S):
            signal.pidfd_send_signal(process, signal.SIGKILL)
            wait_readable(process, _END_DEADLINE_S)
        os.waitid(os.P_PIDFD, process, os.WEXITED | os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass  # it has ended, or is an earlier daemon's
    finally:
        os.close(process)


def _send(control: socket.socket, message: dict[str, Any], sockets: list[socket.socket]) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], [sock.fileno() for sock in sockets])


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
