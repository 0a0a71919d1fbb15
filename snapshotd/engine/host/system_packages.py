"""The programs of the system that snapshotd uses, and the packages that bring them, on Debian and Ubuntu, Fedora and
RHEL, Arch, and Alpine: the one list of them.

Standard library only and runs before anything is installed, so that the Makefile can use it:

    python3 -m snapshotd.engine.host.system_packages run         what a sandbox needs and is missing, package names on one line
    python3 -m snapshotd.engine.host.system_packages develop     what the tests need besides
    python3 -m snapshotd.engine.host.system_packages --install develop

A package counts as installed when its programs or files are there, from any source: Docker's own packages, for one,
would be torn out by Debian's docker.io.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field

_PATH = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
CATATONIT = ("/usr/bin/catatonit", "/usr/libexec/podman/catatonit", "/usr/libexec/catatonit/catatonit")
_APT = ("-o", "DPkg::Lock::Timeout=300")
_DEBIAN_ONLY = {"dnf": "", "pacman": "", "apk": ""}
COMPOSE_PLUGINS = ("/usr/libexec/docker/cli-plugins/docker-compose", "/usr/lib/docker/cli-plugins/docker-compose")


@dataclass(frozen=True)
class Manager:
    """A package manager. `shown`: what a person types; `before` and `install`: the words for a program; `complaint`: the
    beginning of its lines about errors."""

    program: str
    shown: str
    before: tuple[str, ...]
    install: tuple[str, ...]
    complaint: str


MANAGERS = (
    Manager(
        "apt-get",
        "apt-get install",
        (*_APT, "update", "-q"),
        (*_APT, "install", "-q", "-y", "--no-install-recommends"),
        "E:",
    ),
    Manager("dnf", "dnf install", (), ("install", "-y", "--setopt=install_weak_deps=False"), "Error:"),
    Manager("pacman", "pacman -S", (), ("-S", "--noconfirm", "--needed"), "error:"),
    Manager("apk", "apk add", (), ("add", "--no-cache"), "ERROR:"),
)
"""The first is that of Debian and Ubuntu, then come those of Fedora and RHEL, Arch, and Alpine."""


@dataclass(frozen=True)
class Package:
    """One package: the program or files that show its presence (a program's name, or paths; one of them must exist),
    and its purpose."""

    name: str
    """On Debian and Ubuntu, and wherever `names` has no other."""
    provides: tuple[str, ...]
    purpose: str
    level: str = "run"
    """The group of packages that this one belongs to; `LEVELS` lists the groups."""
    names: dict[str, str] = field(default_factory=dict)
    """Manager to its own name for it; "": it has none."""

    def name_for(self, manager: Manager) -> str:
        """The package's name for a manager; "" if it has none there."""
        return self.names.get(manager.program, self.name)

    def missing(self) -> bool:
        return not any(os.path.exists(p) if p.startswith("/") else shutil.which(p, path=_PATH) for p in self.provides)


@dataclass(frozen=True)
class _Venv(Package):
    """Debian ships the module that puts pip into virtual environments apart. Another Python than Debian's has its
    own."""

    def missing(self) -> bool:
        return importlib.util.find_spec("ensurepip") is None


class _Headers(Package):
    """Debian ships Python's headers apart. Another Python than Debian's has its own."""

    def missing(self) -> bool:
        return not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))


def _names(dnf: str, pacman: str, apk: str) -> dict[str, str]:
    return {"dnf": dnf, "pacman": pacman, "apk": apk}


PACKAGES: tuple[Package, ...] = (
    Package("runc", ("runc",), "sandboxes without a Docker engine"),
    Package("catatonit", CATATONIT, "the first process in every sandbox"),
    Package("slirp4netns", ("slirp4netns",), "outbound network for sandboxes of the runc driver"),
    Package("uidmap", ("newuidmap",), "sandboxes of ordinary users, with user ids of their own"),
    Package("xfsprogs", ("mkfs.xfs",), "a layer directory that shares file extents"),
    Package("mmdebstrap", ("mmdebstrap",), "building images of Debian's packages", names=_DEBIAN_ONLY),
    Package(
        "debian-archive-keyring",
        ("/usr/share/keyrings/debian-archive-keyring.gpg",),
        "checking the packages in images",
        names=_DEBIAN_ONLY,
    ),
    Package("mount", ("mount",), "mounting the layer directory", names={"dnf": "util-linux", "pacman": "util-linux"}),
    Package("patch", ("patch",), "the demo's planted bug", "demo"),
    Package("git", ("git",), "the demo's commit", "demo"),
    Package("ca-certificates", ("/etc/ssl/certs/ca-certificates.crt",), "downloading the demo's project", "demo"),
    _Venv(
        "python3-venv", ("ensurepip",), "a virtual environment", "venv", _names("python3-pip", "python-pip", "py3-pip")
    ),
    Package("gcc", ("cc", "gcc"), "building pyfuse3, which mounts snapshots", "venv"),
    Package(
        "libc6-dev", ("/usr/include/stdio.h",), "building pyfuse3", "venv", _names("glibc-devel", "glibc", "musl-dev")
    ),
    Package(
        "libfuse3-dev",
        ("/usr/include/fuse3/fuse_lowlevel.h",),
        "building pyfuse3",
        "venv",
        _names("fuse3-devel", "fuse3", "fuse3-dev"),
    ),
    Package(
        "pkg-config",
        ("pkg-config", "pkgconf"),
        "building pyfuse3",
        "venv",
        _names("pkgconf-pkg-config", "pkgconf", "pkgconf"),
    ),
    _Headers(
        "python3-dev", ("Python.h",), "building pyfuse3", "venv", _names("python3-devel", "python", "python3-dev")
    ),
    Package("docker.io", ("dockerd",), "tests of the Docker driver", "develop"),
    Package("iproute2", ("ip",), "the network bridge of the tests' own Docker engine", "develop"),
    Package("iptables", ("iptables",), "networks of the tests' own Docker engine", "develop"),
    Package("curl", ("curl",), "the page that uses the API with curl alone", "develop"),
    Package("rsync", ("rsync",), "tests that compare restored trees with the originals", "develop"),
    Package("libarchive-tools", ("bsdtar",), "tests that compare restored trees with the originals", "develop"),
    Package("btrfs-progs", ("mkfs.btrfs",), "the test that restores to several file systems", "develop"),
    Package("e2fsprogs", ("mkfs.ext4",), "tests on a file system of their own", "develop"),
    Package("mtree-netbsd", ("mtree",), "tests that compare restored trees with the originals", "develop"),
    Package("qemu-system-x86", ("qemu-system-x86_64",), "tests on other kernels", "develop"),
    Package("chromium", ("chromium",), "tests of the page", "develop"),
    Package("busybox-static", ("busybox",), "tests on other kernels", "develop"),
    Package(
        "postgresql",
        ("pg_ctlcluster", "postgres"),
        "tests of a catalog in PostgreSQL",
        "develop",
        {"dnf": "postgresql-server"},
    ),
    Package("podman", ("podman",), "the test that starts a pod of the DaemonSet", "develop"),
    Package("rclone", ("rclone",), "the test that backs a fleet up", "develop"),
    Package("docker-compose", ("docker-compose", *COMPOSE_PLUGINS), "the test that deploys the daemon", "develop"),
)
LEVELS = {
    "venv": ("venv",),
    "run": ("run",),
    "demo": ("venv", "run", "demo"),
    "develop": ("venv", "run", "demo", "develop"),
}
"""Purpose to the groups of packages that it needs."""


def missing(level: str) -> list[Package]:
    """The packages of a level (one of `LEVELS`) whose programs are missing; not those that this machine's distribution
    does not have."""
    found = manager()
    wanted = [package for package in PACKAGES if found is None or package.name_for(found)]
    return [package for package in wanted if package.level in LEVELS[level] and package.missing()]


def manager() -> Manager | None:
    """The package manager of this machine; None: it has none of those that are known."""
    return next((one for one in MANAGERS if shutil.which(one.program, path=_PATH)), None)


def advice(*names: str) -> str:
    """The one command that installs the packages of these names (Debian's) here."""
    found = manager()
    there = {
        name: "" if found is None else next(one for one in PACKAGES if one.name == name).name_for(found)
        for name in names
    }
    lacking = ", ".join(name for name, own in there.items() if not own)
    said = [f"`{found.shown} {' '.join(filter(None, there.values()))}`"] if found and any(there.values()) else []
    return ", and ".join([*said, *([f"{lacking}, which this machine's packages do not have"] if lacking else [])])


def can_install() -> str | None:
    """None if packages can be installed here; else the reason."""
    if manager() is None:
        return f"this machine has no package manager that is known ({', '.join(one.program for one in MANAGERS)})"
    return None if os.geteuid() == 0 else "installing packages needs root"


def install(packages: list[Package], progress: Callable[[str], None]) -> str | None:
    """Install with one call of the package manager, and with one before that where its lists may be old. None when it
    worked, else the reason. Nothing to do is success."""
    if not packages:
        return None
    reason, found = can_install(), manager()
    if reason or found is None:
        return f"{reason}; install {' '.join(package.name for package in packages)} yourself"
    names = [package.name_for(found) for package in packages]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", "PATH": _PATH}
    for words in filter(None, (found.before, (*found.install, *names))):
        command = [found.program, *words]
        progress(" ".join(command))
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if result.returncode != 0:
            lines = result.stdout.decode("utf-8", "replace").splitlines()
            said = [line for line in lines if line.startswith(found.complaint)]
            return f"`{' '.join(command)}` failed: {'; '.join(said[-3:]) or 'it gave no reason'}"
    left = [package.name for package in packages if package.missing()]
    return f"{' '.join(left)} installed, but what it should bring is not there" if left else None


def main(arguments: list[str]) -> int:
    """The command line of the module's text."""
    if sys.version_info < (3, 11):  # noqa: UP036 - runs before pip could refuse
        print(  # noqa: T201 - the one reader is the Makefile
            f"snapshotd needs Python 3.11 or newer; this is {sys.version.split()[0]} ({sys.executable})",
            file=sys.stderr,
        )
        return 1
    if not arguments or arguments[-1] not in LEVELS:
        usage = f"usage: python3 -m {__spec__.name} [--install] {'|'.join(LEVELS)}"
        print(usage, file=sys.stderr)  # noqa: T201
        return 2
    wanted = missing(arguments[-1])
    if "--install" not in arguments:
        found = manager()
        print(" ".join(package.name if found is None else package.name_for(found) for package in wanted))  # noqa: T201
        return 0
    reason = install(wanted, lambda line: print(line, flush=True))  # noqa: T201
    if reason:
        print(f"the system packages are incomplete: {reason}", file=sys.stderr)  # noqa: T201
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
