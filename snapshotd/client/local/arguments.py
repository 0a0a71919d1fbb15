"""The arguments of the client's methods, checked before anything is sent. Each error is a UsageError that names the
argument, its value, and what is taken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, TypeVar

from snapshotd.api.wire import TIMEOUT_MAX_S
from snapshotd.errors import UsageError

_SHOWN_CHARS = 80
MessageLike = tuple[str, Any] | Mapping[str, Any]
"""A message: a pair of role and content, or an object with these two keys."""


def wrong(name: str, value: object, taken: str) -> UsageError:
    """The error for a value that an argument cannot have. `taken`: the values that it can have."""
    return UsageError(f"{name}={repr(value)[:_SHOWN_CHARS]} cannot be taken: give {taken}")


def check_seconds(name: str, value: Any, *, zero: bool = False) -> None:
    """A time, or None. `zero`: 0 means for ever."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (number and (0 < value <= TIMEOUT_MAX_S or (zero and value == 0))):
        raise wrong(
            name, value, f"seconds above 0, at most a year{', or 0 for none' if zero else ', or None for none'}"
        )


def check_count(name: str, value: Any, least: int, most: int | None = None) -> None:
    """A whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        raise wrong(name, value, f"a whole number from {least}{' on' if most is None else f' to {most}'}")


def check_mode(name: str, value: Any) -> None:
    """The permissions of a file, or None. Text is none: "0644" would be read in one of two ways."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 0o7777):
        raise wrong(name, value, "a number from 0 to 0o7777, such as 0o644")


Wanted = TypeVar("Wanted")


def instance_of(name: str, value: Any, wanted: type[Wanted]) -> Wanted:
    """An object of a class."""
    if not isinstance(value, wanted):
        raise wrong(name, value, f"a {wanted.__name__}")
    return value


def instances_of(name: str, value: Any, wanted: type[Wanted]) -> list[Wanted]:
    """A list of objects of a class."""
    items = list(value) if isinstance(value, Iterable) else [value]
    found = [item for item in items if isinstance(item, wanted)]
    if not isinstance(value, Iterable) or len(found) < len(items):
        raise wrong(name, value, f"a list of {wanted.__name__}")
    return found


def check_file(name: str, value: Any, method: str) -> None:
    """An open file that has a `method`."""
    if not callable(getattr(value, method, None)):
        raise wrong(name, value, f"a file that is open for bytes, with a method {method}")


def words_of(name: str, value: Any) -> list[str]:
    """A command and its arguments, or other words, in their order: a set has none."""
    listed = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set)
    words = list(value) if listed else None
    if words is None or not all(isinstance(word, str) for word in words):
        raise wrong(name, value, "a list of texts")
    return words


def messages_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Messages of a conversation: pairs of role and content, or objects with both, as the SDKs of models take them."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping | Set):
        raise wrong(name, value, "a list of messages")
    return [_message(f"{name}[{number}]", one) for number, one in enumerate(value)]


def _message(name: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, Mapping):
        pair = (value["role"], value["content"]) if set(value) == {"role", "content"} else ()
    else:
        pair = tuple(value) if isinstance(value, tuple | list) else ()
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise wrong(name, value, "{'role': ..., 'content': ...}, or a pair of role and content")
    return pair


def refs_of(refs: tuple[Any, ...]) -> list[str]:
    """Names of trajectories or snapshots: each an argument of its own, or one list of them."""
    one_list = len(refs) == 1 and isinstance(refs[0], list | tuple)
    return words_of("refs", refs[0] if one_list else refs)


def argv_of(value: Any) -> list[str]:
    """A command to execute."""
    words = words_of("argv", value)
    if not words:
        raise UsageError("there is no command to execute: the list of its words is empty")
    return words


def texts_of(name: str, value: Any) -> dict[str, str]:
    """Texts by name; None stands for none. They may be secrets, so an error tells only the type of a value."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(name, type(value), "texts by name, as in {'NAME': 'value'}")
    for key, text in value.items():
        if not isinstance(key, str) or not isinstance(text, str):
            raise wrong(f"{name}[{key!r}]", type(text), "a text, by a name that is one")
    return dict(value)


def bytes_of(name: str, value: Any) -> bytes:
    """Bytes, or text as UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise wrong(name, value, "text that UTF-8 has, or bytes") from None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise wrong(name, value, "text or bytes")
    return bytes(value)


def local_path(path: str | Path, name: str = "path") -> Path:
    """A path of this machine, absolute. `name`: the argument's."""
    try:
        return Path(os.path.abspath(os.fspath(path)))
    except (TypeError, ValueError):
        raise wrong(name, path, "text or a Path, without a zero byte") from None


def absolute(path: str | Path | None, name: str = "path") -> str | None:
    """A local path in a form that is valid for the daemon, which has another working directory."""
    return None if path is None else str(local_path(path, name))


def sandbox_path(path: str | bytes) -> bytes:
    """The bytes of a path in a sandbox or snapshot, from its root. A path without a leading `/` begins at /workspace.
    UsageError for what no path of a sandbox can be."""
    if not isinstance(path, str | bytes):
        raise wrong("path", path, "text or bytes: a path in the sandbox")
    raw = os.fsencode(path)
    if b"\0" in raw or b".." in raw.split(b"/"):
        raise UsageError(f"{os.fsdecode(raw)!r} has a zero byte or `..` in it; write the path from the sandbox's root")
    return raw if raw.startswith(b"/") else b"/workspace/" + raw
