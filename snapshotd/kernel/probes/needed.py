"""Finds out the abilities of this host by doing what the daemon does (abilities.py has the record).

Every probe makes the real call, in a thread with mounts of its own, and leaves nothing behind. `find` keeps the answer in
a file of the state directory until the machine boots again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from snapshotd.errors import NO_ROOM
from snapshotd.kernel import files, mounts, namespaces, rootless, surroundings
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.abilities import ALL_IDS, BY_USER, CGROUP_ROOTS, TRUSTED, Abilities, Marks, container_ids
from snapshotd.kernel.mounts import LayerNaming

FILE_NAME = "abilities.json"
_TIMES_TRIED = 8
_PROBE_TIMEOUT_S = 60


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
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            0,
            f"the abilities of this host were not found within {_PROBE_TIMEOUT_S} s, so the machine may be too busy; try again",
        ) from None
    try:
        return _of(json.loads(done.stdout))
    except ValueError:
        raise OSError(0, f"the abilities of this host cannot be probed: {done.stderr.strip()[-500:]}") from None


def _of(document: dict[str, object]) -> Abilities:
    return Abilities(layer_naming=LayerNaming(str(document.pop("layer_naming"))), **document)  # type: ignore[arg-type]


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _own_code() -> int:
    """The time of this file: another version may probe other things."""
    return os.stat(__file__).st_mtime_ns


# -- the probes --------------------------------------------------------------------------------------------------------


def _probe_here(place: Path) -> Abilities:
    """In a thread that has no other work."""
    reasons: dict[str, str] = {}
    tried = functools.partial(_succeeds, place, reasons)
    mounts_ = tried("mounts", _try_own_mounts)
    marks = TRUSTED if tried("trusted marks", _try_trusted_marks) else BY_USER
    reasons.pop("trusted marks", None)
    keeps_marks = tried("keeps_marks", functools.partial(_try_marks, marks=marks))
    naming = next(
        (one for one in LayerNaming if tried("overlays", functools.partial(_try_overlay, naming=one, marks=marks))),
        None,
    )
    if naming is not None:
        reasons.pop("overlays", None)  # an earlier way, which this kernel does not have
    user_namespaces = tried("user_namespaces", _try_user_namespace)
    redirects = mapped = False
    if naming is not None:
        redirects = tried("redirects", functools.partial(_try_redirect, naming=naming, marks=marks))
        mapped = user_namespaces and tried(
            "mapped_layers", functools.partial(_try_mapped_layers, naming=naming, marks=marks)
        )
    cgroup = freezer()
    if isinstance(cgroup, str):
        reasons["cgroup_version"], cgroup = cgroup, (0, "")
    return Abilities(
        mounts=mounts_,
        overlays=naming is not None,
        layer_naming=naming or LayerNaming.OPTIONS,
        redirects=redirects,
        seals=tried("seals", _try_seal),
        user_namespaces=user_namespaces,
        mapped_layers=mapped,
        fine_times=tried("fine_times", _try_fine_times),
        marks=marks.prefix.decode(),
        ids=rootless.ids_here(),
        cgroup_version=cgroup[0],
        cgroup_root=cgroup[1],
        reasons=reasons,
        looks=not user_namespaces or rootless.ids_here() < ALL_IDS or tried("looks", _try_look),
        priorities=tried("priorities", _try_priority),
        keeps_marks=keeps_marks,
    )


def _succeeds(place: Path, reasons: dict[str, str], name: str, probe: Callable[[Path], None]) -> bool:
    """True if a probe of an ability goes through; else `reasons` has the reason."""
    try:
        with scratch(place) as directory:
            probe(directory)
    except OSError as exc:
        reasons[name] = reason_of(exc)
        return False
    return True


def reason_of(exc: OSError) -> str:
    """An error in a few words."""
    return exc.strerror or str(exc)


def _try_own_mounts(at: Path) -> None:
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


def _try_trusted_marks(at: Path) -> None:
    os.setxattr(at, TRUSTED.opaque, b"y")


def _try_marks(at: Path, marks: Marks) -> None:
    try:
        os.setxattr(at, marks.opaque, b"y")
    except OSError as exc:
        raise OSError(
            exc.errno,
            f"the file system of {at.parents[1]} keeps no extended attributes of users ({exc.strerror}), in which layers have "
            "their marks: name a state directory on ext4, XFS, Btrfs, or tmpfs (Linux 6.6 and newer)",
        ) from None


def _try_overlay(at: Path, naming: LayerNaming, marks: Marks) -> None:
    _try_marks(at, marks)
    with _mount_overlay(at, naming, marks) as mount:
        os.close(os.open(b"probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=mount))


def _try_redirect(at: Path, naming: LayerNaming, marks: Marks) -> None:
    (at / "lower").mkdir()
    (at / "lower" / "made-earlier").mkdir()
    with _mount_overlay(at, naming, marks) as mount:
        os.rename("made-earlier", "renamed", src_dir_fd=mount, dst_dir_fd=mount)


def _try_mapped_layers(at: Path, naming: LayerNaming, marks: Marks) -> None:
    """Mount an overlay as `LayerStore.mapped` makes it possible: through one id-mapped clone of the directory of all
    layers, which is attached somewhere."""
    with ExitStack() as opened:
        userns = opened.enter_context(files.closing_fd(namespaces.user_namespace(namespaces.CONTAINER_IDS)))
        directory = opened.enter_context(files.closing_fd(os.open(at, files.DIR_FLAGS)))
        clone = opened.enter_context(files.closing_fd(mounts.id_mapped_clone(directory, userns)))
        mounts.attach(clone, directory)
        opened.callback(mounts.detach, os.fsencode(at))
        with _mount_overlay(at, naming, marks, clone) as mount:
            os.close(os.open(b"probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=mount))


@contextmanager
def _mount_overlay(at: Path, naming: LayerNaming, marks: Marks, base: int | None = None) -> Iterator[int]:
    """Mount an overlay of one empty layer, and yield its descriptor. The directory `lower` may be there already. `base`:
    a mount of the directory to go through."""
    with ExitStack() as opened:
        layers = []
        for name in ("lower", "upper", "work"):
            (at / name).mkdir(exist_ok=True)
            where = (at / name, None) if base is None else (name, base)
            fd = os.open(where[0], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=where[1])
            layers.append(opened.enter_context(files.closing_fd(fd)))
        mount = mounts.overlay(layers[:1], layers[1], layers[2], naming, user_marks=marks == BY_USER)
        yield opened.enter_context(files.closing_fd(mount))


def _try_seal(at: Path) -> None:
    with files.closing_fd(os.open(at, files.DIR_FLAGS)) as fd:
        os.close(mounts.clone(fd, attributes=sc.MOUNT_ATTR_RDONLY))


def _try_user_namespace(_: Path) -> None:
    ids = rootless.ids_here()
    if ids == ALL_IDS:
        os.close(namespaces.user_namespace(namespaces.CONTAINER_IDS))
    else:
        namespaces.check_user_namespace(container_ids(ids))


def _try_look(_: Path) -> None:
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


def _try_priority(_: Path) -> None:
    """There and back, which a process may not do by itself."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, own + 1)
    os.setpriority(os.PRIO_PROCESS, 0, own)


def _try_fine_times(at: Path) -> None:
    """Changes one right after the other, each after a look at the file: the kernel gives a changed time to a file that
    was looked at since its last change, or gives the time of the last tick."""
    with files.closing_fd(os.open(at / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)) as fd:
        seen = set()
        for _ in range(_TIMES_TRIED):
            os.pwrite(fd, b"x", 0)
            seen.add(os.fstat(fd).st_ctime_ns)
    if len(seen) < _TIMES_TRIED:
        raise OSError(0, "changes within one tick of the clock have the same time")


def freezer() -> tuple[int, str] | str:
    """A cgroup that can be made, frozen and (in version 2, by the kernel) killed: its version and where, or the reason
    why there is none."""
    reasons = []
    for root, control, version in CGROUP_ROOTS:
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
        with files.closing_fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as parent:
            files.remove_tree(parent, place.name)  # a server lets nobody into the directory that overlayfs has closed


def _answer(place: Path) -> Abilities:
    """The answer to `probe`. An ordinary user's daemon has a user namespace, so its abilities are those in one."""
    if not rootless.is_root() and not rootless.in_own_namespace():
        reasons: dict[str, str] = {}
        fine_times = _succeeds(place, reasons, "fine_times", _try_fine_times)
        keeps_marks = _succeeds(place, reasons, "keeps_marks", functools.partial(_try_marks, marks=BY_USER))
        try:
            rootless.enter()
        except OSError as exc:
            reasons["user_namespaces"] = reason_of(exc)
            marks = BY_USER.prefix.decode()
            return Abilities(fine_times=fine_times, marks=marks, ids=1, reasons=reasons, keeps_marks=keeps_marks)
    return _probe_here(place)


if __name__ == "__main__":
    print(json.dumps(asdict(_answer(Path(sys.argv[1])))))  # noqa: T201
