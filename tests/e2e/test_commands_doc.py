"""docs/commands.md, docs/services.md and docs/network.md are true: every command is run, in the order of the page, and prints what it
shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import daemon_on

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.long  # the same commands: e2e/test_background.py, test_services.py
@pytest.mark.runc
@pytest.mark.parametrize(("page", "least"), [("commands.md", 60), ("services.md", 10), ("network.md", 8)])
def test_every_command_prints_what_the_page_shows(minimal_state: Path, tmp_path: Path, page: str, least: int) -> None:
    typed = transcript((DOCS / page).read_text())
    assert len(typed) > least
    (tmp_path / "work").mkdir()
    no_docker = {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"}
    with (
        daemon_on(minimal_state, tmp_path / "state", no_docker) as snap,
        Shell(tmp_path / "work", environment(snap, tmp_path / "bin")) as shell,
    ):
        follow(typed, shell, snap)
