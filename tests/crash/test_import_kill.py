"""An import that is killed has happened as a whole, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd import failpoints
from tests.unit.engine.bundles import STEPS, World

_CHILD = """
import sys
from pathlib import Path
from tests.unit.engine.bundles import World
World(Path(sys.argv[1]), catalog_file=True).take(Path(sys.argv[2]).read_bytes())
"""


@pytest.mark.parametrize(
    ("failpoint", "committed"), [("engine.import.ingested", False), ("engine.import.committed", True)]
)
def test_a_killed_import_is_whole_or_not_there(tmp_path: Path, failpoint: str, committed: bool) -> None:
    (tmp_path / "root").mkdir()
    here = World(tmp_path / "here")
    line = here.line(tmp_path / "root", STEPS)
    (tmp_path / "bundle").write_bytes(here.export(line))
    environment = {**os.environ, "SNAPSHOTD_FAILPOINT": failpoint}
    argv = [sys.executable, "-c", _CHILD, str(tmp_path / "there"), str(tmp_path / "bundle")]
    result = subprocess.run(
        argv, cwd=Path(__file__).parents[2], env=environment, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == failpoints.EXIT_CODE, result.stderr.decode()
    there = World(tmp_path / "there", catalog_file=True)
    there.store.sweep(there.catalog.snapshots.referenced_layers)
    assert there.is_empty() is not committed
    if not committed:
        there.take((tmp_path / "bundle").read_bytes())
    for snapshot in line:
        assert there.shown(snapshot.id) == here.stored(snapshot)
    assert set(there.store.layers()) == there.catalog.snapshots.referenced_layers()
    here.close()
    there.close()
