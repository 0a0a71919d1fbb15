"""A sandbox's files."""

from __future__ import annotations

from typing import Any

from snapshotd.api.operation import READ, RUN, Operation
from snapshotd.api.record import ApiRecord, Base64Text, FullPath, Request, record
from snapshotd.api.snapshots import SnapshotInfo
from snapshotd.api.wire import BYTES, FRAMES, LINES


@record(frozen=True)
class FileInfo(ApiRecord):
    """Something in a tree. `kind` is file, directory, symlink, fifo, socket, char-device or block-device; `target` is
    where a link leads that was listed."""

    path: FullPath
    """From the root, without a leading slash; U+FFFD for what is not UTF-8."""
    kind: str
    mode: str
    """Permission bits, octal text."""
    uid: int
    gid: int
    size: int
    modified_at: str
    target: Base64Text | None
    """Where a symbolic link leads, in bytes; null for all else."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2] or "/"

    @property
    def is_dir(self) -> bool:
        return self.kind == "directory"


@record(frozen=True)
class WriteInfo(ApiRecord):
    """The effect of a write, and the snapshot after it. `warnings` names what was left out."""

    snapshot: SnapshotInfo
    file_count: int
    directories: int
    bytes: int
    warnings: tuple[str, ...]


@record(frozen=True)
class MakeDirRequest(Request):
    path_b64: str
    """Path in the sandbox, from its root, as base64 of its bytes."""
    user: str | None = None
    """Its owner, by name or number; else root."""


@record(frozen=True)
class RemoveFileRequest(Request):
    path_b64: str
    """Path in the sandbox, from its root, as base64 of its bytes."""


@record(frozen=True)
class RenameFileRequest(Request):
    path_b64: str
    """Path in the sandbox, from its root, as base64 of its bytes."""
    to_b64: str
    """The new one, in the same form."""


READ_FILE = Operation[Any]("GET", "/files/{ref}/content", BYTES, READ, "files", by="files.read")
STAT_FILE = Operation("GET", "/files/{ref}/stat", FileInfo, READ, "files", by="files.stat")
LIST_FILES = Operation[Any]("GET", "/files/{ref}/list", LINES, READ, "files")
READ_ARCHIVE = Operation[Any]("GET", "/files/{ref}/archive", FRAMES, READ, "files")
WRITE_FILE = Operation[Any]("POST", "/files/{ref}/content", LINES, RUN, "files", body=BYTES, once=True)
WRITE_ARCHIVE = Operation[Any]("POST", "/files/{ref}/archive", LINES, RUN, "files", body=BYTES, once=True)
MAKE_DIR = Operation(
    "POST", "/files/{ref}/make_dir", SnapshotInfo, RUN, "files", body=MakeDirRequest, once=True, by="files"
)
REMOVE_FILE = Operation(
    "POST", "/files/{ref}/remove", SnapshotInfo, RUN, "files", body=RemoveFileRequest, once=True, by="files.remove"
)
RENAME_FILE = Operation(
    "POST", "/files/{ref}/rename", SnapshotInfo, RUN, "files", body=RenameFileRequest, once=True, by="files.rename"
)
