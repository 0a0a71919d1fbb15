"""The text of a changed path: one line for people, one object for programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from snapshotd.cli.text import path_json, printable
from snapshotd.client.results import ChangeInfo

_LETTERS = {"added": ("A", "green"), "changed": ("M", "yellow"), "deleted": ("D", "red")}


def change_line(change: ChangeInfo) -> str:
    """`M /workspace/app.py`, in its colour."""
    letter, colour = _LETTERS[change.change]
    return click.style(f"{letter} {change_path(change)}", fg=colour)


def change_path(change: ChangeInfo) -> str:
    """The path with a mark of its kind, as `ls -F` has them."""
    entry = change.after or change.before
    mark = {"directory": "/", "symlink": "@", "fifo": "|", "socket": "="}.get(entry.kind if entry else "", "")
    return printable(change.path) + mark


def change_json(change: ChangeInfo) -> dict[str, Any]:
    """{change,path,before,after}, and path_b64 for a path that is not UTF-8."""
    answer: dict[str, Any] = {"change": change.change, **path_json(change.path)}
    for side in ("before", "after"):
        entry = getattr(change, side)
        answer[side] = None if entry is None else dataclasses.asdict(entry)
    return answer
