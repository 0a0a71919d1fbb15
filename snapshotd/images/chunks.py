"""An iterator of bytes as a readable stream."""

from __future__ import annotations

from collections.abc import Iterator


class Chunks:
    """Errors of the iterator come out of `read`."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, size: int, /) -> bytes:
        while not self._rest:
            more = next(self._chunks, None)
            if more is None:
                return b""
            self._rest = more
        data, self._rest = self._rest[:size], self._rest[size:]
        return data

    def read_all(self, most: int) -> bytes:
        """All of it, or the first `most` bytes."""
        parts = []
        while most > 0 and (data := self.read(most)):
            parts.append(data)
            most -= len(data)
        return b"".join(parts)
