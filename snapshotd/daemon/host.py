"""The daemon's demands on the host: root, a way to run sandboxes, and a mount namespace of its own."""

from __future__ import annotations

import os

from snapshotd.errors import NotPermitted, Unsupported
from snapshotd.kernel import surroundings
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.abilities import Abilities, Mode

_left: int | None = None


def check_root() -> None:
    """NotPermitted when not root. `choose_mode` looks at the rest later, when the state directory is there."""
    if os.geteuid() != 0:
        raise NotPermitted(
            f"the daemon needs root (mounts, namespaces, cgroups), but runs as user {os.geteuid()}; start it with sudo, or as the service"
        )


def choose_mode(host: Abilities, wanted: Mode | None) -> Mode:
    """The way to run sandboxes: the wanted one, or the best one that keeps the root user of a sandbox from being root on
    the host. Unsupported when this host is not able to it, with what is missing."""
    able = host.modes()
    mode = wanted or Mode.PIVOT
    if mode in able:
        return mode
    missing = "; ".join(f"{name}: {reason}" for name, reason in host.reasons.items() if name != "fine_times")
    weaker = (
        f". With SNAPSHOTD_MODE={Mode.PIVOT_ROOT} it runs, but the root user of a sandbox is then root on this machine "
        "(docs/threat-model.md)"
        if Mode.PIVOT_ROOT in able
        else ""
    )
    raise Unsupported(
        f"this machine cannot run sandboxes in the mode {mode}: {missing}. `snapshotd doctor` says how to get what is "
        f"missing{weaker}"
    )


def enter_own_mount_namespace() -> None:
    """Give this process mounts that no other process sees, while the host's mounts still arrive; adopt orphans of its
    children.

    Everything mounted for sandboxes then vanishes with the daemon, also after kill -9. From the main thread, before
    others start: a thread started earlier would stay behind in the old namespace. Unsupported: it has not the right to.
    """
    global _left
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    try:
        surroundings.make_fit()
        _left = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        surroundings.enter_own_mounts()
    except OSError as exc:
        raise Unsupported(
            f"the daemon cannot have mounts of its own ({exc.strerror or exc}): it needs root. In a container it needs the "
            "capabilities SYS_ADMIN, SYS_PTRACE and SYS_NICE, and seccomp and AppArmor unconfined (docs/examples/deploy), or a "
            "privileged one"
        ) from exc


def host_mounts() -> int | None:
    """A descriptor of the mount namespace that this process had before its own, for processes that outlive it; None while
    it is still there."""
    return _left
