"""The API's words about a sandbox's files."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from snapshotd.daemon.http import models
from snapshotd.engine.base import FileEntry, Written

_PATH = "Path in the sandbox, from its root, as base64 of its bytes."


class File(models.Answer):
    """Something in a tree."""

    path: str = Field(description="From the root, without a leading slash; U+FFFD for what is not UTF-8.")
    path_b64: str | None = Field(None, description="Its bytes, where the text has lost one.")
    kind: str
    mode: str = Field(description="Octal text.")
    uid: int
    gid: int
    size: int
    modified_at: str
    target_b64: str | None = Field(None, description="Where a symbolic link leads, in bytes; null for all else.")

    @staticmethod
    def of(found: FileEntry) -> File:
        entry = found.entry
        return File(
            **models.path_json(found.path),
            kind=entry.kind.value,
            mode=f"{entry.mode:04o}",
            uid=entry.uid,
            gid=entry.gid,
            size=entry.size,
            modified_at=models.iso_time(max(0, entry.mtime_ns)),
            target_b64=None if found.target is None else models.b64(found.target),
        )


class MakeDirRequest(models.Request):
    path_b64: str = Field(description=_PATH)
    user: str | None = Field(None, description="Whose it is, by name or number; else root's.")


class RemoveFileRequest(models.Request):
    path_b64: str = Field(description=_PATH)


class RenameFileRequest(models.Request):
    path_b64: str = Field(description=_PATH)
    to_b64: str = Field(description="The new one, in the same form.")


def written_json(done: Written) -> dict[str, Any]:
    return {
        "snapshot": models.Snapshot.of(done.snapshot),
        "file_count": done.files,
        "directories": done.directories,
        "bytes": done.bytes,
        "warnings": list(done.warnings),
    }
