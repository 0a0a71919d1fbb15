"""Bounds on the connections to the page's server: every user of this machine can open some, and none is to take those of
the person who has the page open."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from snapshotd.page.owner import find_owner
from snapshotd.serving import BoundedProtocol

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
        """Let the page belong to the user of the connection from this port, too."""
        self._own |= {user for user, held in self._held.items() if port in held}

    def _forget_closed(self) -> None:
        open_ones = {
            user: {port: each for port, each in held.items() if each.fileno() != -1}
            for user, held in self._held.items()
        }
        self._held = {user: held for user, held in open_ones.items() if held}


class RoomProtocol(BoundedProtocol):
    """A connection that has room, and whose requests do not stop within their heads."""

    def __init__(self, room: PageRoom, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        port = self.client[1] if self.client else 0
        if not self._room.admit(transport.get_extra_info("socket"), port):
            transport.abort()
