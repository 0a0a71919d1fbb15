"""A live upper: its mount over lower layers, and its root directory, whose metadata come from the upper alone, so a fresh
one must look like the one below."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from snapshotd.kernel import files, mounts
from snapshotd.kernel.abilities import BY_USER, Marks
from snapshotd.layers.mounting import PATH_FLAGS
from snapshotd.layers.store import LayerStore
from snapshotd.trees.lookup import read_public_xattrs
from snapshotd.types import IdMap, LayerID, Stack


@contextmanager
def mount_upper(store: LayerStore, layer: LayerID, lowers: Sequence[int], id_map: IdMap | None = None) -> Iterator[int]:
    """A detached overlay of a layer over the directories `lowers` (newest first), as containers with `id_map` see them.
    NotFound, OSError."""
    with ExitStack() as opened:
        parent = opened.enter_context(files.closing_fd(store.open_layer(layer, id_map)))
        upper, work = (
            opened.enter_context(files.closing_fd(os.open(name, PATH_FLAGS, dir_fd=parent)))
            for name in ("upper", "work")
        )
        naming, by_user = store.host.layer_naming, store.marks == BY_USER
        mount = mounts.overlay(lowers, upper, work, naming, user_marks=by_user)
        yield opened.enter_context(files.closing_fd(mount))


def dress(store: LayerStore, layer: LayerID, stack: Stack) -> None:
    """Give an empty upper's root directory the owner, mode, xattrs and times that the root of `stack` has. NotFound."""
    with files.closing_fd(_open_top(store, stack)) as below, files.closing_fd(store.open_upper(layer)) as target:
        files.copy_metadata(os.fstat(below), _read_xattrs(below, store.marks), target)


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
    return st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, _read_xattrs(fd, marks)


def _read_xattrs(fd: int, marks: Marks) -> dict[bytes, bytes]:
    return read_public_xattrs(files.fd_path(fd), marks)
