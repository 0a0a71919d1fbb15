"""View, diff, materialise and merge against the kernel's overlayfs, on random operations. The seed is in every failure message.

tests/long.py says how to run one seed again (each is about 60 operations).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from overlay_world import Manifest, World, difference, expected_changes, manifest, need_root, said, view_manifest

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.layers.merge import merge
from snapshotd.trees.diff import diff
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from tests import long

SEEDS = long.seeds(6, 150)
ROUNDS = 10


@pytest.fixture
def base() -> Iterator[Path]:
    need_root()
    path = Path(tempfile.mkdtemp(prefix="snapshotd-model-", dir="/var/tmp"))  # a disk: tmpfs has no user.* attributes on older kernels
    yield path
    shutil.rmtree(path)


def open_view(world: World, dirs: list[Path]) -> View:
    fds = world.open_all(dirs)
    try:
        return StackView(fds)
    finally:
        for fd in fds:
            os.close(fd)


def same(expected: Manifest, got: Manifest, world: World, seed: int, what: str) -> None:
    if expected != got:
        pytest.fail(f"seed {seed}: {what}\n{difference(expected, got)}\n" + "\n".join(world.log))


def check_diff(world: World, seed: int, old: tuple[list[Path], Manifest], new: tuple[list[Path], Manifest]) -> None:
    with open_view(world, old[0]) as a, open_view(world, new[0]) as b:
        got = said(list(diff(a, b)))
        expected = expected_changes(old[1], new[1])
        if got != expected:
            pytest.fail(f"seed {seed}: diff\n{expected}\n{got}\n" + "\n".join(world.log))
        for path in {path.rpartition(b"/")[0] for path, _ in expected if b"/" in path}:
            part = [(p, kind) for p, kind in expected if p == path or p.startswith(path + b"/")]
            assert said(list(diff(a, b, path))) == part, f"seed {seed}: diff of {path!r}"


def check_materialise(world: World, seed: int, stack: list[Path], expected: Manifest) -> None:
    target = world._new_dir("restored")
    fd = os.open(target, DIR_FLAGS)
    with open_view(world, stack) as view:
        report = materialise(view, b"", fd)
    os.close(fd)
    sockets = {path for path, row in expected.items() if row[0] == 0o140000}
    assert len(report.warnings) == len(sockets), f"seed {seed}: {report.warnings}"
    kept = {path: row for path, row in expected.items() if path not in sockets}
    got = manifest(str(target))
    same(_regroup(kept), _regroup(got), world, seed, "materialise")
    assert report.directories == sum(row[0] == 0o40000 for row in kept.values()) - 1


def _regroup(rows: Manifest) -> Manifest:
    groups: dict[int, int] = {}
    return {
        path: (*rows[path][:-1], groups.setdefault(rows[path][-1], len(groups)) if rows[path][-1] >= 0 else -1) for path in sorted(rows)
    }


def check_merge(world: World, seed: int, stack: list[Path], expected: Manifest) -> list[Path]:
    """Merge a random run of a stack's layers; the image stays."""
    layers, image = stack[:-1], stack[-1]
    first = world.rng.randrange(len(layers))
    last = world.rng.randrange(first, len(layers)) + 1
    target = world._new_dir("merged")
    fds = world.open_all([*layers[first:last], target])
    merge(fds[:-1], fds[-1])
    for fd in fds:
        os.close(fd)
    merged = [*layers[:first], target, *layers[last:], image]
    what = f"merge of {first}:{last}"
    same(expected, world.fresh_manifest(merged), world, seed, what + " (mounted)")
    with open_view(world, merged) as b, open_view(world, stack) as a:
        same(expected, view_manifest(b), world, seed, what + " (view)")
        assert list(diff(a, b)) == [], f"seed {seed}: {what} differs from its original"
    return merged


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
