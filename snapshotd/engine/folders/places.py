"""The folder that a trajectory belongs to: where it is, and that it is the same one still.

A folder is known by its inode, the time at which that was made, and its file system. So it stays itself after `mv`;
another one that takes its path (a new clone, an unpacked copy, another disk) begins a trajectory of its own, and no rewind
of the old one reaches it. Two kinds of file systems tell less:

  - one without an identifier that outlives a remount (an overlay, a network's; `file_system_id`) does not count, since
    a folder would lose its history with it: inode and time are told apart alone. A copy of a disk, block by block, has
    the identifier of the disk
  - where it is not told when an inode was made, device and path count as well, and a folder that was moved is a new one

Names are a user's own: what a user who is not root names is NAME@UID for everyone else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass

from snapshotd.catalog.base import Catalog
from snapshotd.engine.base import Opener
from snapshotd.errors import NotFound, NotPermitted, Unsupported, UsageError
from snapshotd.kernel import files
from snapshotd.kernel.identity import HostUser, acting_as
from snapshotd.kernel.mounts import born_at, file_system_id, holds_no_files
from snapshotd.kernel.namespaces import as_seen_by
from snapshotd.types import ID_FORM, NAME_PATTERN, TrajectoryID

_DELETED = " (deleted)"
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_NAMESAKES = 100


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """A folder: its path as the kernel tells it, and what it is known by."""

    path: str
    identity: str
    older: str
    """The name that an older version knew it by, without its file system."""


def place_of(root: int, user: HostUser) -> FolderPlace:
    """The folder of a descriptor. NotPermitted: it holds more than a project; NotFound: it was removed."""
    path = os.readlink(f"/proc/self/fd/{root}")
    _refuse(root, path, user)
    st, born = os.fstat(root), born_at(root)
    if born is None:
        identity = f"{st.st_ino}.{st.st_dev}.{path}"
        return FolderPlace(path, identity, identity)
    older, system = f"{st.st_ino}.{born}", file_system_id(root)
    return FolderPlace(path, older if system is None else f"{older}.{system}", older)


def open_folder(path: str, user: HostUser, opener: Opener) -> int:
    """A descriptor, the caller's own, of a folder that was at this path, as its user opens it. No link is followed on the
    way: the kernel told the path without any, so what has one by now is another path. OSError; Unsupported: the opener
    cannot be seen."""
    if opener.folder is not None:
        return os.dup(opener.folder)
    if opener.namespace_pid is None:
        raise Unsupported(
            "the client runs outside of the daemon's process namespace, so the daemon cannot tell what is mounted there; run the "
            "command where the daemon runs, such as with `docker exec`"
        )
    return as_seen_by(opener.namespace_pid, lambda: _open_beneath_root(path, user))


def _open_beneath_root(path: str, user: HostUser) -> int:
    with acting_as(user):
        top = os.open("/", files.DIR_FLAGS)
        try:
            return files.open_beneath(top, os.fsencode(path).lstrip(b"/"), files.DIR_FLAGS)
        finally:
            os.close(top)


def _refuse(root: int, path: str, user: HostUser) -> None:
    if path in ("/", "/root", "/home", "/etc", "/usr", "/var", "/tmp") or os.path.dirname(path) == "/home":
        raise NotPermitted(f"no snapshots are taken of {path}, which holds more than a project; work in a folder in it")
    if not path.startswith("/") or (path.endswith(_DELETED) and not _leads_to(path, root, user)):
        raise NotFound(f"the folder {path} does not exist any more; begin in another one")
    if holds_no_files(root):
        raise NotPermitted(f"no snapshots are taken of {path}, which the kernel makes up; work in a folder of files")


def _leads_to(path: str, root: int, user: HostUser) -> bool:
    """The kernel says of a removed folder that it is one of such a name. The path may be one of another mount namespace."""
    try:
        with acting_as(user):
            parent = os.open("..", files.DIR_FLAGS, dir_fd=root)
            try:
                found = os.stat(os.path.basename(path), dir_fd=parent, follow_symlinks=False)
            finally:
                os.close(parent)
    except OSError:
        return False
    return os.path.samestat(found, os.fstat(root))


class KnownFolders:
    """The folders' trajectories, in the catalog's named facts. Thread-safe."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def find(self, user: HostUser, place: FolderPlace) -> TrajectoryID | None:
        """The trajectory of a folder. None: it has none."""
        found = self._alive(_key(user, place.identity))
        if found is not None:
            return found
        # an older version did not know a folder's file system: the first one that fits is taken for it, and no other
        found = self._alive(_key(user, place.older))
        if found is not None:
            self.remember(user, place, found)
            self._catalog.set_meta(_key(user, place.older), "")
            return found
        # a still older one knew it by its path alone
        found = self._alive(_old_key(user, place))
        if found is None or self._catalog.get_meta(_path_key(found)) is not None:
            return None
        self.remember(user, place, found)
        return found

    def remember(self, user: HostUser, place: FolderPlace, trajectory: TrajectoryID) -> None:
        """Note that a folder is this trajectory's, and where it is."""
        self.note_path(place, trajectory)
        self._catalog.set_meta(_key(user, place.identity), trajectory)

    def note_path(self, place: FolderPlace, trajectory: TrajectoryID) -> None:
        """Note where a trajectory's folder is."""
        if self.path_of(trajectory) != place.path:
            self._catalog.set_meta(_path_key(trajectory), json.dumps(place.path))

    def path_of(self, trajectory: TrajectoryID) -> str | None:
        """The path of a trajectory's folder at its last hook. None: an older version did not note it."""
        found = self._catalog.get_meta(_path_key(trajectory))
        return None if found is None else str(json.loads(found))

    def free_name(self, user: HostUser, path: str) -> str | None:
        """A name for the trajectory of a folder: the folder's own, with a number if another one has it."""
        name = _NO_NAME.sub("-", os.path.basename(path)).strip("-._")[:48]
        if not name or ID_FORM.fullmatch(name):
            return None
        taken = {one.name for one in self._catalog.trajectories.list()} | self._catalog.refs.tags().keys()
        tried = (own_name(user, name if n == 1 else f"{name}-{n}") for n in range(1, _NAMESAKES))
        return next((one for one in tried if one not in taken), None)

    def _alive(self, key: str) -> TrajectoryID | None:
        found = self._catalog.get_meta(key)
        if found:
            with contextlib.suppress(NotFound):
                return self._catalog.trajectories.get(TrajectoryID(found)).id
        return None


def own_name(user: HostUser, name: str) -> str:
    """A name that a user gives, as all others know it. UsageError: it is malformed."""
    if not NAME_PATTERN.fullmatch(name) or ID_FORM.fullmatch(name):
        raise UsageError(
            f"{name[:80]!r} cannot be a name: use up to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit, "
            "and not what could be taken for an id"
        )
    return name if user.uid == 0 else f"{name}@{user.uid}"


def _key(user: HostUser, identity: str) -> str:
    return f"folder-identity/{user.uid}/{_text(identity)}"


def _old_key(user: HostUser, place: FolderPlace) -> str:
    return f"folder/{user.uid}/{_text(place.path)}"


def _path_key(trajectory: TrajectoryID) -> str:
    return f"folder-path/{trajectory}"


def _text(path: str) -> str:
    """A path of any bytes as text that the catalog can hold, another one for each."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return "\\" + json.dumps(path)
    return path
