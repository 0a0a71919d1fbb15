"""Probes of abilities that are useful, and that sandboxes can do without. Each returns None, or the reason why the
ability is missing."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from snapshotd.kernel import fanotify, files, namespaces, quota, rootless
from snapshotd.kernel.probes.needed import reason_of, scratch

FUSE, LOOP = "/dev/fuse", "/dev/loop-control"


def refusal(device: str) -> OSError | None:
    """The error with which a device cannot be opened to read and write; None: it can."""
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return exc
    return None


def fuse() -> str | None:
    """None if snapshots can be mounted by FUSE, else the reason."""
    refused = refusal(FUSE)
    return None if refused is None else reason_of(refused)


def shares_extents(directory: Path) -> bool:
    """True if files in `directory` can share extents (FICLONE). Leaves nothing behind. OSError: it cannot be tried."""
    with tempfile.TemporaryFile(dir=directory) as source, tempfile.TemporaryFile(dir=directory) as target:
        source.write(b"\0" * 4096)
        source.flush()
        return files.reflink(source.fileno(), target.fileno())


def reflink(directory: Path) -> str | None:
    """None if files in `directory` can share extents, else the reason."""
    try:
        return None if shares_extents(directory) else "its file system cannot share extents"
    except OSError as exc:
        return reason_of(exc)


def project_quotas(directory: Path) -> str | None:
    """None if files in `directory` can be given limits, else the reason; if files cannot be reflinked there, the answer
    is about an XFS image."""
    if reflink(directory) is not None:
        return None if os.path.exists("/proc/fs/xfs/xqmstat") else "this kernel's XFS has no quotas, or is not loaded"
    with files.closing_fd(os.open(directory, files.DIR_FLAGS)) as fd:
        return None if quota.enforces_limits(fd) else "its file system is not mounted with prjquota"


def network_namespaces() -> str | None:
    """None if a network namespace can be made, by an ordinary user in a user namespace; else the reason."""
    try:
        if rootless.is_root():
            os.close(namespaces.new_network_namespace())
            return None
        tried = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True, text=True, check=False
        )
        return None if tried.returncode == 0 else tried.stderr.strip() or "`unshare --user --net` fails"
    except OSError as exc:
        return reason_of(exc)


def writers_told(directory: Path) -> str | None:
    """None if the kernel tells which process changes a file in `directory`, else the reason."""
    try:
        with scratch(directory) as place, files.closing_fd(os.open(place, files.DIR_FLAGS)) as fd:
            if not fanotify.is_local(fd):
                return "its file system is a network's or an overlay, or of a kind that is not known"
            marks = fanotify.NameMarks()
            try:
                marks.add(fd)
                child = subprocess.run(["/bin/mkdir", place / "by-a-child"], check=False)
                told = {touch.name: touch.pid for touch in marks.read()}
                return None if child.returncode or told.get(b"by-a-child", 0) > 0 else "the kernel names no process"
            finally:
                marks.close()
    except (OSError, NotImplementedError) as exc:
        return reason_of(exc) if isinstance(exc, OSError) else str(exc)


def loop_devices() -> str | None:
    """None if a file can be mounted as a disk here, else the reason."""
    refused = refusal(LOOP)
    return None if refused is None else reason_of(refused)
