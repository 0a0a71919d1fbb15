"""Walks over everything that makes layers, with every directory of the mounted stack listed after each step.

A listing that shows a name which cannot be looked up is an error here, as it is for `ls`, `cp -r` and `rm -r`.
tests/long.py says how to run one seed again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay_checks import apply_to, check_merge, open_view, same
from overlay_world import Manifest, World, manifest, view_manifest

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.layers.capture import capture
from snapshotd.layers.store import LayerStore
from snapshotd.trees.difference import DifferenceView
from snapshotd.trees.materialise import materialise
from snapshotd.types import TreeID
from tests import long
from tests.memory_repository import MemoryRepository

SEEDS = (*long.seeds(1, 200), 9)
"""The last one is the walk that found names of deleted files in a merged layer."""
STEPS = long.size(150, 200)


class Walk:
    """A world in which layers are sealed, merged, copied, rebuilt from stored trees, gone back to and forked."""

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.seed = base, seed
        self.world = World(base, seed)
        self.repository = MemoryRepository()
        self.image = apply_to(self.repository, self.world.image, None, marks=False).tree
        self.history: list[tuple[list[Path], Manifest]] = []

    def run(self, steps: int) -> None:
        self.seal()
        kinds = [self.world.step] * 30 + [self.seal] * 6 + [self.world.give] * 2 + [self.merge] * 3 + [self.go_back] * 3
        kinds += [self.rebuild] * 2 + [self.copy] * 2
        for _ in range(steps):
            self.world.rng.choice(kinds)()
            with open_view(self.world, self.world.live_stack()) as view:
                same(view_manifest(view), manifest(self.world.mount), self.world, self.seed, "the live root")

    def seal(self) -> None:
        stack = self.world.live_stack()
        self.world.pivot()
        self.history.append((stack, self.world.fresh_manifest(stack)))

    def merge(self) -> None:
        self.seal()
        merged = check_merge(self.world, self.seed, *self.history[-1])
        self.history.append((merged, self.history[-1][1]))
        self.world.log.append(f"merged to {len(merged)} layers")
        self.world.remount(merged[:-1])

    def go_back(self) -> None:
        """A rewind, and a fork: another live layer above an older stack."""
        stack, expected = self.world.rng.choice(self.history)
        self.world.log.append(f"back to {len(stack)} layers")
        self.world.remount(stack[:-1])
        same(expected, self.world.fresh_manifest(stack), self.world, self.seed, "an older stack")

    def rebuild(self) -> None:
        """A snapshot without layers: its tree is stored, and comes back as one layer over the image."""
        stack, expected = self.world.rng.choice(self.history)
        tree: TreeID = self.image
        for number, layer in enumerate(reversed(stack[:-1])):
            tree = apply_to(self.repository, layer, tree, salt=f"{len(self.history)}.{number}".encode()).tree
        target = self.world._new_dir("rebuilt")
        fd = os.open(target, DIR_FLAGS)
        with DifferenceView(self.repository, tree, self.image) as view:
            report = materialise(view, b"", fd, whiteouts=True)
        os.close(fd)
        assert report.warnings == ()
        self._go_on([target], expected, "rebuilt")

    def copy(self) -> None:
        """What is taken while processes live: the upper is copied, and the copy is the sealed layer."""
        stack = self.world.live_stack()
        expected = self.world.fresh_manifest(stack)
        store = LayerStore(self.world._new_dir("store"), "plain")
        try:
            live = store.create()
            upper = store.root / live / "upper"
            self.world._unmount()
            upper.rmdir()
            stack[0].rename(upper)
            taken = capture(store, live, None, contextlib.nullcontext(), set)
            upper.rename(stack[0])
            (store.root / taken.layer / "upper").rename(stack[0].with_name(f"{stack[0].name}-copy"))
        finally:
            store.close()
        self._go_on([stack[0].with_name(f"{stack[0].name}-copy"), *stack[1:-1]], expected, "copied")

    def _go_on(self, layers: list[Path], expected: Manifest, what: str) -> None:
        stack = [*layers, self.world.image]
        same(expected, self.world.fresh_manifest(stack), self.world, self.seed, what)
        self.history.append((stack, expected))
        self.world.log.append(what)
        self.world.remount(layers)


@pytest.fixture
def walk(base: Path, request: pytest.FixtureRequest) -> Iterator[Walk]:
    walk = Walk(base, request.param)
    yield walk
    walk.world.close()


@pytest.mark.timeout(120 + STEPS * 5)
@pytest.mark.parametrize("walk", SEEDS, indirect=True)
def test_every_directory_of_the_mounted_stack(walk: Walk) -> None:
    walk.run(STEPS)
