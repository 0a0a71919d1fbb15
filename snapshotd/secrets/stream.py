"""Streams of bytes on their way in and out: secrets become markers, and markers secrets again. Memory use is
bounded."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator

from snapshotd.secrets.base import MARKER_BYTES, MARKER_MAX_BYTES, Found
from snapshotd.secrets.scan import PIECE_BYTES, Scan

_HEAD = b"[secret:"
_UNFINISHED = re.compile(rb"\[secret:[A-Za-z0-9_.-]{0,64}(?::[0-9a-f]{0,16})?\Z")


class Concealer:
    """Takes a stream in pieces of any size and writes it on with markers in place of secrets. Made by
    `Funnel.concealer`.

    The output does not depend on how the stream is cut into pieces. Every byte is passed on at once unless it may begin
    a secret: usually none or a few bytes wait, and within a token or a private key all of it so far. Thread-safe: the
    stream is in the order of calls.
    """

    def __init__(
        self, scan: Scan, put_markers: Callable[[list[bytes | Found]], bytes], write: Callable[[bytes], object]
    ) -> None:
        self._scan = scan
        self._put_markers = put_markers
        self._write = write
        self._lock = threading.Lock()
        self.decided = 0
        """Bytes of the stream that are passed on, or are being passed on; later bytes are held back."""

    def write(self, data: bytes) -> None:
        """Raises the errors of the vault and of the given `write`; the stream is then of no more use."""
        with self._lock:
            for start in range(0, len(data), PIECE_BYTES):
                self._pass_on(self._scan.feed(data[start : start + PIECE_BYTES]))

    def finish(self) -> None:
        """The stream has ended: write the bytes that were held back. The same errors as `write`. To be called once."""
        with self._lock:
            self._pass_on(self._scan.feed(b"", final=True))

    def _pass_on(self, pieces: list[bytes | Found]) -> None:
        if pieces:
            self.decided += sum(len(piece.value) if isinstance(piece, Found) else len(piece) for piece in pieces)
            self._write(self._put_markers(pieces))


def reveal_stream(chunks: Iterable[bytes], original: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """The chunks with every marker passed through `original`. A marker may be cut anywhere; other bytes are not held
    back."""
    held = b""
    for chunk in chunks:
        data = held + chunk
        cut = _find_unfinished(data)
        held = data[cut:]
        if cut:
            yield MARKER_BYTES.sub(lambda match: original(match[0]), data[:cut])
    if held:
        yield held


def _find_unfinished(data: bytes) -> int:
    """Position of a marker's beginning that more data would complete. It can only be at the last bracket, for there is
    none inside a marker."""
    at = data.rfind(_HEAD[:1], max(0, len(data) - MARKER_MAX_BYTES))
    return at if at >= 0 and (_HEAD.startswith(data[at:]) or _UNFINISHED.match(data, at)) else len(data)
