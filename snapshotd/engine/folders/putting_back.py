"""Files of a snapshot, put into a folder again.

Everything is done as the folder's user, by descriptors from the folder down: nothing outside of it and nothing that the
user may not touch is reached, and what is made belongs to the user. A file comes under its name as a whole. A directory
that holds something else stays, and so does whatever the rules of the folder ignore.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Sequence
from functools import partial

from snapshotd.engine.folders.capture import TOP
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.trees.base import Change, Entry
from snapshotd.trees.view import View
from snapshotd.types import Kind

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def put_back(folder: int, user: HostUser, view: View, changes: Sequence[Change]) -> list[str]:
    """Make these changes in the folder: `after` is what `view` has. Returns a sentence for each that could not be made."""
    left: list[str] = []
    gone = [change for change in changes if change.after is None or _other_kind(change)]
    for change in reversed(gone):
        _try(left, change, partial(_remove, folder, user))
    for change in changes:
        hit("engine.folders.put")
        after = change.after
        if after is not None:
            _try(left, change, partial(_put, folder, user, view, after))
    return left


def relative(change: Change) -> bytes:
    """The path from the folder."""
    return change.path[len(TOP) + 1 :]


def _other_kind(change: Change) -> bool:
    kinds = {entry.kind is Kind.DIRECTORY for entry in (change.before, change.after) if entry is not None}
    return len(kinds) == 2


def _try(left: list[str], change: Change, action: Callable[[bytes], None]) -> None:
    path = relative(change)
    try:
        action(path)
    except OSError as exc:
        left.append(f"{os.fsdecode(path)} stays as it is: {exc.strerror}")


def _parent(folder: int, path: bytes, *, make: bool = False) -> tuple[int, bytes]:
    parent, _, name = path.rpartition(b"/")
    return (files.make_dirs if make else files.open_deep)(folder, parent), name


def _remove(folder: int, user: HostUser, path: bytes) -> None:
    with acting_as(user):
        try:
            directory, name = _parent(folder, path)
        except FileNotFoundError:
            return
        try:
            if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                os.rmdir(name, dir_fd=directory)
            else:
                os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        finally:
            os.close(directory)


def _put(folder: int, user: HostUser, view: View, entry: Entry, path: bytes) -> None:
    with acting_as(user):
        directory, name = _parent(folder, path, make=True)
    temporary = b".snapshotd-" + secrets.token_hex(8).encode()
    try:
        if entry.kind is Kind.DIRECTORY:
            with acting_as(user):
                made = files.make_dirs(directory, name)
                try:
                    os.fchmod(made, entry.mode & 0o777)
                finally:
                    os.close(made)
            return
        if entry.kind is Kind.SYMLINK:
            target = view.readlink(TOP + b"/" + path)
            with acting_as(user):
                os.symlink(target, temporary, dir_fd=directory)
        else:
            _write(directory, user, temporary, view, path, entry)
        with acting_as(user):
            try:
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                os.unlink(temporary, dir_fd=directory)
                raise
    finally:
        os.close(directory)


def _write(directory: int, user: HostUser, temporary: bytes, view: View, path: bytes, entry: Entry) -> None:
    with acting_as(user):
        target = os.open(temporary, _NEW, 0o600, dir_fd=directory)
    try:
        view.copy_child(view.child(TOP + b"/" + path), target)
        with acting_as(user):
            os.fchmod(target, entry.mode & 0o777)
    except BaseException:
        with acting_as(user):
            os.unlink(temporary, dir_fd=directory)
        raise
    finally:
        os.close(target)
