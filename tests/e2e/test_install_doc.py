"""docs/install.md is true: after its commands nothing is left of snapshotd."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import copy_state
from tests.e2e.support import Snap, wait_until
from tests.leftovers import instance_of, leftovers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"


@pytest.mark.runc
def test_after_the_commands_of_the_page_nothing_is_left(minimal_state: Path, tmp_path: Path) -> None:
    (work := tmp_path / "work").mkdir()
    copy_state(minimal_state, tmp_path / "state")
    instance = instance_of(tmp_path / "state")
    snap = Snap(tmp_path / "state", {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"})
    made, removed = transcript(PAGE.read_text())[:5], transcript(PAGE.read_text())[5:]
    assert removed[-1].command == "rm -rf /var/lib/snapshotd"

    def hooks() -> list[Path]:
        files = (work / "project" / ".claude").rglob("*")
        return [file for file in files if file.is_file() and "snapshotd" in file.read_text()]

    try:
        with Shell(work, environment(snap, tmp_path / "bin")) as shell:
            follow(made, shell, snap)
            assert (work / "mnt" / "trajectories" / "box").exists()
            assert hooks() != []
            follow(removed[:-1], shell, snap)
            wait_until(lambda: leftovers(tmp_path / "state", running=False) == [], "the daemon and all of it has ended")
            follow(removed[-1:], shell, snap)
    finally:
        if (tmp_path / "state").exists():
            snap("daemon", "--stop", code=None)
    assert not (tmp_path / "state").exists()
    for place in ("/run/snapshotd", "/var/lib/snapshotd-share"):
        assert not Path(place, instance).exists()
    assert list((work / "mnt").iterdir()) == []
    assert hooks() == []
