"""Reuse: a new run's tool calls are answered from earlier runs, as long as both did the same from the same beginning.

Earlier runs are alike if image, runtime, limits, network, environment, command line and the files they began with are the
same. The new run goes along all of them at once: a call is answered from the newest one that made the same calls so far,
with the same outcomes, and makes this one next. The call is then a step of the new run like any other: it has a
snapshot of its own, with the files of the recorded one, to which the sandbox's root is switched, so that the program
finds the same files. The first call that cannot be answered runs, and everything after it.

A call is answered only if it was alone, ended well, changed nothing but files, and nobody but its program changed files
on the way to it. The tool's code is compared too (`Intent.code`), because a program that lies outside of the workspace
may be another one.

A model's requests are answered, if that is wanted, one conversation at a time: by the next reply of an earlier run in which the
requests and replies of the conversation were the same so far. The results of tools are not compared there, as in a
replay (wire/records.py).

Where a run stands follows from its own journal, so a program that is resumed goes on being answered.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.journal.replay import DENIED, EDITED, KEPT, LANE, PROMOTED, SAID, canonical, comparison_key
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import DataLoss, NotFound
from snapshotd.types import (
    CallStatus,
    EntryKind,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
)

REUSED = "reused"
"""Detail of an entry that was answered from an earlier run: the snapshot there, or the entry of a model's reply."""
REPLIES = "reuse_replies"
"""Argument of a `start`: the run wants its model requests answered, too."""
CODE = "code"
"""Detail of a tool's entry: the digest of its code."""
REUSE = "reuse"
"""Detail of an entry, False: the tool has opted out. Argument of a `start`: the run wants its calls answered."""
BEYOND = "beyond"
"""Detail of a call that did more than change files: state, store, a question, a checkpoint."""
INPUTS = "inputs"
"""Argument of a `start`: the digest of the files that the run begins with."""
T = TypeVar("T")
MAX_SOURCES = 16
"""Earlier runs that are looked at, the newest ones."""
_OWN_MARKERS = ("checkpoint", "task", "approval")
"""Snapshots of a program that are no call of a tool. Each other marker is a person's or the daemon's."""
_OUTSIDE = "/agent/"
"""Place of a program that is not part of the files which runs are compared by."""


@dataclass(frozen=True, slots=True)
class EarlierCall:
    """A call of an earlier run, with the snapshot it ended with."""

    entry: JournalEntry
    snapshot: Snapshot


class Reuse:
    """The earlier runs of one live sandbox. Not thread-safe: the caller holds the replay's lock."""

    def __init__(self, context: Context, sandbox: Sandbox) -> None:
        self._context, self._catalog, self._sandbox = context, context.catalog, sandbox
        self.active = True
        """False from the first call on that cannot be answered."""
        self._paths: list[Iterator[EarlierCall]] | None = None
        """The earlier runs that did the same so far, each at its next call; None: not looked for yet."""
        self._next: list[tuple[Iterator[EarlierCall], EarlierCall]] = []
        self._with_replies = bool(_start_of(self._catalog, sandbox.trajectory).get(REPLIES))
        self._lanes: dict[int | None, list[Iterator[JournalEntry]]] = {}
        """For each conversation, the earlier runs that led it in the same way so far, each at its next reply."""
        self._at = SnapshotID("")
        """The snapshot of the newest call that was answered, or the first one."""

    def find_steps(self, intent: Intent) -> list[EarlierCall]:
        """The recorded calls that this one can be answered from, best first; `intent` has gone through the funnel. The
        caller then calls `go_along` or `end`."""
        if not self.active or not self._is_reusable(intent):
            return []
        if self._paths is None and not self._find_paths():
            return []
        assert self._paths is not None
        if (
            self._sandbox.use.commands
            or self._sandbox.use.services
            or not _quiet(self._catalog, self._at, self._sandbox.head)
        ):
            return []
        self._next = [
            (path, step)
            for path in self._paths
            if (step := _take_next(path)) is not None and _same(step.entry, intent.name, intent.arguments, intent.code)
        ]
        return [step for _, step in self._next if step.snapshot.state not in (SnapshotState.LOST, SnapshotState.PRUNED)]

    def go_along(self, step: EarlierCall, taken: Snapshot) -> None:
        """Follow the runs in which the call ended as in this step. The call was answered from it, and has its own snapshot."""
        self._paths = [path for path, other in self._next if _outcome(other) == _outcome(step)]
        self._at = taken.id

    def end(self) -> None:
        """Answer no further call: everything runs from here on."""
        self.active, self._paths, self._next = False, None, []

    def find_reply(self, name: str, arguments: Any, lane: int | None) -> JournalEntry | None:
        """The recorded reply to a model request, which has gone through the funnel, in the conversation `lane` (None: it
        does not pass the gateway). None: the model has to be asked, and so in the rest of this conversation."""
        if not self._with_replies:
            return None
        if lane not in self._lanes:
            self._lanes[lane] = self._conversations(lane)
        found = [
            (path, entry)
            for path in self._lanes[lane]
            if (entry := _take_next(path)) is not None and _same_request(entry, name, arguments)
        ]
        chosen = found[0][1] if found else None
        self._lanes[lane] = [path for path, entry in found if chosen is not None and entry.result == chosen.result]
        return chosen

    def _conversations(self, lane: int | None) -> list[Iterator[JournalEntry]]:
        trajectory = self._catalog.trajectories.get(self._sandbox.trajectory.id)
        own = list(_replies(self._catalog, trajectory, lane))
        if any(REUSED not in entry.details for entry in own):
            return []
        paths = [_replies(self._catalog, one, lane) for one in alike(self._context, trajectory)]
        return [path for path in paths if all(_same_reply(_take_next(path), mine) for mine in own)]

    def _is_reusable(self, intent: Intent) -> bool:
        if intent.side_effect is not SideEffect.LOCAL or not intent.reuse:
            return False
        agent = self._sandbox.trajectory.agent
        outside = agent is not None and agent.program == 2 and agent.argv[1].startswith(_OUTSIDE)
        return intent.code is not None or not outside

    def _find_paths(self) -> bool:
        """Find the earlier runs that did what this one did so far. False: this one has left the recorded ways."""
        trajectory = self._catalog.trajectories.get(self._sandbox.trajectory.id)
        assert trajectory.began is not None
        own = list(_path(self._catalog, trajectory))
        if len(own) != sum(1 for _ in _tools(self._catalog, trajectory)) or any(
            REUSED not in step.entry.details for step in own
        ):
            return False
        paths = (_path(self._catalog, one) for one in alike(self._context, trajectory))
        self._paths = [path for path in paths if _follow(path, own)]
        self._at = own[-1].snapshot.id if own else trajectory.began
        return True


def is_wanted(catalog: Catalog, trajectory: Trajectory) -> bool:
    """True if this run was started with reuse. Its forks were not."""
    return bool(_start_of(catalog, trajectory).get(REUSE))


def reuse_count(catalog: Catalog, trajectory: Trajectory) -> dict[str, Any]:
    """The number of answered calls, and of all, as a field of an event or of a call's arguments; {} for a run without
    reuse. Cost: its journal."""
    if not is_wanted(catalog, trajectory):
        return {}
    present = catalog.trajectories.get(trajectory.id)
    found = [REUSED in entry.details for entry in _tools(catalog, present)]
    count = {"calls": sum(found), "of": len(found)}
    if _start_of(catalog, trajectory).get(REPLIES):
        replies = [REUSED in entry.details for entry in _entries(catalog, present, EntryKind.MODEL)]
        count |= {"replies": sum(replies), "replies_of": len(replies)}
    return {REUSED: count}


def alike(context: Context, trajectory: Trajectory) -> list[Trajectory]:
    """The earlier runs that began as this one did, newest first. Runs of bundles are not among them: a bundle says of
    itself what it began with. Cost: a look at every trajectory."""
    image = context.image(trajectory.spec.image)
    inputs = _start_of(context.catalog, trajectory).get(INPUTS)
    if inputs is None or image is None or image.source_id.startswith("empty:"):
        return []
    found = (
        other
        for other in reversed(context.catalog.trajectories.list())
        if (other.spec, other.agent, other.env) == (trajectory.spec, trajectory.agent, trajectory.env)
        and other.id != trajectory.id
        and _start_of(context.catalog, other).get(INPUTS) == inputs
    )
    return list(itertools.islice(found, MAX_SOURCES))


def _start_of(catalog: Catalog, trajectory: Trajectory) -> dict[str, Any]:
    """The arguments with which a run was started; {} for anything but a run, and for its forks."""
    if trajectory.began is None or trajectory.forked_from is not None:
        return {}
    try:
        call = catalog.snapshots.get(trajectory.began).call
    except NotFound:
        return {}  # removed a moment ago
    return call.arguments if call.name == "start" and isinstance(call.arguments, dict) else {}


# -- the way of a run --------------------------------------------------------------------------------------------------


def _tools(catalog: Catalog, trajectory: Trajectory) -> Iterator[JournalEntry]:
    """The entries of its tools' calls, in the order in which they began."""
    return _entries(catalog, trajectory, EntryKind.TOOL)


def _replies(catalog: Catalog, trajectory: Trajectory, lane: int | None) -> Iterator[JournalEntry]:
    """The entries of its model's replies in one conversation."""
    entries = _entries(catalog, trajectory, EntryKind.MODEL)
    return (entry for entry in entries if entry.status is CallStatus.DONE and entry.details.get(LANE) == lane)


def _entries(catalog: Catalog, trajectory: Trajectory, kind: EntryKind) -> Iterator[JournalEntry]:
    entries = itertools.chain(
        catalog.journal.read(trajectory.head, since=trajectory.began), catalog.journal.unbound(trajectory.id)
    )
    return (entry for entry in entries if entry.kind is kind)


def _path(catalog: Catalog, trajectory: Trajectory) -> Iterator[EarlierCall]:
    """The run's calls, up to the first one that no other run may be answered from."""
    entries = _tools(catalog, trajectory)
    entry, at = next(entries, None), trajectory.began
    while entry is not None and at is not None:
        following = next(entries, None)
        if entry.snapshot is None or not _is_source(entry):
            return
        if following is not None and entry.ended_at_ns is not None and following.began_at_ns < entry.ended_at_ns:
            return  # side by side: the snapshot may hold half of the other's work
        snapshot = catalog.snapshots.get(entry.snapshot)
        alone = snapshot.call.id == entry.id and snapshot.parent == entry.after and snapshot.follows is None
        if not alone or not _quiet(catalog, at, entry.after):
            return
        yield EarlierCall(entry, snapshot)
        entry, at = following, snapshot.id


def _is_source(entry: JournalEntry) -> bool:
    details = entry.details
    return (
        entry.status is CallStatus.DONE
        and entry.side_effect is SideEffect.LOCAL
        and details.get(REUSE) is not False
        and not any(mark in details for mark in (DENIED, KEPT, PROMOTED, LANE, BEYOND, SAID, "decided", EDITED))
    )


def _quiet(catalog: Catalog, older: SnapshotID, newer: SnapshotID) -> bool:
    """True if the program alone took snapshots between the two."""
    while newer != older:
        snapshot = catalog.snapshots.get(newer)
        if snapshot.parent is None or snapshot.follows is not None or snapshot.call.name not in _OWN_MARKERS:
            return False
        newer = snapshot.parent
    return True


def _take_next(path: Iterator[T]) -> T | None:
    """Take the next step; None at the end, or if the run is gone."""
    try:
        return next(path, None)
    except (NotFound, DataLoss):
        return None


def _follow(path: Iterator[EarlierCall], own: list[EarlierCall]) -> bool:
    """Follow a run past these calls. True if it made them first, with these outcomes."""
    for step in own:
        other, mine = _take_next(path), step.entry
        same = other is not None and _same(other.entry, mine.name, mine.arguments, mine.details.get(CODE))
        if other is None or not same or _outcome(other) != _outcome(step):
            return False
    return True


def _same(entry: JournalEntry, name: str, arguments: Any, code: str | None) -> bool:
    return (entry.name, entry.details.get(CODE)) == (name, code) and canonical(entry.arguments) == canonical(arguments)


def _same_request(entry: JournalEntry, name: str, arguments: Any) -> bool:
    return entry.name == name and comparison_key(entry.kind, entry.arguments) == comparison_key(entry.kind, arguments)


def _same_reply(entry: JournalEntry | None, mine: JournalEntry) -> bool:
    return entry is not None and _same_request(entry, mine.name, mine.arguments) and entry.result == mine.result


def _outcome(step: EarlierCall) -> tuple[Any, ...]:
    call = step.snapshot.call
    return call.status, call.exit_code, call.error, call.output, call.stdout, call.stderr
