"""Another past: a new trajectory that begins at a snapshot as if something had been different there.

The trajectory is a fork of the snapshot, and its first own snapshot (marker `edit`) has the changes: files as one more
layer, the rest as a mind that follows the snapshot. If the edit changes the result of the snapshot's own call, the mind
follows the snapshot before it, and the journal gets that call again, with the new result.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from snapshotd.engine import requests
from snapshotd.engine.base import EditRequest, FileEdit
from snapshotd.engine.context import Context
from snapshotd.engine.held import KEY as HELD
from snapshotd.engine.held import LOOKED_AT, is_result, unanswered
from snapshotd.engine.history.rewinding import Rewinding
from snapshotd.engine.journal.agent_state import MAX_STATE_BYTES
from snapshotd.engine.journal.pending import MAX_PENDING_BYTES
from snapshotd.engine.journal.replay import EDITED, LANE
from snapshotd.engine.journal.retelling import Retelling
from snapshotd.engine.markers import EDIT
from snapshotd.engine.runs.half_made import Announce, HalfMade
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.errors import LimitExceeded, NotFound, UsageError
from snapshotd.failpoints import hit
from snapshotd.kernel import files
from snapshotd.layers.amend import amend
from snapshotd.terms import number_of
from snapshotd.types import (
    CallID,
    CallStatus,
    EntryKind,
    JournalEntry,
    Message,
    RequestKey,
    Snapshot,
    Trajectory,
    TrajectoryID,
    new_id,
    short,
)

MAX_MODE = 0o7777
_TOLD, _TOLD_CHARS = 10, 1000

Fork = Callable[[Snapshot, str | None, Announce], Trajectory]


@dataclass(frozen=True, slots=True)
class _ChangedMind:
    """A mind that follows snapshot `follows`: it keeps `kept` of its messages and has `added` after them. `entries`: the
    source's own, with another result; None: they stay. `held`: messages that join later (engine/held.py)."""

    entries: list[JournalEntry] | None
    follows: Snapshot
    kept: int
    added: list[Message]
    state: dict[str, Any]
    held: tuple[Message, ...]


class Editing:
    """See the module's text. Thread-safe. `fork`: a running fork of a snapshot, of this name, announced before it is
    recorded; `forget`: takes it back. It is the `Changes` of a fork whose children differ, too (engine/runs/forks.py)."""

    def __init__(
        self,
        context: Context,
        sessions: Sessions,
        rewinding: Rewinding,
        fork: Fork,
        forget: Callable[[TrajectoryID], None],
        listener: StepListener,
    ) -> None:
        self._context, self._catalog, self._sessions, self._rewinding = context, context.catalog, sessions, rewinding
        self._fork, self._forget, self._listener = fork, forget, listener
        self._half_made = HalfMade(context.catalog)

    def edit(self, source: Snapshot, request: EditRequest, name: str | None) -> Trajectory:
        """See `BranchingService.edit`, without the resumption. `source` is pinned. Nothing is left when it raises."""
        self.check(source, request)
        with self.making() as announce:
            trajectory = self._fork(source, name, announce)
            hit("engine.edit.forked")
            try:
                self.change(trajectory, source, request, requests.present())
            except BaseException:
                self._sessions.stop(trajectory, keep=False)
                self._forget(trajectory.id)
                raise
        return self._catalog.trajectories.get(trajectory.id)

    def making(self) -> AbstractContextManager[Announce]:
        """See `HalfMade.making`."""
        return self._half_made.making()

    def check(self, source: Snapshot, request: EditRequest) -> None:
        """Check that the snapshot can be edited so. Files that the tree cannot take are found by `change`. UsageError,
        LimitExceeded."""
        for item in request.files:
            check_file(item)
        if request.result is not None or request.messages is not None or request.add_messages or request.drop_messages:
            self._check_is_heard(source)
        self._plan_mind(self._catalog.trajectories.get(source.trajectory), source, request)

    def change(
        self, trajectory: Trajectory, source: Snapshot, request: EditRequest, asked: RequestKey | None = None
    ) -> None:
        """Make the edits in a running fork of the source, in one step. The caller removes the fork when it raises.
        `asked`: the client's request, if this step is what it asks for."""
        sandbox = self._sessions.find(trajectory.id)
        assert sandbox is not None
        mind = self._plan_mind(trajectory, source, request)
        self._set_env(sandbox, request.env)
        began = self._catalog.trajectories.get(source.trajectory).began
        if began is not None:
            self._catalog.trajectories.set_began(trajectory.id, began)
        with self._rewinding.quieten(sandbox, "edit"):
            self._replace(sandbox, source, request.files)
            sandbox.mind.messages[:] = mind.added
            sandbox.mind.put(mind.state, changed=True)
            commit_step(
                self._catalog,
                sandbox,
                marker(
                    EDIT, _summary(source, request, mind.held, self._context.secrecy.of(sandbox.trajectory).conceal)
                ),
                self._listener,
                follows=mind.follows if mind.entries is not None or mind.kept < source.messages else None,
                keep_messages=mind.kept,
                entries=mind.entries or (),
                request=asked,
            )

    # -- mind ----------------------------------------------------------------------------------------------------------

    def _plan_mind(self, trajectory: Trajectory, source: Snapshot, request: EditRequest) -> _ChangedMind:
        """The mind after the edit. The secrets of `trajectory` are concealed in it."""
        conceal = self._context.secrecy.of(trajectory).conceal
        entries = self._entries(source, request, conceal)
        follows = source
        if entries is not None and source.continues is not None:
            follows = self._catalog.snapshots.get(source.continues)
        held: tuple[Message, ...] = ()
        kept, added = self._messages(source, follows, request, conceal)
        if trajectory.agent is not None and self._ends_in_open_call(source, request):
            held = tuple(_conceal(message, conceal) for message in request.add_messages)
            kept, added = self._messages(source, follows, replace(request, add_messages=()), conceal)
        return _ChangedMind(entries, follows, kept, added, self._state(source, request, conceal), held)

    def _ends_in_open_call(self, source: Snapshot, request: EditRequest) -> bool:
        """True if the conversation ends in a call whose result its program tells later."""
        if not request.add_messages or request.messages is not None or request.drop_messages:
            return False
        end = self._catalog.conversations.read(source.id, max(0, source.messages - LOOKED_AT))
        return not is_result(request.add_messages[0]) and bool(unanswered(end))

    def _check_is_heard(self, source: Snapshot) -> None:
        """Check that the agent would send its model a changed result or message. UsageError: an agent behind the gateway sends
        what it remembers itself."""
        entries = list(self._catalog.journal.read(source.id))
        on_wire = [entry for entry in entries if entry.kind is EntryKind.MODEL and entry.details.get("gateway")]
        apart = any(LANE in entry.details for entry in on_wire)
        own = [entry for entry in entries if entry.kind is EntryKind.TOOL and apart and LANE not in entry.details]
        if on_wire and not own:
            raise UsageError(
                f"the messages and results of snapshot {short(source.id)} cannot be edited: its agent talks to its model "
                "through the gateway and keeps its conversation itself, so the model would never see the change; edit "
                "files or the environment, or fork the snapshot and give the agent another task"
            )

    def _entries(
        self, source: Snapshot, request: EditRequest, conceal: Callable[[Any], Any]
    ) -> list[JournalEntry] | None:
        """The snapshot's entries with the call's new result; None: the entries stay."""
        if request.result is None:
            return None
        own = self._catalog.journal.own(source.id)
        if not any(entry.id == source.call.id for entry in own) or source.continues is None:
            raise UsageError(
                f"snapshot {short(source.id)} has no result that could be edited: it is not of a call of a program"
            )
        changed = []
        for entry in own:
            if entry.id == source.call.id:
                details = {**entry.details, EDITED: entry.id}
                entry = replace(
                    entry, status=CallStatus.DONE, error=None, result=conceal(request.result[0]), details=details
                )
            changed.append(replace(entry, id=CallID(new_id()), snapshot=None))
        return changed

    def _messages(
        self, source: Snapshot, follows: Snapshot, request: EditRequest, conceal: Callable[[Any], Any]
    ) -> tuple[int, list[Message]]:
        """Number of messages of `follows` that stay, and the messages that come after them."""
        if not 0 <= request.drop_messages <= source.messages:
            raise UsageError(
                f"cannot leave out {number_of(request.drop_messages, 'message')}: the conversation has {source.messages}"
            )
        kept = min(source.messages, follows.messages)
        if request.messages is not None:
            whole = [_conceal(message, conceal) for message in request.messages]
            recorded = islice(self._catalog.conversations.read(source.id), kept)
            kept = Retelling.count_same(recorded, whole[: len(whole) - request.drop_messages])
            rest = whole[kept : max(kept, len(whole) - request.drop_messages)]
        else:
            end = source.messages - request.drop_messages
            kept = min(kept, end)
            rest = list(islice(self._catalog.conversations.read(source.id, kept), end - kept))
        added = [*rest, *(_conceal(message, conceal) for message in request.add_messages)]
        size = sum(len(message.role) + len(json.dumps(message.content)) for message in added)
        if size > MAX_PENDING_BYTES:
            raise LimitExceeded(
                f"the changed messages have {size} bytes as JSON, more than {MAX_PENDING_BYTES}; change fewer at once"
            )
        return kept, added

    def _state(self, source: Snapshot, request: EditRequest, conceal: Callable[[Any], Any]) -> dict[str, Any]:
        state = self._catalog.conversations.state(source.id)
        values = dict(state.get("values", {}))
        for key, value in request.state:
            if value is None:
                values.pop(key, None)
            else:
                values[key] = conceal(value)
        changed = {**state, "values": values} if request.state else state
        size = len(json.dumps(changed))
        if size > MAX_STATE_BYTES:
            raise LimitExceeded(
                f"the state would have {size} bytes, over the limit of {MAX_STATE_BYTES}; keep large values in files"
            )
        return changed

    def _set_env(self, sandbox: Sandbox, env: tuple[tuple[str, str], ...]) -> None:
        if not env:
            return
        trajectory, secrecy = sandbox.trajectory, self._context.secrecy
        changed = secrecy.environment(trajectory.id, env, ())
        names = {name for name, _ in changed}
        whole = (*((name, value) for name, value in trajectory.env if name not in names), *changed)
        self._catalog.trajectories.set_env(trajectory.id, whole)
        secrecy.forget_funnels(trajectory.id)
        sandbox.renew(replace(trajectory, env=whole))

    # -- files ---------------------------------------------------------------------------------------------------------

    def _replace(self, sandbox: Sandbox, source: Snapshot, edits: tuple[FileEdit, ...]) -> None:
        def write(root: int) -> None:
            for item in edits:
                write_file(root, item)

        if edits:
            self._rewinding.replace_files(sandbox, source, lambda stack: amend(self._context.store, stack, write))
            sandbox.root.bury()


def check_file(item: FileEdit) -> None:
    """Check that a file can have the path and the mode. UsageError."""
    parts = item.path.strip(b"/").split(b"/")
    if any(part in (b"", b".", b"..") or len(part) > 255 or b"\0" in part for part in parts):
        raise UsageError(f"{os.fsdecode(item.path)[:200]!r} cannot be edited: it is no path of a file")
    if item.mode is not None and not 0 <= item.mode <= MAX_MODE:
        raise UsageError(
            f"the mode {item.mode:#o} of {os.fsdecode(item.path)[:200]!r} is none; give 0 to {MAX_MODE:#o}"
        )


def write_file(root: int, item: FileEdit) -> None:
    """Write or remove a file in a tree that is an attacker's. UsageError, NotFound, naming the path."""
    *parents, name = item.path.strip(b"/").split(b"/")
    shown = "/" + os.fsdecode(item.path.strip(b"/"))
    try:
        directory = (files.open_deep if item.content is None else files.make_dirs)(root, b"/".join(parents))
    except FileNotFoundError as exc:
        raise NotFound(f"{shown!r} cannot be removed: it does not exist in this snapshot") from exc
    except OSError as exc:
        raise UsageError(f"{shown!r} cannot be edited: a directory on the way to it is none ({exc.strerror})") from exc
    with files.closing_fd(directory):
        if item.content is None:
            _remove(directory, name, shown)
        else:
            _write(directory, name, shown, item.content, item.mode)


def _remove(directory: int, name: bytes, shown: str) -> None:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError as exc:
        raise NotFound(f"{shown!r} cannot be removed: it does not exist in this snapshot") from exc
    files.remove_tree(directory, name)


def _write(directory: int, name: bytes, shown: str, content: bytes, mode: int | None) -> None:
    """Write a file. A new one is root's; an existing one keeps its owner and attributes. Its other names keep the old content,
    as for any program in an overlay."""
    try:
        there = stat.S_ISREG(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        flags = os.O_CREAT | os.O_EXCL
        mode = 0o644 if mode is None else mode
    else:
        if not there:
            raise UsageError(f"{shown!r} is no regular file; remove it first, or edit another path")
        flags = os.O_TRUNC
    fd = os.open(name, flags | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    with open(fd, "wb", buffering=0) as f:
        if flags == os.O_CREAT | os.O_EXCL:
            files.give(fd, 0, 0)  # an ordinary user's daemon is another user in its namespace
        left = memoryview(content)
        while left:
            left = left[f.write(left) or 0 :]
        if mode is not None:
            os.fchmod(fd, mode)


def _conceal(message: Message, conceal: Callable[[Any], Any]) -> Message:
    return Message(message.role, conceal(message.content))


def _in_words(request: EditRequest, conceal: Callable[[Any], Any]) -> str:
    """The changes in words for people: what was said, and the names of everything else."""

    def said(message: Message) -> str:
        text = message.content if isinstance(message.content, str) else json.dumps(message.content, ensure_ascii=False)
        return f"{message.role}: {text}"

    told = [said(_conceal(one, conceal)) for one in (*(request.messages or ())[-_TOLD:], *request.add_messages[:_TOLD])]
    if request.drop_messages:
        told.append(f"{number_of(request.drop_messages, 'message')} left out")
    names = {
        "files": [os.fsdecode(item.path) for item in request.files],
        "state": [key for key, _ in request.state],
        "environment": [key for key, _ in request.env],
    }
    told += [f"{what}: {', '.join(sorted(found)[:_TOLD])}" for what, found in names.items() if found]
    told += ["another result"] if request.result is not None else []
    text = "; ".join(told).encode(errors="backslashreplace").decode()
    return text if len(text) <= _TOLD_CHARS else text[: _TOLD_CHARS - 1] + "…"


def _summary(
    source: Snapshot, request: EditRequest, held: tuple[Message, ...], conceal: Callable[[Any], Any]
) -> dict[str, Any]:
    """Summary of the changes for people."""
    paths = [item.path[:200].decode(errors="backslashreplace") for item in request.files[:100]]
    said = request.messages is not None or bool(request.drop_messages or request.add_messages)
    return {
        "with": _in_words(request, conceal),
        **({HELD: [[message.role, message.content] for message in held]} if held else {}),
        "of": source.id,
        "files": paths,
        "messages": said,
        "result": request.result is not None,
        "state": [key for key, _ in request.state[:100]],
        "env": [key for key, _ in request.env[:100]],
    }
