"""Check the machine and name every piece that snapshotd misses, with the fix; install the pieces that can be
installed."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from snapshotd.config import read
from snapshotd.engine.host import system_packages
from snapshotd.engine.mind import policy
from snapshotd.errors import UsageError
from snapshotd.kernel import features

_FREE_BYTES_WANTED = 5 << 30
_DOCKER_TIMEOUT_S = 0.5
_DOCKER_NEEDED = (20, 10)
_RUNC_NEEDED = (1, 1)
_PYTHON_NEEDED = (3, 11)
_NEWER_KERNEL = (
    "boot Linux 6.13 or newer; on Debian 13, from its backports: `apt-get install -t trixie-backports "
    "linux-image-$(dpkg --print-architecture)` (Debian 12 ends at 6.12, also in its backports: upgrade it to 13 first)"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `ok` is None for a warning: it works without, but not as well. `fix` is empty when `ok`
    is True."""

    name: str
    ok: bool | None
    detail: str
    fix: str = ""


def diagnose(state_dir: Path) -> list[Check]:
    """Check everything, most important first. `state_dir` need not exist: then its nearest parent is checked.

    Real probes (the system call is made), under a second together; nothing is left behind and nothing is changed.
    """
    place = _existing(state_dir)
    machine = [_privileges(), _kernel_version(), *_kernel_features(place), _cgroups()]
    storage = [_reflink(place), _disk_limits(place), _free_space(place)]
    return [*machine, *_programs(), _docker(), _fuse(), *storage, _python(), _policy(state_dir), _whose_change()]


def setup(progress: Callable[[str], None]) -> list[Check]:
    """Install the missing packages (Debian and Ubuntu, as root). One check per package that was missing; empty when
    none was."""
    wanted = system_packages.missing("run")
    reason = system_packages.install(wanted, progress)
    checks = []
    for package in wanted:
        if package.missing():
            fix = f"install {package.name} by hand ({package.purpose})"
            checks.append(Check(package.name, False, f"not installed: {reason}", fix))
        else:
            checks.append(Check(package.name, True, "installed"))
    return checks


def _existing(path: Path) -> Path:
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path


def _privileges() -> Check:
    if os.geteuid() == 0:
        return Check("privileges", True, "root")
    return Check(
        "privileges", False, f"user {os.geteuid()}, not root", "run the daemon with sudo or as the systemd service"
    )


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _kernel_version() -> Check:
    release = platform.release()
    if _version(release) >= (6, 13):
        return Check("kernel", True, release)
    return Check(
        "kernel", False, f"{release} is older than 6.13, which brought overlay layers by descriptor", _NEWER_KERNEL
    )


def _kernel_features(place: Path) -> list[Check]:
    checks = []
    for feature in features.FEATURES:
        reason: str | None
        try:
            reason = feature.probe(place)
        except OSError as exc:  # the place itself: not writable, full
            reason = f"{place}: {exc.strerror}"
        if reason is None:
            checks.append(Check(feature.name, True, feature.purpose))
            continue
        detail = f"{feature.purpose}: {reason} (needs Linux {feature.since})"
        checks.append(Check(feature.name, False, detail, _feature_fix(feature, place)))
    return checks


def _feature_fix(feature: features.Feature, place: Path) -> str:
    if os.geteuid() != 0:
        return "run `sudo snapshotd doctor`: this cannot be tried without root"
    if _version(platform.release()) < _version(feature.since):
        return _NEWER_KERNEL
    if feature.name == "user namespaces":
        return "allow them: `sysctl user.max_user_namespaces=15000` (inside a chroot the kernel allows none)"
    if feature.name == "id-mapped overlay" and features.user_namespaces(place):
        return "make user namespaces work first"
    if feature.name in ("overlay in the state directory", "id-mapped overlay"):
        return f"put the state directory (now below {place}) on ext4, XFS or btrfs, not on overlay or a network file system"
    return "in a container, run it with --privileged; else load the module (`modprobe overlay`)"


def _cgroups() -> Check:
    found = features.freezer()
    if isinstance(found, tuple):
        return Check("cgroups", True, f"version {found[0]} with freezer at {found[1]}")
    return Check(
        "cgroups", False, found, "run as root on a machine with the freezer; in a container, with --privileged"
    )


def _programs() -> list[Check]:
    checks = []
    for package in system_packages.PACKAGES:
        if package.level != "run":
            continue
        if package.missing():
            needed = package.name in ("runc", "catatonit", "mount")
            fix = f"`snapshotd setup`, or `apt-get install {package.name}`"
            checks.append(
                Check(package.name, False if needed else None, f"not installed; it is for {package.purpose}", fix)
            )
        elif package.name == "runc":
            checks.append(_runc())
        else:
            checks.append(Check(package.name, True, package.purpose))
    return checks


def _runc() -> Check:
    result = subprocess.run(["runc", "--version"], capture_output=True, text=True, check=False, timeout=5)
    first = result.stdout.partition("\n")[0]
    if _version(first) >= _RUNC_NEEDED:
        return Check("runc", True, first)
    detail = f"{first or 'runc --version said nothing'}: 1.1 or newer is needed"
    return Check("runc", False, detail, "`apt-get install runc`, or a release of the runc project")


def _docker() -> Check:
    name, fix = (
        "Docker engine",
        "only for `--runtime docker`: `apt-get install docker.io`, then start it; the runc driver needs none",
    )
    address = read(only=("docker_host",)).docker_host
    if not address.startswith("unix://"):
        return Check(
            name, None, f"DOCKER_HOST is {urlsplit(address).scheme}://…; snapshotd needs an engine on this machine", fix
        )
    try:
        version = _docker_version(address.removeprefix("unix://"))
    except (OSError, ValueError, HTTPException) as exc:
        return Check(name, None, f"{address} does not answer: {getattr(exc, 'strerror', None) or exc}", fix)
    if _version(version) < _DOCKER_NEEDED:
        return Check(name, None, f"version {version} is older than 20.10", fix)
    return Check(name, True, f"version {version}")


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_DOCKER_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_DOCKER_TIMEOUT_S)
        self.sock.connect(self._path)


def _docker_version(path: str) -> str:
    """Straight over the socket: the SDK takes a third of a second to import."""
    connection = _UnixConnection(path)
    try:
        connection.request("GET", "/version")
        answer = json.loads(connection.getresponse().read(1 << 20))
    finally:
        connection.close()
    if not isinstance(answer, dict) or not isinstance(answer.get("Version"), str):
        raise ValueError("it is no Docker engine")
    return str(answer["Version"])


def _fuse() -> Check:
    reason = features.fuse()
    if reason is None and importlib.util.find_spec("pyfuse3") is None:
        detail = "pyfuse3 is not installed; it is for browsing snapshots, and for starting from cold ones at once"
        return Check(
            "FUSE",
            None,
            detail,
            "apt-get install libfuse3-dev pkg-config gcc python3-dev; pip install 'snapshotd[fuse]'",
        )
    if reason is None:
        return Check("FUSE", True, "/dev/fuse")
    detail = f"/dev/fuse: {reason}; it is for browsing snapshots as files, and for starting from cold ones at once"
    return Check("FUSE", None, detail, "`modprobe fuse`; in a container, --device /dev/fuse")


def _reflink(place: Path) -> Check:
    reason = features.reflink(place)
    if reason is None:
        return Check("reflink", True, f"{place} shares extents")
    if not any(p.name == "xfsprogs" and p.missing() for p in system_packages.PACKAGES) and os.path.exists(
        "/dev/loop-control"
    ):
        return Check(
            "reflink", True, f"{place} cannot ({reason}); an XFS image in the state directory will hold the layers"
        )
    fix = "`apt-get install xfsprogs` and make loop devices available, or put the state directory on XFS or btrfs"
    return Check("reflink", None, f"{place}: {reason}, so the first write into a big file copies it whole", fix)


def _disk_limits(place: Path) -> Check:
    reason = features.project_quotas(place)
    if reason is None:
        return Check("disk limits", True, "kept by the file system of the layers")
    fix = "boot a kernel with CONFIG_XFS_QUOTA, or mount the state directory's XFS with prjquota"
    return Check("disk limits", None, f"{reason}: the daemon looks once a second and ends what takes too much", fix)


def _whose_change() -> Check:
    """For agents in a user's own folder (`snapshotd hooks`), asked of the working directory."""
    folder = Path.cwd()
    reason = features.writers_told(folder)
    if reason is None:
        return Check("folders", True, f"the kernel tells which process changes a file in {folder}")
    return Check(
        "folders",
        None,
        f"which process changes a file in {folder} is not known ({reason}): what others write there while an agent's call "
        "runs counts as the call's",
        "as root, in a folder on ext4, XFS, Btrfs or tmpfs; elsewhere write nothing there during a call",
    )


def _free_space(place: Path) -> Check:
    free = shutil.disk_usage(place).free
    detail = f"{free / (1 << 30):.1f} GiB free in {place}"
    if free >= _FREE_BYTES_WANTED:
        return Check("disk", True, detail)
    return Check("disk", None, detail, "free some space: 5 GiB or more are comfortable")


def _python() -> Check:
    version = platform.python_version()
    ok = sys.version_info >= _PYTHON_NEEDED
    return Check("Python", ok, version, "" if ok else "install Python 3.11 or newer")


def _policy(state_dir: Path) -> Check:
    """The policy file: the rules for which calls a person is asked about (docs/policy.md)."""
    path = state_dir / policy.FILE_NAME
    try:
        rules = len(policy.PolicyFile(path).read().rules)
    except UsageError as exc:
        return Check("policy", False, exc.message, f"correct {path}; docs/policy.md has the form")
    return Check(
        "policy",
        True,
        f"{path}: {rules} rules" if path.is_file() else f"{path} does not exist: nobody is asked about any call",
    )
