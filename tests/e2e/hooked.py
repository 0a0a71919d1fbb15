"""An agent as its hooks show it: events as Claude Code sends them, from a folder of the machine."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from snapshotd.api.wire import hook_socket_of
from tests.e2e.support import Snap

SEND = Path(__file__).parents[2] / "snapshotd" / "hooks" / "send.py"

AGENT = """
import base64, json, subprocess, sys
for line in sys.stdin:
    asked = json.loads(line)
    done = subprocess.run(asked["words"], input=base64.b64decode(asked["data"]), capture_output=True, env=asked["env"], cwd=asked["cwd"])
    print(json.dumps([done.returncode, base64.b64encode(done.stdout + done.stderr).decode()]), flush=True)
"""


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


class Agent(Claude):
    """Claude Code in a process of its own: this one is a person's editor beside it. `session` None: it tells none."""

    def __init__(self, snap: Snap, folder: Path, session: str = "s-1", agent: str = "claude") -> None:
        super().__init__(snap, folder, session, agent)
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, words: list[str], data: str = "") -> tuple[int, str]:
        """A child of the agent."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        asked = {
            "words": words,
            "data": base64.b64encode(data.encode()).decode(),
            "env": {"CLAUDE_PROJECT_DIR": str(self.folder), "PATH": os.environ["PATH"]},
            "cwd": str(self.folder),
        }
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        code, text = json.loads(self.process.stdout.readline())
        return code, base64.b64decode(text).decode()

    def send(self, *words: str, data: str = "", code: int = 0) -> str:
        found, text = self.run([*self.program, str(hook_socket_of(self.snap.state_dir)), *words], data)
        assert found == code, text
        return text

    def before(self, call: str) -> None:
        assert self.hook("PreToolUse", tool_name="Bash", tool_input={}, tool_use_id=call) == ""

    def after(self, call: str) -> None:
        assert self.hook("PostToolUse", tool_name="Bash", tool_input={}, tool_use_id=call, tool_response={}) == ""

    def do(self, command: str) -> None:
        """One call."""
        self.number += 1
        call = f"toolu_{self.session}_{self.number}"
        self.before(call)
        assert self.run(["bash", "-c", command])[0] == 0
        self.after(call)

    def rewind(self, *words: str) -> dict[str, Any]:
        """A rewind of the files; the facts that it told."""
        done = self.snap.json("rewind", "--files", *words[:-1], self.trajectory, words[-1])
        facts: dict[str, Any] = done["tool"]["arguments"]
        return facts

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
