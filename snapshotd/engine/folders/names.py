"""Paths of a folder as records and messages have them: text, without loss."""

from __future__ import annotations

import re

_ESCAPE = re.compile(rb"\\\\|\\x[0-9a-f]{2}")


def name_of(path: bytes) -> str:
    r"""The path as text. A byte that is no UTF-8 becomes `\xff`, and a backslash two, so no two paths have one name."""
    return path.replace(b"\\", b"\\\\").decode(errors="backslashreplace")


def path_of(name: str) -> bytes:
    """The path that `name_of` was given."""
    return _ESCAPE.sub(lambda found: b"\\" if found[0] == b"\\\\" else bytes([int(found[0][2:], 16)]), name.encode())
