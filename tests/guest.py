"""A virtual machine with another kernel: Debian's own, on cgroups of version 2, in QEMU's software emulation.

The root is the base image of the deployment with what snapshotd and its tests import; it is kept (tests/kept.py), and a
run changes nothing of it. The project's sources, and files of the test, come as a tar each time.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.e2e import deployment
from tests.kept import cached

OLDEST = "6.1"
"""The kernel that the short set boots."""
CHECKOUT = Path(__file__).resolve().parents[1]
MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "crc32c-intel", "overlay", "loop", "xfs", "fuse", "tun")
"""What a guest's kernel loads before anything else, where it is not built in."""
_SOURCES = ("snapshotd", "sandbox-images", "tests", "pyproject.toml", "docs")
_NEEDED = ("snapshotd[fuse]", "pytest", "pytest-timeout", "pytest-docker", "pytest-xdist", "hypothesis")
"""Distributions that the guest gets from this process's Python, with what they need."""
_ROOM_BYTES = 4 << 30
_BOOT_S = 60
_BOOTS = 3
"""The emulator now and then runs a half-patched instruction of a kernel that boots, on its other processor: that panics, before
anything of ours has begun."""


@dataclass(frozen=True)
class Ended:
    """A guest that has ended: all that it said on its console, and the exit status of its script (None: it told none)."""

    said: str
    status: int | None


def run(kernel: str, script: str, *, timeout_s: float, files: Mapping[str, Path] | None = None) -> Ended:
    """Boot the newest of Debian's kernels whose version begins with `kernel`, and run a shell script as its root.

    `files`: path in the guest to a file. The project lies in /project, where the script begins. AssertionError when the
    machine does not come to its end in time.
    """
    tree, image = _kernel(kernel), _image()
    with tempfile.TemporaryDirectory(prefix="snapshotd-guest-", dir="/var/tmp") as folder:
        initial, given = Path(folder) / "initial.gz", Path(folder) / "given.tar"
        _write_initial(tree, Path(folder) / "initial", initial)
        _write_given(given, script, files or {})
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max,-cx16", "-smp", "2", "-m", "3072"]
        command += ["-nographic", "-no-reboot", "-nic", "none", "-kernel", str(next((tree / "boot").glob("vmlinuz-*")))]
        command += ["-initrd", str(initial), "-append", "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off"]
        command += ["-drive", f"file={image},format=raw,if=virtio,snapshot=on"]
        command += ["-drive", f"file={given},format=raw,if=virtio,readonly=on"]
        for _ in range(_BOOTS):
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=timeout_s + _BOOT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as exc:
                raise AssertionError(f"the guest did not end:\n{(exc.stdout or b'').decode(errors='replace')}") from exc
            said = done.stdout.decode(errors="replace").replace("\r\n", "\n")
            if "\nGUEST BEGINS\n" in said:
                break
    found = re.search(r"^GUEST ENDS (\d+)$", said, re.MULTILINE)
    return Ended(said, int(found[1]) if found else None)


def prepare(kernel: str) -> None:
    """Make what a guest with this kernel needs; it is kept."""
    _kernel(kernel)
    _image()


def _kernel(version: str) -> Path:
    """A folder with the files of the package of a kernel."""
    names = _packages(rf"^linux-image-{re.escape(version)}\.[0-9].*-cloud-amd64$")
    if not names:
        subprocess.run(["apt-get", "update", "-q"], check=True, capture_output=True)
        names = _packages(rf"^linux-image-{re.escape(version)}\.[0-9].*-cloud-amd64$")
    if not names:
        pytest.skip(f"no package of this system has Debian's kernel {version}")
    package = max(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def make(folder: Path) -> None:
        folder.mkdir()
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder, check=True, capture_output=True)
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        archive.unlink()

    return cached(
        f"kernel-{version.replace('.', '-')}", package, make
    )  # up to the first dot is what `cached` keeps once


def _packages(pattern: str) -> list[str]:
    command = ["apt-cache", "search", "--names-only", pattern]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in known.splitlines()]


def _image() -> Path:
    """The root of a guest, as an ext4 file system."""
    base, parts = deployment.base_archive(), _distributions()
    made_of = "\n".join((str(base), *(f"{one.name} {one.version}" for one in parts), Path(__file__).read_text()))

    def make(image: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="snapshotd-guest-root-", dir="/var/tmp") as folder:
            root = Path(folder)
            subprocess.run(["tar", "-C", root, "--xattrs", "--numeric-owner", "-xf", base], check=True)
            for one in parts:
                _copy_distribution(one, root / "usr/lib/python3/dist-packages")
            for library in Path("/usr/lib/x86_64-linux-gnu").glob("libfuse3.so.3*"):
                shutil.copy2(library, root / "usr/lib/x86_64-linux-gnu" / library.name, follow_symlinks=False)
            compileall.compile_dir(
                root / "usr/lib/python3/dist-packages", quiet=2, stripdir=root, prependdir="/", workers=2
            )
            command = root / "usr/local/bin/snapshotd"
            command.write_text("#!/usr/bin/python3\nfrom snapshotd.cli.main import main\n\nraise SystemExit(main())\n")
            command.chmod(0o755)
            with open(image, "wb") as file:
                os.truncate(file.fileno(), _ROOM_BYTES)
            subprocess.run(["mke2fs", "-q", "-t", "ext4", "-F", "-d", root, image], check=True)

    return cached("guest.img", made_of, make)


def _distributions() -> list[metadata.Distribution]:
    found: dict[str, metadata.Distribution] = {}

    def add(requirement: Requirement) -> None:
        one = metadata.distribution(requirement.name)
        if one.name in found and not requirement.extras:
            return
        found[one.name] = one
        for text in one.requires or ():
            needed = Requirement(text)
            if any(
                needed.marker is None or needed.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                add(needed)

    for text in _NEEDED:
        add(Requirement(text))
    found.pop("snapshotd")
    return [found[name] for name in sorted(found)]


def _copy_distribution(one: metadata.Distribution, site: Path) -> None:
    for file in one.files or ():
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(one.locate_file(file), site / file)  # type: ignore[arg-type]


def _write_initial(tree: Path, folder: Path, target: Path) -> None:
    """The initial root: it loads modules, mounts the image, and hands over."""
    for name in ("bin", "proc", "sys", "dev", "new", "lib"):
        (folder / name).mkdir(parents=True)
    shutil.copy2("/bin/busybox", folder / "bin/busybox")
    order = _modules(tree, folder / "lib")
    lines = ["#!/bin/busybox sh", "b=/bin/busybox"]
    lines += ["$b mount -t proc p /proc; $b mount -t sysfs s /sys; $b mount -t devtmpfs d /dev"]
    lines += [f"$b insmod /lib/{name}" for name in order]
    lines += ["$b mount -t ext4 /dev/vda /new || $b poweroff -f"]
    lines += ["for d in proc sys dev; do $b mount --move /$d /new/$d; done"]
    lines += ["$b tar -xf /new/dev/vdb -C /new", "exec $b switch_root /new /bin/sh /guest-init"]
    (folder / "init").write_text("\n".join(lines) + "\n")
    (folder / "init").chmod(0o755)
    subprocess.run(["bsdtar", "-C", folder, "--format", "newc", "--gzip", "-cf", target, "."], check=True)


def _modules(tree: Path, target: Path) -> list[str]:
    """Put the modules, and those that they need, into a folder; their names in the order in which they can be loaded."""
    found = {path.name.split(".")[0].replace("-", "_"): path for path in (tree / "lib/modules").rglob("*.ko*")}
    order: list[str] = []

    def add(name: str) -> None:
        path = found.get(name.replace("-", "_"))
        if path is None or path.name.removesuffix(".xz") in order:
            return  # built in
        plain = target / path.name.removesuffix(".xz")
        shutil.copy2(path, target / path.name)
        if path.suffix == ".xz":
            subprocess.run(["xz", "-df", target / path.name], check=True)
        needs = re.search(rb"\0depends=([^\0]*)\0", plain.read_bytes())
        for other in needs[1].decode().split(",") if needs else ():
            add(other)
        order.append(plain.name)

    for name in MODULES:
        add(name)
    return order


_INIT = """
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 PYTHONPATH=/project
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts; for d in /dev/shm /run /tmp; do mount -t tmpfs tmpfs $d; done
mount -t cgroup2 none /sys/fs/cgroup
hostname guest; cd /project
echo; echo "GUEST BEGINS"
sh /guest-script; status=$?
echo; echo "GUEST ENDS $status"
sync; echo o > /proc/sysrq-trigger; sleep 60
"""


def _write_given(target: Path, script: str, files: Mapping[str, Path]) -> None:
    with tempfile.TemporaryDirectory(prefix="snapshotd-guest-given-") as folder:
        (Path(folder) / "guest-init").write_text(_INIT)
        (Path(folder) / "guest-script").write_text(script)
        with tarfile.open(target, "w") as archive:
            for name in ("guest-init", "guest-script"):
                archive.add(Path(folder) / name, name)
            for name in _SOURCES:
                compileall.compile_dir(CHECKOUT / name, quiet=2)  # in emulation it would take a minute
                archive.add(CHECKOUT / name, f"project/{name}", filter=_for_guest)
            for path, source in files.items():
                archive.add(source, path.lstrip("/"))


def _for_guest(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member
