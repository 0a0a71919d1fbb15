"""The OCI configuration of a sandbox: a pure function of its spec. Same isolation as Docker's defaults, less the parts
that are not needed here.

Source: opencontainers/runtime-spec config.md and config-linux.md.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from snapshotd.egress.resolver import RESOLV_CONF
from snapshotd.kernel import rootless
from snapshotd.runtime import seccomp
from snapshotd.runtime.base import (
    CAPABILITIES,
    DEFAULT_PATH,
    FIRST_HOSTNAME,
    RUN_DIR,
    SHARE_DIR,
    ContainerSpec,
    ExecSpec,
)
from snapshotd.types import IdMap, Limits, Network

STUB_DIRS = ("proc", "sys", "dev", "run/snapshotd", "tmp", "etc")
"""Content of the stub root: mount points, and the files that an OCI runtime expects."""
INIT_ARGV = (f"{SHARE_DIR}/init", "-P")
"""`-P`: no child of its own, only reap (catatonit's pause mode)."""

_CPU_PERIOD_US = 100_000
_MIN_CPU_QUOTA_US = 1_000
"""The kernel refuses less."""
_WANTED_FILES = 1_048_576
_TTY_GROUP = 5
_CAP_SYS_RESOURCE = 24

_MASKED_PATHS = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
)
_READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

_MOUNT_FLAGS = (
    (os.ST_NOSUID, "nosuid"),
    (os.ST_NODEV, "nodev"),
    (os.ST_NOEXEC, "noexec"),
    (os.ST_NOATIME, "noatime"),
    (os.ST_NODIRATIME, "nodiratime"),
    (os.ST_RELATIME, "relatime"),
)


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a container: its read-only root and its cgroup (None: it has none of its own, and no limits), True if a
    limit on swap can be set there, and with an id map the path of its user namespace."""

    root: Path
    cgroup: str | None
    swap_is_counted: bool
    user_namespace: str | None = None


def bundle(spec: ContainerSpec, id_map: IdMap | None, placement: Placement) -> dict[str, Any]:
    """`config.json` of a container whose only process is its init."""
    return {
        "ociVersion": "1.0.2",
        "hostname": FIRST_HOSTNAME,
        "root": {"path": str(placement.root), "readonly": True},
        "process": process(ExecSpec(argv=INIT_ARGV, cwd="/", env={"PATH": DEFAULT_PATH, "HOME": "/"})),
        "mounts": _mounts(spec, id_map),
        "linux": {
            "namespaces": _namespaces(placement.user_namespace),
            **_id_mappings(id_map),
            **_control_group(spec.limits, placement),
            "seccomp": seccomp.profile(),
            "maskedPaths": list(_MASKED_PATHS),
            "readonlyPaths": list(_READONLY_PATHS),
        },
    }


def process(spec: ExecSpec) -> dict[str, Any]:
    """The `process` object of one command, complete: nothing is taken from the container's own."""
    # None for other users: they could run programs that only root may reach, since execve runs as us.
    held = list(CAPABILITIES) if spec.user == 0 else []
    console = {} if spec.terminal is None else dict(zip(("height", "width"), spec.terminal, strict=True))
    return {
        "terminal": spec.terminal is not None,
        **({"consoleSize": console} if console else {}),
        "user": {"uid": spec.user, "gid": spec.group, "additionalGids": list(spec.groups)},
        "args": list(spec.argv),
        "env": [f"{name}={value}" for name, value in spec.env.items()],
        "cwd": spec.cwd,
        "capabilities": {
            # None inheritable, so that a program with inheritable file capabilities gains nothing (CVE-2022-24769).
            "bounding": list(CAPABILITIES),
            "effective": held,
            "permitted": held,
            "inheritable": [],
            "ambient": [],
        },
        "rlimits": _rlimits(),
        "noNewPrivileges": True,
        "oomScoreAdj": max(0, int(Path("/proc/self/oom_score_adj").read_text())),  # only root may lower it
    }


@cache
def _rlimits() -> list[dict[str, Any]]:
    """1048576 open files where this process may grant limits, which takes CAP_SYS_RESOURCE (in a foreign user namespace
    also for lower limits); else what it has itself, by inheritance. In a user namespace no more than its own."""
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if not effective >> _CAP_SYS_RESOURCE & 1:
        return []
    files = min(_WANTED_FILES, int(Path("/proc/sys/fs/nr_open").read_text()))
    if rootless.in_own_namespace():
        files = min(files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    return [{"type": "RLIMIT_NOFILE", "hard": files, "soft": files}]


def _namespaces(user_namespace: str | None) -> list[dict[str, str]]:
    new = [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount", "cgroup")]
    return new if user_namespace is None else [*new, {"type": "user", "path": user_namespace}]


def _id_mappings(id_map: IdMap | None) -> dict[str, Any]:
    if id_map is None:
        return {}
    extent = [{"containerID": 0, "hostID": id_map.base, "size": id_map.count}]
    return {"uidMappings": extent, "gidMappings": extent}


def _control_group(limits: Limits, placement: Placement) -> dict[str, Any]:
    if placement.cgroup is None:
        return {"resources": {}}
    return {"cgroupsPath": placement.cgroup, "resources": _resources(limits, placement.swap_is_counted)}


def _resources(limits: Limits, swap_is_counted: bool) -> dict[str, Any]:
    memory = {"limit": limits.memory_bytes}
    if swap_is_counted:
        memory["swap"] = limits.memory_bytes  # memory and swap together: no swap on top
    return {
        "devices": [
            {"allow": False, "access": "rwm"}
        ],  # the runtime adds null, zero, full, random, urandom, tty and ptys
        "memory": memory,
        "cpu": {"quota": max(_MIN_CPU_QUOTA_US, int(limits.cpus * _CPU_PERIOD_US)), "period": _CPU_PERIOD_US},
        "pids": {"limit": limits.pids},
    }


def _mount(destination: str, kind: str, source: str | Path, *options: str) -> dict[str, Any]:
    return {"destination": destination, "type": kind, "source": str(source), "options": list(options)}


def _mounts(spec: ContainerSpec, id_map: IdMap | None) -> list[dict[str, Any]]:
    strict = ("nosuid", "noexec", "nodev")
    tty = () if id_map is not None and id_map.count <= _TTY_GROUP else (f"gid={_TTY_GROUP}",)
    options = _bind_options(spec.run_dir, "noexec")
    resolver = [_mount(f"/etc/{RESOLV_CONF}", "bind", spec.run_dir / RESOLV_CONF, *options)]
    return [
        _mount("/proc", "proc", "proc", *strict),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", *tty),
        _mount("/dev/shm", "tmpfs", "shm", *strict, "mode=1777", "size=65536k"),
        _mount("/dev/mqueue", "mqueue", "mqueue", *strict),
        _mount("/sys", "sysfs", "sysfs", *strict, "ro"),
        _mount(RUN_DIR, "bind", spec.run_dir, *options),
        _mount(SHARE_DIR, "bind", spec.share_dir, *_bind_options(spec.share_dir)),
        *(() if spec.network == Network.NONE else resolver),
    ]


def _bind_options(source: Path, *more: str) -> tuple[str, ...]:
    """Read-only and private. Flags of the source's mount are repeated: in a user namespace they are locked, and a
    remount that leaves one out is refused with EPERM (mount_namespaces(7))."""
    flags = os.statvfs(source).f_flag
    kept = [name for flag, name in _MOUNT_FLAGS if flags & flag]
    return tuple(dict.fromkeys(("bind", "rprivate", "ro", "nosuid", "nodev", *more, *kept)))
