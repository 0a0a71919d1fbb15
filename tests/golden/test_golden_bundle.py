"""A bundle as an older snapshotd wrote it: it comes in with its files, conversation and tags. The file never changes.

It is the trajectory of `tests/unit/engine/bundles.py` with two tags. `bundle-v2.json` says what its version found in it.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path

from snapshotd.engine.transfer.bundle import VERSION
from snapshotd.types import Message
from tests.unit.engine.bundles import Manifest, World

GOLDEN = Path(__file__).with_name(f"bundle-v{VERSION}.tar.gz")


def digest(files: Manifest) -> str:
    rows = sorted((path, *map(str, facts)) for path, facts in files.items())
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def test_it_comes_in(tmp_path: Path) -> None:
    expected = json.loads(GOLDEN.with_name(f"bundle-v{VERSION}.json").read_text())
    with closing(World(tmp_path / "there")) as there:
        result = there.take(GOLDEN.read_bytes())
        assert result.warnings == ()
        (trajectory,) = result.trajectories
        assert trajectory.name == expected["name"]
        snapshots = there.catalog.snapshots.of_trajectory(trajectory.id)
        assert {one.id: digest(there.shown(one.id)) for one in snapshots} == expected["files"]
        assert there.catalog.refs.tags() == expected["tags"]
        assert list(there.catalog.conversations.read(trajectory.head)) == [Message("user", {"n": n}) for n in range(2)]
        there.archive_all()
