"""Transcripts in a page: what is typed, and what is printed then. Run as they stand, and compared.

A block marked `console` has commands behind `$ ` (continued behind `> `), each followed by its output. All of a page's
commands run in one shell. What differs from run to run may do so: ids and random numbers are *bound*, each to the one
that stands in its place, and have to be that again wherever the page shows it, also in later commands; times, pauses
and whether a snapshot is stored already are not compared.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e import forked_command
from tests.e2e.support import Snap

_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_BOUND = re.compile(r"\b(?:[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{12,32}|0\.\d{6})\b")
_VARYING = (
    (re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z"), "TIME"),
    (re.compile(r"\d+ (?:seconds?|minutes?) ago|\bnow\b"), "AGO"),
    (re.compile(r"\d+(?:\.\d)? ms\b"), "MS"),
    (re.compile(r"\d+\.\d s\b"), "S"),
    (re.compile(r"\bcaptured\b"), "stored"),
    (re.compile(r" {2,}"), " "),
)
_COUNTED, _NOT_COUNTED = re.compile(r"\+\d+ ~\d+ -\d+ +[\d.]+ [KMG]?i?B\b"), "…"
"""Changed files are counted in the background: a command that has just made a snapshot may not know the numbers yet."""
_NOISE = "snapshotd: still starting"
_LOOKS = tuple(f"snapshotd {verb}" for verb in ("approvals", "diff", "journal", "log", "ls", "tasks", "tree"))
"""Commands that change nothing: what they show may take a moment to come true."""
_DEADLINE_S = 60.0
_STATE_DIR = "/var/lib/snapshotd"
"""The state directory, as a page has it."""
_SHOWN = 12
"""Characters of an id in its short form."""


@dataclass(frozen=True)
class Typed:
    """A command, and the lines that the page shows behind it."""

    command: str
    output: tuple[str, ...]


def transcript(page: str) -> list[Typed]:
    """All commands of a page, in order."""
    found: list[Typed] = []
    for block in _BLOCK.findall(page):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = part.splitlines()
            more = next((number for number, line in enumerate(lines[1:], 1) if not line.startswith("> ")), len(lines))
            command = "\n".join([lines[0], *(line[2:] for line in lines[1:more])])
            found.append(Typed(command, tuple(line for line in lines[more:] if line)))
    return found


@dataclass
class Bindings:
    """Which id or number of this run stands for which of the page."""

    real: dict[str, str] = field(default_factory=dict)

    def typed(self, command: str) -> str:
        """A command of the page, with the ids of this run."""
        return _BOUND.sub(lambda match: self.real.get(match[0][:_SHOWN], match[0])[: len(match[0])], command)

    def match(self, shown: tuple[str, ...], printed: list[str]) -> str | None:
        """Bind what the page shows to what was printed. Else says what differs, and binds nothing."""
        if len(shown) != len(printed):
            return f"{len(printed)} lines were printed, and the page shows {len(shown)}"
        bound = dict(self.real)
        for expected, line in zip(shown, printed, strict=True):
            if _NOT_COUNTED in line:
                expected = _COUNTED.sub(_NOT_COUNTED, expected)
            if _plain(expected) != _plain(line):
                return f"{line!r} was printed, and the page shows {expected!r}"
            for theirs, ours in zip(_BOUND.findall(expected), _BOUND.findall(line), strict=True):
                known = bound.setdefault(theirs[:_SHOWN], ours)
                if known[:_SHOWN] != ours[:_SHOWN] or len(ours) != len(theirs):
                    return f"{ours} was printed where the page shows {theirs}, which is {known} in this run"
                bound[theirs[:_SHOWN]] = max(known, ours, key=len)
        if len({text[:_SHOWN] for text in bound.values()}) != len(bound):
            return f"one thing was printed where the page shows two: {bound}"
        self.real = bound
        return None


def _plain(line: str) -> str:
    line = _BOUND.sub("BOUND", line)
    for pattern, put in _VARYING:
        line = pattern.sub(put, line)
    return line.rstrip()


class Shell:
    """One bash for all commands of a page. Use it as a context manager."""

    def __init__(self, folder: Path, env: dict[str, str], timeout_s: float = 240) -> None:
        self._timeout_s = timeout_s
        self._bash = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            stderr=subprocess.STDOUT,
            errors="replace",
        )

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        self._bash.stdin.close()
        try:
            self._bash.wait(self._timeout_s)
        finally:
            self._bash.kill()
            self._bash.wait()
            self._bash.stdout.close()

    def run(self, command: str) -> tuple[list[str], int]:
        """What it prints, stdout and stderr together, and its exit status."""
        assert self._bash.stdin is not None
        assert self._bash.stdout is not None
        end = "--- the end of this command ---"
        overdue = threading.Timer(self._timeout_s, self._bash.kill)
        overdue.start()
        try:
            self._bash.stdin.write(
                f"{{\n{command}\n}} </dev/null\n_status=$?; printf '\\n%s %d\\n' '{end}' $_status; (exit $_status)\n"
            )
            self._bash.stdin.flush()
            printed: list[str] = []
            for line in self._bash.stdout:
                if line.startswith(end):
                    return [text for text in printed if text and not text.startswith(_NOISE)], int(line.split()[-1])
                printed.append(line.rstrip("\n"))
        finally:
            overdue.cancel()
            overdue.join()
        raise AssertionError(f"the shell ended, or took longer than {self._timeout_s} s, in {command!r}: {printed}")


def environment(snap: Snap, folder: Path) -> dict[str, str]:
    """Variables for a shell that finds this checkout's `snapshotd` and its Python first. `folder` is made for them."""
    folder.mkdir()
    forked_command.install(folder)
    python = folder / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    return {**snap.env, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": root, "COLUMNS": "200"}


def follow(typed: list[Typed], shell: Shell, snap: Snap) -> None:
    """Type all commands, and compare what they print. A page shows `echo $?` behind one that fails."""
    bindings = Bindings()
    for number, entry in enumerate(typed):
        fails = number + 1 < len(typed) and typed[number + 1].command == "echo $?"
        _follow(entry, bindings, shell, snap, fails=fails)


def _follow(entry: Typed, bindings: Bindings, shell: Shell, snap: Snap, *, fails: bool) -> None:
    command = bindings.typed(entry.command).replace(_STATE_DIR, str(snap.state_dir))
    deadline = time.monotonic() + _DEADLINE_S
    while True:
        printed, status = shell.run(command)
        differs = bindings.match(entry.output, [line.replace(str(snap.state_dir), _STATE_DIR) for line in printed])
        if differs is None or not command.startswith(_LOOKS) or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert differs is None, (entry.command, differs, printed)
    assert (status != 0) == fails, (entry.command, status, printed)
