"""The names by which a sandbox's programs tell machines apart: hostname, machine id, boot id, gateway token. Each
trajectory has its own, also when its sandbox starts again; two forks share none. docs/limits.md lists them.

Neither is part of a snapshot. Machine id and boot id are files in the container's run directory that are mounted,
read-only, over the image's /etc/machine-id and over the kernel's boot_id. An image without a regular /etc/machine-id
gets none: nothing is made in the root. Sources: machine-id(5), proc_sys_kernel(5).
"""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import SandboxFailed
from snapshotd.kernel import files, mounts, namespaces
from snapshotd.layers.pivot import MACHINE_ID, Target, layout_of
from snapshotd.layers.store import LayerStore
from snapshotd.runtime.base import Container, Runtime
from snapshotd.types import ImageID, TrajectoryID, short

_MACHINE_ID, _BOOT_ID = "machine-id", "boot-id"
"""Names of the files in the run directory."""
_TOKEN_END = "-key-kept-by-snapshotd"
"""The same for all: Claude Code asks a person about every key whose last 20 characters it has not seen."""
_KERNEL_BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class SandboxIdentity:
    """The identity of one trajectory's sandboxes. `token`: what agents send to the gateway in place of a key."""

    hostname: str
    machine_id: str
    boot_id: str
    token: str

    @staticmethod
    def of(trajectory: TrajectoryID) -> SandboxIdentity:
        """Derived from the trajectory's id, so nothing has to be recorded."""

        def derive(what: str) -> uuid.UUID:
            return uuid.UUID(bytes=hashlib.sha256(f"{what} {trajectory}".encode()).digest()[:16], version=4)

        return SandboxIdentity(
            f"sandbox-{short(trajectory)}", derive("machine").hex, str(derive("boot")), derive("token").hex + _TOKEN_END
        )


def give(runtime: Runtime, container: Container, target: Target, run_dir: Path, identity: SandboxIdentity) -> None:
    """Give a fresh container, which has no root of a snapshot yet, its hostname and boot id, and prepare the machine id.
    SandboxFailed."""
    try:
        for name, value in ((_MACHINE_ID, identity.machine_id), (_BOOT_ID, identity.boot_id)):
            (run_dir / name).write_text(value + "\n")
            (run_dir / name).chmod(0o444)
        runtime.rename(container, identity.hostname)
        with files.closing_fd(os.open(run_dir / _BOOT_ID, os.O_PATH | os.O_CLOEXEC)) as fd:
            tree = mounts.read_only_file(fd)
        with files.closing_fd(tree):
            namespaces.in_mount_namespace(target.mount_ns_fd, lambda: _cover(_KERNEL_BOOT_ID, tree))
    except OSError as exc:
        raise SandboxFailed(
            f"container {short(container.id)} cannot be given its identity: {exc.strerror}; try again"
        ) from exc


def cover_machine_id(target: Target, store: LayerStore, image: ImageID, run_dir: Path) -> None:
    """Give the container its own machine id with its next root, if the image has one."""
    root = store.open_image(image)
    try:
        spot = files.open_beneath(root, MACHINE_ID, os.O_PATH | os.O_NOFOLLOW)
    except OSError:
        return  # there is none, or a link on the way to it
    finally:
        os.close(root)
    with files.closing_fd(spot):
        if stat.S_ISREG(os.fstat(spot).st_mode):
            target.cover_machine_id(run_dir / _MACHINE_ID)


def go_on(target: Target, run_dir: Path) -> None:
    """As `cover_machine_id`, for a container of an earlier daemon. OSError, SandboxFailed."""
    found = dict(layout_of(target).points).get(b"/" + MACHINE_ID)
    if found is not None:
        target.cover_machine_id(run_dir / _MACHINE_ID, found)


def _cover(path: str, tree: int) -> None:
    with files.closing_fd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as spot:
        mounts.attach(tree, spot)
