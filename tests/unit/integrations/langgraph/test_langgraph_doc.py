"""docs/integrations/langgraph.md is true: what needs no sandbox is run here, in the order of the page."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.e2e.console import Bindings, Shell, transcript

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "integrations" / "langgraph.md"
ELSEWHERE = ("pip ", "python3 coder.py", "python3 release.py", "snapshotd ")
"""Beginnings of commands that are not run here: packages are installed before the tests are, and tests/e2e/test_langgraph.py
has a daemon."""


def test_every_program_of_the_page_prints_what_it_shows(tmp_path: Path) -> None:
    folder = tmp_path / "examples"
    shutil.copytree(ROOT / "docs" / "examples" / "integrations", folder)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (programs / "python3").chmod(0o755)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    typed = [entry for entry in transcript(PAGE.read_text()) if not entry.command.startswith(ELSEWHERE)]
    assert len(typed) >= 2
    bindings = Bindings()
    with Shell(folder, env) as shell:
        for entry in typed:
            printed, status = shell.run(bindings.typed(entry.command))
            assert bindings.match(entry.output, printed) is None, (entry.command, printed)
            assert status == 0
