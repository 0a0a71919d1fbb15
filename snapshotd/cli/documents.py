"""JSON that people give and see: values from files and arguments, one value on a line, a value as a page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from snapshotd.api.wire import BODY_MAX_BYTES
from snapshotd.cli.command import refuse
from snapshotd.cli.text import printable

_SHORT_CHARS = 60


def json_file(path: str, what: str) -> Any:
    """The JSON value in a file of this machine, or on standard input (`-`). UsageError calls it `what`."""
    return json_value(file_bytes(path, what).decode(errors="replace"), f"{what} in {path}")


def file_bytes(path: str, what: str) -> bytes:
    """A file of this machine, or standard input (`-`), at most as large as a request may be. UsageError."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(BODY_MAX_BYTES + 1)
        else:
            with Path(path).open("rb") as f:
                data = f.read(BODY_MAX_BYTES + 1)
    except OSError as exc:
        raise click.UsageError(f"{what} cannot be read from {path}: {exc.strerror}") from exc
    if len(data) > BODY_MAX_BYTES:
        refuse(f"{path} has more than {BODY_MAX_BYTES >> 20} MiB, which is too much for {what}; make it smaller")
    return data


def json_value(text: str, what: str) -> Any:
    """UsageError for a text that is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise click.UsageError(f"{what} is not JSON ({exc}); text needs quotation marks") from exc


def messages_of(value: Any, what: str) -> list[tuple[str, Any]]:
    """Messages as the client takes them. UsageError when it is not an array of {"role","content"}."""
    if not isinstance(value, list) or not all(
        isinstance(item, dict) and set(item) == {"role", "content"} and isinstance(item["role"], str) for item in value
    ):
        raise click.UsageError(f'{what} is not an array of {{"role", "content"}}')
    return [(item["role"], item["content"]) for item in value]


def short_json(value: Any) -> str:
    """The beginning of a value, safe to show, on one line."""
    return shorten(printable(json.dumps(value, ensure_ascii=False)))


def shorten(text: str) -> str:
    return text if len(text) <= _SHORT_CHARS else f"{text[: _SHORT_CHARS - 1]}…"


def as_page(value: Any) -> str:
    """A value for people to read and edit: indented JSON, in which everything that is not printable is escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return "".join(ch if ch.isprintable() or ch == "\n" else json.dumps(ch)[1:-1] for ch in text)


def content_text(content: Any) -> str:
    """A message's content: text as it is, everything else as JSON."""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
