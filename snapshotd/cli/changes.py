"""The text of a changed path: one line for people, one object for programs."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from snapshotd.cli.follow import RawOutput
from snapshotd.cli.text import path_json, printable
from snapshotd.client.results import ChangeInfo

LETTERS = {"added": ("A", "green"), "changed": ("M", "yellow"), "deleted": ("D", "red")}


def change_line(change: ChangeInfo) -> str:
    """`M /workspace/app.py`, in its colour."""
    letter, colour = LETTERS[change.change]
    return click.style(f"{letter} {change_path(change)}", fg=colour)


class ShownPatch:
    """A patch on standard output: on a terminal in colour and without controls, elsewhere its bytes."""

    def __init__(self) -> None:
        self._raw = RawOutput()
        self._for_people = sys.stdout.isatty()
        self._rest = b""
        self._is_header = False

    def write(self, data: bytes) -> None:
        """Print the next piece. BrokenPipeError: the reader of our output has gone away."""
        if not self._for_people:
            self._raw.write("stdout", data)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line)

    def end(self) -> None:
        """Print what is left, when all has been written."""
        if self._rest:
            self._line(self._rest)

    def _line(self, line: bytes) -> None:
        if line.startswith(b"diff "):
            self._is_header = True
        elif line.startswith((b"@@", b"GIT binary patch")):
            self._is_header = False
        colour = None if self._is_header else _IN_PATCH.get(line[:1])
        text = "\t".join(printable(part) for part in os.fsdecode(line).split("\t"))
        click.echo(click.style(text, fg=colour, bold=self._is_header or None))


_IN_PATCH = {b"+": "green", b"-": "red", b"@": "cyan"}
"""Colours by a line's first byte, between the headers of files."""


def change_path(change: ChangeInfo) -> str:
    """The path with a mark of its kind, as `ls -F` has them."""
    entry = change.after or change.before
    return marked_path(change.path, entry.kind if entry else "")


def marked_path(path: str, kind: str) -> str:
    """The path with the mark of this kind."""
    return printable(path) + {"directory": "/", "symlink": "@", "fifo": "|", "socket": "="}.get(kind, "")


def change_json(change: ChangeInfo) -> dict[str, Any]:
    """Return {change,path,before,after}, and path_b64 for a path that is not UTF-8."""
    return {"change": change.change, **path_json(change.path), "before": change.before, "after": change.after}
