"""The layers' image gives the disk below back what its layers no longer take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.layers import store as layer_store
from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID
from tests.capabilities import require
from tests.storage_rig import in_own_mount_namespace, wait_until

BIG_BYTES = 64 << 20


def big_layer(store: LayerStore) -> LayerID:
    layer = store.create()
    store.unpin([layer])
    with open(store.root / layer / "upper" / "big", "wb") as file:
        file.write(os.urandom(BIG_BYTES))
        os.fsync(file.fileno())
    return layer


def taken_bytes(state: Path) -> int:
    return (state / "layers.img").stat().st_blocks * 512


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    require("root", "xfs")
    layer_store._make_image(tmp_path / "layers.img")
    yield tmp_path
    assert not os.path.ismount(tmp_path / "layers")


@in_own_mount_namespace
def test_a_removed_layer_gives_its_space_back(state: Path) -> None:
    store = layer_store.prepare(state)
    try:
        empty = taken_bytes(state)
        layers = [big_layer(store) for _ in range(3)]
        assert taken_bytes(state) > empty + 3 * BIG_BYTES - (1 << 20)
        store.remove(layers[0])
        wait_until(lambda: taken_bytes(state) < empty + 2 * BIG_BYTES + (8 << 20), "the removed layer's space is back")
        assert store.evict(layers[1])
        wait_until(lambda: taken_bytes(state) < empty + BIG_BYTES + (8 << 20), "the evicted layer's space is back")
        assert store.sweep(set) == layers[2:]
        wait_until(lambda: taken_bytes(state) < empty + (8 << 20), "the swept layer's space is back")
    finally:
        layer_store.release(store)


@in_own_mount_namespace
def test_what_an_earlier_daemon_left_behind_comes_back_at_the_next_start(state: Path) -> None:
    (state / "layers").mkdir()
    layer_store._mount_image(state / "layers.img", state / "layers")
    killed = LayerStore(state / "layers", "loop-xfs")
    empty = taken_bytes(state)
    killed.remove(big_layer(killed))
    layer_store.release(killed)
    assert taken_bytes(state) > empty + BIG_BYTES - (1 << 20)
    store = layer_store.prepare(state)
    try:
        wait_until(lambda: taken_bytes(state) < empty + (8 << 20), "the space is back")
    finally:
        layer_store.release(store)
