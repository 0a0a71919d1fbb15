"""The scripts of docs/examples/branching: a bug is repaired eight ways, and the best repair ends in a commit. In the long
set: the short one has a page's best of eight in test_files.py, ranks in test_experiment.py, and commits in test_apply.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.demo_project import EXAMPLES, prepare
from tests.e2e.support import Snap


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A git folder with the planted bug."""
    target = tmp_path / f"p{os.getpid()}-{tmp_path.name[-20:]}"
    prepare(target)
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "As found")):
        git(target, *words)
    return target


def git(folder: Path, *words: str) -> str:
    names = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    return subprocess.run(
        ["git", *names, *words], cwd=folder, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def played(snap: Snap, script: str, project: Path) -> str:
    who = {
        f"GIT_{role}_{what}": value
        for role in ("AUTHOR", "COMMITTER")
        for what, value in (("NAME", "test"), ("EMAIL", "t@example.org"))
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "branching" / script), str(project)],
        env={**snap.env, **who},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.runc
@pytest.mark.long
@pytest.mark.parametrize("script", ["eight_ways.py", "experiment.py"])
def test_the_best_of_eight_repairs_is_committed(snap: Snap, project: Path, script: str) -> None:
    out = played(snap, script, project)
    ranks = [line.split(". ")[0] for line in out.splitlines() if line[:1].isdigit()]
    assert len(ranks) == 8
    assert ranks[:4] == ["1"] * 4, "four repairs pass all hidden tests"
    assert ranks[4] != "1"
    assert git(project, "rev-parse", "HEAD").strip() == out.partition("commit ")[2].split()[0]
    changed = git(project, "show", "--stat", "--format=%B").splitlines()
    assert changed[0] == "Repair the splitter"
    assert any("Snapshotd-Trajectory" in line for line in changed)
    assert "1 file changed" in changed[-1]
    assert git(project, "status", "--porcelain") == ""
    hidden = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLES / "branching" / "hidden")]
    environment = {**os.environ, "PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(hidden, cwd=project, env=environment, check=True, capture_output=True, timeout=120)
