"""`snapshotd run NAME`: agents that come with a profile, and profiles of a user's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import INSTALL_TIMEOUT_S, KEY, Agents, provider
from tests.e2e.support import Snap
from tests.kept import CACHE

PAGE = Path(__file__).parents[2] / "docs" / "agents-you-run.md"
BOTH_KEYS = {"ANTHROPIC_API_KEY": KEY, "OPENAI_API_KEY": KEY}


def _known(snap: Snap, **env: str) -> Snap:
    """Commands that install agents into the cache of the tests."""
    found = Snap(snap.state_dir, {**snap.env, **BOTH_KEYS, "XDG_CACHE_HOME": str(CACHE), **env})
    found.timeout_s = INSTALL_TIMEOUT_S
    return found


def _run(snap: Snap, *words: str | Path) -> str:
    trajectory = snap("run", "--detach", "--runtime", "runc", *words).stdout.strip()
    snap("attach", trajectory)
    return trajectory


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("heading", "kind"), [("Claude Code", "anthropic"), ("Codex", "openai")])
def test_the_page_begins_in_three_lines(snap: Snap, runc_ready: None, tmp_path: Path, heading: str, kind: str) -> None:
    """The commands of the page as they are. The shell's `snapshotd` adds the address of the scripted provider."""
    block = PAGE.read_text().split(f"## {heading}\n")[1].split("```bash\n")[1].split("```")[0]
    assert len(block.splitlines()) <= 3
    (tmp_path / "project").mkdir()
    more = {"toolless": [{"text": "A title"}]} if kind == "anthropic" else {}
    with provider(tmp_path, {"text": "Done."}, **more) as at:
        wrapper = tmp_path / "snapshotd"
        wrapper.write_text(
            f'#!/bin/sh\nshift\nexec {sys.executable} -m snapshotd run --runtime runc --provider {kind}={at.url} "$@"\n'
        )
        wrapper.chmod(0o755)
        env = {**_known(snap).env, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        script = "\n".join(line.replace("=...", f"={KEY}") for line in block.splitlines())
        done = subprocess.run(
            ["bash", "-ec", script],
            cwd=tmp_path / "project",
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "Done." in done.stdout
        assert at.asked()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("agent", "kind", "call", "words"),
    [
        pytest.param(
            "claude",
            "anthropic",
            {"name": "Bash", "arguments": {"command": "echo hello > greeting", "description": "x"}},
            ("--model", "claude-sonnet-4-5", "-p", "do it"),
            id="claude",
        ),
        pytest.param(
            "codex",
            "openai",
            {"name": "exec_command", "arguments": {"cmd": "echo hello > greeting", "yield_time_ms": 30000}},
            ("exec", "--skip-git-repo-check", "-m", "gpt-5", "do it"),
            id="codex",
        ),
    ],
)
def test_one_line_runs_an_agent(
    snap: Snap, runc_ready: None, tmp_path: Path, agent: str, kind: str, call: dict[str, Any], words: tuple[str, ...]
) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "a").write_text("a\n")
    known = _known(snap)
    with provider(
        tmp_path, {"text": "I do.", "calls": [call]}, {"text": "Done."}, toolless=[{"text": "A title"}]
    ) as at:
        options = ("--workspace", tmp_path / "project", "--provider", f"{kind}={at.url}")
        trajectory = _run(known, *options, agent, *words)
        agents = Agents(snap, "runc")
        assert agents.names(trajectory) == ["start", call["name"], "exit"]
        assert agents.files(trajectory)["greeting"] == "hello\n"
        assert "installing" not in known("run", "--detach", *options, agent, *words).stderr, "it is installed once"


def test_a_profile_of_a_user(snap: Snap, runc_ready: None, tmp_path: Path) -> None:
    """A program in a folder of the machine, which is taken in once, and again when it has changed."""
    (tmp_path / "tool").mkdir()
    program = tmp_path / "tool" / "mine"
    program.write_text('#!/bin/sh\necho "$GREETING $1" > /workspace/said\n')
    program.chmod(0o755)
    place = tmp_path / "config" / "snapshotd" / "agents"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(
        f'folder = "{tmp_path / "tool"}"\ncommand = ["{{program}}/mine"]\n[env]\nGREETING = "hello"\n'
    )
    own = _known(snap, XDG_CONFIG_HOME=str(tmp_path / "config"))
    agents = Agents(snap, "runc")
    assert agents.files(_run(own, "mine", "you"))["said"] == "hello you\n"
    assert agents.files(_run(own, "--env", "GREETING=bye", "mine", "you"))["said"] == "bye you\n"
    program.write_text('#!/bin/sh\necho "changed" > /workspace/said\n')
    assert agents.files(_run(own, "mine"))["said"] == "changed\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("command = 3", "another type"),
        ("folder = 'x'", "list of words"),
        ("command = ['x']\nnpm = 'a@1'\nfolder = 'b'", "not both"),
        ("command = ['x']\nunknown = 1", "no field"),
        ("command = [", "TOML"),
        ("command = ['x']\nfolder = '/nowhere'", "does not exist"),
    ],
)
def test_a_malformed_profile_is_told(snap: Snap, runc_ready: None, tmp_path: Path, text: str, says: str) -> None:
    place = tmp_path / "snapshotd" / "agents"
    place.mkdir(parents=True)
    (place / "mine.toml").write_text(text)
    own = _known(snap, XDG_CONFIG_HOME=str(tmp_path))
    before = len(snap.json("ls"))
    assert says in own("run", "--runtime", "runc", "mine", code=125).stderr
    assert len(snap.json("ls")) == before
