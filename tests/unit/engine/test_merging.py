"""Runs of layers are merged while others evict layers: what a stack is told to stand on is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.config import Config
from snapshotd.engine.context import Context
from snapshotd.engine.storage.cold import Cold
from snapshotd.engine.storage.evict import Disposal
from snapshotd.engine.storage.merging import FAN_IN, Merger
from snapshotd.engine.storage.worker import Worker
from snapshotd.layers.store import LayerStore
from snapshotd.types import ImageID, LayerID, Stack, new_id


class Layers(LayerStore):
    """A layer store in which an eviction comes whenever something has just become evictable."""

    evicting: Context | None = None
    merger: Merger

    def __init__(self, root: Path) -> None:
        super().__init__(root, "plain")
        self._note, self.sizes.note = self.sizes.note, self.note  # type: ignore[method-assign]

    def note(self, layer: LayerID, size_bytes: int) -> None:
        self._note(layer, size_bytes)
        if self.evicting is not None:
            Disposal(self.evicting, self.merger, cast(Cold, SimpleNamespace(prepare=lambda: None))).evict()


@pytest.fixture
def layers(tmp_path: Path) -> Iterator[Layers]:
    store = Layers(tmp_path)
    worker = Worker(tmp_path, "plain")
    store.merger = Merger(store, worker)
    yield store
    worker.close()
    store.close()


def deep_stack(store: Layers) -> Stack:
    """With one run to merge, and a file of a layer's own in each layer."""
    made = []
    for number in range(FAN_IN + 1):
        layer = store.create()
        upper = f"/proc/self/fd/{store.read_upper(layer)}"
        Path(upper, f"f{number}").write_text(str(number))
        os.close(int(Path(upper).name))
        store.sizes.note(layer, 1)
        made.append(layer)
    return Stack(ImageID(new_id()), tuple(reversed(made)))


def test_a_run_is_merged_and_taken(layers: Layers) -> None:
    stack = deep_stack(layers)
    assert layers.merger.work(stack)
    merged = layers.merger.apply(stack)
    assert len(merged.layers) == 2
    assert layers.hold(merged.layers)
    assert sorted(os.listdir(layers.root / merged.layers[1] / "upper")) == [f"f{number}" for number in range(FAN_IN)]


def test_what_is_evicted_as_soon_as_it_was_merged_is_not_stood_on(layers: Layers) -> None:
    stack = deep_stack(layers)
    assert layers.hold(stack.layers)
    layers.evicting = cast(
        Context, SimpleNamespace(store=layers, catalog=SqliteCatalog(":memory:"), config=Config(layer_budget_bytes=0))
    )
    assert layers.merger.work(stack)
    layers.evicting = None
    assert layers.merger.apply(stack) == stack
    assert set(stack.layers) <= set(layers.layers()), "what is held is not evicted"
    assert layers.merger.work(stack), "the run can be merged again"
    assert layers.hold(layers.merger.apply(stack).layers)
