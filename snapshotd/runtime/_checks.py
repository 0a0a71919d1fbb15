"""Requests that every driver refuses before it starts anything, and containers whose ids none of them understands."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotd.errors import SandboxFailed, UsageError
from snapshotd.runtime import failure
from snapshotd.runtime.base import Container, ContainerSpec, ExecSpec
from snapshotd.types import ContainerID, IdMap

_WHOLE_ID_RANGE = 2**32 - 1


def check_exec(spec: ExecSpec) -> None:
    """Raise UsageError for a command that no runtime can carry: no command, a relative directory, NUL, text that is not
    UTF-8, odd names."""
    if not spec.argv:
        raise UsageError("the command is empty; name a program")
    if not spec.cwd.startswith("/"):
        raise UsageError(f"the working directory {spec.cwd!r} must start with /")
    for name in spec.env:
        if not name or "=" in name:
            raise UsageError(f"{name!r} cannot be the name of an environment variable")
    for text in (*spec.argv, spec.cwd, *spec.env.keys(), *spec.env.values()):
        if "\0" in text:
            raise UsageError("a command, its directory and its environment cannot hold a NUL character")
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(
                f"{failure.shorten(ascii(text))} is not UTF-8; put such bytes into a file or use printf in a shell"
            ) from exc


def check_ids(spec: ExecSpec, id_map: IdMap | None) -> None:
    """Raise UsageError for a user or group that does not exist in the container."""
    count = id_map.count if id_map is not None else _WHOLE_ID_RANGE
    for kind, number in (("user", spec.user), *(("group", group) for group in (spec.group, *spec.groups))):
        if not 0 <= number < count:
            raise UsageError(f"{kind} id {number} does not exist in the sandbox; use 0 to {count - 1}")


def check_share_dir(spec: ContainerSpec) -> None:
    """Raise SandboxFailed when the directories of a spec cannot serve; makes the mount point for the share in the run
    directory."""
    init = spec.share_dir / "init"
    if not os.access(init, os.X_OK) or os.statvfs(spec.share_dir).f_flag & os.ST_NOEXEC:
        raise SandboxFailed(
            f"{init} cannot be executed: it is missing, has no x mode, or lies on a noexec file system (as /run often is)"
        )
    (spec.run_dir / "share").mkdir(mode=0o755, exist_ok=True)


def find_container(container_id: ContainerID, pid: int) -> Container | None:
    """A container that an earlier daemon made, by its init; None: that has ended."""
    try:
        return Container(container_id, pid, id_map_of(pid))
    except (FileNotFoundError, ProcessLookupError):
        return None


def id_map_of(pid: int) -> IdMap | None:
    """The id map of a container's init; None when it has no user namespace of its own. SandboxFailed when it is none of
    ours; FileNotFoundError, ProcessLookupError when it has ended."""
    lines = Path(f"/proc/{pid}/uid_map").read_text().split()
    inside, outside, count = (int(word) for word in lines[:3])
    if (inside, outside) == (0, 0) and count == _WHOLE_ID_RANGE:
        return None
    if inside != 0 or len(lines) != 3:
        raise SandboxFailed("the runtime maps user ids in several pieces; snapshotd needs one contiguous range")
    return IdMap(outside, count)
