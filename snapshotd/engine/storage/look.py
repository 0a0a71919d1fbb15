"""Looking into snapshots without running anything: diff, patch, cat, restore. All read through a `View`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from snapshotd.engine.context import Context
from snapshotd.engine.storage.cold import gone_error
from snapshotd.errors import NO_ROOM, NotFound, UsageError
from snapshotd.kernel import files, turns
from snapshotd.kernel.namespaces import as_seen_by
from snapshotd.kernel.rootless import owner_outside
from snapshotd.layers.view import open_stack
from snapshotd.trees import diff, materialise, patch
from snapshotd.trees.base import Change, Entry, RestoreReport
from snapshotd.trees.stored_view import StoredView
from snapshotd.trees.view import View
from snapshotd.types import Kind, Snapshot, SnapshotState, Stack, TreeID, short

_PIECE_BYTES = 1 << 20


def open_view(context: Context, snapshot: Snapshot) -> View:
    """A snapshot's tree: its layers while they are there, else from the repository. Raises the error that tells why it
    has none (`cold.gone_error`)."""
    return _open_in_layers(context, snapshot, snapshot.stack) or _open_stored(context, snapshot)


def _open_in_layers(context: Context, snapshot: Snapshot, stack: Stack) -> View | None:
    """The snapshot through `stack`; None where a layer is not there, and the repository has to do. DataLoss: it is
    lost, or its layers may have other bytes than were written. Unsupported: they cannot be reached."""
    if snapshot.state is SnapshotState.LOST:
        raise gone_error(snapshot)
    if snapshot.state is SnapshotState.CAPTURED:
        context.store.proof.prove(stack.layers)
    elif context.store.proof.failed:
        return None
    # A lazy layer is read through the mount that our own child serves; the repository is the shorter way, as soon as it
    # has the snapshot.
    lazy = any(context.store.lazy(layer) for layer in stack.layers)
    if snapshot.state is SnapshotState.CAPTURED or (snapshot.state is SnapshotState.STORED and not lazy):
        try:
            return open_stack(context.store, stack)
        except NotFound:
            pass  # evicted
    return None


def _open_stored(context: Context, snapshot: Snapshot) -> View:
    snapshot, unpin = context.pins.pin(snapshot.id)
    try:
        if snapshot.tree is None:
            raise gone_error(snapshot)
        return StoredView(context.repo, snapshot.tree, closed=unpin)
    except BaseException:
        unpin()
        raise


def pair(context: Context, a: str, b: str | None) -> tuple[View, View]:
    """The two trees to compare: `a` and `b`, or the parent of `a` and `a`. The caller closes both."""
    first = context.catalog.refs.find_snapshot(a)
    if b is not None:
        return open_pair(context, first, context.catalog.refs.find_snapshot(b))
    if first.parent is not None:
        return open_pair(context, context.catalog.snapshots.get(first.parent), first)
    before = open_stack(context.store, Stack(first.stack.image))
    try:
        return before, open_view(context, first)
    except BaseException:
        before.close()
        raise


def open_pair(context: Context, first: Snapshot, second: Snapshot) -> tuple[View, View]:
    """The trees of two snapshots, in a form that shows shared parts without reading them: both in layers, or else both
    from the repository. The caller closes both. Errors as `open_view`."""
    for stacks in dict.fromkeys((shared_stacks(first, second), (first.stack, second.stack))):
        with ExitStack() as opened:
            views = []
            for snapshot, stack in zip((first, second), stacks, strict=True):
                view = _open_in_layers(context, snapshot, stack)
                if view is None:
                    break
                views.append(opened.enter_context(view))
            else:
                opened.pop_all()
                return views[0], views[1]
    open_one = _open_stored if first.tree is not None and second.tree is not None else open_view
    before = open_one(context, first)
    try:
        return before, open_one(context, second)
    except BaseException:
        before.close()
        raise


def shared_stacks(first: Snapshot, second: Snapshot) -> tuple[Stack, Stack]:
    """Stacks of two snapshots that share all they can: if one was made from the other, its own layers stand on the
    layers of the other, even if some were merged in between. So the cost of comparing neighbours depends on the step's
    changes, not on merges."""
    if second.base == first.id:
        return first.stack, _above(second, first)
    if first.base == second.id:
        return _above(first, second), second.stack
    return first.stack, second.stack


def _above(snapshot: Snapshot, base: Snapshot) -> Stack:
    return Stack(base.stack.image, (*snapshot.stack.layers[: snapshot.own_layers], *base.stack.layers))


def changes(context: Context, a: str, b: str | None) -> Iterator[Change]:
    before, after = pair(context, a, b)
    with before, after:
        yield from diff.diff(before, after)


def write_patch(
    context: Context, a: str, b: str | None, root: bytes, write: patch.Write, bound: patch.PatchBound | None
) -> int:
    before, after = pair(context, a, b)
    with before, after:
        return patch.write_patch(before, after, root, write, bound)


def cat(context: Context, ref: str, path: bytes) -> Iterator[bytes]:
    """Pieces of a regular file. Errors are raised before the first piece."""
    snapshot = context.catalog.refs.find_snapshot(ref)
    relative = path.strip(b"/")
    shown = "/" + os.fsdecode(relative)
    with open_view(context, snapshot) as view:
        try:
            entry = view.lstat(relative)
            if entry.kind is not Kind.FILE:
                raise UsageError(f"{shown!r} in snapshot {short(snapshot.id)} is a {entry.kind}, not a regular file")
            fd = view.open(relative)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise NotFound(
                f"{shown!r} does not exist in snapshot {short(snapshot.id)}; `snapshotd diff` lists what changed"
            ) from exc
    return pieces(fd)


def lstat(context: Context, ref: str, path: bytes) -> tuple[Entry, bytes | None]:
    snapshot = context.catalog.refs.find_snapshot(ref)
    with open_view(context, snapshot) as view:
        try:
            entry = view.lstat(path)
        except (FileNotFoundError, NotADirectoryError) as exc:
            shown = "/" + os.fsdecode(path)
            raise NotFound(f"{shown!r} does not exist in snapshot {short(snapshot.id)}") from exc
        return entry, view.readlink(path) if entry.kind is Kind.SYMLINK else None


def pieces(fd: int) -> Iterator[bytes]:
    with open(fd, "rb", buffering=0) as f:
        while piece := f.read(_PIECE_BYTES):
            turns.give_way()
            yield piece


ColdRestore = Callable[[TreeID, bytes, Path], RestoreReport]
"""Writes a directory of a stored tree into an empty directory of the host, in a process of its own."""
_STAGING_NAME_BYTES = 200
"""The part of the target's name that the directory beside it has in its own, which is longer, and must fit 255 bytes."""


def restore(context: Context, ref: str, to: Path, path: bytes, namespace_pid: int, cold: ColdRestore) -> RestoreReport:
    """Write into a fresh directory next to `to`, then rename: `to` is whole or does not exist. The path is meant as the
    process `namespace_pid` sees it.

    A stored snapshot is read from the repository, which verifies every byte, although its layers may be at hand.

    UsageError when `to` exists and is not an empty directory, or lies where no directory can be made, or in the daemon's
    own directories.
    """
    snapshot = context.catalog.refs.find_snapshot(ref)
    relative = path.strip(b"/")
    if not to.is_absolute() or to.name in ("", ".."):
        raise UsageError(f"restore target {str(to)!r} must be an absolute path that ends with the name of a directory")
    try:
        parent = as_seen_by(namespace_pid, lambda: os.open(to.parent, files.DIR_FLAGS & ~os.O_NOFOLLOW))
    except OSError as exc:
        raise UsageError(
            f"cannot restore to {str(to)!r}: its parent directory cannot be opened ({exc.strerror}); make it first"
        ) from exc
    with files.closing_fd(parent):
        check_host_folder(context, parent, to)
        is_there = _check_empty(parent, to)
        with open_view(context, snapshot) if snapshot.tree is None else _open_stored(context, snapshot) as view:
            _check_directory(view, relative, f"snapshot {short(snapshot.id)}")
            staging = b".%b.snapshotd-%b" % (os.fsencode(to.name)[:_STAGING_NAME_BYTES], snapshot.id[:8].encode())
            with _making(to):
                files.remove_tree(parent, staging)
                os.mkdir(staging, 0o700, dir_fd=parent)
            try:
                report = _fill(view, relative, parent, staging, cold)
                with _making(to):
                    if is_there:
                        os.rmdir(to.name, dir_fd=parent)
                    files.rename_no_replace(parent, staging, parent, os.fsencode(to.name))
            except BaseException:
                files.remove_tree(parent, staging)
                raise
    return report


def check_host_folder(context: Context, directory: int, shown: Path) -> None:
    """UsageError: the directory, which was opened for a user by the path `shown`, is one of the daemon's own or lies in
    one. A directory that a user makes there could damage the daemon."""
    above = files.list_ancestors(directory)
    for place in (context.state_dir, context.run_dir, context.share_dir):
        if files.identity_of(os.stat(place)) in above:
            raise UsageError(
                f"{str(shown)!r} lies in {place}, where the daemon keeps its own files; name another place"
            )


@contextmanager
def _making(to: Path) -> Iterator[None]:
    """UsageError where nothing can be made, or replaced, at the target. A disk that is full or broken is another
    matter."""
    try:
        yield
    except OSError as exc:
        if exc.errno in (*NO_ROOM, errno.EIO):
            raise
        raise UsageError(
            f"cannot restore to {str(to)!r}: no directory can be made there ({exc.strerror}); name one in another place"
        ) from exc


def _check_empty(parent: int, to: Path) -> bool:
    """True if the target is there already, as an empty directory; UsageError if it is anything else, or cannot be."""
    with _making(to):
        try:
            fd = files.open_dir(parent, os.fsencode(to.name))
        except FileNotFoundError:
            return False
        except NotADirectoryError:
            fd = -1  # a file, or a link
    if fd != -1:
        with files.closing_fd(fd):
            if os.fstat(fd).st_dev != os.fstat(parent).st_dev:
                raise UsageError(f"restore target {str(to)!r} is a mount point; name a new directory in it")
            if files.is_empty_dir(fd):
                return True
    raise UsageError(f"restore target {str(to)!r} exists and is not an empty directory; name a new one")


def _check_directory(view: View, path: bytes, snapshot: str) -> None:
    """NotFound, UsageError: the path is no directory of the snapshot."""
    shown = repr("/" + os.fsdecode(path))
    try:
        entry = view.lstat(path)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise NotFound(f"{shown} does not exist in {snapshot}; `snapshotd diff` lists what changed") from exc
    if entry.kind is not Kind.DIRECTORY:
        raise UsageError(f"{shown} is a {entry.kind}; restore takes directories, use `snapshotd cat` for files")


def _fill(view: View, path: bytes, parent: int, staging: bytes, cold: ColdRestore) -> RestoreReport:
    target = os.open(staging, files.DIR_FLAGS, dir_fd=parent)
    where = Path(f"/proc/{os.getpid()}/fd/{target}")  # a child process may not see the file system that it lies on
    with files.closing_fd(target):
        # Decoding much in this process would hold up the steps of running agents.
        report = (
            cold(view.tree, path, where)
            if isinstance(view, StoredView)
            else materialise.materialise(view, path, target, owner=owner_outside())
        )
        os.fchmod(target, 0o700)  # no user outside may run a sandbox's setuid programs
        return report
