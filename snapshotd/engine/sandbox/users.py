"""Users and groups by name, as a sandbox's own /etc/passwd and /etc/group have them. Source of the rules: docker's
`exec --user`.

Both files are the sandbox's to write. They are looked up below its root and nowhere else, links included. Only regular
files of bounded size are read. A line that is not of the format is passed over.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from snapshotd.errors import SandboxFailed, UsageError
from snapshotd.kernel import files
from snapshotd.runtime.base import Container
from snapshotd.types import short

_MAX_FILE_BYTES = 1 << 20
_NUMBER = re.compile(rb"[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class User:
    """The user that runs a command: numbers in the container, `groups` beyond the first one, and the home directory."""

    user: int
    group: int
    groups: tuple[int, ...]
    home: str


ROOT = User(0, 0, (), "/root")
"""The user that runs a command if the request names none."""


def look_up(container: Container, wanted: str) -> User:
    """`wanted` is USER or USER:GROUP, each a name or a number, in the container's present root.

    Without GROUP the command gets the user's own group and every group that lists the user; with it only that one. A
    number needs no entry: its group is then the same number, its home /. Raises UsageError when a name has no entry or
    a file cannot be read, SandboxFailed when the container is gone.
    """
    try:
        root_fd = container.open_root()
    except OSError as exc:
        raise SandboxFailed(f"container {short(container.id)} is gone: {exc}") from exc
    with files.closing_fd(root_fd):
        return look_up_below(root_fd, wanted)


def look_up_below(root_fd: int, wanted: str) -> User:
    """Look up a user as `look_up` does, in the root that a descriptor holds."""
    name, colon, group_name = wanted.partition(":")
    if not name or (colon and not group_name):
        raise UsageError(f"{_quote(wanted)} names no user; give USER or USER:GROUP, by name or number")
    found = next((entry for entry in _entries(root_fd, "passwd", 7) if _is(entry, name)), None)
    number = 0 if name == "root" else _id(name.encode(errors="replace"))
    user, group = (number, number) if found is None else (_id(found[2]), _id(found[3]))
    if user is None or group is None:
        raise UsageError(f"user {_quote(name)} is not in the sandbox's /etc/passwd; give a name that is, or a number")
    home = os.fsdecode(found[5]) if found is not None and found[5].startswith(b"/") else "/root" if user == 0 else "/"
    if not colon:
        own = found[0] if found is not None else None
        listed = {int(entry[2]) for entry in _entries(root_fd, "group", 4) if own in entry[3].split(b",")}
        return User(user, group, tuple(sorted(listed - {group})), home)
    named = (_id(entry[2]) for entry in _entries(root_fd, "group", 4) if _is(entry, group_name))
    group = next(named, _id(group_name.encode(errors="replace")))
    if group is None:
        raise UsageError(
            f"group {_quote(group_name)} is not in the sandbox's /etc/group; give a name that is, or a number"
        )
    return User(user, group, (), home)


def _quote(name: str) -> str:
    return repr(name[:100])


def _is(entry: list[bytes], name: str) -> bool:
    """True if the entry has that name or number."""
    wanted = name.encode(errors="replace")
    return entry[0] == wanted or (wanted.isdigit() and _id(entry[2]) == _id(wanted))


def _id(text: bytes) -> int | None:
    return int(text) if _NUMBER.fullmatch(text) else None


def _entries(root_fd: int, name: str, fields: int) -> Iterator[list[bytes]]:
    """The entries of /etc/NAME, each with that many fields, a number in the third. Empty when there is no such file."""
    for line in _read(root_fd, name).split(b"\n"):
        entry = line.split(b":")
        if len(entry) == fields and b"\0" not in line and _id(entry[2]) is not None:
            yield entry


def _read(root_fd: int, name: str) -> bytes:
    try:
        with files.closing_fd(files.open_in_root(root_fd, f"etc/{name}".encode(), os.O_PATH)) as fd:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise UsageError(
                    f"/etc/{name} of the sandbox is not a regular file, so no user is looked up in it; mend it there"
                )
            with open(os.open(files.fd_path(fd), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except OSError as exc:
        raise UsageError(
            f"/etc/{name} of the sandbox cannot be read ({exc.strerror}), so no user is looked up in it"
        ) from exc
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(
            f"/etc/{name} of the sandbox is larger than 1 MiB, so no user is looked up in it; mend it there"
        )
    return data
