"""Users of a sandbox, by its own /etc/passwd and /etc/group, and the paths that a client means.

A request names its user by HTTP's Basic authentication without a password, or means the sandbox's own. Relative paths and
`~` are meant from the template's working directory, or the user's home.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import time
from dataclasses import dataclass

from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import NotFound, UsageError
from snapshotd.integrations.e2b.failures import WireError
from snapshotd.integrations.e2b.records import Box

_KNOWN_S = 1.0
"""So long the names of a sandbox are not read again: `list` of many files asks for each."""
_KNOWN_MAX = 256
_FILE_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Person:
    name: str
    home: str


@dataclass(frozen=True, slots=True)
class Names:
    """`people` by name, and the names of numbers."""

    people: dict[str, Person]
    users: dict[int, str]
    groups: dict[int, str]
    read_at: float


class People:
    """Reads the names of sandboxes."""

    def __init__(self, client: AsyncSnapshotd) -> None:
        self._client = client
        self._known: dict[str, Names] = {}

    async def names(self, sandbox: str, *, afresh: bool = False) -> Names:
        known = self._known.get(sandbox)
        if known is not None and not afresh and time.monotonic() - known.read_at < _KNOWN_S:
            return known
        people, users = dict[str, Person](), dict[int, str]()
        for name, number, parts in self._rows(await self._read(sandbox, "/etc/passwd")):
            people.setdefault(name, Person(name, parts[5] if len(parts) > 5 and parts[5].startswith("/") else "/"))
            users.setdefault(number, name)
        groups = {number: name for name, number, _ in reversed(self._rows(await self._read(sandbox, "/etc/group")))}
        people.setdefault("root", Person("root", "/root"))
        while len(self._known) >= _KNOWN_MAX:
            del self._known[next(iter(self._known))]
        self._known[sandbox] = Names(people, users, groups, time.monotonic())
        return self._known[sandbox]

    async def find(self, box: Box, name: str | None) -> Person:
        """Find a user of a sandbox by name; None: the sandbox's own user. WireError: it has no such user."""
        wanted = name or box.user
        found = (await self.names(box.id)).people.get(wanted)
        if found is None:
            found = (await self.names(box.id, afresh=True)).people.get(wanted)
        if found is None:
            raise WireError("unauthenticated", f"the sandbox has no user {wanted!r}")
        return found

    def path(self, box: Box, person: Person, path: str) -> str:
        """The absolute form of a path that the client gave. `..` does not lead above the root."""
        if path == "~" or path.startswith("~/"):
            path = person.home + path[1:]
        return posixpath.normpath(posixpath.join("/", self.cwd(box, person), path)).replace("//", "/", 1)

    def cwd(self, box: Box, person: Person) -> str:
        return box.workdir if box.workdir is not None and person.name == box.user else person.home

    async def _read(self, sandbox: str, path: str) -> bytes:
        data = b""
        try:
            async for piece in self._client.read_file(sandbox, path):
                data += piece
                if len(data) > _FILE_MAX_BYTES:
                    break
        except (NotFound, UsageError):
            pass  # an image without users
        return data

    def _rows(self, data: bytes) -> list[tuple[str, int, list[str]]]:
        rows = [line.split(":") for line in data.decode(errors="replace").splitlines()]
        return [(row[0], int(row[2]), row) for row in rows if len(row) > 2 and row[2].isascii() and row[2].isdecimal()]


def basic_user(header: str | None) -> str | None:
    """The user that an Authorization header names; None: it names none. WireError: it cannot be read."""
    if header is None or not header.lower().startswith("basic "):
        return None
    try:
        given = base64.b64decode(header[6:].strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as exc:
        raise WireError("unauthenticated", "the Authorization header cannot be read") from exc
    return given.partition(":")[0] or None
