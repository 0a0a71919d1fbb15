"""Snapshots do not change what programs do: a real project's test suite has the same outcomes with and without them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PREPARE = ROOT / "docs/examples/prepare.py"
PYTEST = ["python3", "-m", "pytest", "-q", "-rA", "--tb=no", "--color=no"]
OUTCOMES = ("PASSED ", "FAILED ", "ERROR ", "SKIPPED ", "XFAIL ", "XPASS ")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's project with its planted bug, so that failures are compared too."""
    target = tmp_path_factory.mktemp("project") / "sqlparse"
    subprocess.run([sys.executable, str(PREPARE), str(target)], check=True, stdout=subprocess.DEVNULL, timeout=300)
    return target


def test_files(project: Path) -> list[str]:
    return sorted(f"tests/{path.name}" for path in (project / "tests").glob("test_*.py"))


def outcomes(output: str) -> list[str]:
    """`PASSED tests/test_x.py::test_y` and so on, sorted: one entry per test."""
    return sorted(line for line in output.splitlines() if line.startswith(OUTCOMES))
