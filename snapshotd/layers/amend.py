"""Make a layer that changes a stack, by writing through an overlay that no other process sees.

The overlay is a detached mount: no process has it in its namespace, and it is gone when the layer is done. So overlayfs
itself keeps the marks right (whiteouts, opaque directories, hard links), and no running sandbox notices before it is
given the layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from snapshotd.kernel.files import DIR_FLAGS, closing_fd
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress, mount_upper
from snapshotd.types import LayerID, Stack


def amend(store: LayerStore, stack: Stack, write: Callable[[int], object]) -> LayerID:
    """A sealed layer for the top of `stack`, with the changes that `write` makes in its directory: the root of the
    whole tree, for reading and writing. The caller holds the stack's layers, and unpins the new one.

    Ids are the container's. Raises the errors of `write`, NotFound (a layer is gone), OSError; then nothing is left
    behind.
    """
    with store.making() as layer:
        dress(store, layer, stack)
        with ExitStack() as opened:
            lowers = [opened.enter_context(closing_fd(store.open_upper(lower))) for lower in stack.layers]
            lowers.append(opened.enter_context(closing_fd(store.open_image(stack.image))))
            mount = opened.enter_context(mount_upper(store, layer, lowers))
            write(opened.enter_context(closing_fd(os.open(".", DIR_FLAGS, dir_fd=mount))))
        store.drop_work(layer)
    return layer
