"""Stacks of layers, by hand or at random, and what must hold of each."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest
from overlay_world import Manifest, World, difference, expected_changes, manifest, said, view_manifest

from snapshotd.kernel.files import DIR_FLAGS
from snapshotd.layers.merge import merge
from snapshotd.trees.archive import Applied, apply
from snapshotd.trees.diff import diff
from snapshotd.trees.materialise import materialise
from snapshotd.trees.stack_view import StackView
from snapshotd.trees.view import View
from snapshotd.types import TreeID
from tests.memory_repository import MemoryRepository


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
        path: (*rows[path][:-1], groups.setdefault(rows[path][-1], len(groups)) if rows[path][-1] >= 0 else -1)
        for path in sorted(rows)
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


NAMES = ("a", "b", "c")


def new_layer(world: World) -> Path:
    return world._new_dir("made")


def whiteout(path: Path) -> None:
    os.mknod(path, stat.S_IFCHR, 0)
    os.setxattr(
        path.parent, "trusted.overlay.origin", b""
    )  # else the kernel lists the name where nothing lies below the directory


def random_layer(world: World, rng: random.Random) -> Path:
    """A layer of up to three levels; a redirect may lead anywhere, or nowhere."""
    root = new_layer(world)
    todo = [(root, 0)]
    while todo:
        parent, depth = todo.pop()
        for name in NAMES:
            dice, path = rng.random(), parent / name
            if dice < 0.45 and depth < 3:
                path.mkdir()
                todo.append((path, depth + 1))
                if rng.random() < 0.15:
                    os.setxattr(path, "trusted.overlay.opaque", b"y")
                if rng.random() < 0.3:
                    target = (
                        rng.choice(NAMES)
                        if rng.random() < 0.4
                        else "/" + "/".join(rng.choices(NAMES, k=rng.randrange(1, 4)))
                    )
                    os.setxattr(path, "trusted.overlay.redirect", target.encode())
            elif dice < 0.6:
                path.write_text(str(rng.random()))
            elif dice < 0.7:
                whiteout(path)
    return root


def apply_to(
    repository: MemoryRepository, layer: Path, parent: TreeID | None, *, salt: bytes = b"s", marks: bool = True
) -> Applied:
    fd = os.open(layer, DIR_FLAGS)
    try:
        return apply(repository, fd, parent, salt=salt, marks=marks)
    finally:
        os.close(fd)
