"""Layers are deleted by several at once: by whoever removes a trajectory, and by the archive that makes room."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotd.layers.store import LayerStore
from snapshotd.types import LayerID
from tests import long

AT_ONCE = 4


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(tmp_path, "plain")


def _layer(store: LayerStore) -> LayerID:
    layer = store.create()
    for number in range(40):
        (store.root / layer / "upper" / f"d{number}").mkdir()
        (store.root / layer / "upper" / f"d{number}" / "file").touch()
    store.unpin([layer])
    return layer


def test_sweeps_side_by_side(store: LayerStore) -> None:
    for _ in range(long.size(3, 10)):
        layers = [_layer(store) for _ in range(5)]
        together = threading.Barrier(AT_ONCE)

        def sweep(together: threading.Barrier = together) -> None:
            together.wait(60)
            store.sweep(set)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for done in [pool.submit(sweep) for _ in range(AT_ONCE)]:
                done.result(60)
        assert not [layer for layer in layers if (store.root / layer).exists()]
    assert [path.name for path in store.root.iterdir()] == ["images"]


def test_a_layer_that_is_removed_and_evicted(store: LayerStore) -> None:
    for _ in range(long.size(6, 20)):
        layer = _layer(store)
        together = threading.Barrier(2)

        def delete(how: str, layer: LayerID = layer, together: threading.Barrier = together) -> None:
            together.wait(60)
            if how == "remove":
                store.remove(layer)
            else:
                store.evict(layer)

        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(delete, how) for how in ("remove", "evict")]:
                done.result(60)
        assert [path.name for path in store.root.iterdir()] == ["images"]


def test_a_layer_whose_size_could_not_be_noted_is_evicted(store: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full at that moment."""
    layer, back = _layer(store), LayerID("b" * 32)
    store.expect(back, lambda _: 0)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.setxattr", full)
        store.sizes.note(layer, 4096)
    store.publish(layer, back)
    assert store.sizes.total() == 4096
    assert [size for size, _ in store.sizes.read().values()] == [4096]
    assert store.evict(back)
    assert (store.sizes.total(), store.sizes.read()) == (0, {})


def test_a_layer_that_comes_into_use_during_a_sweep(store: LayerStore) -> None:
    used, unused = _layer(store), _layer(store)

    def referenced() -> set[LayerID]:
        assert store.hold([used])
        return set()

    assert store.sweep(referenced) == [unused]
    assert store.layers() == [used]
    store.release([used])
    assert store.sweep(set) == [used]
