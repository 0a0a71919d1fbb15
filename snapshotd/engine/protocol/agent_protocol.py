"""The daemon's end of the conversation with agents: one unix socket per container. The requests are in
docs/agent-protocol.md.

Trust: everything that connects is an attacker who may send anything, in any order, on any number of connections. Data
from one connection never affects another, and costs the daemon one thread, one line of memory and the amount that the
handler allows. The socket is the identity: the directory that holds it is only visible in the container, and `admit` is
asked about each peer's process id besides.

Concurrency: one thread per connection (at most 64); the handler's methods are called from all of them, also at the same
time.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import socket
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotd.engine.protocol.agent_connection import AgentConnection
from snapshotd.engine.protocol.agent_handler import BODY_LIMIT_BYTES, AgentHandler
from snapshotd.errors import LimitExceeded, SnapshotdError
from snapshotd.kernel import files
from snapshotd.kernel.listening import Listening

CONNECTION_LIMIT = 64
_LOG = logging.getLogger(__name__)


class AgentServer:
    """Serves one container's agents from construction until `close`. Raises OSError when the socket cannot be bound.

    `socket_path`: its directory exists and is a host directory; a socket left there by an earlier daemon is replaced.
    `handler()`: the handler of a request, asked for each.
    `admit(pid)`: whether this process may talk to us (is in the container). Called from the connection's thread.
    `lost(pid, call_ids)`: called when a connection ended with calls that began and did not end; their ends will never
    come.
    """

    def __init__(
        self,
        socket_path: Path,
        handler: Callable[[], AgentHandler],
        admit: Callable[[int], bool],
        *,
        body_limit_bytes: int = BODY_LIMIT_BYTES,
        lost: Callable[[int, tuple[str, ...]], None] | None = None,
    ) -> None:
        self.handler = handler
        self.body_limit_bytes = body_limit_bytes
        self.messages_lock = threading.Lock()
        """One page of messages at a time: bounds the memory."""
        self.admit = admit
        self.lost = lost
        self._lock = threading.Lock()
        self._parked: Counter[int] = Counter()
        self.closing = threading.Event()
        self._name = socket_path.name
        self._directory = os.open(socket_path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener = _bind(self._directory, self._name)
        except BaseException:
            os.close(self._directory)
            raise
        self._listening = Listening(
            listener,
            functools.partial(AgentConnection, self),
            self.closing,
            limit=CONNECTION_LIMIT,
            busy=_refusal(
                LimitExceeded(f"This sandbox has {CONNECTION_LIMIT} connections already; close some and try again.")
            ),
            name="agent-accept",
        )

    def parked_pids(self) -> set[int]:
        """Processes that have let go of the root and wait for the answer to a call_end or checkpoint (host process
        ids)."""
        with self._lock:
            return set(self._parked)

    def close(self) -> None:
        """Remove the socket, refuse new connections, and end all, as `Listening.close`. Idempotent."""
        with self._lock:
            if self.closing.is_set():
                return
            self.closing.set()
        try:
            os.unlink(self._name, dir_fd=self._directory)
        except OSError:
            # the container may have removed it or put something else there; its run directory is removed with
            # everything in it
            pass
        os.close(self._directory)
        self._listening.close()

    def __enter__(self) -> AgentServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def park(self, pid: int, parked: bool, reason: str | None = None) -> Iterator[None]:
        """Count `pid` as parked inside the block, if it claims to be; else `reason` is its explanation."""
        if not parked:
            _LOG.debug("process %d is not parked: %r", pid, (reason or "no reason given")[:200])
            yield
            return
        with self._lock:
            self._parked[pid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._parked[pid] -= 1
                if not self._parked[pid]:
                    del self._parked[pid]


def _refusal(error: SnapshotdError) -> bytes:
    return json.dumps({"id": None, **error.as_json()}).encode() + b"\n"


def _bind(directory: int, name: str) -> socket.socket:
    """A listening socket `name` in the directory, open to everyone who can reach it.

    The address goes through the directory's descriptor: paths of any length fit, and no process can swap the directory.
    The mode is set through a descriptor of the socket itself, since the container may replace the name by a link to
    anything at any moment.
    """
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        pass  # the usual case: no earlier daemon left one
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(f"/proc/self/fd/{directory}/{name}")
        with files.closing_fd(os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)) as fd:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                raise OSError(errno.EEXIST, "another process replaced the agent socket while it was made", name)
            os.chmod(f"/proc/self/fd/{fd}", 0o666)
        listener.listen(CONNECTION_LIMIT)
    except BaseException:
        listener.close()
        raise
    return listener
