"""The program behind Claude Code's hooks for worktrees: a copy of the folder as it is, with what git ignores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.client.local.hook_settings import WORKTREE


def run(word: str, code: int = 0, **event: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(WORKTREE), word],
        input=json.dumps(event),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout.removesuffix("\n") if code == 0 else done.stderr


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "node_modules").mkdir(parents=True)
    (folder / "node_modules" / "m.js").write_text("m")
    (folder / ".env").write_text("KEY=1")
    (folder / "a").write_text("a")
    (folder / ".gitignore").write_text("node_modules\n.env\n.claude/worktrees\n")
    return folder


@pytest.fixture
def repository(folder: Path) -> Path:
    git(folder, "init", "-q")
    git(folder, "config", "user.name", "n")
    git(folder, "config", "user.email", "n@x")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def test_it_has_the_folder_as_it_is_and_a_branch_of_its_own(repository: Path) -> None:
    (repository / "a").write_text("not committed")
    (repository / "untracked").write_text("u")
    (repository / ".claude").mkdir()
    (repository / ".claude" / "settings.local.json").write_text("{}")
    made = Path(run("create", name="feature", cwd=str(repository)))
    assert made == repository / ".claude" / "worktrees" / "feature"
    assert (made / "node_modules" / "m.js").read_text() == "m"
    assert (made / ".env").read_text() == "KEY=1"
    assert (made / ".claude" / "settings.local.json").exists()
    assert not (made / ".claude" / "worktrees").exists()
    assert git(made, "status", "--short", "--untracked-files=all") == git(
        repository, "status", "--short", "--untracked-files=all"
    )
    assert git(made, "branch", "--show-current") == "worktree-feature\n"
    git(made, "commit", "-qam", "theirs")
    tip = git(repository, "rev-parse", "worktree-feature")

    (made / "a").write_text("theirs")
    assert (repository / "a").read_text() == "not committed"
    assert "exists already" in run("create", 1, name="feature", cwd=str(repository))
    run("remove", worktree_path=str(made))
    assert not made.exists()
    assert git(repository, "worktree", "list").count("\n") == 1
    again = Path(run("create", name="feature", cwd=str(repository)))
    assert git(again, "branch", "--show-current") == "worktree-feature-2\n", "the branch of before keeps its commits"
    assert git(repository, "rev-parse", "worktree-feature") == tip


def test_a_folder_without_git_is_copied(folder: Path) -> None:
    made = Path(run("create", worktree_name="w", cwd=str(folder)))
    assert sorted(path.name for path in made.iterdir()) == [".claude", ".env", ".gitignore", "a", "node_modules"]
    run("remove", worktree_path=str(made))
    assert not made.exists()
    assert (folder / "a").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "../x", "-x", "x" * 65])
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str) -> None:
    assert "no name" in run("create", 1, name=name, cwd=str(folder))
    assert not (folder / ".claude").exists()


@pytest.mark.parametrize("path", ["", ".", "a", ".claude/worktrees", ".claude/worktrees/x/.."])
def test_only_a_worktree_is_removed(folder: Path, path: str) -> None:
    (folder / ".claude" / "worktrees" / "x").mkdir(parents=True)
    assert "stays" in run("remove", 1, worktree_path=str(folder / path))
    assert (folder / ".claude" / "worktrees" / "x").is_dir()
    assert (folder / "a").exists()


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (folder / ".claude" / "worktrees").mkdir(parents=True)
    (folder / ".claude" / "worktrees" / "x").symlink_to(tmp_path / "elsewhere")
    assert "is a link" in run("remove", 1, worktree_path=str(folder / ".claude" / "worktrees" / "x"))
    assert (tmp_path / "elsewhere").is_dir()
