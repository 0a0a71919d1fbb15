"""The socket for hooks of agents that work in a user's own folder, without a sandbox.

Every user of the machine may connect. A peer is whom the kernel says it is, and the folder is the descriptor that it
sends: all work on files is done with that user's rights, and a verb reaches that user's trajectory of that folder alone.

    peer    one line, its words parted by NUL, with the descriptor of the folder; after `hook AGENT` a JSON object
    daemon  one byte (the exit code), then text; then it closes

    hook AGENT | checkpoint NAME | rewind [--files|--conversation|--both] [--dry-run] [--session=ID|--session=all] [ID] | undo | log

Concurrency: one thread for each connection (`HookPlaces`); few of them work at once (`HookTurns`). A peer has `_REQUEST_S` for
its whole request, however it comes. A hook is answered after `_LATE_S`, and done in any case (`LateAnswers`).
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapshotd.api.history import RewindMode, RewindQuery, RewindRequest
from snapshotd.api.snapshots import LogQuery
from snapshotd.daemon.hook_lateness import LateAnswers
from snapshotd.daemon.hook_places import HookPlaces, HookTurns
from snapshotd.engine.base import Opener
from snapshotd.engine.engine import Engine
from snapshotd.errors import LimitExceeded, SnapshotdError, UsageError
from snapshotd.formats.foreign_json import parse
from snapshotd.kernel import passing
from snapshotd.kernel.identity import HostUser, peer
from snapshotd.terms import number_of
from snapshotd.types import Snapshot, Trajectory, short

_LINE_BYTES, _PAYLOAD_BYTES = 8192, 16 << 20
_MOST_TRIES = 30
"""Times that a payload which may be whole is read: an agent may send it in pieces."""
_REQUEST_S, _ANSWER_S = 20.0, 10.0
_LATE_S = 20.0
"""An agent waits for so long at its hook, and no longer (`hooks/send.py` gives up after 30 s without a reason)."""
_CLOSE_S = 30.0
"""The longest that the end waits for requests, which a file system of a user's may hold for ever."""
_LISTED = 15
_BACKLOG = 256
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED, errno.EINTR, errno.EPROTO)
"""Failures of accept(2) after which there is another connection to take."""
_PAUSE_S = 0.05
_MODES: dict[str, RewindMode] = {"--files": "files", "--conversation": "conversation", "--both": "both"}
_SESSION, _DRY_RUN = "--session=", "--dry-run"
_log = logging.getLogger(__name__)


class HookServer:
    """Serves from construction until `close`. OSError: the socket cannot be made."""

    def __init__(self, path: Path, engine: Engine, is_sandboxed: Callable[[int], bool]) -> None:
        self._path, self._engine, self._is_sandboxed = path, engine, is_sandboxed
        self._lock = threading.Lock()
        self._places, self._turns = HookPlaces(), HookTurns()
        self._threads: set[threading.Thread] = set()
        self._connections: set[socket.socket] = set()
        path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # the lock of the state directory says that its daemon is gone
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(str(path))
        os.chmod(path, 0o666)
        self._listener.listen(_BACKLOG)
        self._late_text = LateAnswers(_LATE_S)
        self._thread = threading.Thread(target=self._accept, name="hooks")
        self._thread.start()

    def close(self) -> None:
        """Remove the socket; return when every request has ended, or cannot be waited for any longer. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._turns.close()
        with self._lock:
            threads = list(self._threads)
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RD)  # the daemon answers what has come
        ends = time.monotonic() + _CLOSE_S
        for thread in threads:
            thread.join(max(ends - time.monotonic(), 0))
            if thread.is_alive():
                _log.warning("a request of a hook is left, which a file system of its user holds")
        self._late_text.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as exc:
                if exc.errno in _PASSING:
                    time.sleep(_PAUSE_S)
                    continue
                return
            try:
                pid, user = peer(connection)
                if self._is_sandboxed(pid) or not self._places.take(user.uid):
                    connection.close()
                    continue
            except OSError:
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection, user), name="hook", daemon=True)
            with self._lock:
                self._threads.add(thread)
                self._connections.add(connection)
            thread.start()

    def _serve(self, connection: socket.socket, user: HostUser) -> None:
        try:
            with connection:
                code, text = self._answer(connection, user)
                connection.settimeout(_ANSWER_S)
                with contextlib.suppress(OSError):
                    connection.sendall(bytes([code]) + text.encode(errors="backslashreplace"))
        finally:
            self._places.give_back(user.uid)
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, user: HostUser) -> tuple[int, str]:
        fds: list[int] = []
        ends = time.monotonic() + _REQUEST_S
        try:
            connection.settimeout(_REQUEST_S)
            data, fds = passing.receive(connection, _LINE_BYTES, 4)
            line, _, rest = data.partition(b"\n")
            words = [os.fsdecode(word) for word in line.split(b"\0")]
            if len(fds) != 1 or not words[0]:
                raise UsageError("a request of a hook is one line with one descriptor, that of the folder")
            if words[0] == "hook":
                agent, payload = words[1] if len(words) > 1 else "", _payload(connection, rest, ends)
                late = self._late_text.answer_late(connection, LimitExceeded.exit_code, _late_text(fds[0]))
                with late, self._turns.turn(user.uid):
                    self._engine.folders.calls.record(user, fds[0], agent, payload, peer(connection)[0])
                return 0, ""
            with self._turns.turn(user.uid):
                return 0, self._verb(user, fds[0], words, peer(connection)[0])
        except SnapshotdError as exc:
            return exc.exit_code or 1, f"snapshotd: {exc.message}\n"
        except OSError as exc:
            return 1, f"snapshotd: no snapshot: {exc.strerror or exc}\n"
        except Exception:  # noqa: BLE001 - the top of a request: an agent must not be stopped by a fault of ours
            _log.exception("a request of a hook failed")
            return 1, "snapshotd: no snapshot, the daemon's log says why\n"
        finally:
            for fd in fds:
                os.close(fd)

    # -- what slash commands ask for -----------------------------------------------------------------------------------

    def _verb(self, user: HostUser, folder: int, words: list[str], hook: int) -> str:
        verb, arguments = words[0], [word for text in words[1:] for word in text.split()]
        options = [word for word in arguments if word.startswith("-")]
        if verb == "checkpoint" and arguments and not options:
            name = "-".join(arguments).strip("\"'")
            return f"{short(self._engine.folders.checkpoint(user, folder, name).id)} is {name}\n"
        trajectory, opener = self._engine.folders.trajectory(user, folder), Opener(folder)
        if verb == "undo" and not arguments:
            return _rewind_text(self._engine.branching.undo(trajectory.id, opener=opener))
        if verb == "log" and not arguments:
            return self._list_snapshots(trajectory, user)
        if verb == "rewind":
            refs = [word for word in arguments if word not in options]
            modes = {_MODES[word] for word in options if word in _MODES}
            sessions = {word[len(_SESSION) :] for word in options if word.startswith(_SESSION)}
            known = all(word in _MODES or word == _DRY_RUN or word.startswith(_SESSION) for word in options)
            if known and max(len(refs), len(modes), len(sessions)) < 2 and "" not in sessions:
                if not refs:
                    return self._list_snapshots(trajectory, user)
                target = self._engine.folders.snapshot(user, folder, refs[0])
                session = next(iter(sessions), None) or self._engine.folders.rewinds.session_of(
                    user, folder, hook, target.id
                )
                mode: RewindMode = next(iter(modes), "both")
                return self._rewind(trajectory, target, mode, session, opener, dry=_DRY_RUN in options)
        raise UsageError(f"{' '.join(words)[:200]!r} is no request; see `snapshotd hooks --help`")

    def _rewind(
        self,
        trajectory: Trajectory,
        target: Snapshot,
        mode: RewindMode,
        session: str | None,
        opener: Opener,
        *,
        dry: bool,
    ) -> str:
        if not dry:
            return _rewind_text(
                self._engine.branching.rewind(
                    trajectory.id, RewindRequest(target.id, mode, session=session), opener=opener
                )
            )
        query = RewindQuery(target.id, mode, max_files=100, session=session)
        preview = self._engine.branching.preview_rewind(trajectory.id, query, opener=opener)
        lines = [f"{change.kind} {os.fsdecode(change.path)}" for change in preview.files]
        more = [f"and {preview.file_count - len(lines)} more"] if preview.file_count > len(lines) else []
        return "\n".join([*lines, *more, *preview.left, f"{number_of(len(preview.messages), 'message')} would go", ""])

    def _list_snapshots(self, trajectory: Trajectory, user: HostUser) -> str:
        rows = []
        for one in self._engine.snapshots.log(trajectory.id, LogQuery(_LISTED)):
            names = [tag.removesuffix(f"@{user.uid}") for tag in one.tags]
            rows.append("  ".join((short(one.id), one.call.name, json.dumps(one.call.arguments)[:80], *names)))
        return "\n".join([*rows, ""])


def _payload(connection: socket.socket, first: bytes, ends: float) -> dict[str, Any]:
    """Read the JSON object that a hook gets on its standard input, until `ends` (by the monotonic clock). An agent may leave
    that input open, so the daemon does not wait for its end."""
    data, tries = bytearray(first), 0
    while True:
        if data[-64:].rstrip().endswith(b"}"):
            tries += 1
            with contextlib.suppress(ValueError):
                found = parse(bytes(data))
                if isinstance(found, dict):
                    return found
        connection.settimeout(max(ends - time.monotonic(), 0.001))
        piece = b"" if tries == _MOST_TRIES else connection.recv(1 << 18)
        if not piece:
            raise UsageError("a hook's input is one JSON object, and this one is none")
        data += piece
        if len(data) > _PAYLOAD_BYTES:
            raise LimitExceeded(f"a hook's input has more than {_PAYLOAD_BYTES} bytes")


def _late_text(folder: int) -> str:
    """Return the answer to a hook whose work goes on."""
    return (
        f"snapshotd: {os.readlink(f'/proc/self/fd/{folder}')} is still being recorded after {_LATE_S:g} s; that goes on, and "
        "calls until then have no snapshot of their own. Name what needs none, such as builds and data, in a "
        ".snapshotdignore at its top\n"
    )


def _rewind_text(snapshot: Snapshot) -> str:
    """Return the result of a rewind, for a person."""
    facts = snapshot.call.arguments
    lines = [f"{short(snapshot.id)} {snapshot.call.name}: {number_of(len(facts.get('files') or ()), 'path')} put back"]
    lines += facts.get("left", ())
    if "resume" in facts:
        lines.append(f"go on with: {facts['resume']}")
    return "\n".join([*lines, ""])
