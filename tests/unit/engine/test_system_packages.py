"""Each distribution's packages: their names in one table, and the words of its package manager."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshotd.engine.host import doctor, system_packages
from snapshotd.engine.host.system_packages import MANAGERS, Manager, Package

RUN = {"runc", "catatonit", "slirp4netns", "xfsprogs"}


@pytest.fixture(params=MANAGERS, ids=lambda one: one.program)
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """The one package manager of a machine that has no other program: it notes its words, and fails on `broken`."""
    found: Manager = request.param
    program = tmp_path / found.program
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/words\ncase "$*" in *broken*) echo "{found.complaint} no such package"; exit 1; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(system_packages, "_PATH", str(tmp_path))
    monkeypatch.setattr(system_packages.os, "geteuid", lambda: 0)
    return found


def words(tmp_path: Path) -> list[str]:
    return (tmp_path / "words").read_text().splitlines()


def test_what_a_sandbox_needs_is_in_each_distribution(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = {package.name for package in system_packages.PACKAGES if package.missing()}
    wanted = system_packages.missing("run")
    assert {package.name for package in wanted} >= RUN & missing
    assert ("mmdebstrap" in {package.name for package in wanted}) == (manager.program == "apt-get")
    monkeypatch.setattr(Package, "missing", lambda self: self.name in ("xfsprogs", "mount"))
    said: list[str] = []
    reason = system_packages.install(system_packages.missing("run"), said.append)
    assert reason == "xfsprogs mount installed, but what it should bring is not there"
    mount = "mount" if manager.program in ("apt-get", "apk") else "util-linux"
    assert words(tmp_path)[-1].endswith(f"xfsprogs {mount}")
    assert len(words(tmp_path)) == len(said) == (2 if manager.program == "apt-get" else 1)


def test_a_package_manager_that_fails_is_quoted(manager: Manager) -> None:
    reason = system_packages.install([Package("broken", ("no-such-program",), "a test")], lambda _: None)
    assert reason is not None
    assert reason.endswith(f"failed: {manager.complaint} no such package")


def test_packages_that_go_together_are_one_command(manager: Manager) -> None:
    said = system_packages.advice("gcc", "libfuse3-dev", "pkg-config")
    assert said.count(manager.shown) == 1
    assert said.startswith(f"`{manager.shown} ")
    said = system_packages.advice("gcc", "mmdebstrap")
    assert ("mmdebstrap, which this machine's packages do not have" in said) == (manager.program != "apt-get")


def test_the_doctor_names_the_command_of_this_machine(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "missing", lambda _: True)
    found = {check.name: check for check in doctor._programs()}
    assert f"{manager.shown} slirp4netns`" in found["slirp4netns"].fix
    assert "--image minimal" in found["mmdebstrap"].fix
    assert (f"{manager.shown} mmdebstrap" in found["mmdebstrap"].fix) == (manager.program == "apt-get")


def test_a_machine_without_any_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_packages, "_PATH", str(tmp_path))
    reason = system_packages.install([Package("runc", ("no-such-program",), "a test")], lambda _: None)
    assert reason == (
        "this machine has no package manager that is known (apt-get, dnf, pacman, apk); install runc yourself"
    )
