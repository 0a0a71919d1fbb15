"""Texts for people: ids, sizes, times, tables, and names that may hold anything."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

import click

from snapshotd.terms import SECONDS, number_of, short

T = TypeVar("T")
_REST_CHARS, _REST_LEAST_CHARS = 60, 10
"""How much of a call is shown where there is no terminal, and on one of any width."""


def printable(text: str) -> str:
    """`text` with everything escaped that a terminal could take for a command or that would hide something (controls,
    bidi marks)."""
    if text.isprintable():
        return text
    return "".join(ch if ch.isprintable() else _escape(ch) for ch in text)


def _escape(ch: str) -> str:
    code = ord(ch)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as os.fsdecode hands it on
        return f"\\x{code - 0xDC00:02x}"
    return ch.encode("unicode_escape").decode()


def bytes_json(name: str, data: bytes) -> dict[str, str]:
    """Bytes for JSON: the member `name` as text, and `NAME_b64` for bytes that are not UTF-8."""
    text = data.decode(errors="replace")
    return {name: text} if text.encode() == data else {name: text, f"{name}_b64": base64.b64encode(data).decode()}


def path_json(path: str) -> dict[str, str]:
    """A sandbox path for JSON, as `bytes_json`."""
    return bytes_json("path", os.fsencode(path))


def id_text(any_id: str | None, *, full: bool) -> str:
    if any_id is None:
        return "-"
    return any_id if full else short(any_id)


def is_snapshot(ref: str, found: Any) -> bool:
    """True if `ref`, which led to this snapshot, names it; false if it names its trajectory."""
    return found.id.startswith(ref) or ref in found.tags


def size(count: int) -> str:
    """`1.2 KiB`."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1024 or unit == "TiB":
            break
    return f"{value:.1f} {unit}"


def milliseconds(value: float) -> str:
    """`2.1 ms`, `4.5 s`."""
    return f"{value / 1000:.1f} s" if value >= 1000 else f"{value:.1f} ms"


def ago(iso: str) -> str:
    """Time since a time of the API: `3 minutes ago`."""
    seconds = int((datetime.now(UTC) - datetime.fromisoformat(iso)).total_seconds())
    for unit in ("day", "hour", "minute"):
        length = SECONDS[unit[0]]
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}s ago"
    return f"{number_of(max(seconds, 0), 'second')} ago"


def file_counts(files: Any) -> str:
    """`+1 ~2 -0`; `files` is a record with added, changed and deleted, or None while they are not counted."""
    return "…" if files is None else f"+{files.added} ~{files.changed} -{files.deleted}"


def call_text(name: str, arguments: Any, limit: int) -> str:
    """A tool call on one line, cut where it gets too long: `exec make test`, `edit_file {"path": "a.py"}`."""
    argv = arguments.get("argv") if isinstance(arguments, dict) else None
    if isinstance(argv, list) and all(isinstance(word, str) for word in argv):
        shown = shlex.join(argv)
    else:
        shown = json.dumps(arguments, ensure_ascii=False) if arguments else ""
    text = f"{name} {shown}".rstrip()
    return printable(text if len(text) <= limit else text[: limit - 1] + "…")


def fit_text(text: str, taken: int, stream: TextIO | None = None) -> str:
    """Escape a text, and cut it to what a line has left behind its first `taken` columns. `stream` (standard output) tells the
    terminal's width; without a terminal the text is cut to a usual length."""
    limit = _REST_CHARS
    with contextlib.suppress(OSError):  # no terminal
        limit = max(_REST_LEAST_CHARS, os.get_terminal_size((stream or sys.stdout).fileno()).columns - taken)
    shown = printable(text)
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), fit: bool = False
) -> None:
    """Print aligned columns on standard output. `right` are the columns to align right. The last column is never
    padded; with `fit` it is any text, and `fit_text`."""
    widths = [max(len(click.unstyle(row[i])) for row in (header, *rows)) for i in range(len(header))]
    if fit:
        before = sum(widths[:-1]) + 2 * len(widths[:-1])
        rows = [(*row[:-1], fit_text(row[-1], before)) for row in rows]
    for number, row in enumerate((header, *rows)):
        cells = []
        for i, cell in enumerate(row):
            gap = " " * (widths[i] - len(click.unstyle(cell)))
            last = i == len(row) - 1
            cells.append(gap + cell if i in right else cell if last else cell + gap)
        line = "  ".join(cells).rstrip()
        click.echo(click.style(line, bold=True) if number == 0 else line)


_COLOURS = {
    "running": "green",
    "done": "green",
    "stored": "green",
    "finished": "green",
    "failed": "red",
    "lost": "red",
    "interrupted": "yellow",
    "timed-out": "red",
    "unknown": "yellow",
    "pruned": "yellow",
}


def status(word: str) -> str:
    """A status word in its colour (click takes the colour away where standard output is no terminal)."""
    colour = _COLOURS.get(word.partition(",")[0])
    return click.style(word, fg=colour) if colour else word


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print one JSON value on standard output: on one line, or indented. A record is an object with its fields."""
    click.echo(json.dumps(value, indent=indent, default=_record_json))


def _record_json(record: Any) -> dict[str, Any]:
    from dataclasses import asdict  # 10 ms, where a record is printed

    return asdict(record)


def print_answer(value: Any, text: str, *, as_json: bool) -> None:
    """Print a command's answer: `value` as JSON, or `text` for people."""
    if as_json:
        print_json(value)
    else:
        click.echo(text)


def print_list(
    found: Sequence[T],
    header: Sequence[str],
    row: Callable[[T], Sequence[str]],
    *,
    as_json: bool,
    right: Sequence[int] = (),
) -> None:
    """Print records: as JSON, or as a table with the row that `row` makes of each."""
    if as_json:
        print_json(found)
    else:
        table(header, [row(item) for item in found], right=right)


def print_ids(ids: Iterable[str], *, full: bool) -> None:
    for each in ids:
        click.echo(id_text(each, full=full))


def snapshot_line(
    *,
    seq: int,
    snapshot_id: str,
    tool: str,
    status: str,
    files: dict[str, int] | None,
    pause_ms: float,
    method: str,
    state: str | None = None,
    reused: str | None = None,
    argument: str = "",
) -> str:
    """`● 3 a1b2c3d4e5f6  run_tests  done  +1 ~2 -0  1.2 KiB  2.1 ms`, the state if it was waited for, and the call's main
    argument. `files`: None until counted."""
    parts = [f"● {seq} {short(snapshot_id)}", printable(tool), status]
    parts += (
        ["…"] if files is None else [f"+{files['added']} ~{files['changed']} -{files['deleted']}", size(files["bytes"])]
    )
    parts.append(milliseconds(pause_ms))
    if method == "copy":
        parts.append("(copied: live processes)")
    if reused is not None:
        parts.append(f"(reused from {short(reused)})")
    if state is not None:
        parts.append(state)
    line = "  ".join(parts)
    return f"{line}  {fit_text(argument, len(line) + 2, sys.stderr)}" if argument else line
