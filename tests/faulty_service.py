"""A service that can be away, slow, or answer 503: a process of the tests passes on what a client of it sends."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Literal

Manner = Literal["well", "away", "slow", "refusing"]
_SLOW_S = 0.3
"""Pause before each piece that a slow service sends or takes."""
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyService:
    """In front of the HTTP service at a port of this machine. Every change of its manner cuts off what is under way."""

    def __init__(self, port: int) -> None:
        self._behind, self._manner = port, "well"
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.asked = 0
        """Number of connections that were made while it was not well."""
        threading.Thread(target=self._serve, daemon=True).start()

    @contextmanager
    def being(self, manner: Manner) -> Iterator[None]:
        """For the length of a block."""
        self._change(manner)
        try:
            yield
        finally:
            self._change("well")

    def close(self) -> None:
        self._listening.close()
        self._change("away")

    def _change(self, manner: Manner) -> None:
        with self._lock:
            self._manner = manner
            for one in self._open:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                threading.Thread(target=self._answer, args=(client,), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            self.asked += self._manner != "well"
            if self._manner == "away":
                return
            if self._manner == "refusing":
                client.recv(1 << 16)
                client.sendall(_REFUSAL)
                return
            with socket.create_connection(("127.0.0.1", self._behind)) as behind:
                ends = {client, behind}
                with self._lock:
                    self._open |= ends
                try:
                    back = threading.Thread(target=self._pass_on, args=(behind, client), daemon=True)
                    back.start()
                    self._pass_on(client, behind)
                    back.join()
                finally:
                    with self._lock:
                        self._open -= ends

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self._manner == "slow":
                    time.sleep(_SLOW_S)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
