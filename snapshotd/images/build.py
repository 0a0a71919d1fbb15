"""Build a root file system from a recipe with mmdebstrap: Debian packages, no image registry, one recipe gives one
tree.

The build is reproducible (checked by building twice and comparing). Packages come out the same; only times of the build
differ, so file times are set to one date, and the dates inside files (shadow) follow SOURCE_DATE_EPOCH. The build
removes caches, logs, package lists, the bootstrapper's own configuration and the files that it copies from the host
(host name, resolver). Python's byte code is the same in both builds and stays: without it every first import would
write into the sandbox and show up as changed files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from snapshotd.config import read_variables
from snapshotd.errors import OutOfSpace, SnapshotdError, Unsupported, UsageError
from snapshotd.images import recipes
from snapshotd.images.recipes import Mirror, Recipe
from snapshotd.images.root import MADE_AT_NS, prepare_root, settle_times
from snapshotd.kernel import files, rootless
from snapshotd.kernel.processes import wait_readable

_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT), "don't have enough free space")
"""Words of programs, and of apt, about a full disk."""
_SILENCE_S = 900
"""The package manager gives up on a mirror after minutes; longer silence means that something hangs."""
_LINES_SHOWN = 5
"""Number of lines shown of a failed script's output."""
_EXCLUDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/lintian/*")
_KEPT = ("/usr/share/doc/*/copyright", "/usr/share/locale/locale.alias")
_EMPTIED = (b"var/cache/apt", b"var/cache/ldconfig", b"var/lib/apt/lists", b"dev", b"tmp")
_REMOVED = (
    b"etc/apt/apt.conf.d/99mmdebstrap etc/dpkg/dpkg.cfg.d/99mmdebstrap etc/apt/sources.list etc/hostname "
    b"etc/resolv.conf etc/machine-id var/lib/dbus/machine-id etc/.pwd.lock var/lib/dpkg/lock "
    b"var/lib/dpkg/lock-frontend var/lib/dpkg/triggers/Lock var/lib/systemd/random-seed etc/passwd- etc/group- "
    b"etc/shadow- etc/gshadow- var/cache/debconf/config.dat-old var/cache/debconf/templates.dat-old "
    b"var/cache/debconf/passwords.dat var/log/btmp var/log/wtmp var/log/lastlog var/log/faillog var/log/dpkg.log "
    b"var/log/alternatives.log var/log/bootstrap.log var/log/fontconfig.log var/log/apt/history.log "
    b"var/log/apt/term.log var/log/apt/eipp.log.xz"
).split()
_FILES_HOOK = (
    'tar -C "$SNAPSHOTD_RECIPE/files" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --sort=name -c . | '
    'chroot "$1" tar -x --keep-directory-symlink --no-overwrite-dir -C /'
)
_CUSTOMIZE_HOOK = 'install -m 0700 "$SNAPSHOTD_RECIPE/customize" "$1/tmp/customize" && chroot "$1" /tmp/customize && rm "$1/tmp/customize"'
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_TRUST_HOOK = (
    'if [ -r "$SNAPSHOTD_AUTHORITIES" ]; then install -m 0600 "$SNAPSHOTD_AUTHORITIES" "$1/tmp/authorities.crt"; '
    "for name in SSL_CERT_FILE NODE_EXTRA_CA_CERTS CURL_CA_BUNDLE PIP_CERT; do export $name=/tmp/authorities.crt; done; fi; "
)
"""Programs of a `customize` trust the certificate authorities that this machine does: its network may have one of its
own. The copy is in the new root's /tmp, which is emptied at the end."""
_APT_SETTINGS = re.compile(
    r'(Acquire::(?:https?|ftp|Retries|Check-Valid-Until|Check-Date|ForceIPv4|ForceIPv6)\S*) "([^"]*)";'
)


def check_ids() -> None:
    """Unsupported where files cannot have the owners that an image of packages gives them."""
    if rootless.ids_here() == 1:
        raise Unsupported(
            "an image of packages needs more user ids than the one of this user, since packages have files of several users: use "
            "the image `minimal`, made of this machine's own programs, or one of a tar or a folder (`snapshotd image import`), or get a "
            "range of ids as `snapshotd doctor` says"
        )


def check_available() -> None:
    """Unsupported where images of packages cannot be built."""
    check_ids()
    for program, package in (("mmdebstrap", "mmdebstrap"), ("unshare", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(program) is None:
            raise Unsupported(
                f"an image of Debian's packages is built with the program {program}, of the package {package}, which `snapshotd "
                "setup` installs on Debian and Ubuntu; elsewhere use the image `minimal`, one of an engine or a registry "
                "such as `debian:12`, or `snapshotd image import`"
            )


def digest(recipe: Recipe) -> str:
    """Names what `build_root` makes of a recipe here: another one where packages come from other mirrors."""
    text = recipe.source_id + "".join(
        f"\n{m.public_uri()} {' '.join(m.suites)}" for m in recipes.host_mirrors(recipe.suite)
    )
    return hashlib.sha256(text.encode()).hexdigest()


def build_root(recipe: Recipe, root: Path, progress: Callable[[str], None]) -> None:
    """Fill the empty directory `root`. Takes half a minute to minutes, and the network.

    Raises Unsupported, UsageError (the mirror or a package fails: the message carries the last reason).
    `root` may then hold part of it; no process and no mount is left, also when this process is killed.
    """
    check_available()
    mirrors = recipes.host_mirrors(recipe.suite)
    began_ns = time.time_ns() - 10**9  # a file's time is the kernel's coarse clock, up to a tick behind
    _run(_command(recipe, root, bool(mirrors)), recipe, _source_lines(mirrors), progress)
    with files.closing_fd(os.open(root, files.DIR_FLAGS)) as root_fd:
        _tidy(root_fd)
        if "apt" in recipe.packages or recipe.variant != "essential":
            _write_sources(root_fd, mirrors)
        prepare_root(root_fd)
        settle_times(root_fd, began_ns, MADE_AT_NS)


def _command(recipe: Recipe, root: Path, own_mirrors: bool) -> list[str]:
    """The command that builds, in a mount and process namespace of its own, bound to this thread's life: no build
    outlives the daemon, no mount stays."""
    command = [
        *rootless.as_its_root(),
        "setpriv",
        "--pdeathsig",
        "KILL",
        "--",
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child=KILL",
        "--mount-proc",
        "--",
    ]
    command += ["mmdebstrap", "--mode=root", "--format=directory", f"--variant={recipe.variant}", "--components=main"]
    command += ['--aptopt=Apt::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"']
    command += [f'--aptopt={name} "{value}"' for name, value in _host_apt_settings()]
    command.append("--dpkgopt=force-unsafe-io")  # the store makes the whole tree durable at the end
    command += [f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED]
    command += [f"--dpkgopt=path-include={pattern}" for pattern in _KEPT]
    if recipe.packages:
        command.append("--include=" + ",".join(recipe.packages))
    if (recipe.folder / "files").is_dir():
        command.append(f"--customize-hook={_FILES_HOOK}")
    if (recipe.folder / "customize").is_file():
        command.append(f"--customize-hook={_TRUST_HOOK}{_CUSTOMIZE_HOOK}")
    return [*command, "" if own_mirrors else recipe.suite, str(root), *(["-"] if own_mirrors else [])]


def _host_apt_settings() -> list[tuple[str, str]]:
    """The settings with which this machine's package manager reaches the network (proxies, retries, checks of dates).
    Not kept in the image."""
    result = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False)
    return _APT_SETTINGS.findall(result.stdout)


def _source_lines(mirrors: list[Mirror]) -> str:
    signed = f"[signed-by={recipes.KEYRING}] " if os.path.exists(recipes.KEYRING) else ""
    return "".join(f"deb {signed}{mirror.uri} {suite} main\n" for mirror in mirrors for suite in mirror.suites)


def _run(command: list[str], recipe: Recipe, sources: str, progress: Callable[[str], None]) -> None:
    """Run to the end, passing on its output. The addresses go through standard input: they may hold a password."""
    kept = ("PATH", "HOME", "TMPDIR", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    env = read_variables(kept)
    env["PATH"] = env.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    env["SNAPSHOTD_AUTHORITIES"] = read_variables(["SSL_CERT_FILE"]).get("SSL_CERT_FILE", _AUTHORITIES)
    env |= {"LC_ALL": "C.UTF-8", "SOURCE_DATE_EPOCH": str(MADE_AT_NS // 10**9), "SNAPSHOTD_RECIPE": str(recipe.folder)}
    last: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, umask=0o022, cwd="/"
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(sources.encode())
            process.stdin.close()
            _follow(process, last, progress)
            code = process.wait(timeout=60)
        except BaseException:
            process.kill()
            raise
    if code != 0:
        raise _failure(recipe, last)


def _follow(process: subprocess.Popen[bytes], last: deque[str], progress: Callable[[str], None]) -> None:
    assert process.stdout is not None
    fd, rest = process.stdout.fileno(), b""
    while True:
        if not wait_readable(fd, _SILENCE_S):
            raise UsageError(
                f"building an image stopped: mmdebstrap said nothing for {_SILENCE_S // 60} minutes; check the package mirror"
            )
        data = os.read(fd, 65536)
        *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
        for line in (raw.decode("utf-8", "replace").strip() for raw in lines):
            if line.startswith("I: "):
                progress(line[3:])
            if line and not line.startswith("I: "):
                last.append(line[:300])
        rest = rest[-65536:]
        if not data:
            return


def _failure(recipe: Recipe, last: deque[str]) -> SnapshotdError:
    full = next((line for line in last if any(word in line for word in _FULL)), None)
    if full is not None:
        return OutOfSpace(
            f"the image of recipe {recipe.name} cannot be built because the disk is full ({_public(full)}): free some space "
            "and try again"
        )
    if any(line.startswith("E: ") and "command failed: " in line and "/tmp/customize" in line for line in last):
        printed = [line for line in last if not line.startswith(("E: ", "W: "))][-_LINES_SHOWN:]
        said = f"the last it printed: {' / '.join(printed)}" if printed else "it printed nothing"
        return UsageError(f"the image of recipe {recipe.name} cannot be built: its customize script failed; {said}")
    reasons = [line[3:] for line in last if line.startswith("E: ") and not line.startswith("E: apt-get")] or list(last)[
        -1:
    ]
    reason = _public("; ".join(dict.fromkeys(reasons))) or "mmdebstrap gave no reason"
    advice = "check the package names and the machine's package mirror"
    return UsageError(f"the image of recipe {recipe.name} cannot be built: {reason}; {advice}")


def _public(said: str) -> str:
    """A line of output without the passwords in addresses, and without the mark of an error."""
    return re.sub(r"//[^/@\s]*@", "//", said.removeprefix("E: "))


def _tidy(root_fd: int) -> None:
    for path in _REMOVED:
        parent, _, name = path.rpartition(b"/")
        with suppress(FileNotFoundError), files.closing_fd(_open(root_fd, parent)) as fd:
            files.remove_tree(fd, name)
    for path in _EMPTIED:
        with suppress(FileNotFoundError), files.closing_fd(_open(root_fd, path)) as fd:
            files.empty_dir(fd)


def _open(root_fd: int, path: bytes) -> int:
    return files.open_beneath(root_fd, path, files.DIR_FLAGS)


def _write_sources(root_fd: int, mirrors: list[Mirror]) -> None:
    """The image's own package sources: the same archives, without passwords."""
    if not mirrors:
        return  # the bootstrapper wrote its defaults
    with files.closing_fd(files.make_dirs(root_fd, b"etc/apt/sources.list.d")) as fd:
        files.empty_dir(fd)
        text = "\n".join(
            f"Types: deb\nURIs: {m.public_uri()}\nSuites: {' '.join(m.suites)}\nComponents: main\nSigned-By: {recipes.KEYRING}\n"
            for m in mirrors
        )
        out = os.open(b"debian.sources", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=fd)
        with open(out, "w") as f:
            files.give(f.fileno(), 0, 0)
            os.fchmod(f.fileno(), 0o644)
            f.write(text)
