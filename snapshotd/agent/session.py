"""This process's one session with the daemon: inside or outside of a sandbox, the connection, and parking around the
requests that wait for a snapshot.

All requests of a process go through one lock: while one thread is parked, every other thread that calls this library
sleeps in that lock, which parking.py recognises. A request that waits for a person (`wait`) keeps the lock only if the
process could be parked, when nothing else of it runs anyway; otherwise it waits on a connection of its own, and other
threads go on. A request that only the daemon's policy gates waits like any other request: other threads run on until
they want something recorded. A forked child starts over with its own connection.

If the daemon goes away during a request, the process waits for the next one (link.py), still parked and still with the
lock if it had them: threads that record something wait, and the rest of the program goes on.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Set, Tuple

from snapshotd.agent.wire import parking
from snapshotd.agent.wire.connection import SnapshotdError, socket_path
from snapshotd.agent.wire.link import Link, Steps, begin, finish

_NAMED = ("message", "fact", "output", "store_get", "store_put", "store_delete", "store_search")
"""Requests that do or record something each time, and have no call id of their own to be known by when they are sent
again: these get a `rid`. (The store's answers are recorded.)"""

_LATER_S = 0.02
"""Pause of a call that other threads have to come before, in a replay."""

_DEFERRED = [
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGCHLD,
    signal.SIGUSR1,
    signal.SIGUSR2,
]
"""Signals that wait until a request is answered: a Python handler must not run while open files are out of place, and a
KeyboardInterrupt between a request and its answer would leave the call's outcome unknown."""


class Session:
    """Use the module's `session`. Thread-safe."""

    def __init__(self) -> None:
        self.outside_messages: List[Dict[str, Any]] = []
        """The conversation of a program that runs outside of a sandbox, so that `messages` works there too."""
        self.body_limit_bytes = 1 << 30
        self.replaying = False
        """True if the daemon answers from the journal: from `hello` until an answer says that the program is live."""
        self.on_replayed: List[Callable[[], None]] = []
        """Called after an answer from the record: values read before may have changed."""
        self._refusal: Optional[str] = None
        """Reason why nothing may be recorded now, if there is one: every request is refused with this sentence
        (compensate.py)."""
        self._lock = threading.RLock()
        """Re-entrant, so that a finaliser which runs in the middle of a request is refused (`_busy`) and does not wait
        for itself."""
        self._busy = False
        self._link = Link(self)
        self._own: Set[Link] = set()
        """Connections of requests that wait for a person, and of the calls they began."""
        self.was_inside = False
        """True if a daemon has greeted this process, or the one that it is a fork of."""
        self.patient = _library_belongs_to(socket_path())
        """True if the library waits for a daemon that is away: in a sandbox, or since one has greeted this process;
        until a wait was in vain."""
        self._outside = False

    def refuse(self, why: Optional[str]) -> None:
        """Refuse every request from now on, for this reason; None: no more."""
        self._refusal = why

    def inside(self) -> bool:
        """True if a daemon records this process. The first False of a process writes its one line of warning."""
        if self.was_inside:
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

    def leave(self) -> None:
        """Count this process as outside from now on, without a warning: its work is part of a call that is recorded
        elsewhere."""
        self.was_inside, self._outside = False, True

    def request(
        self,
        op: str,
        fields: Dict[str, Any],
        body: Optional[bytes] = None,
        *,
        park: bool = False,
        replayed: bool = False,
        connection: Optional[Link] = None,
    ) -> Dict[str, Any]:
        """One request and its answer. With `park` the process is parked from before it is sent until it is answered,
        with `replayed` during a replay only. `connection`: the one to use, where it matters which (of `wait`). A daemon
        that goes away meanwhile is waited for.

        Raises SnapshotdError (the daemon refused) or SnapshotdUnavailable.
        """
        with self._exclusively(op), _signals_deferred():
            link = self._link if connection is None else connection
            if op in _NAMED:
                fields = dict(fields, rid=os.urandom(16).hex())
            finish(link.connecting())  # before parking: only the daemon knows whether this is a replay
            if park or (replayed and self.replaying):
                with _park() as (_, note):
                    return self._note_answer(finish(link.requesting(op, dict(note, **fields), body)))
            return self._note_answer(finish(link.requesting(op, fields, body)))

    def begin_call(self, fields: Dict[str, Any], body: Optional[bytes] = None) -> "Waiting":
        """Send a `call_begin`. Raises as `request`."""
        fields = dict(fields, waits=True)
        if fields.get("approve"):
            waiting = self.wait("call_begin", fields, body)
        else:
            waiting = Waiting(self, None, None, self.request("call_begin", fields, body, replayed=True))
        waiting.again = lambda: self.begin_call(fields, body)
        return waiting

    def wait(self, op: str, fields: Dict[str, Any], body: Optional[bytes] = None) -> "Waiting":
        """Send a request that a person has to answer. The process is parked if it can be, and then answered when this
        returns; else `Waiting.answer` waits for it, without the lock. Raises as `request`."""
        with self._exclusively(op):
            with _signals_deferred():
                finish(self._link.connecting())
                with _park() as (place, note):
                    if place is not None or self.replaying:
                        return Waiting(
                            self,
                            None,
                            None,
                            self._note_answer(finish(self._link.requesting(op, dict(note, **fields), body))),
                        )
            own = Link(self)
            self._own.add(own)
            steps = own.requesting(op, dict(note, **fields), body)
            try:
                begin(steps)
            except BaseException:
                self.release(own)
                raise
            return Waiting(self, own, steps, None)

    def fileno(self, connection: Optional[Link] = None) -> int:
        """The descriptor of a connection, or of the session's own, which a request has opened; -1 when it is closed."""
        return (self._link if connection is None else connection).fileno()

    def reconnect(self, connection: Optional[Link] = None) -> None:
        """Connect again: the connection, or the session's own, was found closed between requests. Raises as
        `request`."""
        with self._exclusively("hello"), _signals_deferred():
            link = self._link if connection is None else connection
            link.disconnect()
            finish(link.connecting())

    def release(self, connection: Optional[Link]) -> None:
        """Close a connection that `wait` opened. None and closed ones are fine."""
        if connection is not None:
            self._own.discard(connection)
            connection.disconnect()

    def on_hello(self, answer: Dict[str, Any]) -> None:
        """Note a daemon's answer to `hello`, on any connection of this process."""
        self.body_limit_bytes = int(answer.get("body_limit_bytes", self.body_limit_bytes))
        self.replaying = bool(answer.get("replaying", self.replaying))
        self.was_inside = self.patient = True

    def _note_answer(self, answer: Dict[str, Any]) -> Dict[str, Any]:
        if answer.get("live"):
            self.replaying = False
        if "replayed" in answer:
            for act in self.on_replayed:
                act()
        return answer

    @contextmanager
    def _exclusively(self, op: str) -> Iterator[None]:
        with self._lock:
            if self._busy:
                raise SnapshotdError(
                    "A finaliser or signal handler made the request {} in the middle of another; make it elsewhere.".format(
                        op
                    ),
                    "Conflict",
                )
            if self._refusal is not None:
                raise SnapshotdError(self._refusal, "Conflict")
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def after_fork(self) -> None:
        """Runs in the forked child: the parent keeps its connections and calls, and a thread that does not exist here
        may hold its lock."""
        self._lock = threading.RLock()
        self._busy = False
        self._link.disconnect()
        self._link = Link(self)
        for connection in list(self._own):
            self.release(connection)


class Waiting:
    """A request that a person may answer. `connection`: its own one, if it has one. A call that it began has to be ended
    there; the holder of this object releases the connection at the end. `again`: makes the request once more, where the
    answer is that other threads have to come first."""

    def __init__(
        self, owner: Session, connection: Optional[Link], steps: Optional[Steps], answer: Optional[Dict[str, Any]]
    ) -> None:
        self.connection = connection
        self.again: Optional[Callable[[], Waiting]] = None
        self._owner = owner
        self._steps = steps
        self._answer = answer

    def answer(self) -> Dict[str, Any]:
        """Wait for the answer. Raises as `Session.request`; then, and when it is interrupted, the connection is
        closed."""
        while "later" in self._await_first():
            time.sleep(_LATER_S)
            self._repeat()
        return self._await_first()

    def _await_first(self) -> Dict[str, Any]:
        if self._answer is None:
            assert self._steps is not None
            try:
                self._answer = self._owner._note_answer(finish(self._steps))
            except BaseException:
                self._owner.release(self.connection)
                raise
        return self._answer

    def _repeat(self) -> None:
        assert self.again is not None
        self._owner.release(self.connection)
        other = self.again()
        self.connection, self._steps, self._answer = other.connection, other._steps, other._answer

    async def answer_async(self) -> Dict[str, Any]:
        """`answer` for a coroutine: other tasks of an asyncio event loop run meanwhile, also while a daemon is waited
        for. Under other loops they wait."""
        loop = _running_loop()
        if loop is None:
            return self.answer()
        while "later" in await self._await_first_in(loop):
            await sys.modules["asyncio"].sleep(_LATER_S)
            self._repeat()
        return self._await_first()

    async def _await_first_in(self, loop: Any) -> Dict[str, Any]:
        if self._answer is not None:
            return self._answer
        assert self._steps is not None
        assert self.connection is not None
        try:
            pause_s: Optional[float] = None  # the request has been sent
            while True:
                if pause_s is None:
                    await _readable(loop, self.connection.fileno())
                else:
                    await sys.modules["asyncio"].sleep(pause_s)
                pause_s = next(self._steps)
        except StopIteration as end:
            self._answer = self._owner._note_answer(end.value)
            return self._answer
        except BaseException:
            self._owner.release(self.connection)
            raise


async def _readable(loop: Any, fd: int) -> None:
    readable = loop.create_future()
    loop.add_reader(fd, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _running_loop() -> Any:
    asyncio = sys.modules.get("asyncio")  # not imported: it costs more than this whole library
    try:
        return None if asyncio is None else asyncio.get_running_loop()
    except RuntimeError:
        return None


@contextmanager
def _park() -> Iterator[Tuple[Optional[parking.Place], Dict[str, Any]]]:
    """Park the process inside the block, if that is possible. Gives the place, and the fields that tell the daemon."""
    collecting = gc.isenabled()
    gc.disable()  # a finaliser that closes a file would close the placeholder under its number
    try:
        place, why = parking.park()
        note: Dict[str, Any] = {"parked": place is not None}
        if place is None:
            note["unparked_because"] = why[:200]
        try:
            yield place, note
        finally:
            if place is not None:
                _return_from(place)
    finally:
        if collecting:
            gc.enable()


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


def _library_belongs_to(path: str) -> bool:
    """True if this file lies below the socket's folder, as in every sandbox: a missing socket then means that the
    daemon is away."""
    return os.path.abspath(__file__).startswith(os.path.dirname(os.path.abspath(path)).rstrip("/") + "/")


def warn(text: str) -> None:
    """One line on stderr."""
    try:
        if sys.stderr is not None:
            sys.stderr.write("snapshotd: {}\n".format(text))
            sys.stderr.flush()
    except (OSError, ValueError):
        pass  # the program closed its stderr, so the warning is lost


session = Session()
os.register_at_fork(after_in_child=session.after_fork)
