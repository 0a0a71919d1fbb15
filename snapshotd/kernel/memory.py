"""How the C library keeps memory that is free, for a process that moves much data."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""
_KEPT_BYTES, _PAD_BYTES, _HEAP_BYTES = 128 << 20, 16 << 20, 32 << 20


def keep_freed() -> bool:
    """From now on what this process frees is given out again instead of going back to the kernel, up to 128 MiB. Buffers of up to 32 MiB
    come from there, too, and all threads share it. A page that the kernel gives anew is a fault, and is cleared: without this, archiving
    300 MiB meets twice as many. False when the C library has no such settings (musl); then nothing has changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES), (_MMAP_THRESHOLD, _HEAP_BYTES), (_ARENA_MAX, 1))
    return all([mallopt(parameter, value) == 1 for parameter, value in wanted])
