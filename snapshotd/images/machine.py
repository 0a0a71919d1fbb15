"""A root file system of this machine's own programs: Python, a shell, and the basic tools. Made in a second, without
network and without a package manager, on any distribution.

Taken are the programs of a fixed list, the libraries that they load, and Python's standard library, each at its own
path and by way of the links that lead to it here. Nothing else of the machine gets in: no file of /etc, no home, no
site-packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from snapshotd.errors import Unsupported
from snapshotd.images.root import MADE_AT_NS, prepare_root
from snapshotd.kernel import files

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LINKED_PYTHON = Path("/usr/local/bin/python3")
_PROGRAMS = (
    "[ awk base64 basename bash cat chgrp chmod chown cksum clear cmp comm cp cut date dd df diff dirname du echo egrep "
    "env expand expr factor false fgrep find fmt fold getopt grep groups gunzip gzip head hostname id install join kill "
    "less link ln logname ls md5sum mkdir mkfifo mknod mktemp more mv nice nl nohup nproc od paste pathchk pgrep pidof "
    "pkill printenv printf ps pwd readlink realpath rm rmdir sed seq setsid sh sha1sum sha256sum sha512sum shuf sleep sort "
    "split stat stdbuf stty sum sync tac tail tar tee test timeout top touch tr true truncate tsort tty uname unexpand "
    "uniq unlink uptime vi wc which who whoami xargs yes zcat"
)
_BESIDES = (
    "/bin/sh",  # scripts name these two, and so does the kernel's loader of scripts
    "/usr/bin/env",
    "/usr/lib/locale/C.utf8",  # names that are not ASCII
    "/usr/lib/os-release",  # the programs are those of that distribution
    "/lib/terminfo",
    "/usr/share/terminfo/x/xterm-256color",
)
_LOADED_LATER = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2", "libresolv.so.2")
"""The C library loads these by itself when it needs them, and no program names them."""
_LEFT_OUT = re.compile(
    r"(site-packages|dist-packages|test|tests|idlelib|turtledemo|ensurepip|sitecustomize\.py|usercustomize\.py|config-.*)"
)
"""Names in the standard library that are not for an agent, or that the machine's owner wrote."""
_OF_PYTHON = (
    "import json, sysconfig; paths = sysconfig.get_paths(); print(json.dumps([paths['stdlib'], paths['platstdlib']]))"
)
_LIBRARY = re.compile(r"(?:=> |^\s+)(/\S+) \(0x", re.MULTILINE)
_MOST_LINKS = 40
"""As the kernel follows them."""
_TIMEOUT_S = 600
"""Limit of one program. `ldd` runs a hundred, which takes minutes on an emulated or very busy machine."""
_FILES = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that is taken from this machine, by its path here. `digest` names it: another one after an upgrade."""

    links: dict[Path, str]
    files: dict[Path, os.stat_result]

    @property
    def digest(self) -> str:
        found = [[str(path), target] for path, target in sorted(self.links.items())]
        found += [[str(path), st.st_size, st.st_mtime_ns, st.st_mode] for path, st in sorted(self.files.items())]  # type: ignore[list-item]
        return hashlib.sha256(json.dumps(found).encode("utf-8", "surrogateescape")).hexdigest()


def content() -> Content:
    """Find everything that is taken from this machine, in half a second. Unsupported when this machine's Python does
    not work."""
    found = Content({}, {})
    programs = [path for name in _PROGRAMS.split() if (path := shutil.which(name, path=_PATH)) is not None]
    python = shutil.which("python3", path=_PATH)
    if python is None:  # our own is elsewhere
        python = os.path.realpath(sys.executable)
        found.links[_LINKED_PYTHON] = python
    for one in (python, *programs, *_python_library(python), *_BESIDES):
        _take(Path(one), found)
    loaders = [str(path) for path, st in found.files.items() if st.st_mode & 0o111 or path.suffix == ".so"]
    libraries = {Path(one) for one in _libraries(loaders)}
    libraries |= {one.parent / name for one in libraries for name in _LOADED_LATER if (one.parent / name).exists()}
    for library in libraries:
        _take(library, found)
    return found


def build_root(found: Content, root: Path) -> None:
    """Fill the empty directory `root`. OSError."""
    for path, target in found.links.items():
        here = root / path.relative_to("/")
        here.parent.mkdir(parents=True, exist_ok=True)
        here.symlink_to(target)
    for path, st in found.files.items():
        here = root / path.relative_to("/")
        here.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, here)
        here.chmod(0o755 if st.st_mode & 0o111 else 0o644)  # no program is anybody else's here
        os.utime(here, ns=(st.st_mtime_ns, st.st_mtime_ns))  # the byte code of Python names the time of its source
    for name, text in _FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, mode in (("root", 0o700), ("home", 0o755), ("var/tmp", 0o1777), ("tmp", 0o1777)):
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    _write_loader_cache(found, root)
    with files.closing_fd(os.open(root, files.DIR_FLAGS)) as fd:
        prepare_root(fd)
    for directory, names, own in os.walk(root, topdown=False):
        for name in (*names, *own):
            path = Path(directory, name)
            # An ordinary user's daemon is another user in its namespace.
            files.give(str(path), 0, 0, follow_symlinks=False)
            if path.is_dir() or path.is_symlink() or path.relative_to(root).parts[0] == "etc":
                os.utime(path, ns=(MADE_AT_NS, MADE_AT_NS), follow_symlinks=False)
    os.utime(root, ns=(MADE_AT_NS, MADE_AT_NS))


def _take(path: Path, found: Content) -> None:
    """Note a file, or all files of a directory, and every link on the way. One that is not there, or that no other user
    may read, is left out."""
    at, parts, links = Path("/"), list(path.parts[1:]), 0
    while parts:
        name = parts.pop(0)
        here = at.parent if name == ".." else at / name
        if here.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return
            target = Path(found.links.setdefault(here, os.readlink(here)))
            if target.is_absolute():
                at, parts = Path("/"), [*target.parts[1:], *parts]
            else:
                parts = [*target.parts, *parts]
        else:
            at = here
    if at.is_dir():
        for child in sorted(at.iterdir()):
            if not _LEFT_OUT.fullmatch(child.name):
                _take(child, found)
    elif at.is_file() and (st := at.stat()).st_mode & stat.S_IROTH:
        found.files[at] = st


def _python_library(python: str) -> set[str]:
    done = _run([python, "-I", "-c", _OF_PYTHON])
    try:
        return set(json.loads(done.stdout))
    except ValueError:
        raise Unsupported(f"{python} does not work: {done.stderr.strip()[-300:]}") from None


def _libraries(programs: list[str]) -> list[str]:
    """The libraries that some programs load, and the loader itself. Scripts have none."""
    said = _ldd(programs)
    if "/ld-musl-" in said:  # it takes one program at a time
        said = "".join(_ldd([program]) for program in programs)
    return _LIBRARY.findall(said)


def _ldd(programs: list[str]) -> str:
    return _run(["ldd", *programs], env={"PATH": _PATH, "LC_ALL": "C"}).stdout


def _write_loader_cache(found: Content, root: Path) -> None:
    """The loader finds libraries outside of its own directories, as here. A C library without ldconfig needs none."""
    ldconfig = shutil.which("ldconfig", path=_PATH)
    if ldconfig is None:
        return
    directories = sorted({str(path.parent) for path in found.files if ".so" in path.name})
    (root / "etc/ld.so.conf").write_text("".join(f"{directory}\n" for directory in directories))
    _run([ldconfig, "-r", str(root), "-X"])


def _run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of the machine's own. Unsupported: it does not end."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=env)
    except subprocess.TimeoutExpired:
        raise Unsupported(
            f"`{Path(command[0]).name}` has not ended after {_TIMEOUT_S // 60} minutes, so the image minimal cannot be made; "
            "try again when the machine is less busy, or import an image with `snapshotd image import`"
        ) from None
