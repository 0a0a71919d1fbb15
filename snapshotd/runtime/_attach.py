"""Recognising the init of a container that an earlier daemon made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.runtime._process import poll_fd
from snapshotd.runtime.base import Container
from snapshotd.types import ContainerID, IdMap

_WHOLE_ID_RANGE = 2**32 - 1


def attached(container_id: ContainerID, pid: int, is_ours: Callable[[str], bool]) -> tuple[Container, int] | None:
    """The container whose init is process `pid`, and a pidfd of that; None when it does not run any more.

    The kernel may have given the number to another process since it was recorded. So two checks: the container's init
    is the first of a pid namespace below this one, and `is_ours` accepts the path of one of its cgroups.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
        paths = [line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        container = Container(container_id, pid, id_map_of(pid))
        if len(numbers) > 1 and numbers[-1] == "1" and any(map(is_ours, paths)) and not poll_fd(pidfd, 0):
            found, pidfd = pidfd, -1  # it still runs, so all of that was read of this process
            return container, found
    except (FileNotFoundError, ProcessLookupError, ValueError):
        pass  # it has ended, some of it while it was read
    finally:
        if pidfd >= 0:
            os.close(pidfd)
    return None


def id_map_of(pid: int) -> IdMap | None:
    """The id map of a container's init; None when it has no user namespace of its own. SandboxFailed when it is none of
    ours."""
    lines = Path(f"/proc/{pid}/uid_map").read_text().split()
    inside, outside, count = (int(word) for word in lines[:3])
    if (inside, outside) == (0, 0) and count == _WHOLE_ID_RANGE:
        return None
    if inside != 0 or len(lines) != 3:
        raise SandboxFailed("the runtime maps user ids in several pieces; snapshotd needs one contiguous range")
    return IdMap(outside, count)
