"""A daemon that fails ends, whatever threads it has started by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.capabilities import require

PROGRAM = """
import sys, threading
from snapshotd.cli.main import main
from snapshotd.daemon import wiring
from snapshotd.engine.storage.archive_queue import Archive
from snapshotd.errors import DataLoss

begin = Archive.start
def start(self, *arguments):
    begin(self, *arguments)
    raise {error}("a page does not match its checksum")

Archive.start = start
sys.exit(main(["daemon", "--foreground", "--state-dir", sys.argv[1]]))
"""


@pytest.mark.runc
@pytest.mark.parametrize(("error", "code"), [("DataLoss", 20), ("RuntimeError", 1)])
def test_a_daemon_that_fails_to_start_ends(tmp_path: Path, error: str, code: int) -> None:
    """It fails where a damaged catalog makes it fail: some threads of the engine run already."""
    require("root")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(error=error), tmp_path / "state"],
        env={**os.environ, "SNAPSHOTD_FAILPOINT": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == code, ended
    assert "does not match its checksum" in ended.stderr
