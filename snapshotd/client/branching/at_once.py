"""Work on many things, some of them at once."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def at_once(items: Sequence[T], most: int, work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Results as they come, `most` at once. The first error of a work is raised, and no other begins; those at work go on,
    and whoever closes the iteration early ends them."""
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
        threading.Thread(target=take, name="fork", daemon=True).start()
    try:
        for _ in items:
            item, result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield item, result
    finally:
        left.clear()
