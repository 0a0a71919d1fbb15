"""The root directory of a live upper: its metadata come from the upper alone, so a fresh one must look like the one
below."""

from __future__ import annotations

import os

from snapshotd.kernel import files
from snapshotd.kernel.abilities import Marks
from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID, Stack


def dress(store: LayerStore, layer: LayerID, stack: Stack) -> None:
    """Give an empty upper's root directory the owner, mode, xattrs and times that the root of `stack` has. NotFound."""
    with files.closing_fd(_open_top(store, stack)) as below, files.closing_fd(store.open_upper(layer)) as target:
        files.copy_metadata(os.fstat(below), _public_xattrs(below, store.marks), target)


def is_unchanged(store: LayerStore, layer: LayerID, stack: Stack) -> bool:
    """True if a live upper holds nothing: no entry, and its root directory looks like the stack's. One readdir, two
    stats. NotFound."""
    with files.closing_fd(_open_top(store, stack)) as below, files.closing_fd(store.read_upper(layer)) as upper:
        return files.is_empty_dir(upper) and _identity(upper, store.marks) == _identity(below, store.marks)


def _open_top(store: LayerStore, stack: Stack) -> int:
    """O_PATH descriptor of the directory that the root of `stack` has its metadata from."""
    return store.open_upper(stack.layers[0]) if stack.layers else store.open_image(stack.image)


def _identity(fd: int, marks: Marks) -> tuple[object, ...]:
    st = os.fstat(fd)
    return st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, _public_xattrs(fd, marks)


def _public_xattrs(fd: int, marks: Marks) -> dict[bytes, bytes]:
    return {name: value for name, value in files.read_xattrs(fd).items() if not name.startswith(marks.prefix)}
