"""What a running root shows, directory by directory, against a plain directory in which the same was done.

The stack is made of layers as the product makes them: an ingested workspace, sealed uppers, copies taken while processes live, merges,
layers rebuilt from stored trees, and layers of bundles. After every operation each directory of the mounted root is listed, and each name
that it lists is looked up.

SNAPSHOTD_MODEL_SEEDS=first:last runs those seeds instead, and SNAPSHOTD_MODEL_STEPS=number makes each of them so long. The long version is
0:200 and 200; `pytest -rA` shows what each seed did.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from overlay_world import Manifest, World, difference, manifest, need_root

from snapshotd.kernel.files import DIR_FLAGS, make_dirs
from snapshotd.layers.archive import apply
from snapshotd.layers.capture import Mirror, capture
from snapshotd.layers.difference import DifferenceView
from snapshotd.layers.ingest import ingest_folder, ingest_tar
from snapshotd.layers.materialise import materialise
from snapshotd.layers.merge import merge
from snapshotd.layers.store import LayerStore
from snapshotd.layers.tar_writer import Marks, write_tree
from snapshotd.testing.memory_repository import MemoryRepository
from snapshotd.types import LayerID, TreeID

_first, _, _last = os.environ.get("SNAPSHOTD_MODEL_SEEDS", "0:4").partition(":")
SEEDS = range(int(_first), int(_last))
STEPS = int(os.environ.get("SNAPSHOTD_MODEL_STEPS", "100"))


@pytest.fixture
def base() -> Iterator[Path]:
    need_root()
    path = Path(tempfile.mkdtemp(prefix="snapshotd-model-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


def shown(rows: Manifest) -> dict[bytes, tuple[Any, ...]]:
    """Without times, attributes and link groups; kind, mode, owner, size, device, and content or target."""
    return {path: (row[0], 0 if stat.S_ISLNK(row[0]) else row[1], *row[2:5], *row[6:8]) for path, row in rows.items()}


class Running(World):
    """A root that is worked in, and the directory that it should equal. `past`: sealed stacks, and copies of what they should show."""

    def __init__(self, base: Path, seed: int) -> None:
        (base / "layers").mkdir()
        self.store = LayerStore(base / "layers", "plain")
        self.past: list[tuple[list[Path], Path]] = []
        self.mirror: Mirror | None = None
        self.live = False
        self.done: collections.Counter[str] = collections.Counter()
        self.twin = b""
        super().__init__(base, seed)
        self.twin = os.fsencode(base / "twn")  # a name as long as the mount's: both meet the longest path together
        subprocess.run(["cp", "-a", self.image, self.twin], check=True)
        self._ingest()
        self._actions: tuple[tuple[float, Callable[[], None]], ...] = (
            (80, self.step), (6, self.seal), (2, self.turn), (4, self.merge), (2, self.rewind), (3, self.fork), (1.5, self.rebuild),
            (1.5, self.bundle),
        )  # fmt: skip

    def close(self) -> None:
        super().close()
        self.store.close()

    def _new_dir(self, kind: str) -> Path:
        return self.store.root / self.store.create() / "upper" if kind == "layer" else super()._new_dir(kind)

    def do_link(self) -> str:
        raise OSError(0, "hard links are torn by a copy-up and not in a plain directory")

    def _ingest(self) -> None:
        """A workspace, as `create` takes it."""
        folder, live, twin = self._new_dir("folder"), self.mount, self.twin
        self.mount, self.twin = os.fsencode(folder), b""
        for _ in range(self.rng.randrange(10, 60)):
            self.step()
        for path in self.paths(lambda st: stat.S_IFMT(st.st_mode) in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK)):
            os.unlink(self._full(path))
        self.mount, self.twin = live, twin
        layer = self._new_dir("layer")
        fd = os.open(layer, DIR_FLAGS)
        os.chmod(layer, stat.S_IMODE(os.stat(self.image).st_mode))
        target = make_dirs(fd, b"w")
        ingest_folder(folder, target)
        os.close(target)
        os.close(fd)
        subprocess.run(["cp", "-a", folder, self.twin + b"/w"], check=True)
        self.remount([layer])

    # -- the walk --------------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        self.check("at first")
        for _ in range(steps):
            ((_, action),) = self.rng.choices(self._actions, [weight for weight, _ in self._actions])
            self.done[action.__name__] += 1
            action()
            self.check(action.__name__)

    def step(self) -> None:
        """One operation in the root, and the same in its twin. One that overlayfs alone refuses is not done."""
        before = self.rng.getstate()
        super().step()
        if not self.twin or "[Errno 18]" in self.log[-1]:
            return
        here, after, live = self.log[-1], self.rng.getstate(), self.mount
        self.rng.setstate(before)
        self.mount = self.twin
        super().step()
        self.mount = live
        self.rng.setstate(after)
        there = self.log.pop()
        assert (" refused:" in here) == (" refused:" in there), f"{here}\n{there}"

    def check(self, what: str) -> None:
        self._same(manifest(self.mount), self.twin, what)

    def _same(self, found: Manifest, twin: bytes | Path, what: str) -> None:
        is_, should = shown(found), shown(manifest(os.fsencode(twin)))
        assert is_ == should, f"{what}\n{difference(is_, should)}"

    # -- what the engine does --------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """A snapshot: by a pivot, or while something lives by copying."""
        if not self.live:
            self.pivot()
            self.mirror = None
            self._keep(self.layers)
            return
        self.mirror = capture(self.store, LayerID(self.upper.parent.name), self.mirror, contextlib.nullcontext(), set)
        self.log.append("copied")
        self._keep([self.store.root / self.mirror.layer / "upper", *self.layers])
        self.fork(-1)

    def _keep(self, layers: list[Path]) -> None:
        copy = self.base / f"past{len(self.past)}"
        subprocess.run(["cp", "-a", self.twin, copy], check=True)
        self.past.append((list(layers), copy))

    def turn(self) -> None:
        """A process that stays begins or ends."""
        self.live = not self.live

    def _stand_on(self, layers: list[Path]) -> None:
        self.remount(list(layers))
        self.live, self.mirror = False, None

    def merge(self) -> None:
        self.live = False
        self.seal()
        first = self.rng.randrange(len(self.layers))
        last = self.rng.randrange(first, len(self.layers)) + 1
        target = self._new_dir("layer")
        fds = self.open_all([*self.layers[first:last], target])
        merge(fds[:-1], fds[-1])
        for fd in fds:
            os.close(fd)
        self.log.append(f"merged {first}:{last} of {len(self.layers)}")
        self._stand_on([*self.layers[:first], target, *self.layers[last:]])

    def fork(self, which: int | None = None) -> None:
        """Another root, of any snapshot."""
        if self.past:
            layers, twin = self.rng.choice(self.past) if which is None else self.past[which]
            self._same(self.fresh_manifest([*layers, self.image]), twin, "a fork")

    def rewind(self) -> None:
        if self.past:
            layers, twin = self.rng.choice(self.past)
            self.log.append(f"rewound to {twin.name}")
            self._stand_on(layers)
            subprocess.run(["rm", "-rf", self.twin], check=True)
            subprocess.run(["cp", "-a", twin, self.twin], check=True)

    def rebuild(self) -> None:
        """The snapshot is cold: one layer over the image comes of its stored tree."""
        self.live = False
        self.seal()
        repository = MemoryRepository()
        image, tree = self._archive(repository, []), self._archive(repository, self.layers)
        layer = self._new_dir("layer")
        fd = os.open(layer, DIR_FLAGS)
        with DifferenceView(repository, tree, image) as view:
            assert materialise(view, b"", fd, whiteouts=True).warnings == ()
        os.close(fd)
        self.log.append("rebuilt")
        self._stand_on([layer])

    def bundle(self) -> None:
        """The snapshot comes from a bundle: a layer over those of a snapshot before it, sent as an archive."""
        if not self.past or any(stat.S_ISSOCK(row[0]) for row in manifest(self.mount).values()):  # a tar has no sockets
            return
        self.live = False
        self.seal()
        layers, _ = self.rng.choice(self.past)
        repository = MemoryRepository()
        below, tree = self._archive(repository, layers), self._archive(repository, self.layers)
        stream = io.BytesIO()
        with DifferenceView(repository, tree, below) as view:
            assert write_tree(view, stream.write, marks=Marks.OVERLAY) == ()
        stream.seek(0)
        layer = self._new_dir("layer")
        fd = os.open(layer, DIR_FLAGS)
        ingest_tar(stream, fd, oci_whiteouts=False, overlay_marks=True)
        os.close(fd)
        self.log.append("imported")
        self._stand_on([layer, *layers])

    def _archive(self, repository: MemoryRepository, layers: list[Path]) -> TreeID:
        tree: TreeID | None = None
        for number, path in enumerate([self.image, *reversed(layers)]):
            fd = os.open(path, DIR_FLAGS)
            tree = apply(repository, fd, tree, salt=b"%d" % number, marks=number > 0).tree
            os.close(fd)
        assert tree is not None
        return tree


@pytest.mark.timeout(60 + STEPS)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_directory_of_the_running_root_equals_its_twin(base: Path, seed: int) -> None:
    root = Running(base, seed)
    try:
        root.run(STEPS)
    except BaseException as exc:
        exc.add_note(f"seed {seed}; the last of {len(root.log)} steps:\n" + "\n".join(root.log[-60:]))
        raise
    finally:
        root.close()
    print(f"seed {seed}: {dict(root.done)}")  # noqa: T201 - for whoever reads a long run's output (`pytest -rA`)
