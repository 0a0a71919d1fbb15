"""docs/agents/ is true: every command is run, in the order of the pages, and prints what they show."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import long
from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import daemon_on
from tests.e2e.support import Snap

pytestmark = [pytest.mark.runc, pytest.mark.timeout(1200)]  # it builds the default image
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "agents"
INDEX = ROOT / "docs" / "agents.md"
"""Its links to the pages are in their order."""


@pytest.fixture(scope="module")
def doc_snap(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon of the pages' own, which is killed on one. It finds no Docker, so that sandboxes are runc's. In the long
    set it has the image that a user's has."""
    with daemon_on(
        request.getfixturevalue("default_state" if long.LONG else "minimal_state"),
        tmp_path_factory.mktemp("d") / "state",
        {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"},
    ) as snap:
        yield snap


@pytest.fixture
def shell(doc_snap: Snap, tmp_path: Path) -> Iterator[Shell]:
    """In a folder with the examples, with this checkout's `snapshotd` and its Python first on the path."""
    folder = tmp_path / "agents"
    shutil.copytree(ROOT / "docs" / "examples" / "agents", folder)
    with Shell(folder, environment(doc_snap, tmp_path / "bin")) as shell:
        yield shell


def test_every_command_prints_what_its_page_shows(doc_snap: Snap, shell: Shell) -> None:
    pages = re.findall(r"\]\(agents/([a-z-]+\.md)\)", INDEX.read_text())
    assert sorted(pages) == sorted(path.name for path in PAGES.iterdir())
    typed = [entry for page in pages for entry in transcript((PAGES / page).read_text())]
    assert len(typed) > 40
    follow(typed, shell, doc_snap)
