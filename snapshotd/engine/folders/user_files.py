"""Files that a user names by a path: opened in another process, with that user's rights alone (`user_process.py`).

In the daemon itself a path is not safe even with the user's rights: `/proc/self/fd` leads to what the daemon has open.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.engine.folders import user_process
from snapshotd.kernel.identity import HostUser

LONGEST_S = 5.0
"""The longest that a request waits: for a file system that does not answer, for instance."""
_PROGRAM = Path(user_process.__file__)
_SENT_BYTES = 1 << 18


class UserFiles:
    """Serves from construction until `close`; the process begins with the first request. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._lock:
            self._end()

    def of(self, user: HostUser) -> OwnFiles:
        """The files of one user."""
        return OwnFiles(self, user)

    def ask(self, user: HostUser, request: dict[str, Any], data: bytes = b"") -> bytes:
        """Have a request done, and return what it reads. OSError; TimeoutError after `LONGEST_S`."""
        ends = time.monotonic() + LONGEST_S
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(user, theirs)
            head = json.dumps(request).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has answered before it read all
                _send(ours, head + data, ends)
            pieces = []
            while piece := _within(ours, ends).recv(_SENT_BYTES):
                pieces.append(piece)
        head, found, answer = b"".join(pieces).partition(b"\n")
        if not found:
            raise OSError(errno.EIO, "the process that opens it has ended")
        number = json.loads(head)["errno"]
        if number is not None:
            raise OSError(number, os.strerror(number))
        return answer

    def _hand_over(self, user: HostUser, stream: socket.socket) -> None:
        packet = json.dumps({"uid": user.uid, "gid": user.gid, "groups": list(user.groups)}).encode()
        with self._lock:
            for again in (True, False):
                try:
                    socket.send_fds(self._start_process(), [packet], [stream.fileno()])
                    return
                except OSError:
                    self._end()  # it was killed, or is stuck
                    if not again:
                        raise

    def _start_process(self) -> socket.socket:
        if self._control is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(LONGEST_S)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(_PROGRAM), str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    start_new_session=True,
                    env={},
                )
            self._control = ours
        return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._control = self._process = None


@dataclass(frozen=True, slots=True)
class OwnFiles:
    """The files that one user may open."""

    all: UserFiles
    user: HostUser

    def read(self, path: str, offset: int, most: int) -> bytes:
        """Read at most `most` bytes of a regular file from an offset. OSError. The last part of the path may not be a
        link."""
        return self.all.ask(self.user, {"verb": "read", "path": path, "offset": offset, "most": most})

    def create(self, path: str, data: bytes) -> None:
        """A new file for its user alone, durable on return. OSError; FileExistsError."""
        self.all.ask(self.user, {"verb": "create", "path": path, "bytes": len(data)}, data)


def _within(stream: socket.socket, ends: float) -> socket.socket:
    """The stream, which waits until then and no longer."""
    stream.settimeout(max(ends - time.monotonic(), 0.001))
    return stream


def _send(stream: socket.socket, data: bytes, ends: float) -> None:
    view = memoryview(data)
    while view:
        view = view[_within(stream, ends).send(view[:_SENT_BYTES]) :]
