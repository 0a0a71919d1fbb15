"""Priority among the threads of this process.

Python runs one thread at a time. A step that seals a layer makes some hundred system calls and gives the interpreter up
at each of them; a thread that walks a large tree meanwhile takes it every time, and an agent stands still for that
time. So a thread that keeps an agent waiting works in `first()`, and work that may take long calls `give_way()` between
two entries.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from snapshotd.errors import Conflict

_LONGEST_S = 0.02
"""The longest that one `give_way` waits."""
_changed = threading.Condition(threading.Lock())
_going_first = 0


class _Own(threading.local):
    depth = 0
    """Number of `first` blocks that this thread is in."""
    goes_on_until = 0.0
    """It has waited, and does not again before this (by the monotonic clock)."""
    given_up: threading.Event | None = None
    """Once it is set, nobody wants the thread's work any more."""


_own = _Own()


@contextlib.contextmanager
def first() -> Iterator[None]:
    """Inside the block, this thread goes before threads that give way. May be nested; no lock is taken, and no thread
    waits for long."""
    global _going_first
    with _changed:
        _going_first += 1
    _own.depth += 1
    try:
        yield
    finally:
        _own.depth -= 1
        with _changed:
            _going_first -= 1
            if not _going_first:
                _changed.notify_all()


@contextlib.contextmanager
def until(given_up: threading.Event) -> Iterator[None]:
    """Inside the block, this thread's next `give_way` after the event is a Conflict, once: what cleans up may give way
    as before."""
    _own.given_up = given_up
    try:
        yield
    finally:
        _own.given_up = None


def give_way() -> None:
    """Wait until no thread goes first, or for 20 ms; after a wait the thread runs for as long before it waits again, so
    steps without a pause between them cost it at most half of the time. Does nothing in a thread that goes first
    itself. Costs next to nothing if no thread goes first. Conflict: see `until`."""
    if _own.given_up is not None and _own.given_up.is_set():
        _own.given_up = None
        raise Conflict("the client that asked for this has gone, so it was given up: nothing was made; ask again")
    if not _going_first or _own.depth:
        return
    began = time.monotonic()
    if began < _own.goes_on_until:
        return
    with _changed:
        _changed.wait_for(lambda: not _going_first, _LONGEST_S)
    ended = time.monotonic()
    _own.goes_on_until = ended + (ended - began)
