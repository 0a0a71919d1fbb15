"""Claude Code as it comes from npm, in a folder of the machine with snapshotd's hooks: no sandbox and no gateway."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.model_rig import KEY, Provider, from_npm, provider
from tests.e2e.support import Snap

VERSION = "2.1.197"
PACKAGE = "@anthropic-ai/claude-code-linux-x64"
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def _bash(command: str) -> dict[str, Any]:
    return {"name": "Bash", "arguments": {"command": command, "description": "a step"}}


STEPS = [
    {"text": "I greet.", "calls": [_bash("echo hello > greeting; rm old; mkdir made; echo in > made/in")]},
    {"text": "Two at once.", "calls": [_bash("echo l > left"), _bash("echo r > right")]},
    {"text": "I fail.", "calls": [_bash("echo half > half; exit 3")]},
    {"text": "Done."},
    {"text": "More.", "calls": [_bash("echo more > more")]},
    {"text": "More is done."},
]


class RealClaude:
    """Claude Code in `folder`, with a home of its own."""

    def __init__(self, snap: Snap, at: Provider, place: Path) -> None:
        self.snap, self.at, self.folder = snap, at, place / "project"
        self.folder.mkdir()
        (place / "home").mkdir()
        self.program = from_npm(PACKAGE, VERSION, f"{PACKAGE}/claude")
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(place / "home"),
            "ANTHROPIC_BASE_URL": at.url,
            "ANTHROPIC_API_KEY": KEY,
            "IS_SANDBOX": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def __call__(self, *words: str) -> str:
        done = subprocess.run(
            [self.program, "--dangerously-skip-permissions", "--model", "claude-sonnet-4-5", *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def steps(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.snap.json("log", "--all", self.folder.name)
        return found

    def files(self) -> dict[str, str]:
        found = (path for path in self.folder.rglob("*") if path.is_file() and ".claude" not in path.parts)
        return {str(path.relative_to(self.folder)): path.read_text() for path in found}


@pytest.fixture
def hook_snap(tmp_path: Path) -> Iterator[Snap]:
    snap = Snap(tmp_path / "state")
    yield snap
    snap.stop_daemon()


def _told(request: dict[str, Any]) -> list[str]:
    """The conversation in a request, in short, without what Claude Code adds to it."""
    told = []
    for message in request["body"]["messages"]:
        content = message["content"]
        for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            if block["type"] == "text" and not block["text"].lstrip().startswith("<"):
                told.append(f"{message['role']}: {block['text']}")
            elif block["type"] in ("tool_use", "tool_result"):
                told.append(f"{block['type']} {block.get('id') or block['tool_use_id']}")
    return told


def test_every_change_is_in_a_snapshot_and_a_rewound_session_goes_on(hook_snap: Snap, tmp_path: Path) -> None:
    hook_snap("ls")
    with provider(tmp_path, *STEPS, toolless=[{"text": "A title"}]) as at:
        claude = RealClaude(hook_snap, at, tmp_path)
        (claude.folder / "old").write_text("old\n")
        hook_snap("hooks", "install", "claude", claude.folder)
        claude("-p", "do it all")
        calls = [step for step in claude.steps() if step["tool"]["name"] == "Bash"]
        assert [call["tool"]["status"] for call in calls] == ["done"] * 3 + ["failed"]
        one = claude.folder.name
        changes = [hook_snap("diff", call["id"]).stdout.split() for call in calls]
        assert changes[0] == [
            *("A", "/workspace/greeting", "A", "/workspace/made/"),
            *("A", "/workspace/made/in", "D", "/workspace/old"),
        ]
        assert changes[1:] == [["A", f"/workspace/{name}"] for name in ("left", "right", "half")]
        (claude.folder / "by-hand").write_text("mine\n")

        rewound = hook_snap.json("rewind", one, calls[0]["id"])
        assert claude.files() == {"greeting": "hello\n", "made/in": "in\n", "by-hand": "mine\n"}
        at.forget()
        program, *words = shlex.split(rewound["tool"]["arguments"]["resume"])
        assert program == "claude"
        claude(*words, "-p", "go on")
        first, *_ = [request for request in at.requests() if request["body"].get("tools")]
        history = ["user: do it all", "assistant: I greet.", "tool_use call_0_0", "tool_result call_0_0"]
        own = ["user: Continue from where you left off.", "assistant: No response requested."]
        assert _told(first) == [*history, *own, "user: go on"], "Claude Code closes a turn that was cut off itself"
        assert claude.files()["half"] == "half\n", "the model has gone on from there"
        said = [message["content"] for message in hook_snap.json("show", "--conversation", one)]
        assert said.count("go on") == said.count("do it all") == 1, "the new session goes on with the recorded one"

        claude("-p", "/snapshotd-checkpoint before the end")
        assert [step["tags"] for step in claude.steps() if step["tags"]] == [["before-the-end"]]
        claude("-p", f"/snapshotd-rewind --files {calls[0]['id'][:12]}")
        (_, last) = [step for step in claude.steps() if step["tool"]["name"] == "rewind"]
        gone = [change["path"] for change in hook_snap.json("diff", last["id"])]
        assert gone == [f"/workspace/{name}" for name in ("half", "left", "right")], "then the scripted model goes on"


def test_claude_works_on_when_the_daemon_is_gone(hook_snap: Snap, tmp_path: Path) -> None:
    hook_snap("ls")
    with provider(tmp_path, *STEPS, toolless=[{"text": "A title"}]) as at:
        claude = RealClaude(hook_snap, at, tmp_path)
        (claude.folder / "old").write_text("old\n")
        hook_snap("hooks", "install", "claude", claude.folder)
        hook_snap.stop_daemon()
        assert claude("-p", "do it all") == "Done.\n"
        assert claude.files() == {
            "greeting": "hello\n",
            "made/in": "in\n",
            "left": "l\n",
            "right": "r\n",
            "half": "half\n",
        }


def test_a_worktree_has_what_git_ignores(hook_snap: Snap, tmp_path: Path) -> None:
    hook_snap("ls")
    with provider(tmp_path, *STEPS, toolless=[{"text": "A title"}]) as at:
        claude = RealClaude(hook_snap, at, tmp_path)
        (claude.folder / "old").write_text("old\n")
        (claude.folder / ".gitignore").write_text(".env\nnode_modules\n.claude\n")
        for words in (
            ["init", "-q"],
            ["add", "-A"],
            ["-c", "user.name=n", "-c", "user.email=e@x", "commit", "-qm", "x"],
        ):
            subprocess.run(["git", *words], cwd=claude.folder, check=True)
        (claude.folder / ".env").write_text("KEY=1\n")
        hook_snap("hooks", "install", "claude", "--worktrees", claude.folder)
        claude("--worktree", "feature", "-p", "do it all")
        there = claude.folder / ".claude" / "worktrees" / "feature"
        assert (there / ".env").read_text() == "KEY=1\n"
        assert (there / "left").read_text() == "l\n"
        assert not (claude.folder / "left").exists()
        branch = subprocess.run(
            ["git", "branch", "--show-current"], cwd=there, capture_output=True, text=True, check=True
        )
        assert branch.stdout == "worktree-feature\n"
