"""Notices that a peer hung up while its thread waits for the provider: the answer would have no reader, and a model
costs money."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HangUpWatch:
    """One thread for any number of connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: dict[int, Callable[[], None]] = {}
        self._poll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="gateway-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def watch(self, fd: int, gone: Callable[[], None]) -> Iterator[None]:
        """Inside the block, call `gone` (once, from the watching thread) when the peer of the connected socket `fd`
        closes its end."""
        with self._lock:
            if not self._closed:
                self._waiting[fd] = gone
                self._poll.register(fd, select.EPOLLRDHUP | select.EPOLLONESHOT)  # hang-ups and errors are always told
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(fd, None)
                if not self._closed:
                    self._poll.unregister(fd)

    def close(self) -> None:
        """End the thread. Blocks that are open, or opened later, watch nothing. Not from `gone`."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        with self._lock:
            self._closed = True
            self._poll.close()
            os.close(self._wake)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    return
                with self._lock:
                    gone = self._waiting.pop(fd, None)
                    if gone is not None:
                        gone()
