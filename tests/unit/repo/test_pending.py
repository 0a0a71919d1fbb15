"""What is queued for writing and was in the packs before."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from snapshotd.repo.writing.writer import PackRepository
from snapshotd.store.memory import MemoryStore

KEY = bytes(range(32))


def test_the_base_of_a_delta_may_be_saved_once_more(tmp_path: Path) -> None:
    """An object is queued before it is known whether it is there; who reads what is a delta against it needs the one in
    the pack."""
    store = MemoryStore()
    chain = [random.Random(1).randbytes(20_000)]
    for number in range(3):
        chain.append(chain[-1] + f"version {number}".encode())
    ids = []
    with closing(PackRepository(store, tmp_path / "index.db", KEY)) as repository:
        for data in chain:
            ids.append(repository.save_record(data, ids[-1] if ids else None))
            repository.flush()
        depths = [entry.depth for one in ids if (entry := repository.reader.find(bytes.fromhex(one))) is not None]
        assert depths == [0, 1, 2, 3], "they are deltas"
    for again in range(3):
        with closing(PackRepository(store, tmp_path / "index.db", KEY)) as repository:  # nothing in memory
            repository.save_record(chain[again])
            assert repository.load_record(ids[3]) == chain[3]
