"""The abilities of a host, one record, which everything that depends on the host is given as a value; and the words in which
people are told about them. The probes (kernel/probes) find them out.

Nothing else in snapshotd asks for a kernel's version, for root, or for the layout of cgroups.

Kernels that have them (measured on 6.1, 6.12 and 6.18, else from the sources): layers by descriptor 6.15, times finer
than a tick 6.13, one path for each layer 6.8, an overlay of id-mapped layers 5.19, mount_setattr 5.12.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum

from snapshotd.kernel.mounts import LayerNaming
from snapshotd.types import IdMap

ALL_IDS = 2**32 - 1
CGROUP_ROOTS = (
    ("/sys/fs/cgroup/freezer", "freezer.state", 1),
    ("/sys/fs/cgroup", "cgroup.kill", 2),
    ("/sys/fs/cgroup/unified", "cgroup.kill", 2),
)
"""Directories in which cgroups may be made, each with the file that tells that they can be frozen or killed, and their
version."""


class Mode(StrEnum):
    """A way to run sandboxes. The first one that the host is able to is taken."""

    PIVOT = "pivot"
    """The container's root user is nobody on the host."""
    PIVOT_ROOT = "pivot-root"
    """The container's root user is root on the host, held by capabilities and seccomp alone (docs/threat-model.md). Only
    where a setting asks for it."""
    ROOTLESS = "rootless"
    """The daemon of an ordinary user, in a user namespace. Each snapshot is a copy of what changed."""
    FOLDER = "folder"
    """Sandboxes are plain folders, without isolation (docs/folder-mode.md). Every host is able to it; only where a setting
    or a request asks for it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The names of the extended attributes with which overlayfs marks entries of layers, by what they begin with. The host
    decides on the first kind or the second; each layer directory has one of them."""

    prefix: bytes
    """Attributes that begin with it are never shown as content."""

    @property
    def opaque(self) -> str:
        return self.prefix.decode() + "opaque"

    @property
    def redirect(self) -> str:
        return self.prefix.decode() + "redirect"

    @property
    def whiteout(self) -> str:
        return self.prefix.decode() + "whiteout"

    @property
    def origin(self) -> str:
        return self.prefix.decode() + "origin"

    @property
    def kept(self) -> frozenset[bytes]:
        """The marks that are part of a layer's meaning. The others (origin, impure, uuid) tie an upper to its mount."""
        return frozenset(os.fsencode(name) for name in (self.opaque, self.redirect, self.whiteout))


TRUSTED, BY_USER = Marks(b"trusted.overlay."), Marks(b"user.overlay.")
"""The kind that root of the host alone can set, and the kind of overlays in a user namespace."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of this process on this host, with layers at one place. One that is not named is missing, but for the
    last three."""

    mounts: bool = False
    """Mounts of its own: CAP_SYS_ADMIN, and no filter that refuses."""
    overlays: bool = False
    """Overlays can be mounted, with the layers on the state directory's file system."""
    layer_naming: LayerNaming = LayerNaming.OPTIONS
    """The way in which overlayfs is told its layers."""
    redirects: bool = False
    """A directory of a lower layer can be renamed. Without it every live upper is laid over the image alone, and snapshots
    are copies (layers/delta.py)."""
    seals: bool = False
    """The attributes of a mount can be changed: a root becomes a read-only layer."""
    user_namespaces: bool = False
    """A user namespace with a map of 65,536 ids can be made."""
    mapped_layers: bool = False
    """An overlay takes layers whose ids are shifted by a mount."""
    fine_times: bool = False
    """Two changes of a file never have the same time. Without it, changes within one tick of the clock look alike."""
    cgroup_version: int = 0
    """The version of the cgroups that can be made, frozen and killed, 1 or 2. 0: none."""
    cgroup_root: str = ""
    """The directory in which they can be made."""
    marks: str = TRUSTED.prefix.decode()
    """The beginning of the names of overlayfs's marks (`Marks`)."""
    ids: int = ALL_IDS
    """Number of user ids that this process can give to files: all outside of user namespaces, one more than a container's in
    a user's range (kernel/rootless.py), or 1."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Name of a missing ability to the reason, in a few words."""
    looks: bool = True
    """A process of a sandbox can be looked at: its files, its namespaces."""
    keeps_marks: bool = True
    """The file system of the layers keeps extended attributes of the kind that the marks are. Plain folders need that, too."""
    priorities: bool = True
    """A process can get its priority back, and one of another user can be moved to other processors."""

    @property
    def cgroup_parent(self) -> str:
        """`cgroup_root` as a path below the hierarchy's mount point; "" for the root."""
        points = [root for root, _, _ in CGROUP_ROOTS if self.cgroup_root.startswith(root)]
        return self.cgroup_root[max(map(len, points), default=0) :]

    def modes(self) -> tuple[Mode, ...]:
        """The modes that this host is able to, the best first."""
        if self.is_rootless:
            return (Mode.ROOTLESS,) if self.mounts and self.overlays and self.user_namespaces else ()
        if not (self.mounts and self.overlays and self.redirects and self.seals and self.cgroup_version):
            return ()
        if not (self.looks and self.priorities):
            return ()
        return (Mode.PIVOT, Mode.PIVOT_ROOT) if self.user_namespaces and self.mapped_layers else (Mode.PIVOT_ROOT,)

    @property
    def is_rootless(self) -> bool:
        """True in a user namespace: an ordinary user's daemon, or a container's root."""
        return self.ids < ALL_IDS

    @property
    def overlay_marks(self) -> Marks:
        return Marks(self.marks.encode())

    def needed(self) -> frozenset[str]:
        """The abilities without which there is no sandbox of the best kind."""
        always = frozenset({"mounts", "overlays", "user_namespaces"})
        of_root = {"redirects", "seals", "mapped_layers", "looks", "priorities", "cgroup_version"}
        return always if self.is_rootless else always | of_root


def weaker(mode: Mode, host: Abilities) -> str:
    """The ways in which sandboxes are weaker than in the best mode, as one sentence for a user; empty: in none."""
    if mode is Mode.PIVOT_ROOT:
        return "the root user of a sandbox is root on this machine, held by capabilities and a system call filter alone"
    if mode is Mode.FOLDER:
        return "sandboxes are plain folders, and nothing isolates them"
    parts = []
    if host.ids == 1:
        parts.append("all files of a sandbox belong to this user, and to root in there (one user id)")
    if host.is_rootless and not host.cgroup_version:
        parts.append("a sandbox has no limits of memory, processors and processes (no cgroups)")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Ability:
    """One field of the record, for people: its purpose, what is lost without it, and how to get it."""

    field: str
    name: str
    purpose: str
    lost: str
    fix: str
    without_root: tuple[str, str] | None = None
    """`lost` and `fix` for an ordinary user, where they differ."""


_NEWER = "boot a newer kernel"
ABILITIES: tuple[Ability, ...] = (
    Ability(
        "mounts",
        "mounts",
        "roots of sandboxes",
        "there is no sandbox",
        "run it as root; in a container, with the capabilities SYS_ADMIN, SYS_PTRACE and SYS_NICE, seccomp=unconfined and "
        "apparmor=unconfined",
        ("there is no sandbox", "as for user namespaces, or run it as root"),
    ),
    Ability(
        "overlays",
        "overlay",
        "roots of sandboxes",
        "there is no sandbox",
        "`modprobe overlay`, and put the state directory on ext4, XFS or btrfs, not on an overlay or a network file system",
    ),
    Ability(
        "redirects",
        "renamed directories",
        "a rename of a directory that an earlier step made",
        "there is no sandbox",
        f"{_NEWER}, with CONFIG_OVERLAY_FS",
    ),
    Ability("seals", "seal", "snapshots without a copy", "there is no sandbox", f"{_NEWER} (Linux 5.12)"),
    Ability(
        "user_namespaces",
        "user namespaces",
        "container root without rights on the host",
        "a sandbox's root user would be root on the host",
        "`sysctl user.max_user_namespaces=15000` (inside a chroot the kernel allows none)",
        (
            "there is no sandbox",
            "as root: `sysctl user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1`; on Ubuntu also "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; or run it as root",
        ),
    ),
    Ability(
        "mapped_layers",
        "id-mapped layers",
        "one copy of a layer for all users",
        "a sandbox's root user would be root on the host",
        f"{_NEWER} (Linux 5.19), and put the state directory on ext4, XFS or btrfs",
    ),
    Ability(
        "looks",
        "looks at processes",
        "what the processes of a sandbox have open, before a snapshot",
        "there is no sandbox",
        "run it as root; in a container, with the capability SYS_PTRACE",
    ),
    Ability(
        "priorities",
        "priorities",
        "background work that gives way, and commands that enter a sandbox's cgroup",
        "there is no sandbox",
        "run it as root; in a container, with the capability SYS_NICE",
    ),
    Ability(
        "cgroup_version",
        "cgroups",
        "stopping a sandbox for a copy, limits, and its end",
        "there is no sandbox",
        "run it as root on a machine with the freezer; in a container, with writable cgroups",
        ("a sandbox has no limits of memory, processors and processes, and is stopped by signals", "run it as root"),
    ),
    Ability(
        "fine_times",
        "fine times",
        "files that did not change are not copied again",
        "a file that changed within the clock's last tick is copied once more",
        f"{_NEWER} (Linux 6.13)",
    ),
)
"""In the order in which a missing one matters; each comes after the ones that it needs."""


def container_ids(ids: int) -> IdMap:
    """The id map of a container in a user namespace that has so many ids: the same numbers inside and outside, without
    the user's own where the user has a range."""
    return IdMap(0, max(ids - 1, 1))
