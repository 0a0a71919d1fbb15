"""Encoded pieces of several documents, which come mixed and are written one document after the other.

They lie in an unnamed temporary file; memory holds 16 bytes of each.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from snapshotd.errors import NO_ROOM, OutOfSpace


def encode(value: Any) -> bytes:
    """JSON in ASCII on one line. No control character reaches a terminal, and half a surrogate pair is U+FFFD."""
    text = json.dumps(value, separators=(",", ":"))
    if "\\ud" in text:  # a pair, or half of one
        text = json.dumps(_whole(value), separators=(",", ":"))
    return text.encode("ascii")


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list | tuple):
        return [_whole(child) for child in value]
    if isinstance(value, dict):
        return {_whole(name): _whole(child) for name, child in value.items()}
    return value


class Scratch:
    """The file. Not thread-safe. OutOfSpace from `add` where the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed by __exit__
        self._end = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:
            pass  # its last bytes found no room, and nobody needs them any more

    def pieces(self) -> EncodedPieces:
        """A sequence of its own within the file."""
        return EncodedPieces(self)

    def add(self, data: bytes) -> int:
        """Append; returns the place."""
        place = self._end
        try:
            self._file.seek(place)
            self._file.write(data)
            self._file.flush()
        except OSError as exc:
            if exc.errno not in NO_ROOM:
                raise
            raise OutOfSpace(
                f"the trajectory cannot be gathered in {self._folder}: the disk is full; free some space and repeat the export"
            ) from exc
        self._end += len(data)
        return place

    def read(self, place: int, length: int) -> bytes:
        self._file.seek(place)
        return self._file.read(length)


class EncodedPieces:
    """EncodedPieces in the order in which they were added."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._places, self._lengths = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._places)

    def add(self, value: Any) -> int:
        """Append a JSON value; returns its number."""
        data = encode(value)
        self._places.append(self._scratch.add(data))
        self._lengths.append(len(data))
        return len(self._places) - 1

    def __iter__(self) -> Iterator[bytes]:
        for place, length in zip(self._places, self._lengths, strict=True):
            yield self._scratch.read(place, length)
