"""docs/commands.md is true: every command is run, in the order of the page, and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import daemon_on

PAGE = Path(__file__).resolve().parents[2] / "docs" / "commands.md"


@pytest.mark.runc
def test_every_command_prints_what_the_page_shows(minimal_state: Path, tmp_path: Path) -> None:
    typed = transcript(PAGE.read_text())
    assert len(typed) > 60
    (tmp_path / "work").mkdir()
    no_docker = {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"}
    with (
        daemon_on(minimal_state, tmp_path / "state", no_docker) as snap,
        Shell(tmp_path / "work", environment(snap, tmp_path / "bin")) as shell,
    ):
        follow(typed, shell, snap)
