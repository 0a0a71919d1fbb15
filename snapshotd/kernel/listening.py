"""A server of connections: one thread accepts, and one serves each connection."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class ServedConnection(Protocol):
    """One connection. `Listening` calls the methods."""

    @property
    def name(self) -> str:
        """The name of its thread."""

    def run(self) -> None:
        """Serve the peer until it goes, or until `interrupt`."""

    def interrupt(self) -> None:
        """Cut it. From any thread, and never after `close`."""

    def close(self) -> None:
        """`run` has ended."""


class Listening:
    """Accepts connections from construction until `close`. Thread-safe."""

    def __init__(
        self,
        listener: socket.socket,
        connection: Callable[[socket.socket], ServedConnection],
        closing: threading.Event,
        *,
        limit: int,
        busy: bytes,
        name: str,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """`listener` is taken over. `connection`: takes over an accepted socket (OSError: its peer has gone). `closing`
        is set by `close`. `limit`: greatest number of connections; a peer beyond it gets `busy`. `name`: of the thread
        that accepts. `before`: that thread calls it first."""
        self._listener, self._connection, self._closing = listener, connection, closing
        self._limit, self._busy, self._name, self._before = limit, busy, name, before
        self._lock = threading.Lock()
        self.connections: set[ServedConnection] = set()
        self._threads: list[threading.Thread] = []
        """Every thread that may still run, for `close`; ended ones are dropped when the next one starts."""
        self._open = True
        self._closed = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    def close(self) -> bool:
        """Accept no more and interrupt every connection. Waits for their threads, but not for the calling one, for at
        most 10 s: one may be in work that is not interrupted. False: it was closed before."""
        with self._lock:
            first, self._open = self._open, False
            self._closing.set()
        if first:
            self._stop_accepting()
            self._join()
            self._closed.set()
        else:
            self._closed.wait(2 * _CLOSE_S)
            self._join()  # one of them may be the thread that closed it
        return first

    def _stop_accepting(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept() with EINVAL
        except OSError:
            pass  # it is no longer listening, which does as well
        self._acceptor.join(_CLOSE_S)
        self._listener.close()
        with self._lock:
            for connection in self.connections:
                connection.interrupt()

    def _join(self) -> None:
        deadline = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _accept(self) -> None:
        self._before()
        while not self._closing.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as exc:
                if self._closing.is_set():
                    return
                _log.warning("%s: cannot accept a connection: %s", self._name, exc)
                self._closing.wait(0.1)  # out of descriptors or memory: others may give some back
                continue
            if not self._start(connected):
                connected.close()

    def _start(self, connected: socket.socket) -> bool:
        try:
            with self._lock:
                if len(self.connections) < self._limit and not self._closing.is_set():
                    connection = self._connection(connected)
                    thread = threading.Thread(target=self._serve, args=(connection,), name=connection.name, daemon=True)
                    thread.start()
                    self.connections.add(connection)
                    self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
                    return True
        except OSError:
            return False  # the peer has gone
        except RuntimeError as exc:  # no more threads
            _log.warning("%s: cannot serve a connection: %s", self._name, exc)
        try:
            connected.setblocking(False)
            connected.send(self._busy)
        except OSError:
            pass  # the peer is turned away, and may not hear why
        return False

    def _serve(self, connection: ServedConnection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self.connections.discard(connection)
            connection.close()
