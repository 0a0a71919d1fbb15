"""The report names every piece, each failure has a fix, the probes leave nothing, and the list of packages needs no
dependency."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotd.engine.host import doctor, system_packages
from snapshotd.kernel import abilities
from snapshotd.kernel.abilities import Abilities
from snapshotd.kernel.mounts import LayerNaming
from snapshotd.kernel.probes import useful

pytestmark = pytest.mark.usefixtures("no_trials")
REPOSITORY = Path(system_packages.__file__).parents[3]


def test_every_piece_is_looked_at_and_every_failure_has_a_fix(tmp_path: Path) -> None:
    checks = doctor.diagnose(tmp_path / "not" / "there")
    names = [check.name for check in checks]
    assert len(names) == len(set(names))
    assert {
        "privileges",
        "mode",
        "overlay",
        "id-mapped layers",
        "cgroups",
        "runc",
        "catatonit",
        "Docker engine",
        "FUSE",
        "reflink",
        "xfsprogs",
        "slirp4netns",
        "mmdebstrap",
        "disk",
        "Python",
        "networks of some hosts",
        "other machines",
    } <= set(names)
    for check in checks:
        assert check.detail
        assert (check.fix == "") == (check.ok is True), check


@pytest.mark.parametrize(
    ("listen", "ok", "said"),
    [
        ("", True, "none reaches the daemon"),
        ("http://127.0.0.1:0", True, "will answer at http://127.0.0.1:0"),
        ("203.0.113.7:7676", False, "cannot be listened on"),
        ("nonsense", False, "cannot be listened on"),
        ("127.0.0.1:99999", False, "cannot be listened on"),
    ],
)
def test_the_address_for_other_machines_is_tried(
    monkeypatch: pytest.MonkeyPatch, listen: str, ok: bool, said: str
) -> None:
    monkeypatch.setenv("SNAPSHOTD_LISTEN", listen)
    check = doctor._listening()
    assert check.ok is ok
    assert said in check.detail


def test_an_address_that_is_taken_may_be_the_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("SNAPSHOTD_LISTEN", f"http://127.0.0.1:{listening.getsockname()[1]}")
        check = doctor._listening()
        assert check.ok is True
        assert "is taken" in check.detail


def test_networks_of_some_hosts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(useful, "network_namespaces", lambda: "operation not permitted")
    check = doctor._networks()
    assert check.ok is None
    assert "allow:HOST" in check.detail


def test_it_is_quick_and_leaves_nothing(tmp_path: Path) -> None:
    descriptors, mounts = os.listdir("/proc/self/fd"), Path("/proc/self/mountinfo").read_text().count("probe")
    began = time.monotonic()
    doctor.diagnose(tmp_path)
    assert time.monotonic() - began < 30  # a fraction of a second on a quiet machine
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors)
    assert Path("/proc/self/mountinfo").read_text().count("probe") == mounts
    assert not [
        name
        for root, _, _ in abilities.CGROUP_ROOTS
        if os.path.isdir(root)
        for name in os.listdir(root)
        if "probe" in name
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_a_place_that_cannot_hold_layers_is_reported() -> None:
    """The upper directory of an overlay cannot lie on proc, where nothing can be made."""
    checks = doctor._host(Path("/proc"))
    assert [(check.name, check.ok) for check in checks] == [("mode", False)]
    assert "/proc" in checks[0].detail


def _lacking(**changed: object) -> Abilities:
    whole = Abilities(True, True, LayerNaming.TEXT, True, True, True, True, True, 2, "/sys/fs/cgroup")
    return replace(whole, **changed)  # type: ignore[arg-type]


def test_a_missing_ability_is_named_with_what_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _lacking(mapped_layers=False, reasons={"mapped_layers": "Invalid argument"})
    monkeypatch.setattr(doctor.needed, "probe", lambda _: host)
    monkeypatch.delenv("SNAPSHOTD_MODE", raising=False)
    found = {check.name: check for check in doctor._host(Path("/"))}
    assert found["mode"].ok is False
    assert "SNAPSHOTD_MODE=pivot-root" in found["mode"].fix
    assert found["id-mapped layers"].ok is None
    assert "Invalid argument" in found["id-mapped layers"].detail
    assert "root on the host" in found["id-mapped layers"].detail
    monkeypatch.setenv("SNAPSHOTD_MODE", "pivot-root")
    assert doctor._host(Path("/"))[0].ok is None


def test_a_host_without_overlays_has_no_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    host = _lacking(overlays=False, reasons={"overlays": "No such device"})
    monkeypatch.setattr(doctor.needed, "probe", lambda _: host)
    found = {check.name: check for check in doctor._host(Path("/"))}
    assert (found["mode"].ok, found["overlay"].ok) == (False, False)
    assert "modprobe overlay" in found["overlay"].fix


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOENT, "modprobe fuse"),
        (errno.ENODEV, "modprobe fuse"),
        (errno.EACCES, "chmod 666 /dev/fuse"),
        (errno.EPERM, "--device /dev/fuse"),
    ],
)
def test_the_advice_for_a_device_follows_from_the_error(number: int, advice: str) -> None:
    """A device that is there, and that this user may not open, does not come by loading its module."""
    fix = doctor._device_fix("/dev/fuse", "fuse", OSError(number, os.strerror(number)))
    assert advice in fix
    assert ("modprobe" in fix) == (advice == "modprobe fuse")


def test_missing_programs_are_warnings_or_failures_by_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages.Package, "missing", lambda _: True)
    found = {check.name: check for check in doctor._programs()}
    assert found["runc"].ok is False
    assert found["slirp4netns"].ok is None
    assert "apt-get install slirp4netns" in found["slirp4netns"].fix


@pytest.mark.parametrize("script", ["exec /bin/sleep 60", None])
def test_a_runc_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None) -> None:
    runc = tmp_path / "runc"
    runc.write_text("no program" if script is None else f"#!/bin/sh\n{script}\n")
    runc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_RUNC_TIMEOUT_S", 0.1)
    check = doctor._runc()
    assert (check.ok, check.detail.startswith("`runc --version` does not answer")) == (False, True)


def test_a_silent_docker_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert doctor._docker().ok is None
    monkeypatch.setenv("DOCKER_HOST", "tcp://user:secret@elsewhere.example:2375")
    assert "secret" not in doctor._docker().detail


def test_setup_does_nothing_when_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages.Package, "missing", lambda _: False)
    said: list[str] = []
    assert doctor.setup(said.append) == []
    assert said == []


def test_setup_explains_what_it_cannot_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages.Package, "missing", lambda self: self.name == "runc")
    monkeypatch.setattr(system_packages, "can_install", lambda: "this is not a Debian or Ubuntu system (no apt-get)")
    (check,) = doctor.setup(lambda _: None)
    assert (check.name, check.ok) == ("runc", False)
    assert "not a Debian" in check.detail
    assert "runc" in check.fix


def test_the_list_of_packages_runs_before_anything_is_installed() -> None:
    """With the standard library alone: no site-packages."""
    command = [sys.executable, "-S", "-m", "snapshotd.engine.host.system_packages", "develop"]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert set(said.stdout.split()) <= {package.name for package in system_packages.PACKAGES}
    wrong = subprocess.run([*command[:-1], "everything"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "usage" in wrong.stderr


def test_every_level_knows_its_packages() -> None:
    groups = {package.level for package in system_packages.PACKAGES}
    assert groups == set(system_packages.LEVELS["develop"])


@pytest.mark.parametrize(
    ("root", "parent"),
    [
        ("/sys/fs/cgroup/freezer", ""),
        ("/sys/fs/cgroup", ""),
        ("/sys/fs/cgroup/unified", ""),
        ("/sys/fs/cgroup/user.slice/a.scope", "/user.slice/a.scope"),
        ("", ""),
    ],
)
def test_the_parent_of_cgroups_is_named_from_the_mount_point(root: str, parent: str) -> None:
    assert _lacking(cgroup_root=root).cgroup_parent == parent
