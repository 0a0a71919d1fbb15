"""Variants as people write them: a table for each in a TOML file, or `LABEL:KEY=VALUE`. docs/branching.md has all keys.

A table differs from the keywords of `Snapshotd.fork` where text says less than Python: it names files, and the variables
of this machine that hold secrets.
"""

from __future__ import annotations

import json
import os
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from snapshotd.client.branching import toml_checks as checks
from snapshotd.client.branching.toml_checks import Check, TomlText
from snapshotd.client.local.arguments import sandbox_path
from snapshotd.config import read_variables
from snapshotd.errors import UsageError
from snapshotd.terms import nearest

VARIANT: dict[str, Check] = {
    "args": checks.WORDS,
    "env": checks.TABLE_OF_TEXTS,
    "secrets": checks.TABLE_OF_TEXTS,
    "model": checks.TEXT,
    "message": checks.TABLE_OF_TEXTS,
    "drop_messages": checks.WHOLE,
    "messages": checks.CONVERSATION,
    "result": checks.JSON,
    "state": checks.JSON_TABLE,
    "drop_state": checks.TEXTS,
    "files": checks.TABLE_OF_TEXTS,
    "remove": checks.TEXTS,
    "network": checks.TEXT,
    "memory": checks.SIZE,
    "cpus": checks.NUMBER,
    "pids": checks.WHOLE,
    "disk": checks.SIZE,
}
NAMED_VARIANT = {"name": checks.TEXT, **VARIANT}
_TABLES = ("env", "secrets", "message", "state", "files")
_AS_THEY_ARE = ("name", "args", "env", "model", "drop_messages", "network", "memory", "cpus", "pids", "disk")

Tables = dict[str, dict[str, Any]]
"""The table of each label."""


def read_tables(file: Path) -> Tables:
    """The variants in a file. UsageError: it cannot be read, or names the line of what is wrong."""
    try:
        text = file.read_text(encoding="utf-8")
        tables = tomllib.loads(text)
    except OSError as exc:
        raise UsageError(f"the variants in {file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"the variants in {file} cannot be read: {exc}") from exc
    toml = TomlText(text, str(file))
    for label, table in tables.items():
        if not isinstance(table, dict):
            raise toml.refusal(f"{label} is no variant; write a table, [{label}]", label)
        for key, value in table.items():
            if (fault := _fault(label, key, value)) is not None:
                raise toml.refusal(fault, label, key)
    if not tables:
        raise UsageError(f"there is no variant in {file}; write a table for each, such as [cold]")
    return tables


def _fault(label: str, key: str, value: Any) -> str | None:
    """The reason why a variant cannot have this key and value."""
    if key not in NAMED_VARIANT:
        return f"the variant {label} has an unknown key {key!r}{nearest(key, NAMED_VARIANT)}"
    fits, wanted = NAMED_VARIANT[key]
    return None if fits(value) else f"{key} of the variant {label} is not {wanted}"


def add_options(tables: Tables, options: Sequence[str], folder: Path) -> Tables:
    """The tables with those of options in the form LABEL:KEY=VALUE added. Files in `tables` begin at `folder`. UsageError
    for an option that is none."""
    made = {label: _absolute(table, folder) for label, table in tables.items()}
    for text in options:
        label, colon, rest = text.partition(":")
        key, equals, value = rest.partition("=")
        if not label or (colon and not (key and equals)):
            raise UsageError(
                f"{text!r} is no variant; write LABEL:KEY=VALUE, or LABEL alone for one that changes nothing"
            )
        table = made.setdefault(label, {})
        if colon:
            _add(table, label, key, value)
    return made


def _absolute(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    files = table.get("files", {})
    return {**table, **({"files": {path: str(folder / source) for path, source in files.items()}} if files else {})}


def _add(table: dict[str, Any], label: str, key: str, text: str) -> None:
    kind, dot, rest = key.partition(".")
    if kind not in NAMED_VARIANT or bool(dot and rest) != (kind in _TABLES):
        shown = [f"{one}.X" if one in _TABLES else one for one in NAMED_VARIANT]
        raise UsageError(f"the variant {label} has an unknown key {key!r}{nearest(key, shown)}")
    read = _READERS.get(kind, str)
    try:
        value = read(text)
    except ValueError as exc:
        why = f"is not {NAMED_VARIANT[kind][1]}"
        if read is json.loads:
            why = "is not JSON; text has quotes there, such as '\"yes\"'"
        elif read is shlex.split:
            why = f"cannot be split into words: {exc}"
        raise UsageError(f"{key}={text[:80]!r} of the variant {label} {why}") from None
    if kind in _TABLES:
        table[kind] = {**table.get(kind, {}), rest: value}
    elif kind in ("remove", "drop_state"):
        table[kind] = [*table.get(kind, []), *value]
    else:
        table[kind] = value
    if (fault := _fault(label, kind, table[kind])) is not None:
        raise UsageError(fault)


_READERS: dict[str, Callable[[str], Any]] = {
    "args": shlex.split,
    "remove": lambda text: [text],
    "drop_state": lambda text: [text],
    "drop_messages": int,
    "pids": int,
    "cpus": float,
    "messages": json.loads,
    "result": json.loads,
    "state": json.loads,
    "files": os.path.abspath,
}


def keywords(label: str, table: dict[str, Any], folder: str | Path = ".") -> dict[str, Any]:
    """A checked table as the keywords of `Snapshotd.fork`. Reads files, which begin at `folder`, and variables of this
    process. UsageError: one is not there, or two keys contradict each other."""
    made = {key: table[key] for key in _AS_THEY_ARE if key in table}
    if "secrets" in table:
        made["secrets"] = {name: _secret(label, name, variable) for name, variable in table["secrets"].items()}
    if "message" in table:
        made["add_messages"] = list(table["message"].items())
    if "messages" in table:
        if "drop_messages" in table:
            raise UsageError(
                f"the variant {label} has whole `messages`, so there is nothing to drop; leave out drop_messages"
            )
        made["messages"] = [(one["role"], one["content"]) for one in table["messages"]]
    if "result" in table:
        made["result"] = table["result"]
    if "state" in table or "drop_state" in table:
        made["state"] = {**table.get("state", {}), **dict.fromkeys(table.get("drop_state", ()))}
    if "files" in table or "remove" in table:
        made["files"] = _files(label, table, Path(folder))
    return made


def _secret(label: str, name: str, variable: str) -> str:
    found = read_variables([variable])
    if variable not in found:
        raise UsageError(
            f"the variant {label} has its secret {name} from the variable {variable}, which is not set here; set it"
        )
    return found[variable]


def _files(label: str, table: dict[str, Any], folder: Path) -> dict[bytes, bytes | None]:
    made: dict[bytes, bytes | None] = {}
    for path, source in table.get("files", {}).items():
        try:
            made[sandbox_path(path)] = (folder / source).read_bytes()
        except OSError as exc:
            raise UsageError(
                f"the file {folder / source}, for {path} in the variant {label}, cannot be read: {exc.strerror}"
            ) from exc
    for path in table.get("remove", ()):
        if made.setdefault(sandbox_path(path), None) is not None:
            raise UsageError(f"{path} is written and removed in the variant {label}; leave one of them out")
    return made
