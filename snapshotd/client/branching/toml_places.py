"""The line of a key in a TOML text, as far as a look at the lines can tell: Python's parser keeps no places."""

from __future__ import annotations

import re


def place(text: str, *path: str) -> str:
    """`:LINE` of a key below tables, or of the table that it would be in; empty if neither is found."""
    table: list[str] = []
    best, depth = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[+([^\]]+)\]", line)
        found = re.match(r"\s*([\w\"'. -]+?)\s*=", line)
        if header:
            table = _words(header[1])
        here = table if header else [*table, *_words(found[1])] if found else []
        if here[: len(path)] == list(path):
            return f":{number}"
        shared = next((at for at, (one, other) in enumerate(zip(here, path, strict=False)) if one != other), None)
        known = min(len(here), len(path)) if shared is None else shared
        if known > depth:
            best, depth = f":{number}", known
    return best


def _words(dotted: str) -> list[str]:
    return [word.strip(" \t\"'") for word in dotted.split(".")]
