"""The daemon's demands on the host: a way to run sandboxes, and a mount namespace of its own."""

from __future__ import annotations

import os

from snapshotd.errors import Unsupported
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.abilities import Abilities, Mode

_left: int | None = None


def choose_mode(host: Abilities, wanted: Mode | None) -> tuple[Mode, str]:
    """The way to run sandboxes: the wanted one, or the best one that keeps the root user of a sandbox from being root on
    the host. Where there is none, `FOLDER`, and the reason why only sandboxes that are asked to be without isolation can
    run. Unsupported when this host is not able to the wanted one, with what is missing."""
    able = (*host.modes(), Mode.FOLDER)
    mode = wanted or Mode.PIVOT
    if mode in able:
        return mode, ""
    missing = "; ".join(f"{name}: {reason}" for name, reason in host.reasons.items() if name != "fine_times")
    weaker = (
        f". With SNAPSHOTD_MODE={Mode.PIVOT_ROOT} it runs, but the root user of a sandbox is then root on this machine "
        "(docs/threat-model.md)"
        if Mode.PIVOT_ROOT in able
        else ""
    )
    reason = (
        f"this machine cannot run sandboxes in the mode {mode}: {missing}. `snapshotd doctor` says how to get what is "
        f"missing{weaker}. With --isolation none it runs in a plain folder, without isolation (docs/folder-mode.md)"
    )
    if wanted is not None:
        raise Unsupported(reason)
    return Mode.FOLDER, reason


def enter_own_mount_namespace() -> None:
    """Give this process mounts that no other process sees, while the host's mounts still arrive; adopt orphans of its
    children. Where that is not permitted, nothing can be mounted either, and sandboxes are plain folders.

    Everything mounted for sandboxes then vanishes with the daemon, also after kill -9. From the main thread, before
    others start: a thread started earlier would stay behind in the old namespace. Raises OSError.
    """
    global _left
    _left = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    try:
        sc.call("unshare", sc.CLONE_NEWNS)
        sc.call("mount", "none", "/", None, sc.MS_REC | sc.MS_SLAVE, None)
    except PermissionError:
        os.close(_left)
        _left = None


def host_mounts() -> int | None:
    """A descriptor of the mount namespace that this process was started in, for processes that outlive it; None while
    it is still there."""
    return _left
