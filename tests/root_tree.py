"""A small root file system made of the host's own programs: enough to run shell scripts and perl in a container, built
in a second."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from snapshotd.kernel import syscalls

_PROGRAMS = (
    "sh",
    "cat",
    "chmod",
    "chown",
    "cp",
    "dd",
    "echo",
    "env",
    "grep",
    "head",
    "id",
    "kill",
    "ln",
    "ls",
    "mkdir",
    "mknod",
    "mv",
    "nproc",
    "od",
    "perl",
    "printf",
    "pwd",
    "rm",
    "rmdir",
    "seq",
    "setsid",
    "sleep",
    "stat",
    "sync",
    "tail",
    "test",
    "touch",
    "true",
    "wc",
)
_DIRECTORIES = (
    "proc",
    "sys",
    "dev",
    "run/snapshotd",
    "tmp",
    "etc",
    "root",
    "workspace",
    "var/tmp",
    "usr/lib",
    "usr/lib64",
    "usr/bin",
    "home",
)


def build(root: Path) -> None:
    """Fill `root`, which must not exist. Raises CalledProcessError or FileNotFoundError when the host lacks one of the
    programs."""
    for name in _DIRECTORIES:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to("usr/bin" if "bin" in name else f"usr/{name}")
    (root / "tmp").chmod(0o1777)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    for name in ("resolv.conf", "hosts", "hostname"):
        (root / "etc" / name).touch()  # a Docker engine mounts its own there
    programs = {
        name: Path(shutil.which(name, path="/usr/bin:/bin:/usr/sbin:/sbin") or _missing(name)).resolve()
        for name in _PROGRAMS
    }
    for name, program in programs.items():
        _copy(program, root / "usr/bin" / name)
    for library in _libraries(programs.values()):
        _copy(library, root / _usr_merged(library))
    modules = next(path for path in Path("/usr/lib").glob("*/perl-base"))
    shutil.copytree(modules, root / modules.relative_to("/"), symlinks=True, dirs_exist_ok=True)
    for part in (root, *root.rglob("*")):
        if part.is_dir() and not part.is_symlink() and part.name != "tmp":
            part.chmod(0o755)


def _missing(name: str) -> str:
    raise FileNotFoundError(f"{name} is not installed on this machine; the test root needs it")


def _libraries(programs: Iterable[Path]) -> set[Path]:
    text = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True, timeout=30).stdout
    return {Path(match) for match in re.findall(r"(?:=> )?(/\S+) \(0x", text)}


def _usr_merged(library: Path) -> str:
    path = os.path.normpath(library).lstrip("/")
    return path if path.startswith("usr/") else f"usr/{path}"


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        target.chmod(0o755)


@contextlib.contextmanager
def swapped(root: Path) -> Iterator[None]:
    """In the block the directory `dir` of a root and `link`, a link to the folder `outside` beside the root, are exchanged
    again and again."""
    stop = threading.Event()
    (root / "link").symlink_to(root.parent / "outside")

    def swap() -> None:
        fd = os.open(root, os.O_RDONLY)
        while not stop.is_set():
            syscalls.call("renameat2", fd, b"dir", fd, b"link", 2)  # RENAME_EXCHANGE
        os.close(fd)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
