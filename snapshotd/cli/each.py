"""`snapshotd shell --each`: a shell that takes one snapshot after each command line.

Each line is a tool call of its own, in a shell of its own that ends with the line: nothing but what the line left
running is alive at its snapshot. So a pivot takes the snapshot, and `back` can give the sandbox its earlier files. The
program `snapshotd-line` of the share directory hands directory and variables from one shell to the next, in files of
/dev/shm. A resident shell would need the copy path at each snapshot, and no root can be switched below it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import click

from snapshotd.cli.follow import INTERRUPTED, note
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ExecInfo
from snapshotd.errors import SnapshotdError
from snapshotd.types import SHORT_ID_CHARS, short

_PROGRAM = "snapshotd-line"
_STATE = "/dev/shm/snapshotd-shell-"
_BEGIN = "each line is a tool call with its snapshot; `back` takes the last one back, `snap NAME` names its snapshot, Ctrl-D ends"
_UNFINISHED = ("end of file", "unexpected EOF", "Unterminated", "unterminated")
"""Words of shells about a text that breaks off."""

Run = Callable[[list[str], dict[str, Any]], ExecInfo]
"""Runs a command in the sandbox, with options of `Snapshotd.exec` besides its own, and shows its snapshot."""


class TypedInput:
    """The input of one command: keys that are typed while it runs, not those for the next command. One thread reads,
    another ends it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._ended_r, self._ended_w = os.pipe2(os.O_CLOEXEC)

    def read(self, count: int) -> bytes:
        """At most `count` bytes that were typed; nothing after `end`."""
        ready = select.select([self._fd, self._ended_r], [], [])[0]
        return b"" if self._ended_r in ready else os.read(self._fd, count)

    def end(self) -> None:
        """The command has ended. Once."""
        os.write(self._ended_w, b".")


class EachShell:
    """One such shell of one trajectory."""

    def __init__(self, client: Snapshotd, trajectory: str, run: Run, shell: str | None, cwd: str | None) -> None:
        self._client, self._run, self._shell, self._cwd = client, run, shell or "auto", cwd
        self._trajectory = client.trajectory(trajectory)
        self._state = f"{_STATE}{secrets.token_hex(8)}"
        self._heads = [self._trajectory.head]
        """The snapshot before the first line, and the one after each line that was not taken back."""
        self._count = 0
        self._kept = [0]
        """Number of the shell's state at each of these snapshots."""
        self._code = 0

    def work(self, *, typed: bool) -> int:
        """Read lines until their end. `typed`: a person types them. Returns the exit code of the last one."""
        if typed:
            note(_BEGIN)
        for line in self._lines(typed=typed):
            words = line.split()
            if words[0] in ("exit", "logout") and len(words) <= 2 and all(map(str.isdigit, words[1:])):
                return int(words[1]) % 256 if len(words) == 2 else self._code
            try:
                self._code = self._do(line, words)
            except SnapshotdError as exc:
                if not typed:
                    raise
                note(exc.message)
                self._code = 125
            except KeyboardInterrupt:  # not at a command: that gets the key itself
                if not typed:
                    raise
                self._code = INTERRUPTED
        return self._code

    def _do(self, line: str, words: list[str]) -> int:
        if words == ["back"]:
            return self._back()
        if words[0] == "snap" and len(words) == 2:
            self._client.tag(self._heads[-1], words[1])
            note(f"{words[1]} is {short(self._heads[-1])}")
            return 0
        if words[0] in ("back", "snap"):
            note("`back` takes the last line back, `snap NAME` names its snapshot")
            return 2
        self._count += 1
        env = {
            "SNAPSHOTD_SHELL": self._shell,
            "SNAPSHOTD_LINE_FROM": f"{self._state}.{self._kept[-1]}",
            "SNAPSHOTD_LINE_TO": f"{self._state}.{self._count}",
        }
        done = self._run([_PROGRAM, line], {"env": env, "cwd": self._cwd})
        assert done.snapshot is not None
        self._heads.append(done.snapshot.id)
        self._kept.append(self._count)
        return done.exit_code

    def _back(self) -> int:
        if len(self._heads) == 1:
            note("there is no line to take back; `snapshotd rewind` goes further back")
            return 1
        taken = self._client.rewind(self._trajectory.id, self._heads[-2], mode="files")
        self._heads.pop()
        self._kept.pop()
        note(f"the files are those of {short(self._heads[-1])} again; {short(taken.id)} records it")
        return 0

    def _lines(self, *, typed: bool) -> Iterator[str]:
        """Whole command lines, which may be several lines of text. An empty one is none."""
        text = ""
        while True:
            prompt = (
                "> " if text else f"{self._trajectory.name or self._trajectory.id[:SHORT_ID_CHARS]} {self._count + 1}$ "
            )
            try:
                read = input(prompt) if typed else sys.stdin.readline()
            except KeyboardInterrupt:
                text = ""
                click.echo(err=True)
                continue
            except EOFError:
                click.echo(err=True)
                return
            if not typed and not read:
                if text.strip():
                    yield text
                return
            text += read.rstrip("\n")
            if not text.strip() or text.lstrip().startswith("#"):
                text = ""
            elif is_unfinished(text):
                text += "\n"
            else:
                yield text
                text = ""


def is_unfinished(text: str) -> bool:
    """True if a shell would read on after this text: a quote or a loop is open. It is parsed, not run."""
    if text.endswith("\\") and not text.endswith("\\\\"):
        return True
    shell = shutil.which("bash") or "/bin/sh"
    done = subprocess.run([shell, "-n", "-c", text], capture_output=True, text=True, env={"LC_ALL": "C"}, check=False)
    return done.returncode != 0 and any(words in done.stderr for words in _UNFINISHED)


@contextlib.contextmanager
def enable_editing() -> Iterator[None]:
    """Let a person edit the lines that they type, and find earlier ones again."""
    with contextlib.suppress(ImportError):  # Python can be built without it
        import readline

        readline.parse_and_bind("set enable-bracketed-paste off")
    yield
