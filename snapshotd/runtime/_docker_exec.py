"""One command in a Docker container: the raw stream of its output taken apart into two pipes, and its exit code.

The SDK's own way to get at the stream reads around a buffer that may hold the first bytes already, so the connection is made here:
one request on a unix socket, then frames of 8 bytes header (stream number, three zeros, length big-endian) and data.
Source: Docker Engine API, "Attach to a container: Stream format".

Two threads serve a command. The pump moves output for as long as anything in the container holds it open, and goes on draining when the
reader is gone, so that no background process dies of SIGPIPE. The watcher gets the exit code as soon as the command itself has ended,
because the engine forgets it after some minutes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from snapshotd.errors import SandboxFailed
from snapshotd.runtime._process import exit_code_of_reaped, poll_fd
from snapshotd.runtime.base import Process

_STDOUT, _STDERR = 1, 2
_HEAD_BYTES = 2048
_MAX_HEADER_BYTES = 1 << 16
_CONNECT_DEADLINE_S = 30.0
_EXIT_CODE_DEADLINE_S = 10.0
_KERNEL_DEADLINE_S = 0.1
"""From the end of a process to its parent reaping it."""

Inspect = Callable[[], dict[str, Any] | None]
"""The engine's record of the command (`Pid`, `Running`, `ExitCode`), None when the engine has forgotten it. Raises SandboxFailed."""


def open_stream(socket_path: str, api_version: str, exec_id: str) -> tuple[socket.socket, bytes]:
    """Start a command that was created and return the connection that carries its output, with the bytes that came already.

    Raises SandboxFailed with the engine's words, or OSError.
    """
    body = json.dumps({"Detach": False, "Tty": False}).encode()
    head = (
        f"POST /v{api_version}/exec/{exec_id}/start HTTP/1.1\r\nHost: docker\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
    )
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_CONNECT_DEADLINE_S)
        connection.connect(socket_path)
        connection.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            part = connection.recv(1 << 16)
            if not part or len(received) > _MAX_HEADER_BYTES:
                raise SandboxFailed("the Docker engine closed the connection while a command was started; see its log")
            received += part
        answer, _, rest = received.partition(b"\r\n\r\n")
        status = answer.split(b" ", 2)[1]
        if status not in (b"101", b"200"):
            raise SandboxFailed(f"the Docker engine refused to start a command: {rest.decode('utf-8', 'replace').strip()}")
        connection.settimeout(None)
        return connection, rest
    except BaseException:
        connection.close()
        raise


class Pump:
    """Moves one command's output into two pipes, in a thread of its own, until every process that holds the output has ended."""

    def __init__(self, connection: socket.socket, received: bytes) -> None:
        """Takes over `connection`. The read ends of the pipes belong to the caller."""
        self.stdout_r, stdout_w = os.pipe2(os.O_CLOEXEC)
        self.stderr_r, stderr_w = os.pipe2(os.O_CLOEXEC)
        self._connection = connection
        self._received = received
        self._ends: dict[int, int | None] = {_STDOUT: stdout_w, _STDERR: stderr_w}
        self.heads: dict[int, bytes] = {_STDOUT: b"", _STDERR: b""}
        self._thread = threading.Thread(target=self._run, name="exec-output", daemon=True)
        self._thread.start()

    def ended(self, timeout_s: float) -> bool:
        """Wait for the end of the output."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def first_words(self) -> str:
        """The beginning of what came on either stream, for a command that did not start."""
        return (self.heads[_STDOUT] + self.heads[_STDERR]).decode("utf-8", "replace").strip()

    def abandon(self) -> None:
        """Close the read ends, for a command that did not start."""
        os.close(self.stdout_r)
        os.close(self.stderr_r)

    def _run(self) -> None:
        try:
            while header := self._exactly(8):
                kind, length = struct.unpack(">B3xL", header)
                self._move(kind, length)
        except (OSError, EOFError):
            pass  # the engine or the container went away: the pipes end, the watcher says the rest
        finally:
            for end in self._ends.values():
                if end is not None:
                    os.close(end)
            self._connection.close()

    def _exactly(self, count: int) -> bytes:
        """The next bytes of the stream; b"" at its end, EOFError in the middle of something."""
        data = b""
        while len(data) < count:
            self._received = self._received or self._connection.recv(1 << 16)
            if not self._received:
                if data:
                    raise EOFError
                return b""
            missing = count - len(data)
            data += self._received[:missing]
            self._received = self._received[missing:]
        return data

    def _move(self, kind: int, length: int) -> None:
        while length:
            data = self._exactly(min(length, 1 << 16))
            if not data:
                raise EOFError
            length -= len(data)
            if kind not in self._ends:
                continue
            if len(self.heads[kind]) < _HEAD_BYTES:
                self.heads[kind] += data[: _HEAD_BYTES - len(self.heads[kind])]
            self._write(kind, data)

    def _write(self, kind: int, data: bytes) -> None:
        end = self._ends[kind]
        if end is None:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(end, view) :]
        except BrokenPipeError:  # nobody reads any more; go on draining
            os.close(end)
            self._ends[kind] = None


class DockerProcess(Process):
    """A command whose parent is the engine's, so its end is seen through a pidfd and its exit code asked from the engine."""

    def __init__(self, pid: int, pump: Pump, inspect: Inspect) -> None:
        self.pid = pid
        self.stdout_fd = pump.stdout_r
        self.stderr_fd = pump.stderr_r
        self._inspect = inspect
        self._pidfd = _pidfd(pid)
        if self._pidfd is not None:
            weakref.finalize(self, os.close, self._pidfd)
        self._done = threading.Event()
        self._exit_code: int | None = None
        self._problem = "no reason"
        threading.Thread(target=self._watch, name="exec-wait", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> int | None:
        if not self._done.wait(timeout_s):
            return None
        if self._exit_code is None:
            raise SandboxFailed(f"a command in the sandbox ended and its exit code is lost: {self._problem}")
        return self._exit_code

    @property
    def ended(self) -> bool:
        """Whether nothing is left to wait for."""
        return self._done.is_set()

    def finish(self, timeout_s: float) -> None:
        """Wait until the exit code is known or known to be lost."""
        self._done.wait(timeout_s)

    def kill(self) -> None:
        if self._pidfd is None:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it has ended

    def _watch(self) -> None:
        try:
            if self._pidfd is not None:
                poll_fd(self._pidfd, None)
            self._exit_code = self._ask_kernel()
            if self._exit_code is None:
                self._exit_code = self._ask()
        except SandboxFailed as exc:
            self._problem = exc.message
        finally:
            self._done.set()

    def _ask_kernel(self) -> int | None:
        """At once where the kernel tells (6.15). The engine waits 2 s first if another process still holds the output."""
        if self._pidfd is None:
            return None
        deadline = time.monotonic() + _KERNEL_DEADLINE_S
        while True:
            code = exit_code_of_reaped(self._pidfd)
            if code is not None or time.monotonic() > deadline:
                return code
            time.sleep(0.001)

    def _ask(self) -> int | None:
        """The engine learns of the end a moment after the kernel."""
        deadline = time.monotonic() + _EXIT_CODE_DEADLINE_S
        delay = 0.001
        while True:
            record = self._inspect()
            if record is None:
                self._problem = "its container is gone"
                return None
            if not record["Running"] and record["ExitCode"] is not None:
                return int(record["ExitCode"])
            if time.monotonic() > deadline:
                self._problem = f"the Docker engine says for {_EXIT_CODE_DEADLINE_S:.0f} s that it still runs"
                return None
            time.sleep(delay)
            delay = min(delay * 2, 0.05)


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None  # it has ended already
