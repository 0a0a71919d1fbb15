"""Going on: a trajectory's program is started again from the top and meets the recorded entries, up to the head.

A call that was cut off is settled first, in the journal: a `local` call was rolled back with its files and runs again,
an `idempotent` one is sent again under its key, and an `irreversible` one may or may not have happened, so a person has
to say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from snapshotd.api.history import DecisionFields
from snapshotd.api.record import UNSET
from snapshotd.catalog.base import Catalog
from snapshotd.engine.context import Context
from snapshotd.engine.journal import idempotency
from snapshotd.engine.journal.replay import Resumption, clip, origin_of
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.errors import Ambiguous, Conflict, NotFound, Undecided, UsageError
from snapshotd.failpoints import hit
from snapshotd.types import (
    MIN_PREFIX_CHARS,
    CallStatus,
    Ended,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
    Trajectory,
    TrajectoryStatus,
    short,
)


class Resumes:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions

    def resume(self, trajectory: Trajectory, decisions: Sequence[DecisionFields]) -> Trajectory:
        """See `RunService.resume`."""
        self._context.ownership.take_over(trajectory.id)  # also one without a program, for its commands
        if trajectory.agent is None and decisions:  # its calls ran in commands
            self._settle(self._catalog.trajectories.get(trajectory.id), decisions)
            return self._catalog.trajectories.get(trajectory.id)
        while True:
            with self._sessions.start_lock(
                trajectory.id
            ):  # otherwise a sandbox in which another thread is about to start a program would look idle
                trajectory = self._catalog.trajectories.get(trajectory.id)
                self._check(trajectory)
                idle = self._sessions.find(trajectory.id)
                if idle is None:
                    self._begin(trajectory, decisions)
                    return self._catalog.trajectories.get(trajectory.id)
            self._sessions.stop(trajectory, only=idle)  # it has no program: a person looked into it, or it was rewound

    def _begin(self, trajectory: Trajectory, decisions: Sequence[DecisionFields]) -> None:
        head = self._catalog.snapshots.get(trajectory.head)
        assert trajectory.agent is not None
        assert trajectory.began is not None
        began = self._catalog.snapshots.get(trajectory.began)
        self._settle(trajectory, decisions)
        resumption = Resumption(began, head, self.entries(trajectory, head))
        hit("engine.resume.settled")
        with self._context.pins.pinned(began.id):
            sandbox, calls = self._sessions.launch(trajectory, began, head)
        try:
            self._catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.RUNNING)
            self._sessions.adopt(sandbox, calls, resumption, idempotency.cut_off_keys(self._catalog, trajectory))
            self._sessions.start_agent(sandbox, trajectory.agent)
        except BaseException:
            self._sessions.discard(sandbox)
            self._catalog.trajectories.set_status(trajectory.id, TrajectoryStatus.INTERRUPTED)
            raise

    def entries(self, trajectory: Trajectory, head: Snapshot) -> tuple[JournalEntry, ...]:
        """The entries that a restarted program has to meet: first the calls that it has to run again, then the journal from its
        beginning, then the calls that ended since the head."""
        bound = entries_upto(self._catalog, head, trajectory.began)
        return (*bound, *(entry for entry in self._catalog.journal.unbound(trajectory.id) if entry.status is not None))

    def _check(self, trajectory: Trajectory) -> None:
        name = short(trajectory.id)
        if trajectory.agent is None or trajectory.began is None:
            raise UsageError(
                f"trajectory {name} has no program that could be resumed; run commands in it with `snapshotd exec {name}`"
            )
        sandbox = self._sessions.find(trajectory.id)
        if sandbox is not None and sandbox.use.agent_running and not sandbox.closed:
            raise Conflict(f"the program of {name} is running; `snapshotd attach {name}` follows it")
        if trajectory.status is TrajectoryStatus.FINISHED:
            raise Conflict(
                f"the program of {name} has finished; rewind it first (`snapshotd rewind {name} ID`), or fork a snapshot of it"
            )

    def _settle(self, trajectory: Trajectory, decisions: Sequence[DecisionFields]) -> None:
        """Give every call that was cut off its outcome. Undecided, before anything is changed."""
        cut_off = [entry for entry in self._catalog.journal.unbound(trajectory.id) if entry.status is None]
        decided = {_find_cut_off(decision.call, cut_off, trajectory).id: decision for decision in decisions}
        open_questions = [
            entry for entry in cut_off if entry.side_effect is SideEffect.IRREVERSIBLE and entry.id not in decided
        ]
        if open_questions:
            raise Undecided(_question(trajectory, open_questions))
        self._context.ownership.decide_intents(
            {
                origin_of(entry): decided[entry.id].action != "retry"
                for entry in cut_off
                if entry.side_effect is SideEffect.IRREVERSIBLE
            }
        )
        for entry in cut_off:
            decision = decided.get(entry.id)
            if decision is None or decision.action == "retry":
                ended = Ended(entry.id, CallStatus.UNKNOWN, time.time_ns(), error="it was cut off and runs again")
            else:
                result = None if decision.result is UNSET else decision.result
                ended = Ended(entry.id, CallStatus.DONE, time.time_ns(), result, details={"decided": decision.action})
            self._catalog.journal.end(trajectory.id, ended)


def entries_upto(catalog: Catalog, head: Snapshot, began: SnapshotID | None) -> tuple[JournalEntry, ...]:
    """The journal of a program up to a snapshot. Before it come, as cut off, the calls that ran when that snapshot was taken,
    or one to which a person went back."""
    cut_off = (replace(entry, status=None, details={}) for entry in catalog.journal.left_running(head.id, since=began))
    return (*cut_off, *catalog.journal.read(head.id, since=began))


def _find_cut_off(ref: str, cut_off: Sequence[JournalEntry], trajectory: Trajectory) -> JournalEntry:
    found = [entry for entry in cut_off if entry.id.startswith(ref) or origin_of(entry) == ref] if ref else []
    if len(found) > 1 or (found and len(ref) < MIN_PREFIX_CHARS):
        raise Ambiguous(
            f"{ref} is not enough to name one call that was cut off: type more characters, {MIN_PREFIX_CHARS} at least"
        )
    if not found:
        shown_ids = ", ".join(short(entry.id) for entry in cut_off) or "none"
        raise NotFound(f"no call {ref[:40]!r} of {short(trajectory.id)} was cut off; calls that were: {shown_ids}")
    return found[0]


def _question(trajectory: Trajectory, entries: Sequence[JournalEntry]) -> str:
    calls = "; ".join(f"{short(entry.id)} {entry.name} with {clip(entry.arguments, 200)}" for entry in entries[:5])
    more = f" and {len(entries) - 5} more" if len(entries) > 5 else ""
    return (
        f"nobody knows whether these irreversible calls of {short(trajectory.id)} happened: {calls}{more}; find out, then "
        "resume with a result, skip or retry for each"
    )
