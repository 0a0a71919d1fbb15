"""This process's one session with the daemon: inside or outside of a sandbox, the connection, and parking around the requests that wait
for a snapshot.

All requests of a process go through one lock: while one thread is parked, every other thread that wants something of us sleeps in that
lock, which parking.py recognises. A forked child starts over with its own connection.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional

from snapshotd.agent import parking
from snapshotd.agent.connection import LIBRARY, VERSION, Connection, SnapshotdError, SnapshotdUnavailable

SOCKET_VARIABLE = "SNAPSHOTD_AGENT_SOCKET"
DEFAULT_SOCKET = "/run/snapshotd/agent.sock"

_DEFERRED = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGCHLD,
             signal.SIGUSR1, signal.SIGUSR2]
"""Signals that wait until a request is answered: a Python handler must not run while open files are out of place, and a
KeyboardInterrupt between a request and its answer would leave the call's outcome unknown."""


class Session:
    """Use the module's `session`. Thread-safe."""

    def __init__(self) -> None:
        self.outside_messages: List[Dict[str, Any]] = []
        """The conversation of a program that runs outside of a sandbox, so that `messages` works there too."""
        self.body_limit_bytes = 1 << 30
        self._lock = threading.RLock()
        """Re-entrant, so that a finaliser which runs in the middle of a request is refused (`_busy`) and does not wait for itself."""
        self._busy = False
        self._connection: Optional[Connection] = None
        self._was_inside = False
        self._outside = False

    def inside(self) -> bool:
        """Whether a daemon records this process. The first False of a process writes its one line of warning."""
        if self._was_inside:
            return True
        if self._outside:
            return False
        path = socket_path()
        if os.path.exists(path) or _library_belongs_to(path):
            return True
        with self._lock:
            if not self._outside:
                self._outside = True
                warn("not inside a sandbox (no socket at {}): the program runs, but nothing is recorded".format(path))
        return False

    def request(self, op: str, fields: Dict[str, Any], body: Optional[bytes] = None, *, park: bool = False) -> Dict[str, Any]:
        """One request and its answer; with `park` the process is parked from before it is sent until it is answered.

        Raises SnapshotdError (the daemon refused) or SnapshotdUnavailable.
        """
        with self._lock:
            if self._busy:
                raise SnapshotdError(
                    "A finaliser or signal handler made the request {} in the middle of another; make it elsewhere.".format(op), "Conflict")
            self._busy = True
            try:
                with _signals_deferred():
                    return self._exchange(op, fields, body, park)
            finally:
                self._busy = False

    def _exchange(self, op: str, fields: Dict[str, Any], body: Optional[bytes], park: bool) -> Dict[str, Any]:
        try:
            connection = self._connected()
            if park:
                return self._parked(connection, op, fields, body)
            return connection.request(op, fields, body)
        except SnapshotdError:
            raise
        except BaseException as exc:
            self._drop()  # half a request may be on the wire
            if isinstance(exc, (OSError, ValueError)):
                raise SnapshotdUnavailable(
                    "The snapshotd daemon went away during {} ({}), so it is not known whether that was recorded; "
                    "look at `snapshotd log` on the host and start the agent again.".format(op, exc)) from exc
            raise

    def _parked(self, connection: Connection, op: str, fields: Dict[str, Any], body: Optional[bytes]) -> Dict[str, Any]:
        collecting = gc.isenabled()
        gc.disable()  # a finaliser that closes a file would close the placeholder under its number
        try:
            place, why = parking.park()
            note: Dict[str, Any] = {"parked": place is not None}
            if place is None:
                note["unparked_because"] = why[:200]
            note.update(fields)
            try:
                return connection.request(op, note, body)
            finally:
                if place is not None:
                    _return_from(place)
        finally:
            if collecting:
                gc.enable()

    def _connected(self) -> Connection:
        if self._connection is not None and not self._connection.alive():
            self._drop()
        if self._connection is None:
            path = socket_path()
            try:
                connection = Connection(path)
            except OSError as exc:
                raise SnapshotdUnavailable("The snapshotd daemon cannot be reached at {} ({}); check on the host that it runs.".format(
                    path, exc.strerror or exc)) from exc
            try:
                answer = connection.request("hello", {"version": VERSION, "pid": os.getpid(), "library": LIBRARY})
            except BaseException:
                connection.close()
                raise
            self._connection = connection
            self.body_limit_bytes = int(answer.get("body_limit_bytes", self.body_limit_bytes))
            self._was_inside = True
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def after_fork(self) -> None:
        """In the child: the parent's connection is the parent's, and its lock may be held by a thread that does not exist here."""
        self._lock = threading.RLock()
        self._busy = False
        self._drop()


def _return_from(place: parking.Place) -> None:
    try:
        warnings = parking.unpark(place)
    except BaseException:
        # A signal handler that raised, delivered to another thread before the signals were deferred here: finish first.
        for text in parking.unpark(place):
            warn(text)
        raise
    for text in warnings:
        warn(text)


@contextmanager
def _signals_deferred() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFERRED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def socket_path() -> str:
    """Where the daemon listens: `SNAPSHOTD_AGENT_SOCKET`, or the place it has in every sandbox."""
    return os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET


def _library_belongs_to(path: str) -> bool:
    """Whether this file lies below the socket's folder, as in every sandbox: then a missing socket is a daemon that is away."""
    return os.path.abspath(__file__).startswith(os.path.dirname(os.path.abspath(path)).rstrip("/") + "/")


def warn(text: str) -> None:
    """One line on stderr."""
    try:
        if sys.stderr is not None:
            sys.stderr.write("snapshotd: {}\n".format(text))
            sys.stderr.flush()
    except (OSError, ValueError):
        pass  # the program closed its stderr: there is nobody to tell


session = Session()
os.register_at_fork(after_in_child=session.after_fork)
