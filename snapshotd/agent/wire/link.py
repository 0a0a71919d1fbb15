"""A connection that outlives the daemon at its other end.

A daemon that is killed or replaced leaves the sandbox running. A link notices that its connection is lost, connects
again and again until the next daemon is there, tells it which calls it has begun and not ended, and sends the request
that was not answered again: under the same ids, marked `again`, so that the daemon does it once. The program notices
nothing but the time that it takes.

That is for processes in a sandbox, or that a daemon has greeted: there was one, so there will be. Others hear at once
that there is none.

Requests are generators, `Steps`, since some of them are waited for in an event loop: `finish` runs one where waiting
may block.
"""

from __future__ import annotations

import os
import time
from typing import Any, Dict, Generator, Optional, Protocol

from snapshotd.agent.wire.connection import (
    LIBRARY,
    VERSION,
    Connection,
    SnapshotdError,
    SnapshotdUnavailable,
    socket_path,
)

PATIENCE_VARIABLE = "SNAPSHOTD_RECONNECT_S"
DEFAULT_PATIENCE_S = 600.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.5

Steps = Generator[Optional[float], None, Any]
"""The steps that remain of a request. Each step gives the seconds to wait before the next one, or None when that will
wait for an answer on the link's descriptor; the generator returns the answer."""


class Owner(Protocol):
    """The interface that a link needs of its process (session.py)."""

    patient: bool
    """True if the link waits for a daemon that is away."""

    def on_hello(self, answer: Dict[str, Any]) -> None:
        """Take the daemon's answer to `hello`."""


class Link:
    """One connection, made when it is needed. Not thread-safe."""

    def __init__(self, owner: Owner) -> None:
        self.calls: Dict[str, None] = {}
        """The calls that have begun on it and not ended, in their order. They are the process's until it has tried to
        end them."""
        self._owner = owner
        self._connection: Optional[Connection] = None
        self._greeted_at_s: Optional[float] = None

    def fileno(self) -> int:
        """The descriptor on which an answer comes; -1 when there is no connection. It may be another after each
        step."""
        return -1 if self._connection is None else self._connection.fileno()

    def disconnect(self) -> None:
        """Close the connection, if there is one. The next request makes another, which takes over the open calls."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def connecting(self) -> Steps:
        """Connect, if that has to be done. Raises as `requesting`."""
        outage = _Outage(self._owner)
        while True:
            try:
                self._connect()
                return
            except OSError as exc:
                yield outage.pause_s(None, exc, 0.0)

    def requesting(self, op: str, fields: Dict[str, Any], body: Optional[bytes] = None) -> Steps:
        """One request and its answer. Raises SnapshotdError (the daemon refused: that is final) or
        SnapshotdUnavailable."""
        outage = _Outage(self._owner)
        again = False
        try:
            while True:
                try:
                    connection = self._connect()
                    sent, again = dict(fields, again=True) if again else fields, True
                    connection.send(op, sent, body)
                    yield None
                    answer = connection.answer()
                    break
                except OSError as exc:
                    stood_s = self._stood_s()
                    self.disconnect()
                    yield outage.pause_s(op if again else None, exc, stood_s)
        except SnapshotdError:
            raise
        except BaseException:
            self.disconnect()  # half a request may be on the wire, or its answer not be taken
            raise
        finally:
            if op == "call_end":
                self.calls.pop(fields["call"], None)
        if op == "call_begin" and "replayed" not in answer and "later" not in answer:
            self.calls[fields["call"]] = None
        return answer

    def _connect(self) -> Connection:
        """Connect once, unless there is a connection, and return it. OSError: the attempt failed."""
        if self._connection is not None and self._connection.alive():
            return self._connection
        self.disconnect()
        hello: Dict[str, Any] = {"version": VERSION, "pid": os.getpid(), "library": LIBRARY}
        if self._greeted_at_s is not None:
            hello.update(again=True, calls=list(self.calls))
        connection = Connection(socket_path())
        try:
            answer = connection.request("hello", hello)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        self._greeted_at_s = time.monotonic()
        self._owner.on_hello(answer)
        return connection

    def _stood_s(self) -> float:
        """Age of the lost connection; 0 if there was none."""
        return 0.0 if self._connection is None or self._greeted_at_s is None else time.monotonic() - self._greeted_at_s


class _Outage:
    """The wait of one request for a daemon that is away, in steps.

    Only the waiting counts, not the time with a connection: a snapshot may take long, a person longer. A daemon that
    goes away over and over, perhaps because of this very request, gets no more patience than one that stays away; only
    a connection that stood for as long as the limit starts the wait anew.
    """

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._limit_s = _patience_s() if owner.patient else 0.0
        self._begin()

    def _begin(self) -> None:
        self._left_s = self._limit_s
        self._pause_s = 0.0

    def pause_s(self, op: Optional[str], error: OSError, stood_s: float) -> float:
        """Seconds until the next attempt, after `error` on a connection that stood so long. SnapshotdUnavailable when
        it is enough. `op`: the request that the daemon may have got."""
        if stood_s >= self._limit_s:
            self._begin()
        if self._left_s <= 0:
            self._owner.patient = False
            raise _unavailable(op, error, self._limit_s) from error
        pause_s = min(self._pause_s, self._left_s)
        self._left_s -= pause_s
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return pause_s


def _unavailable(op: Optional[str], error: OSError, waited_s: float) -> SnapshotdUnavailable:
    why = error.strerror or str(error)
    if op is None:
        waited = " for {:g} s".format(waited_s) if waited_s else ""
        return SnapshotdUnavailable(
            "The snapshotd daemon cannot be reached at {}{} ({}); check on the host that it runs.".format(
                socket_path(), waited, why
            )
        )
    waited = " and did not come back within {:g} s".format(waited_s) if waited_s else ""
    return SnapshotdUnavailable(
        "The snapshotd daemon went away during {} ({}){}, so it is not known whether that was recorded; "
        "look at `snapshotd log` on the host and start the agent again.".format(op, why, waited)
    )


def _patience_s() -> float:
    """Seconds to wait for a daemon that went away: `SNAPSHOTD_RECONNECT_S`, 0 for not at all. Any text that is no
    number of seconds counts as the default."""
    try:
        given = float(os.environ.get(PATIENCE_VARIABLE, DEFAULT_PATIENCE_S))
    except ValueError:
        return DEFAULT_PATIENCE_S
    return given if given >= 0 else DEFAULT_PATIENCE_S  # nan is not


def begin(steps: Steps) -> None:
    """Take the steps up to where an answer has to be waited for. Blocks while the daemon is away."""
    for pause_s in steps:
        if pause_s is None:
            return
        time.sleep(pause_s)


def finish(steps: Steps) -> Any:
    """Take all steps that are left, and return the answer. Blocks."""
    while True:
        try:
            pause_s = next(steps)
        except StopIteration as end:
            return end.value
        if pause_s is not None:
            time.sleep(pause_s)
