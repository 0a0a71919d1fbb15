"""Gives a command its standard input while its output comes, for asyncio. `snapshotd/client/feeding.py` is the same for
threads."""

from __future__ import annotations

import asyncio
import base64
import io
import json

from snapshotd.api.wire import STDIN_WINDOW_BYTES
from snapshotd.client.aio.apart import apart
from snapshotd.client.aio.transport import AsyncConversation
from snapshotd.client.feeding import PIECE_BYTES, Readable


class AsyncTerminal:
    """The terminal that a command gets in place of pipes. `resize` at any time."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self._conversation: AsyncConversation | None = None

    async def resize(self, rows: int, columns: int) -> None:
        """Tell the command that its terminal has another size."""
        self.rows, self.columns = rows, columns
        if self._conversation is not None:
            event = {"event": "resize", "rows": rows, "columns": columns}
            await self._conversation.say(json.dumps(event).encode())

    def used_in(self, conversation: AsyncConversation | None) -> None:
        """Changes go there from now on."""
        self._conversation = conversation


class AsyncFeeder:
    """A task that reads the input and sends it; what may wait is read in a thread. `failure`: the error of reading,
    which breaks the conversation off."""

    def __init__(self, conversation: AsyncConversation, source: Readable) -> None:
        self._conversation, self._source = conversation, source
        self._room = asyncio.Condition()
        self._bytes = STDIN_WINDOW_BYTES
        self.failure: BaseException | None = None
        self._task = asyncio.create_task(self._run())

    async def taken(self, count: int) -> None:
        """The command has taken `count` further bytes."""
        async with self._room:
            self._bytes += count
            self._room.notify()

    async def end(self) -> None:
        """The command has ended, and takes no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while data := await self._read():
                await self._take_room(len(data))
                await self._say({"event": "stdin", "data_b64": base64.b64encode(data).decode()})
            await self._say({"event": "stdin_end"})
        except Exception as exc:  # noqa: BLE001 - raised again by whoever waits for the command
            self.failure = exc
            self._conversation.break_off()

    async def _take_room(self, count: int) -> None:
        async with self._room:
            await self._room.wait_for(lambda: self._bytes >= count)
            self._bytes -= count

    async def _read(self) -> bytes | None:
        if isinstance(self._source, io.BytesIO):
            return self._source.read(PIECE_BYTES)
        return await apart(self._source.read, PIECE_BYTES)

    async def _say(self, event: dict[str, str]) -> None:
        await self._conversation.say(json.dumps(event).encode())
