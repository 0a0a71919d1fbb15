"""docs/branching-http.md is true: curl alone compares, scores, bisects and runs experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import daemon_on

PAGE = Path(__file__).resolve().parents[2] / "docs" / "branching-http.md"


@pytest.mark.runc
def test_every_command_prints_what_the_page_shows(minimal_state: Path, tmp_path: Path) -> None:
    typed = transcript(PAGE.read_text())
    assert len(typed) > 20
    (tmp_path / "work").mkdir()
    with (
        daemon_on(minimal_state, tmp_path / "state") as snap,
        Shell(tmp_path / "work", environment(snap, tmp_path / "bin")) as shell,
    ):
        follow(typed, shell, snap)
