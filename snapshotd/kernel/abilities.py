"""The abilities of this host, found out by doing what the daemon does: one record, which everything that depends on the
host is given as a value.

Nothing else in snapshotd asks for a kernel's version, for root, or for the layout of cgroups. Every probe makes the real
call, in a thread with mounts of its own, and leaves nothing behind. `find` keeps the answer in a file of the state
directory until the machine boots again.

Kernels that have them (measured on 6.1, 6.12 and 6.18, else from the sources): layers by descriptor 6.15, times finer
than a tick 6.13, one path for each layer 6.8, an overlay of id-mapped layers 5.19, mount_setattr 5.12.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from snapshotd.errors import NO_ROOM
from snapshotd.kernel import fanotify, files, mounts, namespaces, quota, rootless, surroundings
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.mounts import LayerNaming
from snapshotd.types import IdMap

FILE_NAME = "abilities.json"
ALL_IDS = 2**32 - 1
_CGROUP_ROOTS = (
    ("/sys/fs/cgroup/freezer", "freezer.state", 1),
    ("/sys/fs/cgroup", "cgroup.kill", 2),
    ("/sys/fs/cgroup/unified", "cgroup.kill", 2),
)
_TIMES_TRIED = 8
_PROBE_TIMEOUT_S = 60


class Mode(StrEnum):
    """A way to run sandboxes. The first one that the host is able to is taken."""

    PIVOT = "pivot"
    """The container's root user is nobody on the host."""
    PIVOT_ROOT = "pivot-root"
    """The container's root user is root on the host, held by capabilities and seccomp alone (docs/threat-model.md). Only
    where a setting asks for it."""
    ROOTLESS = "rootless"
    """The daemon of an ordinary user, in a user namespace. Each snapshot is a copy of what changed."""
    FOLDER = "folder"
    """Sandboxes are plain folders, without isolation (docs/folder-mode.md). Every host is able to it; only where a setting
    or a request asks for it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The names of the extended attributes with which overlayfs marks entries of layers, by what they begin with. The host
    decides on the first kind or the second; each layer directory has one of them."""

    prefix: bytes
    """Attributes that begin with it are never shown as content."""

    @property
    def opaque(self) -> str:
        return self.prefix.decode() + "opaque"

    @property
    def redirect(self) -> str:
        return self.prefix.decode() + "redirect"

    @property
    def whiteout(self) -> str:
        return self.prefix.decode() + "whiteout"

    @property
    def origin(self) -> str:
        return self.prefix.decode() + "origin"

    @property
    def kept(self) -> frozenset[bytes]:
        """The marks that are part of a layer's meaning. The others (origin, impure, uuid) tie an upper to its mount."""
        return frozenset(os.fsencode(name) for name in (self.opaque, self.redirect, self.whiteout))


TRUSTED, BY_USER = Marks(b"trusted.overlay."), Marks(b"user.overlay.")
"""The kind that root of the host alone can set, and the kind of overlays in a user namespace."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """The abilities of this process on this host, with layers at one place."""

    mounts: bool
    """Mounts of its own: CAP_SYS_ADMIN, and no filter that refuses."""
    overlays: bool
    """Overlays can be mounted, with the layers on the state directory's file system."""
    layer_naming: LayerNaming
    """The way in which overlayfs is told its layers."""
    redirects: bool
    """A directory of a lower layer can be renamed. Without it every live upper is laid over the image alone, and snapshots
    are copies (layers/delta.py)."""
    seals: bool
    """The attributes of a mount can be changed: a root becomes a read-only layer."""
    user_namespaces: bool
    """A user namespace with a map of 65,536 ids can be made."""
    mapped_layers: bool
    """An overlay takes layers whose ids are shifted by a mount."""
    fine_times: bool
    """Two changes of a file never have the same time. Without it, changes within one tick of the clock look alike."""
    cgroup_version: int
    """The version of the cgroups that can be made, frozen and killed, 1 or 2. 0: none."""
    cgroup_root: str
    """The directory in which they can be made."""
    marks: str = TRUSTED.prefix.decode()
    """The beginning of the names of overlayfs's marks (`Marks`)."""
    ids: int = ALL_IDS
    """Number of user ids that this process can give to files: all outside of user namespaces, one more than a container's in
    a user's range (kernel/rootless.py), or 1."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Name of a missing ability to the reason, in a few words."""
    looks: bool = True
    """A process of a sandbox can be looked at: its files, its namespaces."""
    priorities: bool = True
    """A process can get its priority back, and one of another user can be moved to other processors."""

    @property
    def cgroup_parent(self) -> str:
        """`cgroup_root` as a path below the hierarchy's mount point; "" for the root."""
        points = [root for root, _, _ in _CGROUP_ROOTS if self.cgroup_root.startswith(root)]
        return self.cgroup_root[max(map(len, points), default=0) :]

    def modes(self) -> tuple[Mode, ...]:
        """The modes that this host is able to, the best first."""
        if self.is_rootless:
            return (Mode.ROOTLESS,) if self.mounts and self.overlays and self.user_namespaces else ()
        if not (self.mounts and self.overlays and self.redirects and self.seals and self.cgroup_version):
            return ()
        if not (self.looks and self.priorities):
            return ()
        return (Mode.PIVOT, Mode.PIVOT_ROOT) if self.user_namespaces and self.mapped_layers else (Mode.PIVOT_ROOT,)

    @property
    def is_rootless(self) -> bool:
        """True in a user namespace: an ordinary user's daemon, or a container's root."""
        return self.ids < ALL_IDS

    @property
    def overlay_marks(self) -> Marks:
        return Marks(self.marks.encode())

    def needed(self) -> frozenset[str]:
        """The abilities without which there is no sandbox of the best kind."""
        always = frozenset({"mounts", "overlays", "user_namespaces"})
        of_root = {"redirects", "seals", "mapped_layers", "looks", "priorities", "cgroup_version"}
        return always if self.is_rootless else always | of_root


def weaker(mode: Mode, host: Abilities) -> str:
    """The ways in which sandboxes are weaker than in the best mode, as one sentence for a user; empty: in none."""
    if mode is Mode.PIVOT_ROOT:
        return "the root user of a sandbox is root on this machine, held by capabilities and a system call filter alone"
    if mode is Mode.FOLDER:
        return "sandboxes are plain folders, and nothing isolates them"
    parts = []
    if host.ids == 1:
        parts.append("all files of a sandbox belong to this user, and to root in there (one user id)")
    if host.is_rootless and not host.cgroup_version:
        parts.append("a sandbox has no limits of memory, processors and processes (no cgroups)")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Ability:
    """One field of the record, for people: its purpose, what is lost without it, and how to get it."""

    field: str
    name: str
    purpose: str
    lost: str
    fix: str
    without_root: tuple[str, str] | None = None
    """`lost` and `fix` for an ordinary user, where these are others."""


_NEWER = "boot a newer kernel"
ABILITIES: tuple[Ability, ...] = (
    Ability(
        "mounts",
        "mounts",
        "roots of sandboxes",
        "there is no sandbox",
        "run it as root; in a container, with the capabilities SYS_ADMIN, SYS_PTRACE and SYS_NICE, seccomp=unconfined and "
        "apparmor=unconfined",
        ("there is no sandbox", "as for user namespaces, or run it as root"),
    ),
    Ability(
        "overlays",
        "overlay",
        "roots of sandboxes",
        "there is no sandbox",
        "`modprobe overlay`, and put the state directory on ext4, XFS or btrfs, not on an overlay or a network file system",
    ),
    Ability(
        "redirects",
        "renamed directories",
        "a rename of a directory that an earlier step made",
        "there is no sandbox",
        f"{_NEWER}, with CONFIG_OVERLAY_FS",
    ),
    Ability("seals", "seal", "snapshots without a copy", "there is no sandbox", f"{_NEWER} (Linux 5.12)"),
    Ability(
        "user_namespaces",
        "user namespaces",
        "container root without rights on the host",
        "a sandbox's root user would be root on the host",
        "`sysctl user.max_user_namespaces=15000` (inside a chroot the kernel allows none)",
        (
            "there is no sandbox",
            "as root: `sysctl user.max_user_namespaces=15000 kernel.unprivileged_userns_clone=1`; on Ubuntu also "
            "`sysctl kernel.apparmor_restrict_unprivileged_userns=0`; or run it as root",
        ),
    ),
    Ability(
        "mapped_layers",
        "id-mapped layers",
        "one copy of a layer for all users",
        "a sandbox's root user would be root on the host",
        f"{_NEWER} (Linux 5.19), and put the state directory on ext4, XFS or btrfs",
    ),
    Ability(
        "looks",
        "looks at processes",
        "what the processes of a sandbox have open, before a snapshot",
        "there is no sandbox",
        "run it as root; in a container, with the capability SYS_PTRACE",
    ),
    Ability(
        "priorities",
        "priorities",
        "background work that gives way, and commands that enter a sandbox's cgroup",
        "there is no sandbox",
        "run it as root; in a container, with the capability SYS_NICE",
    ),
    Ability(
        "cgroup_version",
        "cgroups",
        "stopping a sandbox for a copy, limits, and its end",
        "there is no sandbox",
        "run it as root on a machine with the freezer; in a container, with writable cgroups",
        ("a sandbox has no limits of memory, processors and processes, and is stopped by signals", "run it as root"),
    ),
    Ability(
        "fine_times",
        "fine times",
        "files that did not change are not copied again",
        "a file that changed within the clock's last tick is copied once more",
        f"{_NEWER} (Linux 6.13)",
    ),
)
"""In the order in which a missing one matters; each comes after the ones that it needs."""


def find(layers: Path, kept: Path) -> Abilities:
    """The abilities with layers in this directory: as the file `kept` has them from an earlier start since the machine
    booted, else by probes. On a full disk, where nothing can be tried, those of any earlier start. OSError: the probes
    could not be started."""
    key = [_boot(), os.getuid(), rootless.ids_here(), rootless.capabilities(), os.stat(layers).st_dev, _own_code()]
    earlier = None
    try:
        document = json.loads(kept.read_text())
        earlier = _of(document["abilities"])
        if document["key"] == key:
            return earlier
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there yet, or not of this version
    try:
        found = probe(layers)
    except OSError as exc:
        if exc.errno not in NO_ROOM or earlier is None:
            raise
        return earlier
    temporary = kept.with_name(f"{kept.name}.new")
    try:
        temporary.write_text(json.dumps({"key": key, "abilities": asdict(found)}))
        temporary.rename(kept)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk: they are probed again at the next start
    return found


def probe(place: Path) -> Abilities:
    """Probe everything, for a state directory that lies at or below the directory `place`. OSError."""
    with scratch(place) as directory:
        if rootless.is_root() or rootless.in_own_namespace():
            return namespaces.apart("abilities", lambda: _probe_here(directory))
        return _probe_elsewhere(directory)


def _probe_elsewhere(directory: Path) -> Abilities:
    """In a child process, which can leave this user namespace."""
    command = [sys.executable, "-m", __spec__.name, str(directory)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    try:
        return _of(json.loads(done.stdout))
    except ValueError:
        raise OSError(0, f"the abilities of this host cannot be probed: {done.stderr.strip()[-500:]}") from None


def _of(document: dict[str, object]) -> Abilities:
    return Abilities(layer_naming=LayerNaming(str(document.pop("layer_naming"))), **document)  # type: ignore[arg-type]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _own_code() -> int:
    """A new version may ask for other things."""
    return os.stat(__file__).st_mtime_ns


# -- the probes --------------------------------------------------------------------------------------------------------


def _probe_here(place: Path) -> Abilities:
    """In a thread that has no other work."""
    reasons: dict[str, str] = {}

    def tried(name: str, probe: Callable[[Path], None]) -> bool:
        try:
            with scratch(place) as directory:
                probe(directory)
        except OSError as exc:
            reasons[name] = reason_of(exc)
            return False
        return True

    mounts_ = tried("mounts", _own_mounts)
    marks = TRUSTED if tried("trusted marks", _trusted_marks) else BY_USER
    reasons.pop("trusted marks", None)
    naming = next(
        (one for one in LayerNaming if tried("overlays", functools.partial(_overlay, naming=one, marks=marks))), None
    )
    if naming is not None:
        reasons.pop("overlays", None)  # an earlier way, which this kernel does not have
    user_namespaces = tried("user_namespaces", _user_namespace)
    redirects = mapped = False
    if naming is not None:
        redirects = tried("redirects", functools.partial(_rename, naming=naming, marks=marks))
        mapped = user_namespaces and tried("mapped_layers", functools.partial(_mapped, naming=naming, marks=marks))
    cgroup = freezer()
    if isinstance(cgroup, str):
        reasons["cgroup_version"], cgroup = cgroup, (0, "")
    return Abilities(
        mounts=mounts_,
        overlays=naming is not None,
        layer_naming=naming or LayerNaming.OPTIONS,
        redirects=redirects,
        seals=tried("seals", _seal),
        user_namespaces=user_namespaces,
        mapped_layers=mapped,
        fine_times=tried("fine_times", _fine_times),
        marks=marks.prefix.decode(),
        ids=rootless.ids_here(),
        cgroup_version=cgroup[0],
        cgroup_root=cgroup[1],
        reasons=reasons,
        looks=not user_namespaces or rootless.ids_here() < ALL_IDS or tried("looks", _look),
        priorities=tried("priorities", _priority),
    )


def reason_of(exc: OSError) -> str:
    """An error in a few words."""
    return exc.strerror or str(exc)


def _own_mounts(at: Path) -> None:
    surroundings.make_fit()
    surroundings.enter_own_mounts()
    sc.call("mount", "none", str(at), "tmpfs", 0, None)
    try:
        _change_root(at)
    finally:
        mounts.detach(os.fsencode(at))


def _change_root(at: Path) -> None:
    """In a process of its own, which ends. Docker's filter lets who has CAP_SYS_ADMIN mount, and does not let them do
    this."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            sc.call("unshare", sc.CLONE_NEWNS)
            os.chdir(at)
            sc.call("pivot_root", b".", b".")
        except OSError as exc:
            code = exc.errno or 1
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, f"pivot_root: {os.strerror(code)}")


def _trusted_marks(at: Path) -> None:
    os.setxattr(at, TRUSTED.opaque, b"y")


def _overlay(at: Path, naming: LayerNaming, marks: Marks) -> None:
    if marks == BY_USER:
        try:
            os.setxattr(at, marks.opaque, b"y")
        except OSError as exc:
            raise OSError(
                exc.errno,
                f"the file system of {at.parent} keeps no extended attributes of users ({exc.strerror}), in which layers have "
                "their marks: name a state directory on ext4, XFS, Btrfs, or tmpfs (Linux 6.6 and newer)",
            ) from None
    with _mounted(at, naming, marks) as mount:
        os.close(os.open(b"probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=mount))


def _rename(at: Path, naming: LayerNaming, marks: Marks) -> None:
    (at / "lower").mkdir()
    (at / "lower" / "made-earlier").mkdir()
    with _mounted(at, naming, marks) as mount:
        os.rename("made-earlier", "renamed", src_dir_fd=mount, dst_dir_fd=mount)


def _mapped(at: Path, naming: LayerNaming, marks: Marks) -> None:
    """As `LayerStore.mapped`: one clone of the directory of all layers, which is attached somewhere."""
    with ExitStack() as opened:
        userns = namespaces.user_namespace(namespaces.CONTAINER_IDS)
        opened.callback(os.close, userns)
        directory = os.open(at, files.DIR_FLAGS)
        opened.callback(os.close, directory)
        clone = mounts.id_mapped_clone(directory, userns)
        opened.callback(os.close, clone)
        mounts.attach(clone, directory)
        opened.callback(mounts.detach, os.fsencode(at))
        with _mounted(at, naming, marks, clone) as mount:
            os.close(os.open(b"probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=mount))


@contextmanager
def _mounted(at: Path, naming: LayerNaming, marks: Marks, base: int | None = None) -> Iterator[int]:
    """An overlay of one empty layer, `lower` may be there already. `base`: a mount of the directory to go through."""
    with ExitStack() as opened:
        layers = []
        for name in ("lower", "upper", "work"):
            (at / name).mkdir(exist_ok=True)
            where = (at / name, None) if base is None else (name, base)
            layers.append(os.open(where[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where[1]))
            opened.callback(os.close, layers[-1])
        mount = mounts.overlay(layers[:1], layers[1], layers[2], naming, user_marks=marks == BY_USER)
        opened.callback(os.close, mount)
        yield mount


def _seal(at: Path) -> None:
    with ExitStack() as opened:
        fd = os.open(at, files.DIR_FLAGS)
        opened.callback(os.close, fd)
        tree = mounts.clone(fd)
        opened.callback(os.close, tree)
        mounts.set_attributes(tree, attr_set=sc.MOUNT_ATTR_RDONLY)


def _user_namespace(_: Path) -> None:
    ids = rootless.ids_here()
    if ids == ALL_IDS:
        os.close(namespaces.user_namespace(namespaces.CONTAINER_IDS))
    else:
        namespaces.check_user_namespace(container_ids(ids))


def container_ids(ids: int) -> IdMap:
    """The map of a container's ids in a user namespace with this number of them: the same ids, without the user's own
    where there is a range."""
    return IdMap(0, max(ids - 1, 1))


def _look(_: Path) -> None:
    """At a process that is another user in another user namespace, as those of sandboxes are."""
    userns = namespaces.user_namespace(namespaces.CONTAINER_IDS)
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            sc.call("setns", userns, sc.CLONE_NEWUSER)
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
            os.write(tell, b"x")
            signal.pause()
        os._exit(1)
    os.close(tell)
    try:
        os.read(told, 1)
        os.readlink(f"/proc/{pid}/root")
    finally:
        os.close(told)
        os.close(userns)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _priority(_: Path) -> None:
    """There and back, which a process may not do by itself."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, own + 1)
    os.setpriority(os.PRIO_PROCESS, 0, own)


def _has_fine_times(place: Path) -> bool:
    try:
        with scratch(place) as directory:
            _fine_times(directory)
    except OSError:
        return False
    return True


def _fine_times(at: Path) -> None:
    """Changes one right after the other, each after a look at the file: the kernel gives a changed time to a file that
    was looked at since its last change, or gives the time of the last tick."""
    fd = os.open(at / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        seen = set()
        for _ in range(_TIMES_TRIED):
            os.pwrite(fd, b"x", 0)
            seen.add(os.fstat(fd).st_ctime_ns)
    finally:
        os.close(fd)
    if len(seen) < _TIMES_TRIED:
        raise OSError(0, "changes within one tick of the clock have the same time")


def freezer() -> tuple[int, str] | str:
    """A cgroup that can be made, frozen and (in version 2, by the kernel) killed: its version and where, or the reason
    why there is none."""
    reasons = []
    for root, control, version in _CGROUP_ROOTS:
        group = f"{root}/snapshotd-probe-{secrets.token_hex(4)}"
        try:
            os.mkdir(group)
        except OSError as exc:
            reasons.append(f"{root}: {reason_of(exc)}")
            continue
        try:
            if os.path.exists(f"{group}/{control}"):
                return version, root
            reasons.append(f"{root} has no {control}")
        finally:
            os.rmdir(group)
    return "; ".join(reasons)


@contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A directory of its own below `directory`, gone afterwards with all that the kernel put there."""
    place = Path(tempfile.mkdtemp(prefix=".probe-", dir=directory))
    try:
        yield place
    finally:
        shutil.rmtree(place)


# -- what is good to have ----------------------------------------------------------------------------------------------


def fuse() -> str | None:
    """None if /dev/fuse can be opened, else the reason."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return reason_of(exc)
    return None


def shares_extents(directory: Path) -> bool:
    """True if files in `directory` can share extents (FICLONE). Leaves nothing behind. OSError: it cannot be tried."""
    with tempfile.TemporaryFile(dir=directory) as source, tempfile.TemporaryFile(dir=directory) as target:
        source.write(b"\0" * 4096)
        source.flush()
        return files.reflink(source.fileno(), target.fileno())


def reflink(directory: Path) -> str | None:
    """None if files in `directory` can share extents, else the reason."""
    try:
        return None if shares_extents(directory) else "its file system cannot share extents"
    except OSError as exc:
        return reason_of(exc)


def project_quotas(directory: Path) -> str | None:
    """None if files in `directory` can be given limits, else the reason; if files cannot be reflinked there, the answer
    is about an XFS image."""
    if reflink(directory) is not None:
        return None if os.path.exists("/proc/fs/xfs/xqmstat") else "this kernel's XFS has no quotas, or is not loaded"
    fd = os.open(directory, files.DIR_FLAGS)
    try:
        return None if quota.enforced(fd) else "its file system is not mounted with prjquota"
    finally:
        os.close(fd)


def writers_told(directory: Path) -> str | None:
    """None if the kernel tells which process changes a file in `directory`, else the reason."""
    try:
        with scratch(directory) as place:
            fd = os.open(place, files.DIR_FLAGS)
            try:
                if not fanotify.is_local(fd):
                    return "its file system is a network's or an overlay, or of a kind that is not known"
                marks = fanotify.NameMarks()
                try:
                    marks.add(fd)
                    child = subprocess.run(["/bin/mkdir", place / "by-a-child"], check=False)
                    told = {touch.name: touch.pid for touch in marks.read()}
                    return None if child.returncode or told.get(b"by-a-child", 0) > 0 else "the kernel names no process"
                finally:
                    marks.close()
            finally:
                os.close(fd)
    except (OSError, NotImplementedError) as exc:
        return reason_of(exc) if isinstance(exc, OSError) else str(exc)


def loop_devices() -> str | None:
    """None if a file can be mounted as a disk here, else the reason."""
    try:
        os.close(os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC))
    except OSError as exc:
        return reason_of(exc)
    return None


def _answer(place: Path) -> Abilities:
    """The answer to `probe`. An ordinary user's daemon has a user namespace, so its abilities are those in one."""
    if not rootless.is_root() and not rootless.in_own_namespace():
        fine_times = _has_fine_times(place)
        try:
            rootless.enter()
        except OSError as exc:
            return Abilities(
                mounts=False,
                overlays=False,
                layer_naming=LayerNaming.OPTIONS,
                redirects=False,
                seals=False,
                user_namespaces=False,
                mapped_layers=False,
                fine_times=fine_times,
                marks=BY_USER.prefix.decode(),
                ids=1,
                cgroup_version=0,
                cgroup_root="",
                reasons={"user_namespaces": reason_of(exc)},
            )
    return _probe_here(place)


if __name__ == "__main__":
    print(json.dumps(asdict(_answer(Path(sys.argv[1])))))  # noqa: T201
