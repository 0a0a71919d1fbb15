"""Memory for the bytes that are under way: all connections of a sandbox together have so much and no more."""

from __future__ import annotations

from snapshotd.egress.base import NotAllowed

MOST_BYTES = 24 << 20
_LEAST_BYTES = 4096
"""A connection can always hold this much, so that it goes on whatever the others hold."""
_SHARE = 4
"""Part of what is left that one connection may take at once."""
_KERNEL_BYTES = ((16, None), (64, 65_536))
_KERNEL_LEAST_BYTES = 8192
"""Size of the kernel's buffers of a socket, for so many open ones; beyond them the least. None: as it sizes them itself,
which goes up to 10 MiB for each (tcp(7), tcp_rmem and tcp_wmem), and is what fast downloads from afar need."""


class Buffers:
    """Counts what is held. Not thread-safe."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self.held = self._open = 0

    def share(self, wanted: int) -> int:
        """The number of bytes that one connection may receive now."""
        most = self._kernel_bytes() or wanted
        return max(_LEAST_BYTES, min(wanted, most, (self._most - self.held) // _SHARE))

    def open(self) -> int | None:
        """Count one more open socket. Returns the size for the kernel's buffers of it; None: the kernel's own."""
        self._open += 1
        return self._kernel_bytes()

    def _kernel_bytes(self) -> int | None:
        return next((size for most, size in _KERNEL_BYTES if self._open <= most), _KERNEL_LEAST_BYTES)

    def close(self) -> None:
        """Count one open socket less."""
        self._open -= 1

    def hold(self, count: int) -> None:
        """Count so many more bytes as held; fewer, if negative."""
        self.held += count

    def check(self) -> None:
        """NotAllowed: nothing more can be collected, since others hold too much."""
        if self.held >= self._most:
            raise NotAllowed("its connections hold too much that is not complete")
