"""Files of a sandbox, read and written by the daemon itself: no program of the image is needed.

Reading goes through a `View`: of the live root where a trajectory's sandbox is up, else of a snapshot. Writing is a
tool call like `exec`: the sandbox belongs to it from its beginning to its snapshot, so nobody gives it another root or
past meanwhile. A client's data is received beside the sandbox's other steps; the change at its end and the snapshot are
one step under the sandbox's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from snapshotd.engine import requests
from snapshotd.engine.base import FileEntry, Written
from snapshotd.engine.context import Context
from snapshotd.engine.runs.launch import is_alive
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox import placing, users
from snapshotd.engine.sandbox.root import frozen
from snapshotd.engine.sandbox.sandbox import ClientCommand, Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.engine.sandbox.unpacking import Unpacked, Unpacker
from snapshotd.engine.storage import look
from snapshotd.errors import Conflict, DataLoss, OutOfSpace, SnapshotdError, UsageError
from snapshotd.formats.tar_writer import write_tree
from snapshotd.kernel import files, turns
from snapshotd.kernel.quota import Used
from snapshotd.trees.live_view import LiveView
from snapshotd.trees.view import View, follow
from snapshotd.types import MIN_PREFIX_CHARS, CallStatus, Kind, RequestKey, Snapshot, TrajectoryID, short

MOST_PATHS = 256
"""Files that the record of one call names; how many there were it says, too."""
_PIECE_BYTES = 1 << 20
_log = logging.getLogger(__name__)

Place = Callable[[int], object]
"""Changes the live root that a descriptor holds. Quick: under the sandbox's lock."""


@dataclass(slots=True)
class _Call:
    """A call that is being made: its sandbox, and what will be recorded of it."""

    sandbox: Sandbox
    command: ClientCommand
    name: str
    arguments: dict[str, Any]
    opened: contextlib.ExitStack
    """Closes what is open, whatever happens."""
    began_at_ns: int = field(default_factory=time.time_ns)
    changed: bool = False
    """It has changed something already, so it is recorded even if it fails."""
    room: Used = field(init=False)
    """Bytes and files left of the sandbox's disk limit. Where there are quotas, the kernel sees to it, too."""

    def __post_init__(self) -> None:
        self.room = self.sandbox.root.room()

    def take(self, size: int, files: int = 0) -> None:
        """Count bytes and files that are about to be written. OutOfSpace: there is no room for them; Conflict: as `check`."""
        self.check()
        self.room = Used(self.room.bytes - size, self.room.inodes - files)
        if min(self.room.bytes, self.room.inodes) < 0:
            raise OutOfSpace(
                f"cannot {self.name} so much in {short(self.sandbox.trajectory.id)}: it is more than the disk limit of the sandbox leaves; "
                "remove files in it, or begin again with a larger limit"
            )

    def check(self) -> None:
        """Check that the sandbox goes on. Conflict: it ends, or has ended."""
        if self.command.cut_off or self.sandbox.closed:
            raise Conflict(
                f"the sandbox of {short(self.sandbox.trajectory.id)} ended before all was written; try again"
            )

    @contextlib.contextmanager
    def root(self) -> Iterator[int]:
        """The live root, under the sandbox's lock, so that it stays the root."""
        with self.sandbox.lock:
            self.check()
            self.sandbox.root.revive()
            with files.closing_fd(self.sandbox.root.open_root()) as fd:
                yield fd

    def owner(self, user: str | None) -> placing.Owner:
        """The owner of new files. UsageError: there is no such user."""
        if self.sandbox.container.root is not None:
            return placing.Owner(-1, -1)  # as the daemon makes it
        who = users.look_up(self.sandbox.container, user) if user else users.ROOT
        id_map = self.sandbox.container.id_map
        if id_map is None:
            return placing.Owner(who.user, who.group)
        if max(who.user, who.group) >= id_map.count:
            raise UsageError(f"the sandbox has no user {user!r}: its numbers end at {id_map.count - 1}; name another")
        return placing.Owner(id_map.base + who.user, id_map.base + who.group)


class FileCalls:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, listener: StepListener) -> None:
        """`listener` is told of every step."""
        self._context, self._sessions, self._listener = context, sessions, listener

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self, ref: str, path: bytes) -> Iterator[bytes]:
        """The content of a regular file. A trajectory's name or id stands for its files as they are now, a snapshot's id or
        tag for those of the snapshot; so for all that reads here. Links are followed.

        In pieces; of a live file as much as it had when it was opened."""
        with self._view(ref) as view, placing.explain_errors("read", path):
            fd = view.open(follow(view, path)[0])
        return _pieces(fd, os.fstat(fd).st_size)

    def stat(self, ref: str, path: bytes) -> FileEntry:
        """The entry at a path, behind all links."""
        with self._view(ref) as view, placing.explain_errors("look at", path):
            return FileEntry(path, follow(view, path)[1])

    def list(self, ref: str, path: bytes) -> Iterator[FileEntry]:
        """The entries of a directory, sorted by the bytes of their names; links are not followed."""
        with self._view(ref) as view, placing.explain_errors("list", path):
            directory = view.directory(follow(view, path)[0])
            for child in view.children(directory):
                turns.give_way()
                found = b"/".join([*filter(None, [path]), child.name])
                is_link = child.entry.kind is Kind.SYMLINK
                with contextlib.suppress(FileNotFoundError):
                    yield FileEntry(found, child.entry, view.readlink_of(child) if is_link else None)

    def archive(self, ref: str, path: bytes, write: Callable[[bytes], object]) -> tuple[str, ...]:
        """Write what is there, with everything below it, as a tar whose members' paths begin with its last name (the
        root's with `./`). Returns warnings: what the form cannot hold."""
        with self._view(ref) as view, placing.explain_errors("read", path):
            return write_tree(view, write, top=follow(view, path)[0])

    @contextlib.contextmanager
    def _view(self, ref: str) -> Iterator[View]:
        """The files that `ref` names: of a snapshot, or of a trajectory as they are now."""
        snapshot = self._context.catalog.refs.find_snapshot(ref)
        if not _is_named(snapshot, ref):
            # A fork that has made no call yet has its head from the trajectory that it was forked from.
            live = self._live_view(self._context.catalog.refs.find_trajectory(ref).id)
            if live is not None:
                with live:
                    yield live
                return
        with look.open_view(self._context, snapshot) as view:
            yield view

    def _live_view(self, trajectory: TrajectoryID) -> View | None:
        """The view of a running sandbox; None if none runs. The layers below it stay until the view is closed, whatever
        steps are taken meanwhile."""
        sandbox = self._sessions.find(trajectory)
        if sandbox is None:
            return None
        with sandbox.lock:
            if not is_alive(sandbox):
                return None
            sandbox.root.revive()
            store, layers = sandbox.root.store, (sandbox.root.upper, *sandbox.root.stack.layers)
            if not store.hold(layers):
                raise DataLoss(
                    f"a layer of the sandbox of {short(trajectory)} is missing in {store.root}; read its files at its head, by the "
                    f"snapshot's id {short(sandbox.head)}"
                )
            try:
                with files.closing_fd(sandbox.root.open_root()) as root:
                    return LiveView(root, sandbox.container.id_map, closed=lambda: store.release(layers))
            except BaseException:
                store.release(layers)
                raise

    # -- writing -------------------------------------------------------------------------------------------------------

    def write(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None, mode: int | None
    ) -> Written:
        """Fill a file with what `read(count)` gives until it gives nothing, and put it in place in one instant: until
        then the old one is there, and it stays when anything fails. Missing directories are made. A file that is
        overwritten keeps its owner, and its mode unless `mode` is given (0644 for a new file)."""

        arguments: dict[str, Any] = {"path": _as_text(path)}

        def receive(call: _Call) -> Place:
            owner = call.owner(user)
            with call.root() as root:
                file = call.opened.enter_context(os.fdopen(placing.open_unnamed(root), "wb", buffering=0))
            arguments["bytes"] = 0
            while piece := read(_PIECE_BYTES):
                turns.give_way()
                call.take(len(piece))
                arguments["bytes"] += files.write_all(file.fileno(), piece)

            def place(root: int) -> None:
                placing.put(root, path, file.fileno(), owner, mode)
                file.close()  # no root is sealed while a file in it is open for writing

            return place

        snapshot = self._make(ref, "write", arguments, path, receive)
        return Written(snapshot, bytes=arguments["bytes"])

    def unpack(
        self, ref: str, path: bytes, read: Callable[[int], bytes], *, user: str | None, attributes: bool
    ) -> Written:
        """Put the members of a tar below the directory `path`, each as `write_file`. With `attributes` modes and times
        are the archive's. Other files stay."""
        done = Unpacked()

        def receive(call: _Call) -> Place:
            unpacker = Unpacker(call.root, call.owner(user), attributes, MOST_PATHS, call.take, done)
            try:
                unpacker.unpack(path, read)
            finally:
                call.changed = bool(done.files or done.directories)
                call.arguments |= {"paths": list(map(_as_text, done.paths)), **_counts(done)}
            return lambda _: None

        snapshot = self._make(ref, "write", {"path": _as_text(path)}, path, receive)
        return Written(snapshot, done.files, done.directories, done.bytes, tuple(done.warnings))

    def make_dir(self, ref: str, path: bytes, *, user: str | None) -> Snapshot:
        """Make a directory, with those above it.

        Not an error when it is there."""

        def receive(call: _Call) -> Place:
            owner = call.owner(user)
            return lambda root: placing.make_dir(root, path, owner)

        return self._make(ref, "make_dir", {"path": _as_text(path)}, path, receive)

    def remove(self, ref: str, path: bytes) -> Snapshot:
        """Remove a file, a link, or a directory with all that is in it."""

        def receive(call: _Call) -> Place:
            def place(root: int) -> None:
                with frozen(call.sandbox.cgroup):  # else a process could add to a tree for ever
                    placing.remove(root, path)

            return place

        return self._make(ref, "remove", {"path": _as_text(path)}, path, receive)

    def rename(self, ref: str, path: bytes, to: bytes) -> Snapshot:
        """Rename a file or a directory.

        As rename(2): in place of a file, or of an empty directory."""
        arguments = {"path": _as_text(path), "to": _as_text(to)}
        return self._make(ref, "rename", arguments, path, lambda _: lambda root: placing.rename(root, path, to))

    def _make(
        self, ref: str, name: str, arguments: dict[str, Any], path: bytes, receive: Callable[[_Call], Place]
    ) -> Snapshot:
        """Make a call. `receive` takes the client's data, and returns the function that puts them in place."""
        catalog = self._context.catalog
        trajectory, snapshot = catalog.refs.find_trajectory(ref), catalog.refs.find_snapshot(ref)
        if _is_named(snapshot, ref):
            raise UsageError(
                f"{ref} is a snapshot, whose files do not change: name its trajectory {trajectory.shown_name}, "
                "or fork it and write there"
            )
        sandbox = self._sessions.ensure_running(trajectory)
        self._sessions.check_place(sandbox)
        with sandbox.use.command() as command, contextlib.ExitStack() as opened:
            call = _Call(sandbox, command, name, arguments, opened)
            try:
                with placing.explain_errors(name.replace("_", " "), path):
                    place = receive(call)
                    with sandbox.lock, turns.first():
                        with call.root() as root:
                            before = sandbox.root.changed
                            try:
                                place(root)
                            except BaseException:
                                call.changed |= sandbox.root.changed and not before
                                raise
                        return self._commit(call, request=requests.present())
            except BaseException as exc:
                if call.changed:
                    self._record_failure(call, exc)
                raise

    def _record_failure(self, call: _Call, exc: BaseException) -> None:
        ours = isinstance(exc, SnapshotdError | OSError)
        error = str(exc) if ours else "the client went away before it had sent all"
        interrupted = call.command.cut_off or not ours
        try:
            self._commit(call, CallStatus.INTERRUPTED if interrupted else CallStatus.FAILED, error)
        except (SnapshotdError, OSError):
            _log.warning("a %s that failed is not recorded", call.name, exc_info=True)

    def _commit(
        self,
        call: _Call,
        status: CallStatus = CallStatus.DONE,
        error: str | None = None,
        request: RequestKey | None = None,
    ) -> Snapshot:
        funnel = self._context.secrecy.of(call.sandbox.trajectory)
        record = marker(
            call.name,
            funnel.conceal(call.arguments),
            status=status,
            started_at_ns=call.began_at_ns,
            error=funnel.conceal(error),
        )
        return commit_step(self._context.catalog, call.sandbox, record, self._listener, request=request)


def _counts(done: Unpacked) -> dict[str, Any]:
    """The outcome of a write as arguments of its call, from which `Written.told_by` reads it."""
    rare = {"directories": done.directories, "warnings": list(done.warnings)}
    return {"files": done.files, "bytes": done.bytes, **{name: value for name, value in rare.items() if value}}


def _is_named(snapshot: Snapshot, ref: str) -> bool:
    """True if `ref` names the snapshot itself, and not the trajectory whose head it is."""
    return ref in snapshot.tags or (len(ref) >= MIN_PREFIX_CHARS and snapshot.id.startswith(ref))


def _as_text(path: bytes) -> str:
    return "/" + os.fsdecode(path)


def _pieces(fd: int, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file in pieces, or less where it ends before: a live file may grow for ever."""
    with open(fd, "rb", buffering=0) as file:
        while size > 0 and (piece := file.read(min(size, _PIECE_BYTES))):
            turns.give_way()
            size -= len(piece)
            yield piece
