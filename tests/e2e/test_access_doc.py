"""docs/access.md is true: its commands are run, in the order of the page, and print what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import copy_state
from tests.e2e.support import Snap

PAGE = Path(__file__).resolve().parents[2] / "docs" / "access.md"


@pytest.mark.runc
def test_every_command_prints_what_the_page_shows(minimal_state: Path, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    copy_state(minimal_state, tmp_path / "state")
    no_docker = {
        "DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    snap = Snap(tmp_path / "state", no_docker)
    try:
        with Shell(work, environment(snap, tmp_path / "bin")) as shell:
            follow(transcript(PAGE.read_text()), shell, snap)
    finally:
        snap("daemon", "--stop", code=None)
