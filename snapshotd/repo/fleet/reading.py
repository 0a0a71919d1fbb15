"""The repository of a fleet for reading, by any process of a node: the index is the one that the node's archive process
merges."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from snapshotd.repo.base import Peers
from snapshotd.repo.fleet.base import check_key, check_node
from snapshotd.repo.fleet.index import FleetIndex
from snapshotd.repo.fleet.store import FleetStore
from snapshotd.repo.format.index import create_index
from snapshotd.repo.reading.reader import PackReader
from snapshotd.store.base import Store


def prepare(bucket: Store, node: str, index_path: Path, key: bytes) -> None:
    """Prepare a node's repository before it is opened: compare its key with the fleet's, and make its index if there is
    none. UsageError (no name of a node), NotPermitted (another key), OSError."""
    check_node(node)
    check_key(bucket, key)
    if not index_path.exists():
        create_index(index_path)
    FleetIndex(index_path, write=True).close()  # makes the tables that a reader needs


def open_reader(
    bucket: Store, node: str, index_path: Path, key: bytes, missed: Callable[[], bool] = lambda: False
) -> PackReader:
    """`missed`: called when an object or a pack is not there, to merge what other nodes have published: then the reader looks
    again, once."""

    def homes() -> FleetIndex | None:
        index = opened[0].open_index() if opened else None
        assert index is None or isinstance(index, FleetIndex)
        return index

    opened: list[PackReader] = []
    store = FleetStore(bucket, node, Peers(), homes, missed)
    opened.append(PackReader(store, index_path, key, index_kind=FleetIndex, missed=missed))
    return opened[0]
