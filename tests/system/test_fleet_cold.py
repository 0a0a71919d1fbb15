"""A tree that starts cold on nodes of a fleet, one after the other, through FUSE."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from snapshotd.daemon.children import StatePlaces
from snapshotd.fuse.lazy import LazyMount
from snapshotd.repo.base import Peers, Roots
from snapshotd.repo.fleet.maintenance import FleetMaintenance
from snapshotd.repo.key import load_key
from snapshotd.store.local import LocalStore
from snapshotd.trees.archive import apply
from snapshotd.types import TreeID
from tests import forked
from tests.capabilities import require

NODE = "north"
FILES, FILE_BYTES = 60, 200_000


@pytest.fixture(autouse=True, scope="module")
def forked_mounts() -> Iterator[None]:
    require("root", "fuse")
    with forked.children():
        yield


class Fleet:
    """A bucket with a tree, and nodes with the index of the one that stored it."""

    def __init__(self, base: Path) -> None:
        self.base, self.store = base, LocalStore(base / "store")
        home = base / "home"
        (home / "repo").mkdir(parents=True)
        maintenance = FleetMaintenance(self.store, NODE, Peers(), home / "repo" / "index.db", load_key(home / "repo"))
        writer = maintenance.writer()
        rng = random.Random(1)
        self.content = {f"d{number % 5}/f{number}": rng.randbytes(FILE_BYTES) for number in range(FILES)}
        for name, data in self.content.items():
            path = base / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        (base / "below").mkdir()
        self.tree, self.below = (self._apply(writer, base / name) for name in ("tree", "below"))
        maintenance.publish(Roots({self.tree: "it", self.below: "image"}, {}, {}), now=time.time())
        writer.close()

    def _apply(self, writer: object, folder: Path) -> TreeID:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return apply(writer, fd, None, salt=os.fsencode(folder), marks=False).tree  # type: ignore[arg-type]
        finally:
            os.close(fd)

    @contextmanager
    def starting(self, node: str) -> Iterator[int]:
        """The layer as a sandbox of that node would get it: a descriptor of its root."""
        state = self.base / node
        shutil.copytree(self.base / "home", state)
        places = StatePlaces(
            state, state / "layers", "plain", self.store.directory.as_uri(), node=NODE, cache_bytes=1 << 30
        )
        with closing(LazyMount(places.command("lazy"), state / "mount")) as lazy:
            fd = lazy.open_layer(self.tree, self.below, 0)
            try:
                yield fd
            finally:
                os.close(fd)

    def blocks(self, node: str) -> set[str]:
        cache = self.base / node / "repo" / "cache"
        return {str(path.relative_to(cache)) for path in cache.glob("?" * 32 + "/*")}

    def read(self, fd: int, name: str) -> bytes:
        with open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as file:
            return file.read()


def await_that(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_one_node_read_is_on_the_disk_of_the_next_before_it_is_asked_for(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    wanted = [name for name in fleet.content if name.startswith("d3/")][:4]
    with fleet.starting("one") as fd:
        for name in wanted:
            assert fleet.read(fd, name) == fleet.content[name]
        await_that(lambda: list(fleet.store.keys("reads/")))
    read = fleet.blocks("one")
    with fleet.starting("two") as fd:
        await_that(lambda: fleet.blocks("two") >= read)
        packs = list((tmp_path / "store" / "nodes").glob("*/packs/*/*"))
        for pack in packs:
            pack.rename(pack.with_suffix(".away"))
        assert packs
        for name in wanted:
            assert fleet.read(fd, name) == fleet.content[name]
        for name in ("d1/f1", "d0/f55"):
            with pytest.raises(OSError, match="Input/output"):
                fleet.read(fd, name)
