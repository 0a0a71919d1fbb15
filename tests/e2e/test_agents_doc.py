"""docs/agents/ is true: every command is run, in the order of the pages, and prints what they show."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.console import Bindings, Shell, Typed, transcript
from tests.e2e.support import Snap, daemon_with

pytestmark = [pytest.mark.runc, pytest.mark.timeout(1200)]  # it builds the default image
ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "agents"
INDEX = ROOT / "docs" / "agents.md"
"""Its links to the pages are in their order."""
STATE_DIR = "/var/lib/snapshotd"
LOOKS = ("snapshotd approvals", "snapshotd journal", "snapshotd log", "snapshotd tasks", "snapshotd ls")
"""Commands that change nothing: what they show may take a moment to come true."""
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def doc_snap(default_tar: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon of the pages' own, which is killed on one. It finds no Docker, so that sandboxes are runc's."""
    with daemon_with(
        default_tar,
        tmp_path_factory.mktemp("d") / "state",
        {"DOCKER_HOST": "unix:///run/snapshotd-no-such-engine.sock"},
    ) as snap:
        yield snap


@pytest.fixture
def shell(doc_snap: Snap, tmp_path: Path) -> Iterator[Shell]:
    """In a folder with the examples, with this checkout's `snapshotd` and its Python first on the path."""
    folder = tmp_path / "agents"
    shutil.copytree(ROOT / "docs" / "examples" / "agents", folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, options in (("snapshotd", "-m snapshotd"), ("python3", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (programs / name).chmod(0o755)
    env = {**doc_snap.env, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    with Shell(folder, env) as shell:
        yield shell


def test_every_command_prints_what_its_page_shows(doc_snap: Snap, shell: Shell) -> None:
    pages = re.findall(r"\]\(agents/([a-z-]+\.md)\)", INDEX.read_text())
    assert sorted(pages) == sorted(path.name for path in PAGES.iterdir())
    typed = [entry for page in pages for entry in transcript((PAGES / page).read_text())]
    assert len(typed) > 40
    bindings = Bindings()
    for number, entry in enumerate(typed):
        asked_next = number + 1 < len(typed) and typed[number + 1].command == "echo $?"
        run(entry, bindings, shell, doc_snap, fails=asked_next)


def run(entry: Typed, bindings: Bindings, shell: Shell, snap: Snap, *, fails: bool) -> None:
    """Type one command. A page shows `echo $?` behind one that fails."""
    command = bindings.typed(entry.command).replace(STATE_DIR, str(snap.state_dir))
    deadline = time.monotonic() + DEADLINE_S
    while True:
        printed, status = shell.run(command)
        differs = bindings.match(entry.output, [line.replace(str(snap.state_dir), STATE_DIR) for line in printed])
        if differs is None or not command.startswith(LOOKS) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert differs is None, (entry.command, differs, printed)
    assert (status != 0) == fails, (entry.command, status, printed)
