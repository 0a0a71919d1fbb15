"""An agent as its hooks show it: events as Claude Code sends them, from a folder of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from snapshotd.daemon.http.wire import hook_socket_of
from tests.e2e.support import Snap

SEND = Path(__file__).parents[2] / "snapshotd" / "hooks" / "send.py"


class Claude:
    """Claude Code as its hooks show it, in a folder. `agent`: another one, which sends the same."""

    def __init__(self, snap: Snap, folder: Path, session: str = "s-1", agent: str = "claude") -> None:
        self.snap, self.folder, self.session, self.agent = snap, folder, session, agent
        self.transcript = folder.parent / f"{session}.jsonl"
        self.number, self.last = 0, None
        self.run_as: int | None = None
        self.program = [sys.executable, "-I", "-S", str(SEND)]
        self._found: dict[Path, str] = {}

    def send(self, *words: str, data: str = "", code: int = 0) -> str:
        """What the program prints that agents run."""
        done = subprocess.run(
            [*self.program, str(hook_socket_of(self.snap.state_dir)), *words],
            input=data,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={"CLAUDE_PROJECT_DIR": str(self.folder)},
            user=self.run_as,
            group=self.run_as,
            extra_groups=None if self.run_as is None else [],
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
        told = self.hook("PreToolUse", **asked)
        assert told == "", told
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
        """The folder's only one. It is looked for once."""
        if self.folder not in self._found:
            (self._found[self.folder],) = [
                str(line["id"])
                for line in self.snap.json("ls")
                if self.snap.json("log", "--all", line["id"])[0]["tool"]["arguments"].get("folder") == str(self.folder)
            ]
        return self._found[self.folder]

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
