"""Driving snapshotd as a user does: through its command line, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests import forked
from tests.leftovers import instance_of, nothing_left
from tests.way import run_root

COMMAND_TIMEOUT_S = 240

MANIFEST = r"""
import hashlib, json, os, stat, sys
def entry(path, st):
    kind = stat.S_IFMT(st.st_mode)
    item = {"mode": st.st_mode, "uid": st.st_uid, "gid": st.st_gid, "mtime_ns": st.st_mtime_ns}
    if kind == stat.S_IFREG:
        item["size"] = st.st_size
        item["sha256"] = hashlib.sha256(open(path, "rb").read()).hexdigest()
    if kind == stat.S_IFLNK:
        item["target"] = os.readlink(path)
    else:
        item["xattrs"] = {n: os.getxattr(path, n).hex() for n in os.listxattr(path) if not n.startswith("trusted.overlay.")}
    return item
def walk(root):
    found, names = {}, {}
    for base, dirs, files in os.walk(root):
        for name in dirs + files:
            path = os.path.join(base, name)
            st = os.lstat(path)
            found[os.path.relpath(path, root)] = entry(path, st)
            if not stat.S_ISDIR(st.st_mode):
                names.setdefault((st.st_dev, st.st_ino), []).append(os.path.relpath(path, root))
    for group in names.values():
        for name in group:
            found[name]["links"] = sorted(group)
    return found
print(json.dumps(walk(sys.argv[1])))
"""
"""Prints what a tree looks like; runs inside a sandbox and on the host alike."""


class Snap:
    """The command line with one state directory. `timeout_s`: of one command."""

    timeout_s = COMMAND_TIMEOUT_S

    def __init__(self, state_dir: Path, env: dict[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self.env = {**os.environ, "SNAPSHOTD_STATE_DIR": str(state_dir), **(env or {})}
        self.env.pop("SNAPSHOTD_SOCKET", None)

    def __call__(self, *args: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command; fail unless it exits with `code` (None: any)."""
        words = list(map(str, args))
        if forked.can_be_forked(self.env):
            status, out, err = forked.run(words, env=self.env, timeout_s=self.timeout_s)
            result = subprocess.CompletedProcess(words, status, _text(out), _text(err))
        else:
            result = subprocess.run(
                [sys.executable, "-m", "snapshotd", *words],
                env=self.env,
                capture_output=True,
                stdin=subprocess.DEVNULL,
                timeout=self.timeout_s,
                encoding="utf-8",
                errors="surrogateescape",
            )
        if code is not None:
            assert result.returncode == code, (args, result.returncode, result.stdout[-3000:], result.stderr[-3000:])
        return result

    def start(self, *args: str | Path) -> subprocess.Popen[str]:
        """Start a command in the background, in an interpreter of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "snapshotd", *map(str, args)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def follow(self, *args: str | Path) -> subprocess.Popen[str]:
        """The same without one. A daemon that it starts is forked, too."""
        return forked.Piped(list(map(str, args)), self.env) if forked.can_be_forked(self.env) else self.start(*args)

    def json(self, *args: str | Path, code: int | None = 0) -> Any:
        """Run a command with --json in front of a `--`, if any; returns what it printed."""
        items = list(map(str, args))
        at = items.index("--") if "--" in items else len(items)
        return json.loads(self(*items[:at], "--json", *items[at:], code=code).stdout)

    def create(self, *args: str | Path) -> tuple[str, str]:
        """A sandbox without an agent: its trajectory and first snapshot."""
        made = self.json("create", *args)
        return made["trajectory"], made["snapshot"]

    def sh(self, trajectory: str, script: str, code: int | None = 0) -> dict[str, Any]:
        """A shell command as a tool call."""
        result: dict[str, Any] = self.json("exec", trajectory, "--", "sh", "-c", script, code=code)
        return result

    def programs(self, trajectory: str) -> str:
        """The names of a sandbox's processes, a line each. One that ends meanwhile may be missing."""
        names: str = self.sh(trajectory, "cat /proc/[0-9]*/comm 2>/dev/null || true")["stdout"]
        return names

    def manifest(self, trajectory: str, root: str = "/workspace") -> dict[str, Any]:
        """What the sandbox itself sees."""
        result = self.json("exec", trajectory, "--", "python3", "-c", MANIFEST, root)
        found: dict[str, Any] = json.loads(result["stdout"])
        return found

    def daemon_pid(self) -> int:
        return int(self.json("daemon", "--status")["pid"])

    def kill_daemon(self) -> None:
        """kill -9. Agents that run go on at the next daemon."""
        self._kill([self.daemon_pid()])

    def crash(self, *pids: int) -> None:
        """These processes die, or every sandbox, as with the machine, and the daemon before it can see that anything
        does."""
        doomed, daemon = pids or [one["pid"] for one in self.json("ps")], self.daemon_pid()
        os.kill(daemon, signal.SIGSTOP)
        self._kill([*doomed, daemon])

    def forget_sandboxes(self) -> None:
        """The next daemon goes on with none of those that a dead one left, as if the machine had been down."""
        shutil.rmtree(run_root() / instance_of(self.state_dir) / "live", ignore_errors=True)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(map(alive, pids)), "they died")

    def stop_daemon(self) -> None:
        self("daemon", "--stop", code=None)


@contextlib.contextmanager
def daemon_with(image: Path, state_dir: Path, env: dict[str, str] | None = None) -> Iterator[Snap]:
    """A daemon whose default image is this archive or folder. It is stopped at the end, and nothing may be left."""
    with ended(Snap(state_dir, env)) as snap:
        snap("image", "import", image, "--name", "default")
        yield snap


@contextlib.contextmanager
def ended(snap: Snap) -> Iterator[Snap]:
    """Its daemon is stopped at the end, and nothing may be left."""
    yield snap
    snap.stop_daemon()
    nothing_left(snap.state_dir, running=False)


def _text(output: bytes) -> str:
    return output.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def host_manifest(root: Path) -> dict[str, Any]:
    """The same for a directory of the host."""
    result = subprocess.run([sys.executable, "-c", MANIFEST, str(root)], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def alive(pid: int) -> bool:
    """Whether a process runs. One that nobody has reaped yet does not, if all its threads have ended: until then its
    sockets take connections."""
    try:
        left = ") Z " not in Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return left or os.listdir(f"/proc/{pid}/task") != [str(pid)]
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes_with(text: str) -> list[tuple[int, str]]:
    """Every process of this machine whose command line has this in it, with that."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if text in line:
                    found.append((int(entry.name), line))
    return found


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60, pause_s: float = 0.05) -> None:
    """Poll until `condition` holds, every `pause_s`; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause_s)


AGENT = """
from snapshotd.agent import tool, message
import subprocess, sys, os

@tool
def shell(script):
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    return {"exit_code": done.returncode, "output": done.stdout}

"""
"""The head of a test's agent: a shell tool that does what it is told."""
