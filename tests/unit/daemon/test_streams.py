"""The threads of streams."""

import threading

import pytest

from snapshotd.daemon.http.streams import IDLE_MAX, StreamLimit
from snapshotd.errors import LimitExceeded
from tests.unit.daemon.asking import eventually


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "stream"}


def _ran(limit: StreamLimit) -> threading.Thread:
    """The thread of a stream, once it has nothing to do again."""
    seen: list[threading.Thread] = []
    limit.start(lambda: seen.append(threading.current_thread()))
    eventually(lambda: bool(seen and limit._idle))
    return seen[0]


def test_a_stream_takes_the_thread_of_an_earlier_one() -> None:
    limit = StreamLimit()
    assert _ran(limit) is _ran(limit)


def test_a_few_threads_stay() -> None:
    before, limit, go = _threads(), StreamLimit(), threading.Event()
    for _ in range(3 * IDLE_MAX):
        limit.start(lambda: bool(go.wait()))
    assert len(_threads() - before) == 3 * IDLE_MAX
    go.set()
    eventually(lambda: len(_threads() - before) == IDLE_MAX)


def test_streams_are_bounded() -> None:
    limit, go = StreamLimit(2), threading.Event()
    for _ in range(2):
        limit.start(lambda: bool(go.wait()))
    with pytest.raises(LimitExceeded, match="2 streams"):
        limit.start(lambda: None)
    go.set()
    eventually(lambda: len(limit._idle) == 2)
    _ran(limit)
