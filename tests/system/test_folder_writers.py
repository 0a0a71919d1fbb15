"""The kernel names the process of each change in a folder: an agent's, or somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotd.engine.folders import writers
from snapshotd.engine.folders.writers import FOREIGN, UNKNOWN, Touches, Writers, agent_of
from snapshotd.kernel import fanotify
from snapshotd.kernel.processes import start_time
from tests.capabilities import require

SHELL = """
import subprocess, sys
for line in sys.stdin:
    subprocess.run(["sh", "-c", line]) if line[0] != "!" else exec(line[1:])
    print(flush=True)
"""


class Shell:
    """A process that runs commands as children, or (after a `!`) statements itself."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, "-I", "-c", SHELL]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder)
        self.id = (self.process.pid, start_time(self.process.pid))

    def __call__(self, command: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Watched:
    def __init__(self, folder: Path) -> None:
        (folder / "d").mkdir()
        (folder / "d" / "a").write_text("x")
        self.ended = threading.Event()
        self.root = os.open(folder, os.O_RDONLY)
        self.agent, self.person = Shell(folder), Shell(folder)
        self.writers = Writers(self.root, lambda _: self.ended.set())
        self.writers.follow(["", "d"])
        self.writers.know("s-1", self.agent.id)
        self.writers.take()
        self.writers.listen(True)

    def close(self) -> None:
        self.writers.close()
        self.agent.close()
        self.person.close()
        os.close(self.root)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    require("root")
    found = Watched(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize(
    "statement",
    [
        "open('d/a', 'w').write('y')",
        "open('d/new', 'w').write('y')",
        "__import__('os').chmod('d/a', 0o600)",
        "__import__('os').unlink('d/a')",
        "__import__('os').rename('d/a', 'd/b')",
        "__import__('os').truncate('d/a', 0)",
        "__import__('os').symlink('x', 'd/a.link')",
    ],
)
def test_each_kind_of_change_has_its_process(watched: Watched, statement: str) -> None:
    for who, shell in (("s-1", watched.agent), (FOREIGN, watched.person)):
        shell("!" + statement.replace("d/a.link", f"d/{who[-1]}"))
        told = watched.writers.take()
        assert told.knows
        assert told.touched
        assert all(told.who_touched(path) == {who} for path in told.touched), told
        if "new" not in statement and "symlink" not in statement:
            (Path(f"/proc/{watched.agent.process.pid}/cwd") / "d" / "a").write_text("x")
            watched.writers.take()


def test_children_of_the_agent_are_the_agents(watched: Watched) -> None:
    watched.agent("echo y > d/a; sleep 0.1")
    assert watched.writers.take().who_touched(b"d/a") == {"s-1"}


def test_a_new_directory_is_watched_and_counts_for_what_is_in_it(watched: Watched) -> None:
    watched.agent("!__import__('os').makedirs('n/m')")
    assert watched.writers.peek().who_touched(b"n/m/unseen") <= {"s-1", UNKNOWN}
    watched.person("!open('n/m/x', 'w').write('y')")
    told = watched.writers.take()
    assert told.who_touched(b"n/m/x") == {"s-1", FOREIGN}
    assert watched.writers.take().touched == {}


def test_a_process_that_has_gone_is_not_known(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: int) -> list[tuple[int, int]]:
        raise ProcessLookupError

    monkeypatch.setattr(writers, "ancestry", gone)
    watched.person("!open('d/a', 'w').write('y')")
    assert watched.writers.take().who_touched(b"d/a") == {UNKNOWN}


def test_too_many_directories_are_not_known(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "MOST_DIRECTORIES", 3)
    watched.agent("!import os; [os.mkdir(f'n{n}') for n in range(3)]")
    watched.writers.take()
    assert not watched.writers.take().knows


def test_the_end_of_an_agent_is_told(watched: Watched) -> None:
    watched.agent.close()
    assert watched.ended.wait(30)


def test_a_folder_of_another_kind_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fanotify, "_LOCAL", ())
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(OSError, match="does not tell"):
        Writers(fd, lambda _: None)
    os.close(fd)


def test_the_agent_is_the_process_above_the_shells_of_its_hook(tmp_path: Path) -> None:
    program = tmp_path / "send.py"
    program.write_text("import os, sys; print(os.getpid(), flush=True); sys.stdin.read()")
    hook = subprocess.Popen(
        ["sh", "-c", f"{sys.executable} {program}; true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert hook.stdout is not None
    pid = int(hook.stdout.readline())
    assert pid != hook.pid
    assert agent_of(pid) == (os.getpid(), start_time(os.getpid()))
    hook.communicate()
    assert agent_of(pid) is None


def test_an_agent_whose_task_names_the_program_is_the_agent() -> None:
    script = "import os, subprocess, sys; subprocess.run(['sh', '-c', 'echo $$; : send.py; read line'])"
    agent = subprocess.Popen(
        [sys.executable, "-c", script, "-p", "mend /x/snapshotd/hooks/send.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    assert agent_of(int(agent.stdout.readline())) == (agent.pid, start_time(agent.pid))
    agent.communicate()


def test_many_sessions_of_one_agent_hold_one_descriptor(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_RDONLY)
    writers = Writers(root, lambda session: None)
    before = len(os.listdir("/proc/self/fd"))
    me = (os.getpid(), start_time(os.getpid()))
    for number in range(200):
        writers.know(f"s-{number}", me)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    children = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(60)]
    mine = before + len(children)
    for number, child in enumerate(children):
        writers.know(f"s-{number}", (child.pid, start_time(child.pid)))
    assert len(os.listdir("/proc/self/fd")) == mine + 50
    writers.close()
    os.close(root)
    for child in children:
        child.communicate()


def test_times_are_joined() -> None:
    one = Touches(True, {b"a": {"s-1"}}, {b"d": {"s-1"}})
    two = Touches(True, {b"a": {FOREIGN}}, {})
    assert (one | two).who_touched(b"a") == {"s-1", FOREIGN}
    assert (one | two).who_touched(b"d/x") == {"s-1"}
    assert not (one | Touches()).knows
