"""Ending everything in a container, whichever driver made it."""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
import time
from collections.abc import Collection
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.kernel.holding.attempts import attempts
from snapshotd.kernel.holding.cgroup import Cgroup
from snapshotd.kernel.processes import wait_readable
from snapshotd.runtime._process import CHILDREN
from snapshotd.types import ContainerID, short

_END_DEADLINE_S = 10.0
_SWEEP_AFTER_S = 0.02
"""Processes end within milliseconds; later than this, a leftover of runc may hold one."""


def end_all(container_id: ContainerID, groups: Collection[Cgroup], init_pidfd: int | None) -> None:
    """Kill every process of the container and return when all have ended and our own children among them are
    reaped.

    Again and again, because a command may just be entering. `init_pidfd` (if known) is waited for but not reaped; it
    ends last, since its pid namespace has to be empty first. Without `groups` it is killed, and all end with it. A crashed
    daemon may have left the container frozen, where version 1 delivers no SIGKILL. Raises SandboxFailed after 10 s: a
    process is stuck in the kernel.
    """
    begin = time.monotonic()
    for _ in attempts(_END_DEADLINE_S, 0.0005):  # no single event tells that the last of several processes has ended
        left = set[int]()
        if not groups and init_pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(init_pidfd, signal.SIGKILL)
        for group in groups:
            group.thaw()
            left |= group.kill()
        reaped = CHILDREN.reap_all(container_id)
        if reaped and not left and (init_pidfd is None or wait_readable(init_pidfd, 0)):
            return
        if time.monotonic() > begin + _SWEEP_AFTER_S:
            CHILDREN.sweep()
    raise SandboxFailed(
        f"processes {sorted(left)} of container {short(container_id)} do not end (stuck in the kernel); try again"
    )


def remove_files(directory: Path) -> None:
    """Remove a container's directory of short-lived files, while refused commands still clean up in it.

    Not an error when it is missing. Raises OSError.
    """
    while True:
        try:
            shutil.rmtree(directory)
            return
        except FileNotFoundError:
            if not directory.exists():
                return
        except OSError as exc:
            if exc.errno != errno.ENOTEMPTY:  # one more file came; none can once the directory is gone
                raise
