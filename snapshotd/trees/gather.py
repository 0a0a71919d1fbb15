"""Small writes, handed on as large ones."""

from __future__ import annotations

from collections.abc import Callable

_BYTES = 1 << 18


class Gather:
    """Call `flush` at the end; the gathered rest is lost otherwise."""

    def __init__(self, sink: Callable[[bytes], object]) -> None:
        self._sink = sink
        self._gathered = bytearray()

    def write(self, data: bytes) -> None:
        """Take `data`, and hand on the gathered bytes when they are 256 KiB or more. A piece that is as large by itself
        is not copied."""
        if len(data) >= _BYTES:
            self.flush()
            self._sink(data)
            return
        self._gathered += data
        if len(self._gathered) >= _BYTES:
            self.flush()

    def flush(self) -> None:
        if self._gathered:
            self._sink(bytes(self._gathered))
            self._gathered.clear()
