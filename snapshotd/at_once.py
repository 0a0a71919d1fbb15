"""Work on many things, some of them at once: of the daemon and of its clients."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")
PER_PROCESSOR = 8
"""Most sandboxes at once for each processor, unless a number is named."""


def at_once(items: Sequence[T], most: int, work: Callable[[T], R], *, thread: str = "branch") -> Iterator[tuple[T, R]]:
    """Results as they come, `most` at once, each from a thread of this name. The first error of a work is raised, and no
    other begins; those at work go on, and whoever closes the iteration early ends them."""
    left, done = deque(items), queue.SimpleQueue[tuple[T, R | BaseException]]()

    def take() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                done.put((item, work(item)))
            except BaseException as exc:  # noqa: BLE001 - raised again by whoever takes the results
                left.clear()
                done.put((item, exc))

    for _ in range(min(most, len(items))):
        present = contextvars.copy_context()  # with the tenant that the caller sees
        threading.Thread(target=present.run, args=(take,), name=thread, daemon=True).start()
    try:
        for _ in items:
            item, result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield item, result
    finally:
        left.clear()


def fitting(memory_bytes: int, free_bytes: int) -> int:
    """How many sandboxes with this memory limit fit into three quarters of the free memory: 1 at least, and at most
    `PER_PROCESSOR` for each processor."""
    most = PER_PROCESSOR * len(os.sched_getaffinity(0))
    return max(1, min(most, free_bytes * 3 // 4 // max(1, memory_bytes)))
