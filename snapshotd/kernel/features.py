"""The features of this kernel, found out by using them. Every probe makes the system call, undoes it, and leaves
nothing behind.

A probe returns None when the feature works, else the reason in a few words. None of them raises for a missing feature.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from snapshotd.kernel import fanotify, files, mounts, namespaces, quota
from snapshotd.kernel import syscalls as sc
from snapshotd.types import IdMap

_PROBE_MAP = IdMap(base=1_000_000, count=65536)
_CGROUP_ROOTS = (
    ("/sys/fs/cgroup/freezer", "freezer.state", 1),
    ("/sys/fs/cgroup", "cgroup.freeze", 2),
    ("/sys/fs/cgroup/unified", "cgroup.freeze", 2),
)


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing we need of the kernel: since which version it has it, and how to find out. `probe` gets a directory to
    work in."""

    name: str
    since: str
    purpose: str
    probe: Callable[[Path], str | None]


def _reason(exc: OSError) -> str:
    return exc.strerror or str(exc)


def overlay(_: Path) -> str | None:
    """The overlay file system through the new mount interface (fsopen, Linux 5.2)."""
    try:
        os.close(sc.call("fsopen", "overlay", sc.FSOPEN_CLOEXEC))
    except OSError as exc:
        return _reason(exc)
    return None


def layers_by_descriptor(directory: Path) -> str | None:
    """Overlay layers given as file descriptors (Linux 6.13)."""
    with ExitStack() as stack:
        try:
            fs = sc.call("fsopen", "overlay", sc.FSOPEN_CLOEXEC)
            stack.callback(os.close, fs)
            layer = os.open(directory, files.DIR_FLAGS)
            stack.callback(os.close, layer)
            sc.call("fsconfig", fs, sc.FSCONFIG_SET_FD, "lowerdir+", None, layer)
        except OSError as exc:
            return _reason(exc)
    return None


def mount_setattr(directory: Path) -> str | None:
    """Changing a mount's attributes (Linux 5.12): how a snapshot is sealed."""
    with ExitStack() as stack:
        try:
            fd = os.open(directory, files.DIR_FLAGS)
            stack.callback(os.close, fd)
            tree = mounts.clone(fd)
            stack.callback(os.close, tree)
            mounts.set_attributes(tree, attr_set=sc.MOUNT_ATTR_RDONLY)
        except OSError as exc:
            return _reason(exc)
    return None


def user_namespaces(_: Path) -> str | None:
    """User namespaces with a map of 65,536 ids: container root has no rights on the host."""
    try:
        os.close(namespaces.user_namespace(_PROBE_MAP))
    except OSError as exc:
        return _reason(exc)
    return None


def overlay_mount(directory: Path) -> str | None:
    """A whole overlay with upper directory in `directory`, as every sandbox has one."""
    return _try_overlay(directory, None)


def id_mapped_overlay(directory: Path) -> str | None:
    """An overlay whose layers are id-mapped clones (Linux 5.19, and the file system below must support it)."""
    with ExitStack() as stack:
        try:
            userns = namespaces.user_namespace(_PROBE_MAP)
        except OSError as exc:
            return _reason(exc)
        stack.callback(os.close, userns)
        return _try_overlay(directory, userns)


def _try_overlay(directory: Path, userns: int | None) -> str | None:
    with scratch(directory) as place, ExitStack() as stack:
        for part in ("lower", "upper", "work"):
            (place / part).mkdir()
        try:
            fd = os.open(place, files.DIR_FLAGS)
            stack.callback(os.close, fd)
            if userns is not None:
                fd = mounts.id_mapped_clone(fd, userns)
                stack.callback(os.close, fd)
            layers = []
            for name in (b"lower", b"upper", b"work"):
                layers.append(files.open_dir(fd, name))
                stack.callback(os.close, layers[-1])
            mounted = mounts.overlay(layers[:1], *layers[1:])
            stack.callback(os.close, mounted)
            made = os.open(b"probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=mounted)
            os.close(made)
        except OSError as exc:
            return _reason(exc)
    return None


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A directory of its own below `directory`, gone afterwards with all that the kernel put there."""
    place = Path(tempfile.mkdtemp(prefix=".probe-", dir=directory))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def freezer() -> tuple[int, str] | str:
    """A cgroup that can be frozen: its version and where, or the reason why there is none."""
    reasons = []
    for root, control, version in _CGROUP_ROOTS:
        group = f"{root}/snapshotd-probe-{secrets.token_hex(4)}"
        try:
            os.mkdir(group)
        except OSError as exc:
            reasons.append(f"{root}: {_reason(exc)}")
            continue
        try:
            if os.path.exists(f"{group}/{control}"):
                return version, root
            reasons.append(f"{root} has no {control}")
        finally:
            os.rmdir(group)
    return "; ".join(reasons)


def fuse() -> str | None:
    """None if /dev/fuse can be opened, else the reason."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return _reason(exc)
    return None


def reflink(directory: Path) -> str | None:
    """None if files in `directory` can share extents (FICLONE), else the reason."""
    try:
        with tempfile.TemporaryFile(dir=directory) as source, tempfile.TemporaryFile(dir=directory) as target:
            source.write(b"\0" * 4096)
            source.flush()
            return None if files.reflink(source.fileno(), target.fileno()) else "its file system cannot share extents"
    except OSError as exc:
        return _reason(exc)


def project_quotas(directory: Path) -> str | None:
    """None if files in `directory` can be given limits, else the reason; if files cannot be reflinked there, the answer
    is about an XFS image."""
    if reflink(directory) is not None:
        return None if os.path.exists("/proc/fs/xfs/xqmstat") else "this kernel's XFS has no quotas, or is not loaded"
    fd = os.open(directory, files.DIR_FLAGS)
    try:
        return None if quota.enforced(fd) else "its file system is not mounted with prjquota"
    finally:
        os.close(fd)


def writers_told(directory: Path) -> str | None:
    """None if the kernel tells which process changes a file in `directory`, else the reason."""
    try:
        with scratch(directory) as place:
            fd = os.open(place, files.DIR_FLAGS)
            try:
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
            finally:
                os.close(fd)
    except (OSError, NotImplementedError) as exc:
        return _reason(exc) if isinstance(exc, OSError) else str(exc)


FEATURES: tuple[Feature, ...] = (
    Feature("overlay", "5.2", "sandbox roots", overlay),
    Feature("mount_setattr", "5.12", "sealing snapshots", mount_setattr),
    Feature("overlay layers by descriptor", "6.13", "building sandbox roots", layers_by_descriptor),
    Feature("overlay in the state directory", "6.13", "sandbox roots", overlay_mount),
    Feature("user namespaces", "3.8", "container root without rights on the host", user_namespaces),
    Feature("id-mapped overlay", "6.13", "user namespaces over shared layers", id_mapped_overlay),
)
"""Each probe comes after the ones that it needs."""
