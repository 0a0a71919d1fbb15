"""Cache of the hard link groups of each layer and image. The background thread fills it; a seal only reads it
(layers/links.py)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from snapshotd.engine.storage.worker import Worker
from snapshotd.errors import SnapshotdError
from snapshotd.layers.links import MAX_NAMES, Group
from snapshotd.types import Stack

MAX_LAYERS = 1024
"""Number of layers whose link groups are cached; the stacks of the live sandboxes need theirs."""


class LinkGroups:
    """The cache. Thread-safe. A seal repairs no group that is not known yet."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._known: OrderedDict[str, Sequence[Group]] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, stack: Stack) -> None:
        """Find the groups of the stack's layers that are not known yet. From the background thread: reads each layer
        once."""
        for key, is_image in (*((layer, False) for layer in stack.layers), (stack.image, True)):
            with self._lock:
                if key in self._known:
                    self._known.move_to_end(key)
                    continue
            try:
                found = self._worker.links(key, is_image=is_image)
            except SnapshotdError:
                continue  # removed meanwhile
            with self._lock:
                self._known[key] = found or ()
                while len(self._known) > MAX_LAYERS:
                    self._known.popitem(last=False)

    def of(self, stack: Stack) -> Iterator[Group]:
        """The known groups of a stack, newest layer first, at most `MAX_NAMES` names."""
        names = 0
        with self._lock:
            lists = [self._known.get(key, ()) for key in (*stack.layers, stack.image)]
        for group in (group for found in lists for group in found):
            names += len(group)
            if names > MAX_NAMES:
                return
            yield group
