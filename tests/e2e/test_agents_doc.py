"""docs/agents/ is true: every command is run, in the order of the pages, and prints what they show. In the long set: the
short one has the agents of the pages in test_known_agents.py, their manners in test_manners.py, and the names of all commands
and options in unit/test_docs.py."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.console import Shell, environment, follow, transcript
from tests.e2e.prepared import NO_ENGINE, daemon_on
from tests.e2e.support import Snap

pytestmark = [pytest.mark.runc, pytest.mark.long, pytest.mark.timeout(1200)]  # it builds the default image
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "agents"
INDEX = ROOT / "docs" / "agents.md"
"""Its links to the pages are in their order."""


@pytest.fixture(scope="module")
def doc_snap(default_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon of the pages' own, which is killed on one. It finds no Docker, so that sandboxes are runc's. It has the
    image that a user's has."""
    with daemon_on(default_state, tmp_path_factory.mktemp("d") / "state", NO_ENGINE) as snap:
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
