"""View, diff, materialise and merge against the kernel's overlayfs, on random operations. The seed is in every failure
message.

tests/long.py says how to run one seed again (each is about 60 operations).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from overlay_checks import check_diff, check_materialise, check_merge, open_view, same
from overlay_world import Manifest, World, manifest, view_manifest

from tests import long

SEEDS = long.seeds(3, 150)
ROUNDS = 10


@pytest.mark.parametrize("seed", SEEDS)
def test_equal_to_the_kernel(base: Path, seed: int) -> None:
    world = World(base, seed)
    rng = world.rng
    try:
        history: list[tuple[list[Path], Manifest]] = []
        for _ in range(ROUNDS):
            for _ in range(rng.randrange(1, 12)):
                world.step()
                with open_view(world, world.live_stack()) as view:
                    same(manifest(world.mount), view_manifest(view), world, seed, "live view")
            stack = world.live_stack()
            world.pivot()
            expected = world.fresh_manifest(stack)
            with open_view(world, stack) as view:
                same(expected, view_manifest(view), world, seed, "sealed view")
            history.append((stack, expected))
            check_diff(world, seed, history[rng.randrange(len(history))], history[-1])
            if rng.random() < 0.4:
                check_materialise(world, seed, stack, expected)
            merged = check_merge(world, seed, stack, expected)
            if rng.random() < 0.4:  # go on above the merged layer, as the engine does
                world.log.append(f"merged to {len(merged)} layers")
                world.remount(merged[:-1])
    finally:
        world.close()
