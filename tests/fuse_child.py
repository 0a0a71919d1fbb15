"""The process behind a mount in tests: `lazy REPOSITORY MOUNTPOINT` or `browse REPOSITORY CATALOG MOUNTPOINT [PID]`.

The repository is a file, a pickled `MemoryRepository`, or the folder of a real one (`packs`, `index.db`, key of zeros).
This is a composition root, as daemon/ has one.
"""

from __future__ import annotations

import logging
import pickle
import sys
from pathlib import Path

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.fuse import server
from snapshotd.repo.base import Repository
from snapshotd.repo.reading.reader import PackReader
from snapshotd.store.local import LocalStore


def open_repository(path: Path) -> Repository:
    if path.is_dir():
        return PackReader(LocalStore(path / "packs"), path / "index.db", bytes(32))
    repository: Repository = pickle.loads(path.read_bytes())
    return repository


def main() -> int:
    words = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
    repository = open_repository(Path(words[1]))
    if words[0] == "lazy":
        server.serve_lazy(repository, Path(words[2]))
    else:
        server.serve_browse(
            repository, SqliteCatalog(Path(words[2])), Path(words[3]), int(words[4]) if len(words) > 4 else None
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
