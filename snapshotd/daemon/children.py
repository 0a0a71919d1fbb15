"""The composition root of the daemon's child processes, each started with its role and the places it needs (see
`command`).

    archive   owns the repository for writing (engine/storage/archiver.py)
    pack      makes packs of a large step's files for it (repo/writing/packer.py)
    cold      writes files back from it (engine/storage/cold_worker.py)
    lazy      serves layers that are not written yet, through FUSE (fuse/)
    browse    shows snapshots as folders, through FUSE

Each role imports only its own modules: with all modules a packer would take twice as long to start.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotd.kernel.abilities import TRUSTED, Marks
from snapshotd.repo.key import load_key
from snapshotd.repo.reading.reader import PackReader
from snapshotd.repo.writing import packer
from snapshotd.store.open import open_store

if TYPE_CHECKING:
    from snapshotd.layers.store import LayerStore
    from snapshotd.repo.fleet.blocks import DiskBlocks
    from snapshotd.store.base import Store


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """The places of one daemon's state. `store_url`: of the packs. `marks`: what overlayfs's marks in layers begin with.
    `node`: the daemon's name in a fleet, whose bucket has the packs then; empty: it is alone. `cache_bytes`: disk that may
    keep parts of the bucket's packs; negative: the default."""

    state_dir: Path
    layers_root: Path
    layers_kind: str
    store_url: str
    marks: str = TRUSTED.prefix.decode()
    node: str = ""
    cache_bytes: int = -1

    @property
    def repo_dir(self) -> Path:
        """Key, spool and index."""
        return self.state_dir / "repo"

    def open_layers(self) -> LayerStore:
        """The layers, for a process that mounts none."""
        from snapshotd.layers.store import LayerStore

        return LayerStore(self.layers_root, self.layers_kind, marks=Marks(self.marks.encode()))

    def command(self, role: str) -> list[str]:
        """The command line of a child; a role may take further arguments."""
        return [sys.executable, "-m", "snapshotd.daemon.children", role, *map(str, asdict(self).values())]


def open_blocks(places: StatePlaces, key: bytes) -> DiskBlocks:
    """The parts of the fleet's packs that this node's disk keeps."""
    from snapshotd.repo.fleet.blocks import DiskBlocks

    return DiskBlocks(places.repo_dir / "cache", key, None if places.cache_bytes < 0 else places.cache_bytes)


def open_bucket(places: StatePlaces, key: bytes) -> Store:
    """The fleet's bucket, behind this node's disk."""
    from snapshotd.repo.fleet.cached import CachedStore

    store = open_store(places.store_url)
    return CachedStore(store, open_blocks(places, key)) if places.cache_bytes else store


def open_repository(places: StatePlaces, missed: Callable[[], bool] = lambda: False) -> PackReader:
    """The repository for reading. `missed`: as of `repo.fleet.reading.open_reader`, for a node."""
    if places.node:
        from snapshotd.repo.fleet.reading import open_reader

        index, key = places.repo_dir / "index.db", load_key(places.repo_dir)
        return open_reader(open_bucket(places, key), places.node, index, key, missed)
    return PackReader(open_store(places.store_url), places.repo_dir / "index.db", load_key(places.repo_dir))


def _archive(places: StatePlaces, _: list[str]) -> None:
    from snapshotd.engine.storage import archiver, child
    from snapshotd.kernel import memory
    from snapshotd.repo.spool import Spool
    from snapshotd.repo.upkeep.maintenance import PackMaintenance

    memory.keep_freed()
    memory.collect_rarely()
    index, key = places.repo_dir / "index.db", load_key(places.repo_dir)
    pack = places.command("pack")
    layers, spool = places.open_layers(), Spool(places.repo_dir, owner=False)
    if places.node:
        from snapshotd.repo.base import Peers
        from snapshotd.repo.fleet.maintenance import FleetMaintenance

        peers = Peers()

        def open_handler() -> child.Serve:
            shared = FleetMaintenance(open_bucket(places, key), places.node, peers, index, key, pack)
            return archiver.SharedArchiverService(shared, layers, spool, peers)

    else:

        def open_handler() -> child.Serve:
            own = PackMaintenance(open_store(places.store_url), index, key, pack)
            return archiver.ArchiverService(own, layers, spool)

    child.serve(child.open_lazily(open_handler))


def _pack(places: StatePlaces, _: list[str]) -> None:
    packer.serve(open_repository(places))


def _cold(places: StatePlaces, _: list[str]) -> None:
    from snapshotd.engine.storage import child, cold_worker

    child.serve(child.open_lazily(lambda: cold_worker.ColdService(open_repository(places), places.open_layers())))


def _lazy(places: StatePlaces, arguments: list[str]) -> None:
    from snapshotd.fuse.server import serve_lazy

    if not (places.node and places.cache_bytes):
        serve_lazy(open_repository(places), Path(arguments[0]))
        return
    from snapshotd.repo.fleet.reading import open_reader
    from snapshotd.repo.fleet.reads import BucketOrders

    key = load_key(places.repo_dir)
    bucket = open_bucket(places, key)
    reader = open_reader(bucket, places.node, places.repo_dir / "index.db", key)
    serve_lazy(reader, Path(arguments[0]), BucketOrders(reader, bucket, key))


def _browse(places: StatePlaces, arguments: list[str]) -> None:
    from snapshotd.catalog.sqlite import SqliteCatalog
    from snapshotd.fuse.server import serve_browse

    mount_point, namespace_pid = arguments
    serve_browse(
        open_repository(places), SqliteCatalog(places.state_dir / "catalog.db"), Path(mount_point), int(namespace_pid)
    )


_ROLES: dict[str, Callable[[StatePlaces, list[str]], None]] = {
    "archive": _archive,
    "pack": _pack,
    "cold": _cold,
    "lazy": _lazy,
    "browse": _browse,
}


def main(arguments: list[str]) -> None:
    role, state_dir, layers_root, layers_kind, store_url, marks, node, cache_bytes, *rest = arguments
    places = StatePlaces(Path(state_dir), Path(layers_root), layers_kind, store_url, marks, node, int(cache_bytes))
    _ROLES[role](places, rest)


if __name__ == "__main__":
    main(sys.argv[1:])
