"""The layers of a stack as one tree."""

from __future__ import annotations

from contextlib import ExitStack

from snapshotd.errors import NotFound
from snapshotd.kernel.files import closing_fd
from snapshotd.layers.store import LayerStore
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import Stack


def open_stack(store: LayerStore, stack: Stack) -> View:
    """A stack for reading; its layers are held until the caller closes it. NotFound."""
    if not store.hold(stack.layers):
        raise NotFound(
            f"a layer of this snapshot is missing in {store.root}: its files can only come from the repository"
        )
    try:
        with ExitStack() as opened:
            fds = [opened.enter_context(closing_fd(store.read_upper(layer))) for layer in stack.layers]
            fds.append(opened.enter_context(closing_fd(store.read_image(stack.image))))
            return StackView(fds, lambda: store.release(stack.layers), store.marks)
    except BaseException:
        store.release(stack.layers)
        raise
