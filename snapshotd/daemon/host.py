"""The daemon's demands on the host, checked before it does anything: root, a kernel, and a mount namespace of its
own."""

from __future__ import annotations

import os
import platform
import re

from snapshotd.errors import NotPermitted, Unsupported
from snapshotd.kernel import syscalls as sc

_KERNEL_NEEDED = (6, 13)
_left: int | None = None


def check_host() -> None:
    """NotPermitted when not root; Unsupported when the kernel is too old, naming feature and version. `doctor` looks at
    the rest."""
    if os.geteuid() != 0:
        raise NotPermitted(
            f"the daemon needs root (mounts, namespaces, cgroups), but runs as user {os.geteuid()}; start it with sudo, or as the service"
        )
    check_kernel(platform.release())


def check_kernel(release: str) -> None:
    """Unsupported unless `release` ("6.18.1-amd64") has overlay layers by file descriptor."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) >= _KERNEL_NEEDED:
        return
    needed = ".".join(map(str, _KERNEL_NEEDED))
    raise Unsupported(
        f"the kernel {release} is too old: overlay layers by file descriptor need Linux {needed}; `snapshotd doctor` says "
        f"where to get a newer one, and what else is missing"
    )


def enter_own_mount_namespace() -> None:
    """Give this process mounts that no other process sees, while the host's mounts still arrive; adopt orphans of its
    children.

    Everything mounted for sandboxes then vanishes with the daemon, also after kill -9. From the main thread, before
    others start: a thread started earlier would stay behind in the old namespace. Raises OSError.
    """
    global _left
    _left = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    sc.call("unshare", sc.CLONE_NEWNS)
    sc.call("mount", "none", "/", None, sc.MS_REC | sc.MS_SLAVE, None)


def host_mounts() -> int | None:
    """A descriptor of the mount namespace that this process was started in, for processes that outlive it; None while
    it is still there."""
    return _left
