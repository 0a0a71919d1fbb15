"""Change a folder of this machine as a whole or not at all.

New entries are made in a directory of its own inside the folder, and then renamed to their places one after the other;
what they replace is renamed to there. A record in the caller's state directory (journal.py), durable before the first
step, lists all steps. An error undoes those that were done; after a kill the next apply does it. Each step is found
done or not by what lies where, so undoing may be cut off too. No step overwrites anything: renames refuse to, and
whatever somebody else has put or changed in between stops the change, or its undoing, instead of being lost.

The change counts from the moment when the record has no steps any more.

    .snapshotd-apply-TOKEN/nN, oN    new entries that wait, old ones that were taken away
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence

from snapshotd.client.apply.host_tree import DIR_FLAGS, HostTree, Stamp, base_name
from snapshotd.client.apply.journal import STAGING, ApplyRecord, ApplyStep, new_record, record_of
from snapshotd.errors import NO_ROOM, Conflict, NotPermitted, OutOfSpace, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.trees.three_way import InTheWay

_NOREPLACE = 1
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class HostChange:
    """One change of `tree`, made step by step with `take`, `put_file`, `put_link`, `put_directory` and `change_mode`,
    which only prepare, and then done by `run`. Leaving the `with` block removes what was prepared."""

    def __init__(self, tree: HostTree) -> None:
        self.tree = tree
        self._steps: list[ApplyStep] = []
        self._record: ApplyRecord
        self._fd = -1

    def __enter__(self) -> HostChange:
        self._record = new_record(self.tree.where, os.fstat(self.tree.fd).st_ino)
        with _raise_ours(self.tree):
            try:
                os.mkdir(self._record.staging, 0o700, dir_fd=self.tree.fd)
            except BaseException:
                self._record.remove()
                raise
            self._fd = os.open(self._record.staging, DIR_FLAGS, dir_fd=self.tree.fd)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._record.steps is None:  # else its undoing has failed, and the next apply needs it
                with _raise_ours(self.tree):
                    _clear(self.tree, self._fd, self._record)
        finally:
            os.close(self._fd)

    # -- what is to be done
    # ---------------------------------------------------------------------------------------------

    def take(self, path: bytes, stamp: Stamp) -> None:
        """Take away what lies at `path`, and looked like this when it was decided."""
        self._steps.append(ApplyStep("take", path, stamp, f"o{len(self._steps)}"))

    def put_file(self, path: bytes, pieces: Iterable[bytes], permissions: int, owner: tuple[int, int]) -> None:
        name = f"n{len(self._steps)}"
        with _raise_ours(self.tree):
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=self._fd)
            try:
                for piece in pieces:
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(fd, view) :]
                _give(fd, owner)
                os.fchmod(fd, permissions)
                os.fsync(fd)
            finally:
                os.close(fd)
        self._add_place_step(path, name)

    def put_link(self, path: bytes, target: bytes, owner: tuple[int, int]) -> None:
        name = f"n{len(self._steps)}"
        with _raise_ours(self.tree):
            os.symlink(target, os.fsencode(name), dir_fd=self._fd)
            if os.geteuid() == 0:
                os.chown(name, *owner, dir_fd=self._fd, follow_symlinks=False)
        self._add_place_step(path, name)

    def put_directory(self, path: bytes, permissions: int, owner: tuple[int, int]) -> None:
        """Make a directory. Its owner may always write to it, whatever `permissions` say, so that it can be filled."""
        name = f"n{len(self._steps)}"
        with _raise_ours(self.tree):
            os.mkdir(name, 0o700, dir_fd=self._fd)
            fd = os.open(name, DIR_FLAGS, dir_fd=self._fd)
            try:
                _give(fd, owner)
                os.fchmod(fd, permissions | 0o700)
            finally:
                os.close(fd)
        self._add_place_step(path, name)

    def _add_place_step(self, path: bytes, name: str) -> None:
        stamp = Stamp.of(os.lstat(name, dir_fd=self._fd))
        self._steps.append(ApplyStep("place", path, stamp, name))

    def change_mode(self, path: bytes, stamp: Stamp, permissions: int) -> None:
        special = stat.S_IMODE(stamp.mode) & ~0o777  # bits of the folder's own entry beyond the nine stay
        self._steps.append(ApplyStep("mode", path, stamp, mode=special | permissions))

    # -- doing it -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """All steps, or none. Conflict: something in the folder is not as it was when the steps were decided."""
        hit("client.apply.staged")
        with _raise_ours(self.tree):
            os.fsync(self._fd)
            os.fsync(self.tree.fd)
            self._record.save(self.tree.where, self._steps)
            try:
                self._run()
            except BaseException:
                if self._record.steps is None:
                    self._record.save(self.tree.where, self._steps)  # a kill from here on is to be undone, too
                _undo(self.tree, self._fd, self._record)
                raise
        hit("client.apply.done")

    def _run(self) -> None:
        for step in self._steps:
            hit("client.apply.step")
            _do(self.tree, self._fd, step)
        hit("client.apply.placed")
        _flush(self.tree, self._steps)
        self._record.save(self.tree.where, None)
        hit("client.apply.counts")


class LeftOver:
    """The remains of killed changes in the folder. `warnings`: sentences about directories that look like them and are
    in no record of this user; they may have come with the folder. NotPermitted: they belong to another user, whose
    change may have been cut off in the middle."""

    def __init__(self, tree: HostTree) -> None:
        self._tree, self._records = tree, list[ApplyRecord]()
        self.warnings: list[str] = []
        unknown = []
        with _raise_ours(tree):
            inode = os.fstat(tree.fd).st_ino
            for name in sorted(os.fsencode(name) for name in os.listdir(tree.fd)):
                found = record_of(name, inode) if name.startswith(STAGING) else None
                if found is not None:
                    self._records.append(found)
                elif name.startswith(STAGING):
                    unknown.append(self._check_owner(name))
        if unknown:
            more = f" and {len(unknown) - 1} more" if unknown[1:] else ""
            self.warnings.append(
                f"{unknown[0]}{more}: left alone, since this user knows of no apply that was cut off here; look at what is in "
                "it, and remove it"
            )

    @property
    def cut_off(self) -> bool:
        """True if a change was cut off in the middle; `repair` undoes it."""
        return any(record.steps is not None for record in self._records)

    def repair(self) -> None:
        """End what killed changes left: undone if they were in the middle, with a warning. Conflict when somebody has
        changed since what was put there; then nothing is touched."""
        for record in self._records:
            with _raise_ours(self._tree):
                fd = os.open(record.staging, DIR_FLAGS, dir_fd=self._tree.fd)
                try:
                    if record.steps is not None:
                        _check_undoable(self._tree, fd, record)
                        _undo(self._tree, fd, record)
                        self.warnings.insert(0, "an earlier apply was cut off in the middle; it has been undone first")
                    _clear(self._tree, fd, record)
                finally:
                    os.close(fd)

    def _check_owner(self, name: bytes) -> str:
        if os.lstat(name, dir_fd=self._tree.fd).st_uid != os.geteuid():
            raise NotPermitted(
                f"{os.fsdecode(name)} in {self._tree.where} belongs to another user, whose apply was cut off; "
                "let them repeat it, or remove it"
            )
        return os.fsdecode(name)


# -- steps, done and undone -------------------------------------------------------------------------------------------


def _do(tree: HostTree, staging: int, step: ApplyStep) -> None:
    try:
        with tree.parent(step.path) as parent:
            name = base_name(step.path)
            if step.op == "take":
                _rename(parent, name, staging, os.fsencode(step.name))
                if not _is(staging, step.name, step.stamp) or not _is_bare(staging, step.name):
                    raise _changed(tree, step.path)
            elif step.op == "place":
                _rename(staging, os.fsencode(step.name), parent, name)
            else:
                if not _chmod(parent, name, step.stamp, step.mode):
                    raise _changed(tree, step.path)
    except (FileNotFoundError, FileExistsError, InTheWay) as exc:
        raise _changed(tree, step.path) from exc


def _undo(tree: HostTree, staging: int, record: ApplyRecord) -> None:
    """Undo what was done of the record's steps, the last first, and then record that there are none. Conflict, with
    them left, when something stands in the way."""
    steps = record.steps or []
    hit("client.apply.undo")
    for step in reversed(steps):
        try:
            with tree.parent(step.path) as parent:
                _undo_step(parent, staging, step)
        except (FileNotFoundError, InTheWay):
            pass  # the directory it lay in is gone again, or was never there
        except FileExistsError as exc:
            raise _stuck(tree, record, step.path) from exc
        if step.op == "take" and _exists(staging, step.name):
            raise _stuck(tree, record, step.path)
        hit("client.apply.undo")
    _flush(tree, steps)
    record.save(tree.where, None)


def _flush(tree: HostTree, steps: Sequence[ApplyStep]) -> None:
    """Make the renames durable."""
    for folder in {step.path.rpartition(b"/")[0] for step in steps}:
        with contextlib.suppress(FileNotFoundError, InTheWay), tree.parent(folder + b"/x" if folder else b"x") as fd:
            os.fsync(fd)


def _undo_step(parent: int, staging: int, step: ApplyStep) -> None:
    name = base_name(step.path)
    if step.op == "take":
        if _exists(staging, step.name):
            _rename(staging, os.fsencode(step.name), parent, name)
    elif step.op == "place":
        if _exists(staging, step.name) or not _is(parent, name, step.stamp):
            return
        if stat.S_ISDIR(step.stamp.mode):
            with contextlib.suppress(OSError):  # somebody has put something into it: it stays
                os.rmdir(name, dir_fd=parent)
        else:
            _rename(parent, name, staging, os.fsencode(step.name))
    else:
        done = dataclasses.replace(step.stamp, mode=stat.S_IFMT(step.stamp.mode) | step.mode)
        _chmod(parent, name, done, stat.S_IMODE(step.stamp.mode))


def _check_undoable(tree: HostTree, staging: int, record: ApplyRecord) -> None:
    """Conflict when an entry that was put or taken away, or the place of one that was taken away, is somebody else's by
    now."""
    steps = record.steps or []
    known: dict[bytes, list[Stamp]] = {}
    for step in steps:
        known.setdefault(step.path, []).append(step.stamp)
    for step in steps:
        waits = bool(step.name) and _exists(staging, step.name)
        if step.op == "take" and waits and os.lstat(step.name, dir_fd=staging).st_ino != step.stamp.inode:
            raise _stuck(tree, record, step.path)
        try:
            found = tree.look(step.path)
        except InTheWay:
            continue
        if found is None or step.op == "mode" or (step.op == "place" and waits):
            continue
        if not any(_same(stamp, found.stamp) for stamp in known[step.path]):
            raise _stuck(tree, record, step.path)


def _changed(tree: HostTree, path: bytes) -> Conflict:
    return Conflict(
        f"{os.fsdecode(path)!r} in {tree.where} changed while the apply was at work; the folder is as it was: "
        "repeat the command"
    )


def _stuck(tree: HostTree, record: ApplyRecord, path: bytes) -> Conflict:
    kept = os.fsdecode(record.staging)
    return Conflict(
        f"an apply to {tree.where} was cut off and cannot be undone, since {os.fsdecode(path)!r} has changed after it; "
        f"the files from before lie in {kept}, listed in {record.path}: move yours aside and repeat the command, "
        f"or remove {kept} to keep the folder as it is"
    )


def _clear(tree: HostTree, staging: int, record: ApplyRecord) -> None:
    """Remove the staging directory, and then the record."""
    for name in os.listdir(staging):
        if stat.S_ISDIR(os.lstat(name, dir_fd=staging).st_mode):
            os.rmdir(name, dir_fd=staging)
        else:
            os.unlink(name, dir_fd=staging)
    os.rmdir(record.staging, dir_fd=tree.fd)
    record.remove()


# -- entries ----------------------------------------------------------------------------------------------------------


def _give(fd: int, owner: tuple[int, int]) -> None:
    """Only root can give files away, and needs to: the folder is often somebody else's."""
    if os.geteuid() == 0:
        os.fchown(fd, *owner)


def _exists(folder: int, name: str) -> bool:
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _is(folder: int, name: str | bytes, stamp: Stamp) -> bool:
    try:
        return _same(stamp, Stamp.of(os.lstat(name, dir_fd=folder)))
    except FileNotFoundError:
        return False


def _chmod(folder: int, name: bytes, stamp: Stamp, mode: int) -> bool:
    """Change the permissions of an entry if it is still the one that was seen, never through a link."""
    fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not _same(stamp, Stamp.of(os.fstat(fd))):
            return False
        os.chmod(f"/proc/self/fd/{fd}", mode)
        return True
    finally:
        os.close(fd)


def _same(stamp: Stamp, other: Stamp) -> bool:
    """A directory is the same whatever its permissions are."""
    if stat.S_ISDIR(stamp.mode):
        return stat.S_ISDIR(other.mode) and stamp.inode == other.inode
    return stamp == other


def _is_bare(folder: int, name: str) -> bool:
    """True for anything but a directory with entries."""
    if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
        return True
    fd = os.open(name, DIR_FLAGS, dir_fd=folder)
    try:
        return not os.listdir(fd)
    finally:
        os.close(fd)


_libc = ctypes.CDLL(None, use_errno=True)


def _rename(source: int, name: bytes, target: int, new_name: bytes) -> None:
    """renameat2(2) with RENAME_NOREPLACE. A file system or C library without it (EINVAL): a look and a plain rename,
    which leaves a moment to somebody else."""
    call = getattr(_libc, "renameat2", None)
    if call is not None:
        if call(source, name, target, new_name, _NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, os.strerror(code), os.fsdecode(name))
    try:
        os.lstat(new_name, dir_fd=target)
    except FileNotFoundError:
        os.rename(name, new_name, src_dir_fd=source, dst_dir_fd=target)
        return
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(new_name))


@contextlib.contextmanager
def _raise_ours(tree: HostTree) -> Iterator[None]:
    """The system's errors as ours."""
    try:
        yield
    except SnapshotdError:
        raise
    except OSError as exc:
        if exc.errno in (*NO_ROOM, errno.EFBIG):
            raise OutOfSpace(f"{tree.where} has no room for the changes; it is as it was: free some space") from exc
        raise UsageError(f"{tree.where} cannot be changed: {exc.strerror}; it is as it was") from exc
