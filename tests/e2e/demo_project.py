"""The project of the demo, with its planted bug, for sandboxes of the minimal image: pytest lies in its folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests import long
from tests.e2e.model_rig import from_pip

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
_PYTEST = ("pytest==8.3.5",)
"""Of the last series that does not import Pygments, which is ten times as many files."""


def prepare(target: Path) -> None:
    """Make it in `target`. In the short set it has a third of its test files; the two tests that the bug fails are
    among these."""
    command = [sys.executable, str(EXAMPLES / "prepare.py"), str(target)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=300)
    shutil.copytree(from_pip("pytest", _PYTEST), target, dirs_exist_ok=True)
    kept = files_of_tests(target)[:: long.size(3, 1)]
    for file in files_of_tests(target):
        if file not in kept:
            (target / file).unlink()


def files_of_tests(project: Path) -> list[str]:
    return sorted(f"tests/{path.name}" for path in (project / "tests").glob("test_*.py"))
