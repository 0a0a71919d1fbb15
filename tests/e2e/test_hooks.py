"""Agents in a folder of the machine, without a sandbox: hooks as agents send them, rewinds, and what stays untouched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotd.daemon.http.wire import hook_socket_of
from tests.e2e.support import Snap
from tests.leftovers import nothing_left

SEND = Path(__file__).parents[2] / "snapshotd" / "hooks" / "send.py"


@pytest.fixture(scope="module")
def hook_snap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Snap]:
    """A daemon that these tests may kill. It needs no image and no container."""
    snap = Snap(tmp_path_factory.mktemp("h") / "state")
    snap("ls")
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


class Claude:
    """Claude Code as its hooks show it, in a folder. `agent`: another one, which sends the same."""

    def __init__(self, snap: Snap, folder: Path, session: str = "s-1", agent: str = "claude") -> None:
        self.snap, self.folder, self.session, self.agent = snap, folder, session, agent
        self.transcript = folder.parent / f"{session}.jsonl"
        self.number, self.last = 0, None
        self.run_as: int | None = None

    def send(self, *words: str, data: str = "", code: int = 0) -> str:
        """What the program prints that agents run."""
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(SEND), str(hook_socket_of(self.snap.state_dir)), *words],
            input=data,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"CLAUDE_PROJECT_DIR": str(self.folder)},
            user=self.run_as,
            group=self.run_as,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def hook(self, name: str, **more: Any) -> str:
        event = {
            "session_id": self.session,
            "transcript_path": str(self.transcript),
            "cwd": str(self.folder),
            "hook_event_name": name,
            "permission_mode": "default",
            **more,
        }
        return self.send("hook", self.agent, data=json.dumps(event))

    def write(self, role: str, content: Any) -> None:
        """A line of the transcript."""
        line = {
            "uuid": f"u-{self.session}-{os.urandom(4).hex()}",
            "parentUuid": self.last,
            "sessionId": self.session,
            "isSidechain": False,
            "type": role,
            "message": {"role": role, "content": content},
        }
        self.last = line["uuid"]
        with self.transcript.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def says(self, prompt: str) -> None:
        """A person says something."""
        assert self.hook("UserPromptSubmit", prompt=prompt) == ""
        self.write("user", prompt)

    def call(self, command: str, *, later: bool = False) -> None:
        """A call of Bash. The transcript has its result only when the agent goes on. `later`: it stays unwritten."""
        self.number += 1
        asked = {
            "tool_name": "Bash",
            "tool_input": {"command": command},
            "tool_use_id": f"toolu_{self.session}_{self.number}",
        }
        self.write(
            "assistant",
            [{"type": "tool_use", "id": asked["tool_use_id"], "name": "Bash", "input": asked["tool_input"]}],
        )
        assert self.hook("PreToolUse", **asked) == ""
        done = subprocess.run(["bash", "-c", command], cwd=self.folder, capture_output=True, text=True, check=False)
        if done.returncode:
            assert self.hook("PostToolUseFailure", **asked, error=f"Exit code {done.returncode}") == ""
        else:
            response = {"stdout": done.stdout, "stderr": "", "interrupted": False}
            assert self.hook("PostToolUse", **asked, tool_response=response) == ""
        if not later:
            result = {"type": "tool_result", "tool_use_id": asked["tool_use_id"], "content": done.stdout}
            self.write("user", [result])

    @property
    def trajectory(self) -> str:
        (found,) = [
            line["id"]
            for line in self.snap.json("ls")
            if self.snap.json("log", "--all", line["id"])[0]["tool"]["arguments"].get("folder") == str(self.folder)
        ]
        return str(found)

    def steps(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.snap.json("log", "--all", self.trajectory)
        return found

    def names(self) -> list[str]:
        return [step["tool"]["name"] for step in self.steps()]

    def changes(self, snapshot: str) -> list[str]:
        return self.snap("diff", snapshot).stdout.split("\n")[:-1]

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.folder)): path.read_text()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }


@pytest.fixture
def claude(hook_snap: Snap, tmp_path: Path) -> Claude:
    folder = tmp_path / "project"
    (folder / "src").mkdir(parents=True)
    (folder / "src" / "main.py").write_text("print(1)\n")
    (folder / "notes").write_text("mine\n")
    (folder / ".gitignore").write_text("*.log\nbuild/\n!keep.log\n")
    return Claude(hook_snap, folder)


def test_each_call_has_a_snapshot_with_what_its_command_changed(claude: Claude) -> None:
    claude.hook("SessionStart", source="startup")
    claude.says("do it")
    claude.call("echo 2 > src/two; sed -i s/1/2/ src/main.py")
    (claude.folder / "notes").write_text("a person writes\n")
    claude.call("rm -r src; mkdir empty; ln -s ../outside link")
    claude.call("echo x > half; exit 3")
    claude.call("true")
    assert claude.names() == ["start", "edits", "prompt", "Bash", "edits", "Bash", "Bash", "Bash"]
    steps = claude.steps()
    assert claude.changes(steps[1]["id"]) == [
        "A /workspace/",
        "A /workspace/.gitignore",
        "A /workspace/notes",
        "A /workspace/src/",
        "A /workspace/src/main.py",
    ]
    assert claude.changes(steps[3]["id"]) == ["M /workspace/src/main.py", "A /workspace/src/two"]
    assert claude.changes(steps[4]["id"]) == ["M /workspace/notes"]
    assert claude.changes(steps[5]["id"]) == [
        "A /workspace/empty/",
        "A /workspace/link@",
        "D /workspace/src/",
        "D /workspace/src/main.py",
        "D /workspace/src/two",
    ]
    assert claude.changes(steps[6]["id"]) == ["A /workspace/half"]
    assert claude.changes(steps[7]["id"]) == []
    assert [step["tool"]["status"] for step in steps[5:]] == ["done", "failed", "done"]
    assert [entry["name"] for entry in claude.snap.json("journal", claude.trajectory)] == ["Bash"] * 4
    said = claude.snap.json("show", "--conversation", claude.trajectory)
    assert [one["role"] for one in said] == ["user", *["assistant", "user"] * 4], "each message once"
    ids = [block.get("id") or block["tool_use_id"] for one in said[1:] for block in one["content"]]
    assert ids == [f"toolu_s-1_{number}" for number in (1, 2, 3, 4) for _ in range(2)]


def test_a_rewind_brings_back_what_the_agent_touched_and_nothing_else(claude: Claude) -> None:
    claude.hook("SessionStart", source="startup")
    claude.says("do it")
    claude.call("echo 2 > src/two; rm notes; echo log > x.log")
    before = claude.files()
    claude.call("rm -r src; echo more > more; echo kept > keep.log; mkdir -p build; echo o > build/o")
    (claude.folder / "by-hand").write_text("a person's\n")
    target = claude.steps()[3]["id"]
    preview = claude.snap.json("rewind", "--preview", "--files", claude.trajectory, target)
    assert sorted(change["path"] for change in preview["files"]) == [
        "/workspace/keep.log",
        "/workspace/more",
        "/workspace/src",
        "/workspace/src/main.py",
        "/workspace/src/two",
    ]
    changed = claude.files()
    claude.snap("rewind", "--files", claude.trajectory, target)
    outside = {"by-hand": "a person's\n", "build/o": "o\n"}
    assert claude.files() == before | outside
    claude.snap("undo", claude.trajectory)
    assert claude.files() == changed
    claude.snap("undo", claude.trajectory)
    assert claude.files() == before | outside
