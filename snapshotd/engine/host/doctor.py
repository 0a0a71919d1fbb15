"""Check the machine and name every piece that snapshotd misses, with the fix; install the pieces that can be
installed."""

from __future__ import annotations

import errno
import importlib.util
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import unquote, urlsplit

from snapshotd.config import Config, node_of, places, read
from snapshotd.engine.host import integrations, system_packages
from snapshotd.engine.journal.approval import policy
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.kernel import landlock, rootless
from snapshotd.kernel.abilities import ABILITIES, Abilities, Ability, Mode
from snapshotd.kernel.probes import needed, useful
from snapshotd.terms import number_of

_FREE_BYTES_WANTED = 5 << 30
_BUCKET_TIMEOUT_S = 5.0
_RUNC_TIMEOUT_S = 30  # a machine that is busy is none without runc
_DOCKER_TIMEOUT_S = 0.5
_DOCKER_NEEDED = (20, 10)
_RUNC_NEEDED = (1, 1)
_PYTHON_NEEDED = (3, 11)
_ALWAYS_SHOWN = frozenset({"cgroup_version", "fine_times"})


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

    Real probes (the system call is made), under a second together, and as long as it takes to load the integrations that are
    installed, and a fleet's database and bucket take to answer; nothing is left behind and nothing is changed.
    """
    place = _existing(state_dir)
    machine = [_privileges(), _sockets(), *_host(place)]
    storage = [_reflink(place), _disk_limits(place), _free_space(place)]
    return [
        *machine,
        *_programs(),
        *_fleet(state_dir),
        _docker(),
        _fuse(),
        _landlock(),
        _networks(),
        _listening(),
        *storage,
        _python(),
        _policy(state_dir),
        _whose_change(),
        *_integrations(),
    ]


def _fleet(state_dir: Path) -> list[Check]:
    """The node that a daemon with these settings is, and what it needs; nothing where there is no fleet."""
    config = read()
    return [_lease(config), _bucket(config.store), _cache(config, state_dir / "repo" / "cache")] if config.fleet else []


def _lease(config: Config) -> Check:
    """The node as the fleet's database sees it."""
    from snapshotd.fleet.opening import open_coordination  # few daemons are nodes

    try:
        node = node_of(config)
        with open_coordination(config.fleet) as coordination:
            found = [room for room in coordination.rooms() if room.node == node]
    except SnapshotdError as exc:
        return Check("fleet", False, exc.message, "docs/fleet.md says how a daemon joins one")
    if not found:
        return Check("fleet", None, f"PostgreSQL answers; node {node} has not registered yet", "start its daemon")
    lease_s, lag = found[0].lease_ns / 1e9, number_of(found[0].unpublished, "unpublished snapshot")
    if lease_s <= 0:
        said = f"PostgreSQL answers; node {node} holds no lease, {lag}"
        return Check("fleet", None, said, "start its daemon, or look at its log")
    drains = ", draining" if found[0].draining else ""
    return Check("fleet", True, f"PostgreSQL answers; node {node} holds its lease for {lease_s:.0f} s{drains}, {lag}")


def _bucket(url: str) -> Check:
    """The store that all nodes share. A folder is not opened, since that would make it."""
    from snapshotd.store.open import open_store

    fix = "set SNAPSHOTD_STORE to the store that all nodes share, and see that this machine may read and write there"
    if not url:
        return Check("bucket", False, "SNAPSHOTD_STORE is not set", fix)
    try:
        if url.startswith("file:"):
            has_begun = Path(unquote(urlsplit(url).path), "fleet").is_dir()
        else:
            with closing(open_store(url, attempts=1, timeout_s=_BUCKET_TIMEOUT_S)) as bucket:
                has_begun = next(bucket.keys("fleet/"), None) is not None
    except (SnapshotdError, OSError) as exc:
        return Check("bucket", False, f"{url} does not answer: {exc}", fix)
    if not has_begun:
        return Check("bucket", None, f"{url} answers, and no fleet has begun there", "start the daemon of a node")
    return Check("bucket", True, f"{url} answers")


def _cache(config: Config, place: Path) -> Check:
    """The part of the bucket that the node's disk keeps."""
    from snapshotd.repo.fleet.blocks import measure

    if config.node_cache_bytes == 0:
        return Check(
            "cache", None, "each read of a pack asks the bucket (SNAPSHOTD_NODE_CACHE=0)", "give it some bytes"
        )
    try:
        used, budget = measure(place, config.node_cache_bytes)
    except FileNotFoundError:
        return Check("cache", True, f"nothing of the bucket is kept in {place} yet")
    except OSError as exc:
        return Check("cache", None, f"{place} cannot be read: {exc.strerror}", "run it as the daemon's user")
    return Check("cache", True, f"{used / (1 << 20):.1f} MiB of {budget / (1 << 20):,.1f} MiB in {place}")


def setup(progress: Callable[[str], None]) -> list[Check]:
    """Install the missing packages, as root. One check per package that was missing; empty when
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
    """An ordinary user's daemon has a user namespace; how many ids there are in it, and whose they are besides, decides whom
    files can belong to."""
    if rootless.is_root():
        return Check("privileges", True, "root")
    missing = rootless.range_problem()
    shared = rootless.range_sharing_problem() if missing is None else None
    reason, _, fix = (missing or shared or "").partition(": ")
    if shared is not None:
        lost = "each of these users could end the other's sandboxes, and change their files"
        return Check("privileges", None, f"an ordinary user, with a range of user ids ({reason}): {lost}", fix)
    if missing is None:
        return Check("privileges", True, "an ordinary user, with a range of further user ids")
    lost = (
        "all files of a sandbox belong to this user, all owners in it are root, and no image of packages can be built"
    )
    return Check("privileges", None, f"an ordinary user, with one user id ({reason}): {lost}", fix)


def _sockets() -> Check:
    """The directory of the daemon's sockets, which the daemon makes."""
    directory = places().sockets
    problem = rootless.ownership_problem(directory, make=False)
    if problem is None:
        return Check("sockets", True, str(directory))
    reason, _, fix = problem.rpartition(": ")
    return Check("sockets", False, reason, fix)


def _version(text: str) -> tuple[int, int]:
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _host(place: Path) -> list[Check]:
    """The mode in which sandboxes would run, then every ability."""
    try:
        host = needed.probe(place)
    except OSError as exc:  # the place itself: not writable, full
        return [
            Check("mode", False, f"{place}: {exc.strerror}", f"make {place} writable, or name another state directory")
        ]
    modes = host.modes()
    best, wanted = modes[0] if modes else None, read(only=("mode",)).mode
    best = Mode.FOLDER if wanted == Mode.FOLDER else best
    return [
        _mode(best, wanted),
        *(_ability(host, each, best) for each in ABILITIES if each.field in (host.needed() | _ALWAYS_SHOWN)),
    ]


def _mode(best: Mode | None, wanted: str) -> Check:
    said = "the root user of a sandbox is nobody on this machine"
    if best is Mode.PIVOT:
        return Check("mode", True, f"{best}: {said}")
    if best is Mode.ROOTLESS:
        return Check("mode", True, f"{best}: sandboxes in a user namespace; each snapshot copies what changed")
    if best is Mode.PIVOT_ROOT:
        said = "the root user of a sandbox is root on this machine, held by capabilities and a system call filter alone"
        fix = f"see the missing abilities below, or accept it: SNAPSHOTD_MODE={best}"
        return Check("mode", None if wanted == best else False, f"{best}: {said}", fix)
    if best is Mode.FOLDER:
        return Check("mode", None, f"{best}: a sandbox is a plain folder, without isolation, as the settings ask for")
    said = "a sandbox is a plain folder, without isolation, and only where a command says --isolation none"
    fix = f"see the missing abilities below, or accept it for all sandboxes: SNAPSHOTD_MODE={Mode.FOLDER}"
    return Check("mode", False, f"{Mode.FOLDER}: {said}", fix)


def _landlock() -> Check:
    known = landlock.version()
    if known >= landlock.NEEDED:
        return Check("Landlock", True, f"version {known}: without isolation, commands write in their folder alone")
    detail = "without isolation (--isolation none), commands may write wherever the daemon's user may"
    return Check("Landlock", None, detail, "boot a kernel from 5.19 on with Landlock among its security modules (lsm=)")


def _networks() -> Check:
    """Try network namespaces, which sandboxes with `--network allow:HOST` need for their way out."""
    reason = useful.network_namespaces()
    if reason is None:
        return Check("networks of some hosts", True, "a sandbox can reach hosts by name alone: --network allow:HOST")
    fix = (
        "allow network namespaces (in a container: --privileged, or CAP_SYS_ADMIN; for users: user.max_user_namespaces)"
    )
    return Check(
        "networks of some hosts", None, f"{reason}: --network allow:HOST and --network bridge are refused", fix
    )


def _listening() -> Check:
    """The address at which the daemon is to answer other machines."""
    name, text = "other machines", read(only=("listen",)).listen
    if not text:
        return Check(name, True, "none reaches the daemon: `serve --listen` and SNAPSHOTD_LISTEN name no address")
    host, _, port = text.rpartition("://")[2].rpartition(":")
    host = host.strip("[]")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, int(port)))
    except (OSError, ValueError, OverflowError) as exc:
        if not isinstance(exc, OSError) or exc.errno != errno.EADDRINUSE:
            fix = "set SNAPSHOTD_LISTEN to an address of this machine and a port: 0.0.0.0:7676 is all of them"
            return Check(name, False, f"SNAPSHOTD_LISTEN={text} cannot be listened on ({exc})", fix)
        return Check(name, True, f"{text} is taken, as it is while the daemon runs: `snapshotd daemon --status`")
    return Check(name, True, f"the daemon will answer at {text} (docs/access.md)")


def _ability(host: Abilities, one: Ability, best: Mode | None) -> Check:
    reason = host.reasons.get(one.field)
    if reason is None and getattr(host, one.field):
        more = f" (version {host.cgroup_version}, at {host.cgroup_root})" if one.field == "cgroup_version" else ""
        return Check(one.name, True, f"{one.purpose}{more}")
    lost, fix = (host.is_rootless and one.without_root) or (one.lost, one.fix)
    detail = f"{one.purpose}: {reason or 'not tried, because an ability above is missing'}. Without it, {lost}"
    return Check(one.name, None if best is not None else False, detail, fix)


def _programs() -> list[Check]:
    checks = []
    for package in system_packages.PACKAGES:
        if package.level != "run":
            continue
        if package.missing():
            needed = package.name in ("runc", "catatonit", "mount")
            fix = f"`snapshotd setup`, or {system_packages.advice(package.name)}"
            if package.name in ("mmdebstrap", "debian-archive-keyring"):
                fix += "; `--image minimal`, and images of an engine or a registry, need none (docs/images.md)"
            checks.append(
                Check(package.name, False if needed else None, f"not installed; it is for {package.purpose}", fix)
            )
        elif package.name == "runc":
            checks.append(_runc())
        else:
            checks.append(Check(package.name, True, package.purpose))
    return checks


def _runc() -> Check:
    fix = f"{system_packages.advice('runc')}, or a release of the runc project"
    try:
        result = subprocess.run(
            ["runc", "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_RUNC_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return Check("runc", False, f"`runc --version` does not answer: {exc}", fix)
    first = result.stdout.partition("\n")[0]
    if _version(first) >= _RUNC_NEEDED:
        return Check("runc", True, first)
    detail = f"{first or 'runc --version said nothing'}: 1.1 or newer is needed"
    return Check("runc", False, detail, fix)


def _docker() -> Check:
    name, purpose = "Docker engine", "only for `--runtime docker` of root's daemon; the runc driver needs none"
    fix = f"{purpose}: {system_packages.advice('docker.io')}, then start it"
    address = read(only=("docker_host",)).docker_host
    if not address.startswith("unix://"):
        return Check(
            name, None, f"DOCKER_HOST is {urlsplit(address).scheme}://…; snapshotd needs an engine on this machine", fix
        )
    try:
        version = _docker_version(address.removeprefix("unix://"))
    except (OSError, ValueError, HTTPException) as exc:
        if isinstance(exc, PermissionError):
            fix = f"{purpose}: run it as root"
        elif isinstance(exc, OSError) and not isinstance(exc, FileNotFoundError):
            fix = f"{purpose}: `sudo systemctl restart docker`"
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
    refused = useful.refusal(useful.FUSE)
    if refused is None and importlib.util.find_spec("pyfuse3") is None:
        detail = "pyfuse3 is not installed; it is for browsing snapshots, and for starting from cold ones at once"
        return Check(
            "FUSE",
            None,
            detail,
            f"{system_packages.advice('gcc', 'libfuse3-dev', 'pkg-config', 'python3-dev')}; "
            "pip install 'snapshotd[fuse]'",
        )
    if refused is None:
        return Check("FUSE", True, useful.FUSE)
    purpose = "it is for browsing snapshots as files, and for starting from cold ones at once"
    return Check(
        "FUSE", None, f"{useful.FUSE}: {refused.strerror}; {purpose}", _device_fix(useful.FUSE, "fuse", refused)
    )


def _device_fix(device: str, module: str, refused: OSError) -> str:
    """Return the advice for a device that could not be opened."""
    if isinstance(refused, PermissionError):
        filtered = f"give the container --device {device}"
        return f"`sudo chmod 666 {device}`" if refused.errno == errno.EACCES else filtered
    return f"`sudo modprobe {module}`; in a container, --device {device}"


def _reflink(place: Path) -> Check:
    reason = useful.reflink(place)
    if reason is None:
        return Check("reflink", True, f"{place} shares extents")
    steps = []  # to an XFS image, which only root of the host can mount
    if rootless.is_host_root():
        if any(p.name == "xfsprogs" and p.missing() for p in system_packages.PACKAGES):
            steps.append(system_packages.advice("xfsprogs"))
        if (refused := useful.refusal(useful.LOOP)) is not None:
            steps.append(_device_fix(useful.LOOP, "loop", refused))
        if not steps:
            return Check(
                "reflink", True, f"{place} cannot ({reason}); an XFS image in the state directory will hold the layers"
            )
    other = "put the state directory on XFS or Btrfs"
    fix = f"{', and '.join(steps)}; or {other}" if steps else other
    return Check("reflink", None, f"{place}: {reason}, so the first write into a big file copies it whole", fix)


def _disk_limits(place: Path) -> Check:
    reason = useful.project_quotas(place)
    watched = "the daemon looks once a second and ends what takes too much"
    if not rootless.is_host_root():
        return Check("disk limits", None, f"an ordinary user can set no quotas: {watched}", "run it as root")
    if reason is None:
        return Check("disk limits", True, "kept by the file system of the layers")
    fix = "boot a kernel with CONFIG_XFS_QUOTA, or mount the state directory's XFS with prjquota"
    return Check("disk limits", None, f"{reason}: {watched}", fix)


def _whose_change() -> Check:
    """Ask whether the kernel tells which process changes a file in the working directory, for agents in a user's folder
    (`snapshotd hooks`)."""
    folder = Path.cwd()
    reason = useful.writers_told(folder)
    if reason is None:
        return Check("folders", True, f"the kernel tells which process changes a file in {folder}")
    return Check(
        "folders",
        None,
        f"which process changes a file in {folder} is not known ({reason}): what others write there while an agent's call "
        "runs counts as the call's",
        "as root, in a folder on ext4, XFS, Btrfs or tmpfs; elsewhere write nothing there during a call",
    )


def _integrations() -> list[Check]:
    """One line for each integration: installed, in a version that fits, and loaded; one that is not installed is no fault."""
    checks = []
    for one, failure in integrations.try_all(list(integrations.INTEGRATIONS.values())):
        version, name = one.version(), f"integration {one.extra}"
        if version is None:
            checks.append(Check(name, True, f"not installed; `{one.install}` adds {one.purpose}"))
        elif failure is None:
            checks.append(Check(name, True, f"{one.package} {version} works: {one.purpose}"))
        else:
            checks.append(Check(name, None, f"{failure}; it is for {one.purpose}", one.install))
    return checks


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
        f"{path}: {number_of(rules, 'rule')}"
        if path.is_file()
        else f"{path} does not exist: nobody is asked about any call",
    )
