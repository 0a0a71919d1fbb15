"""Make a layer that changes a stack, by writing through an overlay that no other process sees.

The overlay is a detached mount: no process has it in its namespace, and it is gone when the layer is done. So overlayfs
itself keeps the marks right (whiteouts, opaque directories, hard links), and no running sandbox notices before it is
given the layer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack

from snapshotd.kernel import files, mounts
from snapshotd.kernel.abilities import BY_USER
from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress
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

            def hold(fd: int) -> int:
                opened.callback(os.close, fd)
                return fd

            lowers = [hold(store.open_upper(lower)) for lower in stack.layers]
            lowers.append(hold(store.open_image(stack.image)))
            parent = hold(store.open_layer(layer))
            parts = [
                hold(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=parent))
                for name in ("upper", "work")
            ]
            naming, by_user = store.host.layer_naming, store.marks == BY_USER
            mount = hold(mounts.overlay(lowers, parts[0], parts[1], naming, user_marks=by_user))
            write(hold(os.open(".", files.DIR_FLAGS, dir_fd=mount)))
        store.drop_work(layer)
    return layer
