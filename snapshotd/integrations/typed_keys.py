"""Keys for a terminal, as a file that a thread reads."""

from __future__ import annotations

import queue

from snapshotd.client.feeding import PIECE_BYTES


class TypedKeys:
    """Keys that were typed and are not read yet. `waiting`: how many bytes they are."""

    def __init__(self) -> None:
        self._pieces = queue.SimpleQueue[bytes]()
        self.waiting = 0

    def put(self, data: bytes) -> None:
        """Type this."""
        self.waiting += len(data)
        for at in range(0, len(data), PIECE_BYTES):
            self._pieces.put(data[at : at + PIECE_BYTES])

    def end(self) -> None:
        """Nothing more is typed: lets the thread that reads go."""
        self._pieces.put(b"")

    def read(self, count: int, /) -> bytes:
        """The next piece, as soon as there is one; nothing at the end."""
        piece = self._pieces.get()
        self.waiting -= len(piece)
        return piece
