"""Gives a command its standard input while its output comes."""

from __future__ import annotations

import base64
import json
import threading
from typing import Protocol

from snapshotd.api.wire import STDIN_WINDOW_BYTES
from snapshotd.client.transport import Conversation

PIECE_BYTES = 64 << 10


class Readable(Protocol):
    """Any file opened for bytes."""

    def read(self, count: int, /) -> bytes | None:
        """At most `count` bytes; nothing at the end."""


class Terminal:
    """The terminal that a command gets in place of pipes. `resize` from any thread, at any time."""

    def __init__(self, rows: int = 24, columns: int = 80) -> None:
        self.rows, self.columns = rows, columns
        self._conversation: Conversation | None = None

    def resize(self, rows: int, columns: int) -> None:
        """Tell the command that its terminal has another size."""
        self.rows, self.columns = rows, columns
        if self._conversation is not None:
            event = {"event": "resize", "rows": rows, "columns": columns}
            self._conversation.say(json.dumps(event).encode())

    def used_in(self, conversation: Conversation | None) -> None:
        """Changes go there from now on."""
        self._conversation = conversation


class Feeder:
    """A thread that reads the input and sends it. It may stay in `read` when the command has ended: nothing waits for
    it. `failure`: the error of reading, which breaks the conversation off."""

    def __init__(self, conversation: Conversation, source: Readable) -> None:
        self._conversation, self._source = conversation, source
        self._room = threading.Condition()
        self._bytes = STDIN_WINDOW_BYTES
        self.failure: BaseException | None = None
        threading.Thread(target=self._run, name="stdin", daemon=True).start()

    def taken(self, count: int) -> None:
        """The command has taken `count` further bytes."""
        with self._room:
            self._bytes += count
            self._room.notify()

    def end(self) -> None:
        """The command has ended, and takes no more. A thread that waits for room meets the closed conversation."""
        self.taken(1 << 62)

    def _run(self) -> None:
        try:
            while data := self._source.read(PIECE_BYTES):
                self._take_room(len(data))
                self._say({"event": "stdin", "data_b64": base64.b64encode(data).decode()})
            self._say({"event": "stdin_end"})
        except BaseException as exc:  # noqa: BLE001 - raised again by whoever waits for the command
            self.failure = exc
            self._conversation.break_off()

    def _take_room(self, count: int) -> None:
        with self._room:
            self._room.wait_for(lambda: self._bytes >= count)
            self._bytes -= count

    def _say(self, event: dict[str, str]) -> None:
        self._conversation.say(json.dumps(event).encode())
