"""The record of an apply that is under way, by which the next one undoes it after a kill.

It lies in the caller's own state directory, since whoever wrote the folder could put a false one there: its steps would
put any file in place, as a hook of git's that runs. The staging directory in the folder has the record's name, which is
random, and the record has the folder's inode: a copy of a half-applied folder is not taken for it. The folder may have
been moved, and its device may have another number after a boot.

    $XDG_STATE_HOME/snapshotd/applies/TOKEN.json   (XDG_STATE_HOME: ~/.local/state)
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from snapshotd.client.apply.host_tree import DIR_FLAGS, Stamp
from snapshotd.config import read_variables
from snapshotd.errors import NO_ROOM, Conflict, NotPermitted, OutOfSpace, SnapshotdError, UsageError
from snapshotd.trees.three_way import KEPT_NAMES

STAGING = KEPT_NAMES + b"-"
"""The staging directory of an apply has a name that begins with this."""
_TOKEN = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"(?:[no]\d+)?")
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """`take`: rename `path` to `name` in the staging directory. `place`: the reverse. `mode`: give `path` the
    permissions `mode`. `stamp` is the entry before the step."""

    op: Literal["take", "place", "mode"]
    path: bytes
    stamp: Stamp
    name: str = ""
    mode: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "path": base64.b64encode(self.path).decode()}

    @staticmethod
    def of(data: dict[str, Any]) -> ApplyStep:
        """ValueError, TypeError, KeyError."""
        step = ApplyStep(
            data["op"], base64.b64decode(data["path"]), Stamp(**data["stamp"]), str(data["name"]), int(data["mode"])
        )
        parts = step.path.split(b"/")
        named = _NAME.fullmatch(step.name) and bool(step.name) == (step.op != "mode")
        if not named or any(part in (b"", b".", b"..") for part in parts) or b"\0" in step.path:
            raise ValueError(step)
        return step


class ApplyRecord:
    """One record. `steps`: those that are to be undone after a kill; None: there are none, and what lies in the staging
    directory is to be removed. Errors: OutOfSpace, NotPermitted, UsageError (the state directory cannot be used)."""

    def __init__(self, token: str, inode: int, steps: list[ApplyStep] | None = None) -> None:
        self.token, self.inode, self.steps = token, inode, steps

    @property
    def staging(self) -> bytes:
        """The name of the staging directory."""
        return STAGING + self.token.encode()

    @property
    def path(self) -> Path:
        """Where it lies."""
        return _place() / f"{self.token}.json"

    def save(self, folder: Path, steps: Sequence[ApplyStep] | None) -> None:
        """Replace what is recorded, as a whole. Durable on return."""
        listed = None if steps is None else [step.to_json() for step in steps]
        data = json.dumps({"folder": os.path.realpath(folder), "inode": self.inode, "steps": listed}).encode()
        part, flags = f"{self.token}.part", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with _open_directory() as place:
            fd = os.open(part, flags, 0o600, dir_fd=place)
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.rename(part, f"{self.token}.json", src_dir_fd=place, dst_dir_fd=place)
            self.steps = None if steps is None else list(steps)
            os.fsync(place)

    def remove(self) -> None:
        with _open_directory() as place, contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.token}.json", dir_fd=place)


def new_record(folder: Path, inode: int) -> ApplyRecord:
    """A record without steps of an apply to `folder`. Removes the records of earlier ones to it, whose staging
    directories are gone."""
    with _open_directory() as place:
        for name in os.listdir(place):
            token, _, kind = name.partition(".")
            if kind == "json" and _folder_of(place, token) == (os.path.realpath(folder), inode):
                os.unlink(name, dir_fd=place)
    record = ApplyRecord(os.urandom(16).hex(), inode)
    record.save(folder, None)
    return record


def record_of(staging: bytes, inode: int) -> ApplyRecord | None:
    """The record whose staging directory has this name, in a folder with this inode. None: there is none of this user.
    Conflict: it is damaged."""
    token = os.fsdecode(staging.removeprefix(STAGING))
    if not _TOKEN.fullmatch(token) or not os.path.isdir(_place()):
        return None
    with _open_directory() as place:
        try:
            found = _read(place, token)
            if found is None or found["inode"] != inode:
                return None
            steps = found["steps"]
            return ApplyRecord(token, inode, None if steps is None else [ApplyStep.of(step) for step in steps])
        except (ValueError, TypeError, KeyError) as exc:
            where = _place() / f"{token}.json"
            raise Conflict(f"{where} is no record of an apply; look at it and remove it") from exc


def _read(place: int, token: str) -> dict[str, Any] | None:
    try:
        fd = os.open(f"{token}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        if os.fstat(fd).st_uid != os.geteuid():
            return None
        found: dict[str, Any] = json.loads(file.read(_MAX_BYTES))
    return found


def _folder_of(place: int, token: str) -> tuple[object, object] | None:
    try:
        found = _read(place, token)
        return None if found is None else (found["folder"], found["inode"])
    except (ValueError, TypeError, KeyError):
        return None


def _place() -> Path:
    given = read_variables(["XDG_STATE_HOME"]).get("XDG_STATE_HOME", "")
    return Path(given if os.path.isabs(given) else Path.home() / ".local" / "state") / "snapshotd" / "applies"


@contextlib.contextmanager
def _open_directory() -> Iterator[int]:
    """The directory of all records, made where it is missing."""
    where = _place()
    try:
        os.makedirs(where, mode=0o700, exist_ok=True)
        fd = os.open(where, DIR_FLAGS)
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise NotPermitted(
                    f"the record of an apply cannot be kept in {where}, since others can write there; make it a directory of "
                    "your own with mode 0700, or name another with XDG_STATE_HOME"
                )
            yield fd
        finally:
            os.close(fd)
    except SnapshotdError:
        raise
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(f"{where} has no room for the record of an apply: free some space") from exc
        raise UsageError(
            f"the record of an apply cannot be kept in {where}: {exc.strerror}; name a directory of yours with XDG_STATE_HOME"
        ) from exc
