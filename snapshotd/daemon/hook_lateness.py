"""An answer in time for a hook whose work takes longer: the agent goes on, and the work is done all the same."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class _Waiting:
    connection: socket.socket
    ends: float
    answer: bytes


class LateAnswers:
    """Answers each connection that waits for `longest_s`. One thread, which sleeps while none waits, until `close`."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._changed = threading.Condition()
        self._waiting: dict[_Waiting, None] = {}
        """In the order of their ends."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hook-lateness")
        self._thread.start()

    def close(self) -> None:
        """Return when the thread has ended. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    @contextlib.contextmanager
    def answer_late(self, connection: socket.socket, code: int, text: str) -> Iterator[None]:
        """Answer the connection with this code and text if the block takes longer than `longest_s`, and shut it: sending on it
        is a BrokenPipeError then."""
        one = _Waiting(
            connection, time.monotonic() + self._longest_s, bytes([code]) + text.encode(errors="backslashreplace")
        )
        with self._changed:
            self._waiting[one] = None
            if len(self._waiting) == 1:
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._waiting.pop(one, None)

    def _work(self) -> None:
        with self._changed:
            while not self._closed:
                first = next(iter(self._waiting), None)
                if first is None or (left_s := first.ends - time.monotonic()) > 0:
                    self._changed.wait(None if first is None else left_s)
                    continue
                del self._waiting[first]
                with contextlib.suppress(OSError):  # it has gone, or reads nothing
                    first.connection.send(first.answer, socket.MSG_DONTWAIT)
                    first.connection.shutdown(socket.SHUT_RDWR)
