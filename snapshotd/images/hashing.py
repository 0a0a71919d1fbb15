"""The SHA-256 of a stream, computed while another reader consumes it."""

from __future__ import annotations

import hashlib

from snapshotd.formats.tar_reader import ByteSource

_PIECE_BYTES = 1 << 20


class HashingReader:
    """A stream that knows the hash of the bytes read from it."""

    def __init__(self, stream: ByteSource) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._hash.update(data)
        return data

    def hexdigest(self) -> str:
        """Digest of the bytes read so far."""
        return self._hash.hexdigest()

    def finish(self) -> str:
        """Read to the end; the hash of all of it."""
        while self.read(_PIECE_BYTES):
            pass
        return self.hexdigest()
