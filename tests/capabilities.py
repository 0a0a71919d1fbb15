"""What a test needs of the machine. A missing capability skips on a laptop and fails where SNAPSHOTD_REQUIRE lists it
(as CI does)."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from snapshotd.engine.host import system_packages
from snapshotd.kernel.mounts import LayerNaming
from snapshotd.kernel.probes import needed, useful
from tests import dockerd


def _root() -> str | None:
    return None if os.geteuid() == 0 else "this test needs root"


def _program(*names: str) -> str | None:
    absent = [name for name in names if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _docker() -> str | None:
    if dockerd.answers():
        return _program("runc", "catatonit")
    return _root() or _program("dockerd", "containerd", "runc", "ip", "catatonit")


def _compose() -> str | None:
    absent = [
        package.name for package in system_packages.PACKAGES if package.name == "docker-compose" and package.missing()
    ]
    return f"not installed: {absent[0]}" if absent else None


def _fuse() -> str | None:
    if importlib.util.find_spec("pyfuse3") is None:
        return "not installed: pyfuse3"
    return useful.fuse()


def _python312() -> str | None:
    found = sorted(map(str, Path.home().glob(".pyenv/versions/3.12.*/bin/python")))
    return found[-1] if found else shutil.which("python3.12")  # pyenv's own name for it may lead nowhere


@cache
def layer_naming() -> LayerNaming:
    """How overlayfs takes layers here, for tests that mount an overlay by themselves."""
    return needed.probe(Path(tempfile.gettempdir())).layer_naming


CAPABILITIES: dict[str, Callable[[], str | None]] = {
    "root": _root,
    "runc": lambda: _program("runc", "catatonit"),
    "slirp4netns": lambda: _program("slirp4netns"),
    "docker": _docker,
    "fuse": _fuse,
    "xfs": lambda: _program("mkfs.xfs"),
    "quotas": lambda: useful.project_quotas(Path("/proc")),
    "oracles": lambda: _program("rsync", "mtree", "bsdtar"),
    "btrfs": lambda: _program("mkfs.btrfs"),
    "compose": _compose,
    "qemu": lambda: _program("qemu-system-x86_64", "busybox", "mke2fs", "bsdtar", "apt-get"),
    "postgres": lambda: (
        None if any(Path("/usr/lib/postgresql").glob("*/bin/postgres")) else "Debian's PostgreSQL is missing"
    ),
    "podman": lambda: _root() or _program("podman", "conmon", "runc"),
    "rclone": lambda: _program("rclone"),
    "python3.12": lambda: None if _python312() else "no Python 3.12 is there",
    "chromium": lambda: _program("chromium"),
    "systemd": lambda: _program("systemctl", "systemd-analyze", "nsenter", "unshare"),
}
"""Name to a check: None if it is there, else why not."""


def require(*names: str) -> None:
    """Skip the running test when one of the capabilities is missing; fail it when SNAPSHOTD_REQUIRE (comma-separated)
    names that one."""
    demanded = {name.strip() for name in os.environ.get("SNAPSHOTD_REQUIRE", "").split(",") if name.strip()}
    unknown = demanded - CAPABILITIES.keys()
    assert not unknown, (
        f"SNAPSHOTD_REQUIRE names unknown capabilities {sorted(unknown)}; there are {sorted(CAPABILITIES)}"
    )
    for name in names:
        reason = CAPABILITIES[name]()
        if reason is None:
            continue
        if name in demanded:
            pytest.fail(f"SNAPSHOTD_REQUIRE demands {name}: {reason}", pytrace=False)
        pytest.skip(f"{name}: {reason}")


def python312() -> str:
    """Python 3.12, which some frameworks need; skips or fails the running test as `require` does."""
    require("python3.12")
    return str(_python312())
