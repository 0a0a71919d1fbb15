"""A fresh upper's root directory looks like the root directory below it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.layers.store import LayerStore
from snapshotd.layers.upper import dress
from snapshotd.types import ImageID, LayerID, Stack

IMAGE = ImageID("1" * 32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LayerStore]:
    store = LayerStore(tmp_path, "plain")
    (store.root / "images" / IMAGE / "root").mkdir(parents=True)
    yield store
    store.close()


def xattrs(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name) for name in os.listxattr(path) if name.startswith(("user.", "trusted."))}


def metadata(path: Path) -> tuple[int, ...]:
    at = path.stat()
    return at.st_mode, at.st_uid, at.st_gid, at.st_mtime_ns


@pytest.mark.parametrize("on_a_layer", [False, True], ids=["an image", "a layer"])
def test_a_fresh_upper_looks_like_the_root_below(store: LayerStore, on_a_layer: bool) -> None:
    """Marks of overlayfs stay behind: on the new layer they would hide what is below it."""
    layers: tuple[LayerID, ...] = (store.create(),) if on_a_layer else ()
    below = store.root / layers[0] / "upper" if layers else store.root / "images" / IMAGE / "root"
    os.setxattr(below, "user.note", b"\0\xff")
    if os.geteuid() == 0:
        os.setxattr(below, "trusted.overlay.opaque", b"y")
    below.chmod(0o1751)
    os.utime(below, ns=(1, 2))
    fresh = store.create()
    dress(store, fresh, Stack(IMAGE, layers))
    upper = store.root / fresh / "upper"
    assert xattrs(upper) == {"user.note": b"\0\xff"}
    assert metadata(upper) == metadata(below)
