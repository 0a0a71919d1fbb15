"""The daemon's demands on the host: a way to run sandboxes, and namespaces of its own. Where nothing isolates sandboxes,
the daemon goes on only where the settings or a command have said that plain folders will do."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from snapshotd.config import COVERED, OF_ROOT, Config, UserPlaces, places
from snapshotd.errors import NotPermitted, Unsupported
from snapshotd.kernel import mounts, rootless, surroundings
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.abilities import Abilities, Mode
from snapshotd.kernel.files import closing_fd
from snapshotd.kernel.holding import cgroup

_log = logging.getLogger("snapshotd.daemon")
_NAMESPACE = "namespace"
"""File of a state directory: the user namespace of its last daemon, or `_NONE` where plain folders had to do."""
_NONE = "none"
_left: int | None = None


@dataclass(frozen=True, slots=True)
class Footing:
    """A daemon's ground: its places as it sees them, and the modes that will do."""

    places: UserPlaces = OF_ROOT
    wanted: Mode | None = None
    """The mode that the settings ask for."""
    folder_will_do: bool = False
    """Where nothing isolates sandboxes, the daemon runs those that ask for no isolation, and refuses others."""
    refusal: str = ""
    """The reason why nothing isolates sandboxes; empty: something may."""

    @property
    def in_folder(self) -> bool:
        """True if it is known already that all sandboxes are plain folders."""
        return self.wanted is Mode.FOLDER or bool(self.refusal)

    @property
    def in_namespace(self) -> bool:
        """True if the daemon has entered a user namespace (`become_able`)."""
        return not self.places.is_root and not self.in_folder

    def without_isolation(self, refusal: str) -> Footing:
        """Return the ground of a daemon for which nothing isolates sandboxes. Unsupported, with the reason: plain folders will not
        do."""
        if self.wanted is Mode.FOLDER:
            return self
        if not self.folder_will_do:
            raise Unsupported(refusal + _HINT)
        return replace(self, places=self.places.without_namespace(), refusal=refusal + _HINT)


AS_ROOT = Footing()


def footing_of(config: Config, isolation: str | None) -> Footing:
    """Return the ground of this process's user. `isolation`: "none" if a command has said that plain folders will do. Call it
    before this process enters a user namespace."""
    wanted = Mode(config.mode) if config.mode else None
    return Footing(places(), wanted, folder_will_do=isolation is not None and wanted is None)


_HINT = (
    ". In a plain folder, without isolation, it runs with --isolation none, or SNAPSHOTD_MODE=folder for all sandboxes "
    "(docs/folder-mode.md)"
)


def choose_mode(host: Abilities, footing: Footing) -> tuple[Mode, str]:
    """Choose the way to run sandboxes: the wanted one, or the best one in which the root user of a sandbox is not root on the
    host. Where no way works and plain folders will do: `FOLDER`, and the reason why only sandboxes without isolation run.
    Unsupported, with what is missing: this host cannot run sandboxes."""
    if footing.in_folder:
        return _choose_folder(host, footing.refusal)
    able, wanted = host.modes(), footing.wanted
    best = Mode.ROOTLESS if host.is_rootless else Mode.PIVOT
    mode = wanted or best
    if mode in able:
        return mode, ""
    if wanted is not None and (mode is Mode.ROOTLESS) != host.is_rootless:
        whose = "an ordinary user's daemon" if mode is Mode.ROOTLESS else "root's daemon"
        raise Unsupported(f"the mode {mode} is for {whose}: unset SNAPSHOTD_MODE, or run the command as such a user")
    missing = "; ".join(f"{name}: {reason}" for name, reason in host.reasons.items() if name in host.needed())
    weaker = (
        f". With SNAPSHOTD_MODE={Mode.PIVOT_ROOT} it runs, but the root user of a sandbox is then root on this machine "
        "(docs/threat-model.md)"
        if Mode.PIVOT_ROOT in able
        else ""
    )
    reason = (
        f"this machine cannot run sandboxes in the mode {mode}: {missing}.{rootless.restriction() if host.is_rootless else ''} "
        f"`snapshotd doctor` says how to get what is missing{weaker}"
    )
    return _choose_folder(host, footing.without_isolation(reason).refusal)


def _choose_folder(host: Abilities, refusal: str) -> tuple[Mode, str]:
    """Choose plain folders. Unsupported, with what is missing: this host can keep no layer."""
    if not host.keeps_marks:
        raise Unsupported(host.reasons["keeps_marks"])
    return Mode.FOLDER, refusal


def hand_down_controllers(host: Abilities) -> None:
    """Let sandboxes have limits, where cgroups are of version 2."""
    missing = cgroup.hand_down_controllers(host.cgroup_root) if host.cgroup_version == 2 else {}
    if missing:
        _log.warning("sandboxes cannot have all limits", extra={"fields": {"controllers": missing}})


def become_able(footing: Footing, state_dir: Path) -> Footing:
    """Make sure that this process may make sandboxes: an ordinary user's enters a user namespace of its own, or the one
    that an earlier daemon of the state directory has left sandboxes in. Does nothing for root.

    From the main thread, before others start: a thread started earlier would stay behind. Unsupported: the machine gives an
    ordinary user no such rights, and plain folders will not do. NotPermitted: the directory of the sockets is not the
    user's own.
    """
    places = footing.places
    if _read_note(state_dir) == _NONE:
        footing = replace(footing, folder_will_do=footing.wanted is None)
    if places.is_root:
        return footing
    assert places.run_source is not None
    _make_own(places.sockets)
    if footing.wanted is Mode.FOLDER:
        return replace(footing, places=places.without_namespace())
    with _try_namespace(places, state_dir) as (namespace, reason):
        if namespace is not None:
            _enter(places, namespace, _read_earlier(state_dir)[1])
            return footing
    return footing.without_isolation(
        f"an ordinary user cannot run sandboxes on this machine: {reason}.{rootless.restriction()} "
        "`snapshotd doctor` says more; as root (sudo) they can be run"
    )


def _enter(places: UserPlaces, earlier: int | None, ids: int) -> None:
    """As `rootless.enter`, and make the places. OSError."""
    assert places.run_source is not None
    rootless.enter(earlier, ids)
    surroundings.enter_own_mounts()
    _make_own(places.run_source)
    _cover(places)


@contextlib.contextmanager
def _try_namespace(places: UserPlaces, state_dir: Path) -> Iterator[tuple[int | None, str]]:
    """Enter the namespace in a child process, which stays there during the block. Yields the namespace's inode, or None and the
    reason why the child could not enter. The daemon does not try by itself: the kernel lets no process leave a user namespace."""
    (told, tell), (ends, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        said = "it was killed"
        try:
            os.close(end)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            _enter(places, *_read_earlier(state_dir))
            said = f"{rootless.own_inode()}"
        except (OSError, NotPermitted) as exc:
            said = exc.message if isinstance(exc, NotPermitted) else exc.strerror or str(exc)
        finally:
            os.write(tell, os.fsencode(said.replace("\n", " ")) + b"\n")
            os.read(ends, 1)
            os._exit(0)
    for fd in (tell, ends):
        os.close(fd)
    try:
        with open(told, "rb") as f:
            said = os.fsdecode(f.readline()).strip()  # not to the end: a helper of the child has the pipe, too
        yield (int(said), "") if said.isdigit() else (None, said or "it was killed")
    finally:
        os.close(end)
        os.waitpid(child, 0)


def note_namespace(footing: Footing, state_dir: Path) -> None:
    """Write a note for the next daemon of the state directory: the user namespace in which this one may leave sandboxes, or
    that only plain folders can be used. The caller holds the directory's lock."""
    if footing.refusal:
        (state_dir / _NAMESPACE).write_text(_NONE)
    elif footing.in_namespace:
        (state_dir / _NAMESPACE).write_text(f"{rootless.own_inode()} {rootless.ids_here()}")


def _read_note(state_dir: Path) -> str:
    """Return the note of the last daemon; empty: it left none."""
    try:
        return (state_dir / _NAMESPACE).read_text()
    except OSError:
        return ""


def _read_earlier(state_dir: Path) -> tuple[int | None, int]:
    """Read the inode of the last daemon's namespace, and the number of its ids (0: any)."""
    try:
        inode, ids = _read_note(state_dir).split()
        return int(inode), int(ids)
    except ValueError:
        return None, 0


def _make_own(directory: Path) -> None:
    """Make a directory that only this user can enter. NotPermitted when it cannot be, or another user's is in its
    place."""
    problem = rootless.ownership_problem(directory, make=True)
    if problem is not None:
        raise NotPermitted(problem)


def _cover(places: UserPlaces) -> None:
    """Mount the directories of `places` in this mount namespace. Users of containers can go through these; the user's own
    directories are closed to them."""
    sc.call("mount", "snapshotd", str(COVERED), "tmpfs", sc.MS_NOSUID | sc.MS_NODEV, "mode=0711")
    for directory in (places.run_root, places.share_root):
        directory.mkdir(mode=0o711)
    assert places.run_source is not None
    os.chmod(places.run_source, 0o711)
    with (
        closing_fd(os.open(places.run_source, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as source,
        closing_fd(os.open(places.run_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as target,
        closing_fd(mounts.clone(source)) as tree,
    ):
        mounts.attach(tree, target)


def enter_own_mount_namespace() -> None:
    """Give this process mounts that no other process sees, while the host's mounts still arrive; adopt orphans of its
    children.

    Everything mounted for sandboxes then vanishes with the daemon, also after kill -9. From the main thread, before
    others start: a thread started earlier would stay behind in the old namespace. Unsupported: it has not the right to.
    """
    global _left
    sc.prctl(sc.PR_SET_CHILD_SUBREAPER, 1)
    try:
        surroundings.make_fit()
        _left = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        surroundings.enter_own_mounts()
    except OSError as exc:
        if _left is not None:
            os.close(_left)
            _left = None
        raise Unsupported(
            f"the daemon cannot have mounts of its own ({exc.strerror or exc}): it needs root. In a container it needs the "
            "capabilities SYS_ADMIN, SYS_PTRACE and SYS_NICE, and seccomp and AppArmor unconfined (docs/examples/deploy), or a "
            "privileged one"
        ) from exc


def host_mounts() -> int | None:
    """Return a descriptor of the mount namespace that this process left for its own, for processes that outlive it; None: it has
    left none."""
    return _left
