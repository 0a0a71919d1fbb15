"""Entries of a sandbox's files, in the words of the protocol.

A link is told as itself, with `type` and `size` of what it leads to, as `envd` does. The daemon's `stat` looks behind all
links, so an entry is looked up in its directory.
"""

from __future__ import annotations

import posixpath
import stat
from contextlib import aclosing
from typing import Any, cast

from snapshotd.api.files import FileInfo
from snapshotd.api.record import Json
from snapshotd.client import AsyncSnapshotd
from snapshotd.errors import NotFound, UsageError
from snapshotd.integrations.e2b.people import Names, People

_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY"}
_KINDS = {
    "file": stat.S_IFREG,
    "directory": stat.S_IFDIR,
    "symlink": stat.S_IFLNK,
    "fifo": stat.S_IFIFO,
    "socket": stat.S_IFSOCK,
    "char-device": stat.S_IFCHR,
    "block-device": stat.S_IFBLK,
}


class Entries:
    """Looks things up. Errors: as the daemon's file verbs."""

    def __init__(self, client: AsyncSnapshotd, people: People) -> None:
        self._client, self._people = client, people

    async def stat(self, sandbox: str, path: str) -> FileInfo:
        """The entry at an absolute path, behind all links."""
        return await self._client.stat_file(sandbox, path)

    async def entry(self, sandbox: str, path: str) -> Json:
        """The entry itself. NotFound."""
        if path == "/":
            return await self.describe(sandbox, path, await self.stat(sandbox, path))
        parent, name = posixpath.split(path)
        try:
            async with aclosing(cast(Any, self._client.list_files(sandbox, parent))) as found:
                async for one in found:
                    if one.name == name:
                        return await self.describe(sandbox, path, one)
        except UsageError:
            if (await self.stat(sandbox, parent)).is_dir:
                raise
        raise NotFound(f"there is nothing at {path}")

    async def list(self, sandbox: str, path: str) -> list[FileInfo]:
        """The entries of a directory. NotFound; UsageError: it is none."""
        async with aclosing(cast(Any, self._client.list_files(sandbox, path))) as found:
            return [one async for one in found]

    async def describe(self, sandbox: str, path: str, info: FileInfo) -> Json:
        """`info` in the words of the protocol, under this path."""
        names = await self._people.names(sandbox)
        if info.target is None:
            return _entry_json(path, info, names)
        try:
            behind = await self.stat(sandbox, path)
        except (NotFound, UsageError):
            behind = info  # it leads nowhere
        target = posixpath.join(posixpath.dirname(path), info.target)
        return {
            **_entry_json(path, info, names, behind),
            "isSymlink": True,
            "symlinkTarget": posixpath.normpath(target),
        }


def _entry_json(path: str, info: FileInfo, names: Names, behind: FileInfo | None = None) -> Json:
    mode = int(info.mode, 8)
    return {
        "name": posixpath.basename(path) or "/",
        "type": _TYPES.get((behind or info).kind, "FILE_TYPE_UNSPECIFIED"),
        "path": path,
        "size": str((behind or info).size),
        "mode": mode & 0o7777,
        "permissions": stat.filemode(_KINDS.get(info.kind, 0) | mode & 0o7777),
        "owner": names.users.get(info.uid, str(info.uid)),
        "group": names.groups.get(info.gid, str(info.gid)),
        "modifiedTime": info.modified_at,
    }
