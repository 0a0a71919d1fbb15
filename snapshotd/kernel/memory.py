"""Free memory: the machine's, and settings of the C library and of Python's garbage collector."""

from __future__ import annotations

import ctypes
import gc

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
"""Parameters of mallopt(3), from glibc's malloc.h."""
_KEPT_BYTES, _PAD_BYTES, _HEAP_BYTES = 128 << 20, 16 << 20, 32 << 20


def available_bytes() -> int:
    """Memory that new processes can use without swapping, as the kernel estimates it (proc_meminfo(5))."""
    with open("/proc/meminfo") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), 0)


def keep_freed() -> bool:
    """From now on this process reuses memory that it frees instead of giving it back to the kernel, up to 128 MiB.
    Buffers of up to 32 MiB come from there, too, and all threads share it. A page that the kernel gives anew is a
    fault, and is cleared: without this, archiving 300 MiB meets twice as many. False when the C library has no such
    settings (musl); then nothing has changed."""
    return _set((_TRIM_THRESHOLD, _KEPT_BYTES), (_TOP_PAD, _PAD_BYTES), (_MMAP_THRESHOLD, _HEAP_BYTES), (_ARENA_MAX, 1))


def share_freed() -> bool:
    """From now on all threads share free memory. Without this each of many threads keeps as much as it needed at its
    busiest. False as in `keep_freed`."""
    return _set((_ARENA_MAX, 1))


def give_back() -> bool:
    """Return free memory to the kernel now, also after `keep_freed`. False as in `keep_freed`."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1


def collect_rarely() -> None:
    """For a process with next to no cycles among its values: archiving makes many small values that live until the next
    batch, and the collector would go through all of them again and again."""
    gc.set_threshold(100_000)


def _set(*wanted: tuple[int, int]) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all([mallopt(parameter, value) == 1 for parameter, value in wanted])
