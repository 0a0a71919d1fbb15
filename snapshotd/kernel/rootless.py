"""A user namespace in which an ordinary user's daemon has root's rights: mounts, namespaces and owners of files, all of
them the user's own as the host sees it.

The user's range of further ids (/etc/subuid, /etc/subgid) is mapped by newuidmap and newgidmap, programs of the
distribution. Ids inside are those of the containers, and the user is the last one:

    inside     0 .. 65535               65536
    host       the user's range         the user

So files of containers have on disk the ids that the containers know, and no process of a container is the user that the
daemon's files belong to. Without a range, or without those programs, the user is mapped alone, as id 0, and every file
of a container belongs to it.

The namespace lives as long as a process in it, or a container below it. Only from inside it can those containers be
entered and ended, so a later daemon of the same state directory enters the namespace of the earlier one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import pwd
import shutil
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.processes import runs, start_time

RANGE_IDS = 65_536
"""Ids of a container; a range of fewer is not used."""
_RANGE_FILES = ("/etc/subuid", "/etc/subgid")
_FIRST_SPARE = 100_000
"""Distributions give no user ids below this (SUB_UID_MIN, login.defs(5))."""
_NS_GET_PARENT = 0xB702
"""ioctl_ns(2)."""
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_HELPER_TIMEOUT_S = 30
_RESTRICTION = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"


@dataclass(frozen=True, slots=True)
class _Range:
    """One extent of ids that /etc/subuid or /etc/subgid gives a user."""

    first: int
    count: int

    def __str__(self) -> str:
        """As usermod(8) takes it."""
        return f"{self.first}-{self.first + self.count - 1}"

    def meets(self, other: _Range | None) -> bool:
        """True if an id is in both."""
        return other is not None and self.first < other.first + other.count and other.first < self.first + self.count


def ids_here() -> int:
    """The number of ids that the user namespace of this process has: 4,294,967,295 in the host's own."""
    with open("/proc/self/uid_map") as f:
        return sum(int(line.split()[2]) for line in f)


def is_root() -> bool:
    """True for root, that of a user namespace included."""
    return os.geteuid() == 0


def is_host_root() -> bool:
    """True for root outside of user namespaces, whom the machine lets mount disks and set quotas."""
    return is_root() and not in_own_namespace()


def in_own_namespace() -> bool:
    """True in a user namespace that is not the host's."""
    return ids_here() < 2**32 - 1


def capabilities() -> str:
    """The effective capabilities of this process, as /proc shows them."""
    with open("/proc/self/status") as f:
        return next(line.split()[1] for line in f if line.startswith("CapEff:"))


def range_problem() -> str | None:
    """None if the user's range of ids can be mapped; else the reason, and what to do."""
    for program in ("newuidmap", "newgidmap"):
        if shutil.which(program) is None:
            return f"{program} is not installed: `apt-get install uidmap`"
    user = _user_name()
    for file in _RANGE_FILES:
        if _range_in(file) is None:
            free = _Range(_free_first(), RANGE_IDS)
            return f"{file} gives {user} no {RANGE_IDS} ids: `sudo usermod --add-subuids {free} --add-subgids {free} {user}`"
    return None


def range_sharing_problem() -> str | None:
    """None if the ids of the user's range are no other user's; else the reason, and what to do. The user has a range
    (`range_problem` is None)."""
    user, (uids, gids) = _user_name(), map(_range_in, _RANGE_FILES)
    for file, own in zip(_RANGE_FILES, (uids, gids), strict=True):
        others = [f"{name} {given}" for name, given in _ranges(file) if name not in _own_names() and given.meets(own)]
        if others:
            free = _Range(_free_first(), RANGE_IDS)
            return (
                f"{file} gives ids of {user} {own} also to {', '.join(others)}: `sudo usermod --del-subuids {uids} "
                f"--del-subgids {gids} --add-subuids {free} --add-subgids {free} {user}`, after `snapshotd export` of what "
                "shall stay and the removal of the state directory, whose files have the old ids"
            )
    return None


def enter(earlier: int | None = None, ids: int = 0) -> None:
    """Give this process a user namespace with all capabilities in it, which programs that it starts keep. `earlier`:
    the inode of the namespace of an earlier daemon, which is entered if something still lives in it. `ids`: the number
    of ids that the namespace needs, because files have them; 0: as many as the user has.

    From the main thread, before others start. OSError, with the reason: the machine allows none, or not so many ids.
    """
    held = None if earlier is None else _find(earlier)
    try:
        if held is not None:
            sc.call("setns", held, sc.CLONE_NEWUSER)
        else:
            _enter_new(ids)
    finally:
        if held is not None:
            os.close(held)
    _keep_capabilities()


def leave_rights() -> None:
    """Make this process, and what it will start, the user as the machine knows them: the ids that they have outside of this
    user namespace, no capabilities, no rights over the namespace's mounts and other ids. From the only thread. OSError."""
    user, group = _outside("uid_map", os.geteuid()), _outside("gid_map", os.getegid())
    _unshare()
    _map_alone(user, group)
    sc.set_capabilities(0, 0, 0)


def ownership_problem(directory: Path, *, make: bool) -> str | None:
    """None if this user has a directory that only they can enter, which is made where it is missing; else one sentence with
    the reason and the fix. Without `make` nothing is changed."""
    fix = "see that /run can be written to" if is_root() else "set XDG_RUNTIME_DIR to a directory of this user's own"
    try:
        if make:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except FileNotFoundError:
        above = next(path for path in directory.parents if os.path.lexists(path))
        if not above.is_dir():
            return f"{directory}, the place of the sockets, cannot be made, since {above} is no directory: {fix}"
        reason = "" if os.access(above, os.W_OK | os.X_OK) else f"{above} is not writable for this user"
    except FileExistsError as exc:  # it, or a link to nothing above it
        return f"{directory}, the place of the sockets, cannot be made, since {exc.filename} is no directory: {fix}"
    except OSError as exc:
        reason = f"{exc.strerror} ({exc.filename})"
    else:
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
            return None
        return (
            f"{directory}, the place of the sockets, is not a directory of this user's own (owner {found.st_uid}, mode "
            f"{stat.S_IMODE(found.st_mode):04o}): remove it, or {fix}"
        )
    return f"{directory}, the place of the sockets, cannot be made, since {reason}: {fix}" if reason else None


def own_inode() -> int:
    """The inode of this process's user namespace, which is its name while it exists."""
    return os.stat("/proc/self/ns/user").st_ino


def owner_outside() -> tuple[int, int] | None:
    """The user and group of files that are written outside of layers, for the user: an ordinary user's own. None: the
    files have the owners that they had in the sandbox."""
    return (os.geteuid(), os.getegid()) if in_own_namespace() else None


def as_its_root() -> tuple[str, ...]:
    """Words to put before a command whose program demands the user id 0, although it needs capabilities alone."""
    return () if is_root() else ("setpriv", "--reuid=0", "--regid=0", "--clear-groups", "--")


# -- a new one ---------------------------------------------------------------------------------------------------------


def _enter_new(ids: int) -> None:
    uid, gid, missing = os.geteuid(), os.getegid(), range_problem()
    if ids > 1 and missing is not None:
        raise OSError(
            errno.EPERM, f"files of this state directory have ids of a range that there is no more ({missing})"
        )
    wants_range = missing is None and ids != 1
    ranges = (_range_in(_RANGE_FILES[0]), _range_in(_RANGE_FILES[1])) if wants_range else None
    map_ids = _start_mapper(uid, gid, ranges)
    _unshare()
    if map_ids():
        return
    if ids > 1:
        raise OSError(errno.EPERM, "newuidmap cannot map the range of /etc/subuid: see that it is set-user-id root")
    _map_alone((0, uid), (0, gid))


def _unshare() -> None:
    try:
        sc.call("unshare", sc.CLONE_NEWUSER)
    except OSError as exc:
        raise OSError(exc.errno, f"a user namespace cannot be made: {os.strerror(exc.errno or 0)}") from None


def _map_alone(user: tuple[int, int], group: tuple[int, int]) -> None:
    """Give this process's new user namespace one user and one group, each as the number inside and the one outside.
    OSError."""
    files = {"setgroups": "deny", "uid_map": f"{user[0]} {user[1]} 1", "gid_map": f"{group[0]} {group[1]} 1"}
    for name, text in files.items():
        try:
            with open(f"/proc/self/{name}", "w") as f:
                f.write(text)
        except OSError as exc:
            raise OSError(exc.errno, f"the user's id cannot be mapped into a user namespace: {exc.strerror}") from None


def _outside(file: str, number: int) -> tuple[int, int]:
    """The number outside of this user namespace of an id in it, and the id. OSError: it has none."""
    with open(f"/proc/self/{file}") as f:
        for first, outside, count in (map(int, line.split()) for line in f):
            if first <= number < first + count:
                return outside + number - first, number
    raise OSError(errno.EINVAL, f"the id {number} is not mapped in {file}")


def _start_mapper(uid: int, gid: int, ranges: tuple[_Range | None, _Range | None] | None) -> Callable[[], bool]:
    """Start a process that stays outside of the namespace which is made next. The returned function has it map the
    ranges into that namespace; False: the user has to be mapped alone."""
    if ranges is None:
        return lambda: False
    go, done = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    target = os.getpid()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(go[1])
            if os.read(go[0], 1):
                code = _run_helpers(target, ((uid, ranges[0]), (gid, ranges[1])))
            os.write(done[1], bytes((code,)))
        finally:
            os._exit(code)
    os.close(go[0])
    os.close(done[1])

    def map_ids() -> bool:
        try:
            os.write(go[1], b".")
            said = os.read(done[0], 1)
        finally:
            os.close(go[1])
            os.close(done[0])
            os.waitpid(child, 0)
        if said == b"\2":
            raise OSError(errno.EPERM, "newgidmap cannot map the range of /etc/subgid: see that it is set-user-id root")
        return said == b"\0"

    return map_ids


def _run_helpers(target: int, wanted: tuple[tuple[int, _Range | None], ...]) -> int:
    """0; 1: nothing is mapped; 2: only one of two is."""
    import subprocess  # only then: it takes 10 ms, and every client imports this module

    for number, (program, (own, spare)) in enumerate(zip(("newuidmap", "newgidmap"), wanted, strict=True)):
        assert spare is not None
        extents = ["0", str(spare.first), str(RANGE_IDS), str(RANGE_IDS), str(own), "1"]
        done = subprocess.run(
            [program, str(target), *extents],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            sys.stderr.write(done.stderr.decode("utf-8", "replace"))
            return 1 + number
    return 0


def _range_in(file: str) -> _Range | None:
    """The first range that is large enough."""
    own = _own_names()
    return next((found for name, found in _ranges(file) if name in own and found.count >= RANGE_IDS), None)


def _own_names() -> set[str]:
    """The names under which /etc/subuid and /etc/subgid may list this user."""
    return {_user_name(), str(os.getuid())}


def _free_first() -> int:
    """The first id of a range that no user has. Two users with the same ids could end each other's processes and own
    each other's files."""
    given = [found for file in _RANGE_FILES for _, found in _ranges(file)]
    return max([_FIRST_SPARE, *(found.first + found.count for found in given)])


def _ranges(file: str) -> list[tuple[str, _Range]]:
    """The ranges that a file gives, with the name or number of the user."""
    try:
        with open(file) as f:
            lines = [line.strip().split(":") for line in f]
    except OSError:
        return []
    return [
        (words[0], _Range(int(words[1]), int(words[2])))
        for words in lines
        if len(words) == 3 and words[1].isdigit() and words[2].isdigit()
    ]


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _keep_capabilities() -> None:
    """Let programs that this process starts have its capabilities, whatever its user id (capabilities(7), ambient)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/status") as f:
        permitted = next(int(line.split()[1], 16) for line in f if line.startswith("CapPrm:"))
    sc.set_capabilities(permitted, permitted, permitted)
    for number in range(permitted.bit_length()):
        if permitted >> number & 1:
            libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, number, 0, 0)


# -- an earlier one ----------------------------------------------------------------------------------------------------


def _find(inode: int) -> int | None:
    """A descriptor of the user namespace with this inode, if a process lives in it or in a container below it."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or it has ended
        if not runs((int(name), start_time(int(name)))):  # an ended one is in its namespaces until it is reaped
            os.close(fd)
            continue
        while True:
            if os.fstat(fd).st_ino == inode:
                if _is_mapped_as_here(fd):
                    return fd
                os.close(fd)
                return None
            try:
                above = fcntl.ioctl(fd, _NS_GET_PARENT)
            except OSError:
                above = -1  # the host's own, or one that this process may not see
            os.close(fd)
            if above < 0:
                break
            fd = above
    return None


def _is_mapped_as_here(namespace: int) -> bool:
    """True if a user namespace has the ids that `enter` gives one. The inode alone does not tell: when a namespace has ended,
    the kernel gives its inode to another, which may be a container's or another program's."""
    user, (told, tell) = os.geteuid(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            sc.call("setns", namespace, sc.CLONE_NEWUSER)
            with open("/proc/self/uid_map", "rb") as f:
                os.write(tell, f.read())
        finally:
            os._exit(0)
    os.close(tell)
    with open(told) as f:
        extents = [tuple(map(int, line.split())) for line in f]
    os.waitpid(child, 0)
    return extents == [(0, user, 1)] or (len(extents) == 2 and extents[1] == (RANGE_IDS, user, 1))


def restriction() -> str:
    """A security module's rule that takes the capabilities of user namespaces away, with what to do; empty: none."""
    try:
        with open(_RESTRICTION) as f:
            restricted = f.read().strip() not in ("", "0")
    except OSError:
        return ""
    return (
        " AppArmor takes the rights of user namespaces away here: `sudo sysctl kernel.apparmor_restrict_unprivileged_userns=0`, "
        "or give this Python a profile that allows `userns`."
        if restricted
        else ""
    )
