"""A user's own folder in which two agents and a person write: the agents are processes, the person is this one."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotd.api.wire import hook_socket_of
from snapshotd.client.client import Snapshotd
from snapshotd.errors import SnapshotdError
from tests.e2e.support import Snap

DIRECTORIES = ("", "d/", "d/e/")
NAMES = tuple(one + name for one in DIRECTORIES for name in ("a", "b", "x.log", "y.log"))
AGENT = r"""
import json, os, socket, sys
path, folder = sys.argv[1:]
os.chdir(folder)
def hook(event):
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    fd = os.open(".", os.O_RDONLY)
    socket.send_fds(s, [b"hook\0claude\n"], [fd])
    s.sendall(json.dumps(event).encode())
    answer = b""
    while piece := s.recv(65536):
        answer += piece
    return answer
for line in sys.stdin:
    asked = json.loads(line)
    if "hook" in asked:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, hook(asked["hook"]))
            except OSError as exc:
                os.write(write, b"\1gone: " + str(exc).encode())
            os._exit(0)
        os.close(write)
        told = b""
        while piece := os.read(read, 65536):
            told += piece
        os.close(read)
        os.waitpid(child, 0)
        print(json.dumps(told.decode()), flush=True)
    else:
        child = os.fork() if asked["forked"] else 0
        if not child:
            try:
                exec(asked["run"])
            except OSError:
                pass
            if asked["forked"]:
                os._exit(0)
        else:
            os.waitpid(child, 0)
        print("0", flush=True)
"""
State = dict[str, tuple[int, bytes]]
"""Path to mode, and content or target."""
Groups = set[frozenset[str]]
"""Paths that are names of one file."""
Target = tuple[str, int, State, Groups]
"""A snapshot, its time, and the folder then."""


def state_of(folder: Path) -> State:
    """Everything in the folder."""
    found: State = {}
    for base, directories, files in os.walk(folder):
        for name in (*directories, *files):
            path = os.path.join(base, name)
            st = os.lstat(path)
            content = Path(path).read_bytes() if stat.S_ISREG(st.st_mode) else b""
            found[os.path.relpath(path, folder)] = (st.st_mode, content)
    return found


def groups_of(folder: Path) -> Groups:
    """The files in the folder that have several names there."""
    found: dict[int, set[str]] = {}
    for base, _, files in os.walk(folder):
        for name in files:
            path = os.path.join(base, name)
            found.setdefault(os.lstat(path).st_ino, set()).add(os.path.relpath(path, folder))
    return {frozenset(names) for names in found.values() if len(names) > 1}


@dataclass
class Agent:
    """One session: a process that makes calls."""

    session: str
    process: subprocess.Popen[str]
    call: str | None = None
    number: int = 0
    is_told: bool = True
    """The daemon that runs has been told of the call's begin."""

    def ask(self, **asked: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def hook(self, name: str, **more: Any) -> None:
        told = self.ask(hook={"hook_event_name": name, "session_id": self.session, **more})
        assert told == "\0", told

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class World:
    """`now` counts changes; each token is one write, and tells whose it is."""

    snap: Snap
    folder: Path
    rng: random.Random
    agents: list[Agent] = field(default_factory=list)
    client: Any = None
    trajectory: str = ""
    targets: list[Target] = field(default_factory=list)
    touched: dict[str, int] = field(default_factory=dict)
    """Path to the last time at which the person touched it."""
    made: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Path to the times at which agents touched it, while the daemon knew of the call, and their sessions."""
    brought: set[bytes] = field(default_factory=set)
    """Contents that a rewind brought back after an agent had taken them: another one may take them again."""
    ruled: set[str] = field(default_factory=set)
    """Names that a rule has ignored at some time: a file so named may be in no snapshot."""
    happened: Counter[str] = field(default_factory=Counter)
    """The things that must happen in a long run, or it proves nothing."""
    now: int = 0
    sessions: int = 0

    def begin(self) -> None:
        for name in DIRECTORIES[1:]:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / ".gitignore").write_text("*.log\n")
        self.client = Snapshotd(state_dir=self.snap.state_dir, autostart=False)
        for first, *others in (("a", "d/a", "d/e/a"), ("b", "d/b")):
            (self.folder / first).write_text("p0 ")
            for other in others:
                os.link(self.folder / first, self.folder / other)
        for _ in range(2):
            self.person_writes()
        self.agents = [self.new_agent(), self.new_agent()]
        for agent in self.agents:
            agent.hook("SessionStart")
        (self.trajectory,) = [
            one.id
            for one in self.client.trajectories()
            if self.client.log(one.id)[0].tool.arguments.get("folder") == str(self.folder)
        ]
        self.note()

    def new_agent(self) -> Agent:
        self.sessions += 1
        words = [sys.executable, "-I", "-c", AGENT, str(hook_socket_of(self.snap.state_dir)), str(self.folder)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return Agent(f"s-{self.sessions}", process)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()

    def note(self) -> None:
        """The newest snapshot is a target of rewinds, unless a call runs: it would hold a part of it."""
        if not any(agent.call for agent in self.agents):
            head = self.client.log(self.trajectory, last=1)[-1]
            self.targets.append((head.id, self.now, state_of(self.folder), groups_of(self.folder)))

    # -- writing -------------------------------------------------------------------------------------------------------

    def statement(self, token: str) -> tuple[str, list[str]]:
        """A change in Python, and the paths that it touches."""
        path, other = self.rng.choice(NAMES), self.rng.choice(NAMES)
        kind = self.rng.choice(
            ("write", "write", "append", "replace", "remove", "move", "link", "mode", "rules", "directory")
        )
        if kind == "rules":
            text = self.rng.choice(("*.log\n", "", "x.log\n", "a\n*.log\n", "d/\n", "*.log\n!x.log\n"))
            self.ruled |= {"a"} if text.startswith("a") else {"d"} if text == "d/\n" else set()
            return f"open('.gitignore', 'w').write({text!r} + '#{token}\\n')", [".gitignore"]
        if kind == "append":
            return f"open({path!r}, 'a').write('{token} ')", [path]
        if kind == "replace":
            return f"open('.new', 'w').write('{token} '); os.rename('.new', {path!r})", [path]
        if kind == "remove":
            return f"os.unlink({path!r})", [path]
        if kind == "move":
            return f"os.rename({path!r}, {other!r})", [path, other]
        if kind == "link":
            return f"os.link({path!r}, {other!r})", [other]
        if kind == "mode":
            return f"os.chmod({path!r}, 0o{self.rng.choice((600, 640, 700))})", [path]
        if kind == "directory":
            place = self.rng.choice(("n", "d/n"))
            return f"os.makedirs({place!r}, exist_ok=True); open({place + '/a'!r}, 'w').write('{token} ')", [
                place + "/a"
            ]
        return f"open({path!r}, 'w').write('{token} ')", [path]

    def person_writes(self) -> None:
        self.now += 1
        statement, paths = self.statement(f"p{self.now}")
        before = state_of(self.folder)
        if any(path.split("/")[-2:-1] == ["n"] and os.path.dirname(path) not in before for path in paths) or (
            "makedirs" in statement and any(agent.call for agent in self.agents)
        ):
            return  # a directory so new has no mark yet: the kernel does not tell
        here = os.getcwd()
        os.chdir(self.folder)
        try:
            exec(statement)
        except OSError:
            pass
        finally:
            os.chdir(here)
        after = state_of(self.folder)
        for path in before.keys() | after.keys():
            if before.get(path) != after.get(path):
                self.touched[path] = self.now
                self._count("person", path, statement)

    def agent_writes(self, agent: Agent) -> None:
        self.now += 1
        statement, _ = self.statement(f"a{self.now}")
        before = state_of(self.folder)
        agent.ask(run=statement, forked=self.rng.random() < 0.3)
        after = state_of(self.folder)
        for path in before.keys() | after.keys():
            if before.get(path) != after.get(path):
                self.made.setdefault(path, []).append((self.now, agent.session if agent.is_told else ""))
                self._count("agent", path, statement)

    def _count(self, who: str, path: str, statement: str) -> None:
        """Count a change of rules or of a file with several names, and a new name of a file."""
        self.happened[f"{who}: rules"] += path == ".gitignore"
        self.happened[f"{who}: link"] += "os.link" in statement
        if any(path in group for group in groups_of(self.folder)) and "os.link" not in statement:
            self.happened[f"{who}: linked file"] += 1

    # -- calls ---------------------------------------------------------------------------------------------------------

    def begin_call(self, agent: Agent) -> None:
        agent.number += 1
        agent.call = f"{agent.session}-{agent.number}"
        agent.is_told = True
        agent.hook("PreToolUse", tool_name="Bash", tool_input={}, tool_use_id=agent.call)

    def end_call(self, agent: Agent) -> None:
        call, agent.call = agent.call, None
        agent.hook("PostToolUse", tool_name="Bash", tool_input={}, tool_use_id=call, tool_response={})
        self.note()

    def prompt(self, agent: Agent) -> None:
        agent.call = None
        agent.hook("UserPromptSubmit", prompt="go on")
        self.note()

    def kill_agent(self, agent: Agent) -> None:
        self.happened["agent killed in a call"] += agent.call is not None
        agent.process.send_signal(signal.SIGKILL)
        agent.process.communicate()
        if agent.call is not None and not agent.is_told:
            self._forget(agent)
        self.agents[self.agents.index(agent)] = self.new_agent()

    def kill_daemon(self, env: dict[str, str] | None = None) -> None:
        self.snap.kill_daemon()
        self.happened["daemon killed in a call"] += any(agent.call is not None for agent in self.agents)
        for agent in self.agents:
            if agent.call is not None:
                self._forget(agent)
        Snap(self.snap.state_dir, {**self.snap.env, **(env or {})})("ls")

    def _forget(self, agent: Agent) -> None:
        """What the agent did in a call whose begin no daemon knows any more may be named, and need not be."""
        agent.is_told = False
        for times in self.made.values():
            times[:] = [(at, session) for at, session in times if session != agent.session]

    # -- going back ----------------------------------------------------------------------------------------------------

    def rewind(self, target: Target, session: str | None) -> None:
        before = state_of(self.folder)
        try:
            done = self.client.rewind(self.trajectory, target[0], mode="files", session=session or "all")
        except SnapshotdError as exc:
            if "has changed nothing" not in str(exc):
                raise
            return
        left = done.tool.arguments.get("left", [])
        self.check_kept(before, target)
        self.check_named(target, session, left)
        self.check_linked(before, target)
        self.happened["rewind in a call"] += any(agent.call is not None for agent in self.agents)
        self.happened["rewind that changed something"] += before != state_of(self.folder)
        self.happened["rewind that left something"] += bool(left)
        self.note()

    def rewind_cut_off(self, target: Target, point: str) -> None:
        """The daemon dies within a rewind, at its point; the next one settles it."""
        self.kill_daemon({"SNAPSHOTD_FAILPOINT": point})
        before = state_of(self.folder)
        try:
            self.client.rewind(self.trajectory, target[0], mode="files", session="all")
        except SnapshotdError:
            self.snap("ls")
            self.happened["rewind cut off"] += 1
        else:
            self.kill_daemon()
        self.agents[0].hook("SessionStart")
        self.check_kept(before, target)
        self.note()

    def undo(self) -> None:
        before = state_of(self.folder)
        try:
            self.client.undo(self.trajectory)
        except SnapshotdError as exc:
            if "nothing to undo" not in str(exc):
                raise
            return
        self.check_kept(before, None)
        self.happened["undo that changed something"] += before != state_of(self.folder)
        self.note()

    def check_kept(self, before: State, target: Target | None) -> None:
        """No byte that only the person wrote is gone, and what the person has touched since the target is as it was."""
        after = state_of(self.folder)
        there = [content for _, content in after.values()]
        for path, (_, content) in before.items():
            if content and all(word.startswith(b"p") for word in content.split() if not word.startswith(b"#")):
                if path == ".gitignore" or content in self.brought:
                    continue
                assert any(content in one for one in there), (path, content, before, after)
        self.brought |= {content for _, content in after.values()} - {content for _, content in before.values()}
        if target is not None:
            for path, at in self.touched.items():
                if at > target[1]:
                    assert after.get(path) == before.get(path), (path, before.get(path), after.get(path))
        assert not [path for path in after if path.startswith(".snapshotd-")]

    def check_named(self, target: Target, session: str | None, left: list[str]) -> None:
        """A path that the session's calls have changed since is as it was, or named."""
        after = state_of(self.folder)
        for path, times in self.made.items():
            mine = [one for at, one in times if at > target[1] and one and session in (None, one)]
            if mine and after.get(path) != target[2].get(path) and not self._may_be_ignored(path):
                if path in after and stat.S_ISDIR(after[path][0]) and path in target[2]:
                    continue
                assert any(one.startswith(path + " ") for one in left), (path, times, target, left, after.get(path))

    def check_linked(self, before: State, target: Target) -> None:
        """The names that went back, and were names of one file, are again."""
        after = state_of(self.folder)
        for group in target[3]:
            back = [path for path in group if before.get(path) != after.get(path) == target[2][path]]
            back = [path for path in back if not self._may_be_ignored(path)]
            if len(back) > 1:
                self.happened["names of one file went back"] += 1
                assert len({(self.folder / path).stat().st_ino for path in back}) == 1, (back, target)

    def _may_be_ignored(self, path: str) -> bool:
        return path.endswith(".log") or bool(self.ruled & set(path.split("/")))
