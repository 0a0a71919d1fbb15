"""Gives a command its standard input while its output comes."""

from __future__ import annotations

import base64
import io
import json
from typing import Protocol

from snapshotd.api.wire import STDIN_WINDOW_BYTES
from snapshotd.client.links import Links
from snapshotd.client.transport import Conversation
from snapshotd.client.twofold import Blocking, Twofold, verb

PIECE_BYTES = 64 << 10


class Readable(Protocol):
    """Any file opened for bytes."""

    def read(self, count: int, /) -> bytes | None:
        """At most `count` bytes; nothing at the end."""


class AsyncTerminal(Twofold):
    """The terminal that a command gets in place of pipes. `resize` at any time, and from any thread where it is for
    threads."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self._conversation: Conversation | None = None

    @verb
    async def resize(self, rows: int, columns: int) -> None:
        """Tell the command that its terminal has another size."""
        self.rows, self.columns = rows, columns
        if self._conversation is not None:
            event = {"event": "resize", "rows": rows, "columns": columns}
            await self._conversation.say(json.dumps(event).encode())

    def send_to(self, conversation: Conversation | None) -> None:
        """Changes go there from now on."""
        self._conversation = conversation


class Terminal(Blocking, AsyncTerminal):
    """The terminal that a command gets in place of pipes. `resize` from any thread, at any time."""


class Feeder:
    """Reads the input and sends it, at the side; what may wait is read in a thread. That thread may stay in `read` when
    the command has ended: nothing waits for it. `failure`: the error of reading, which breaks the conversation off."""

    def __init__(self, links: Links, conversation: Conversation, source: Readable) -> None:
        self._links, self._conversation, self._source = links, conversation, source
        self._room = links.room(STDIN_WINDOW_BYTES)
        self._task = links.begin(self._feed, "stdin", conversation.break_off)

    @property
    def failure(self) -> BaseException | None:
        return self._task.failure

    async def make_room(self, count: int) -> None:
        """The command has taken `count` further bytes."""
        await self._room.add(count)

    async def end(self) -> None:
        """The command has ended, and takes no more. A thread that waits for room meets the closed conversation."""
        await self._room.add(1 << 62)
        await self._task.end(0)

    async def _feed(self) -> None:
        while data := await self._read():
            await self._room.take(len(data))
            await self._say({"event": "stdin", "data_b64": base64.b64encode(data).decode()})
        await self._say({"event": "stdin_end"})

    async def _read(self) -> bytes | None:
        if isinstance(self._source, io.BytesIO):
            return self._source.read(PIECE_BYTES)
        return await self._links.apart(self._source.read, PIECE_BYTES)

    async def _say(self, event: dict[str, str]) -> None:
        await self._conversation.say(json.dumps(event).encode())
