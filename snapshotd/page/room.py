"""Bounds on the connections to the page's server: every user of this machine can open some, and none is to take those of
the person who has the page open."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from snapshotd.page.owner import find_owner

HEAD_S = 10.0
"""Time for the head of a request, and for the body of a sign-in."""
OWN_MAX = 256
"""Connections of a user whom the page belongs to: one for each tab, and six more of the browser."""
OTHER_MAX, OTHERS_MAX = 16, 64
"""Connections of each other user, and of all others together: enough to sign in."""


class PageRoom:
    """The open connections, by the user who has the other end. The page belongs to the user of the server, and to the one
    who signed in. Not thread-safe."""

    def __init__(self) -> None:
        self._own: set[int | None] = {os.geteuid()}
        self._held: dict[int | None, dict[int, socket.socket]] = {}

    def admit(self, connection: socket.socket, port: int) -> bool:
        """Count a connection for as long as its socket is open; `port` is the other end's. False: its user has no more
        room."""
        self._forget_closed()
        user = find_owner(connection)
        held = self._held.setdefault(user, {})
        others = sum(len(each) for other, each in self._held.items() if other not in self._own)
        if len(held) >= OWN_MAX if user in self._own else len(held) >= OTHER_MAX or others >= OTHERS_MAX:
            return False
        held[port] = connection
        return True

    def give_to(self, port: int) -> None:
        """The page belongs to the user of the connection from this port, too."""
        self._own |= {user for user, held in self._held.items() if port in held}

    def _forget_closed(self) -> None:
        open_ones = {
            user: {port: each for port, each in held.items() if each.fileno() != -1}
            for user, held in self._held.items()
        }
        self._held = {user: held for user, held in open_ones.items() if held}


class BoundedProtocol(H11Protocol):
    """uvicorn's HTTP protocol for a connection that has room, and whose requests do not stop within their heads."""

    def __init__(self, room: PageRoom, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        port = self.client[1] if self.client else 0
        if self._room.admit(transport.get_extra_info("socket"), port):
            self._watch_head()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_head()

    def _watch_head(self) -> None:
        """A head is awaited from the first byte on, and at the beginning of the connection."""
        if self.conn.their_state is not h11.IDLE:
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
