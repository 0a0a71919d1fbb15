"""Irreversible calls that a trajectory has left behind, and their compensation.

A call is left behind if the history before a rewind holds it and the history after it does not. It cannot be taken
back; a registered command may make up for it. The command runs in the trajectory's sandbox with the call in
`SNAPSHOTD_CALL`, at most once for each call, whatever happens: its begin is recorded before it runs, and a command
whose end was not recorded does not run again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.api.commands import CommandFields
from snapshotd.engine.base import Effect
from snapshotd.engine.context import Context
from snapshotd.engine.journal.answers import result_of, with_result
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.approval.records import WaitingCaller
from snapshotd.engine.journal.replay import DENIED, origin_of
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener, commit_step
from snapshotd.errors import Ambiguous, Conflict, NotFound, SandboxFailed, SnapshotdError, UsageError
from snapshotd.failpoints import hit
from snapshotd.types import (
    MIN_PREFIX_CHARS,
    CallID,
    CallStatus,
    Compensation,
    EntryKind,
    JournalEntry,
    SideEffect,
    Snapshot,
    SnapshotID,
    ToolCall,
    Trajectory,
    TrajectoryID,
    new_id,
    short,
)

COMPENSATE = "compensate"
"""Name of the recorded tool call, for the policy too."""
MAX_CALL_BYTES = 96 << 10
"""Size limit of `SNAPSHOTD_CALL`; the kernel takes 128 KiB for one variable."""
MAX_ARGV_ITEMS, MAX_ARGV_BYTES = 256, 64 << 10
OF_FUNCTION = ("-m", "snapshotd.agent.compensate")
"""Arguments of Python in a compensation that is a function of the agent's."""
NOT_BEGUN = 75
"""Exit code of such a compensation whose function was not called (`snapshotd.agent.compensate`)."""


class Effects:
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, sessions: Sessions, gate: Gate, listener: StepListener) -> None:
        self._context, self._catalog, self._sessions = context, context.catalog, sessions
        self._gate, self._listener = gate, listener

    # -- which ones ----------------------------------------------------------------------------------------------------

    def beyond(self, trajectory: Trajectory, target: Snapshot) -> list[Effect]:
        """The effects that going back from the trajectory's head to `target` leaves behind, newest first."""
        present = [*self._catalog.journal.read(trajectory.head), *self._catalog.journal.unbound(trajectory.id)]
        return self._effects(trajectory.id, present, self._catalog.journal.read(target.id))

    def left_behind(self, trajectory: Trajectory) -> list[Effect]:
        """See `BranchingService.effects`. Cost: the journals that rewinds left."""
        present = [*self._catalog.journal.read(trajectory.head), *self._catalog.journal.unbound(trajectory.id)]
        return self._effects(trajectory.id, self._abandoned_entries(trajectory.id), present)

    def _abandoned_entries(self, trajectory: TrajectoryID) -> Iterable[JournalEntry]:
        for snapshot in self._catalog.snapshots.of_trajectory(trajectory):
            if snapshot.follows is not None and snapshot.parent is not None:
                yield from self._catalog.journal.read(snapshot.parent, since=snapshot.follows)

    def _effects(
        self, trajectory: TrajectoryID, entries: Iterable[JournalEntry], held: Iterable[JournalEntry]
    ) -> list[Effect]:
        """The irreversible calls in `entries` that are not in `held`, newest first. A call that `retry` has kept, or that came
        from a branch, counts as the call that was recorded first."""
        known = {origin_of(entry) for entry in held}
        found = {origin_of(e): e for e in entries if e.side_effect is SideEffect.IRREVERSIBLE and _may_have_happened(e)}
        left = [
            replace(with_result(self._context, entry), id=origin)
            for origin, entry in found.items()
            if origin not in known
        ]
        left.sort(key=lambda entry: entry.began_at_ns, reverse=True)
        return [
            Effect(trajectory, entry, compensation_of(entry), self._compensation_status(entry.id)) for entry in left
        ]

    def _compensation_status(self, entry: CallID) -> CallStatus | None:
        compensation = self._catalog.compensations.get(entry)
        return None if compensation is None else compensation.status or CallStatus.UNKNOWN

    # -- compensation --------------------------------------------------------------------------------------------------

    def compensate(self, trajectory: Trajectory, calls: Sequence[str]) -> list[Effect]:
        """See `BranchingService.compensate`."""
        effects = self.left_behind(trajectory)
        if not calls:
            return self.run(trajectory, effects)
        chosen = {_find_effect(ref, effects, trajectory).entry.id for ref in calls}
        wanted = [effect for effect in effects if effect.entry.id in chosen]
        for effect in wanted:
            name = f"{effect.entry.name} ({short(effect.entry.id)})"
            if effect.compensation is None:
                raise UsageError(f"the call {name} has no compensation registered; make up for it by hand")
            if effect.compensated is not None:
                raise Conflict(
                    f"the compensation of {name} has run already ({effect.compensated}), and it runs at most once"
                )
        return self.run(trajectory, wanted)

    def run_all(self, trajectory: Trajectory, effects: Sequence[Effect], go_on: str) -> None:
        """Run all compensations, before their calls are left behind. Conflict: one of them has failed before, and would be
        passed over; `go_on` says how to leave its call behind."""
        failed = [effect for effect in effects if effect.compensated not in (None, CallStatus.DONE)]
        if failed:
            names = ", ".join(
                f"{effect.entry.name} ({short(effect.entry.id)}, {effect.compensated})" for effect in failed
            )
            raise Conflict(
                f"the compensation of {names} has run before, did not end well, and does not run again: make up for it by hand, "
                f"then {go_on}"
            )
        self.run(trajectory, effects)

    def run(self, trajectory: Trajectory, effects: Sequence[Effect]) -> list[Effect]:
        """Run the registered compensations that have not run yet, in the given order; returns the new `effects`.
        SandboxFailed: one failed (the ones after it have not run); Denied."""
        sandbox: Sandbox | None = None
        for effect in effects:
            if effect.compensation is None or effect.compensated is not None:
                continue
            sandbox = sandbox or self._sessions.ensure_running(trajectory)
            self._run(sandbox, effect.entry, effect.compensation)
        return [replace(effect, compensated=self._compensation_status(effect.entry.id)) for effect in effects]

    def _run(self, sandbox: Sandbox, entry: JournalEntry, argv: tuple[str, ...]) -> None:
        arguments = {"call": entry.id, "tool": entry.name, "argv": list(argv)}
        caller = WaitingCaller(sandbox, lambda call: self._step(sandbox, call), threading.Event())
        self._gate.admit(caller, CallID(new_id()), COMPENSATE, arguments, SideEffect.IRREVERSIBLE)
        self._sessions.check_place(sandbox)
        with sandbox.use.command():
            self._make_up(sandbox, entry, argv, arguments)

    def _make_up(self, sandbox: Sandbox, entry: JournalEntry, argv: tuple[str, ...], arguments: dict[str, Any]) -> None:
        reveal = self._context.secrecy.of(sandbox.trajectory).reveal
        environment = {"SNAPSHOTD_CALL": self._describe(entry, reveal)}
        compensations, ownership = self._catalog.compensations, self._context.ownership
        intent = intent_of(entry.id, arguments, sandbox.head)
        ownership.record_intent(sandbox.trajectory.id, intent)
        compensations.begin(Compensation(entry.id, sandbox.trajectory.id, None, time.time_ns()))
        hit("engine.compensate.begun")
        try:
            ownership.confirm_intent(intent.id)
        except SnapshotdError:
            compensations.forget(entry.id)
            raise
        try:
            done = self._sessions.commands.exec(
                sandbox,
                CommandFields(tuple(reveal(list(argv))), env=environment),
                sink=lambda *_: None,
                record=False,
                save=True,
            )
        except SnapshotdError as exc:
            compensations.end(entry.id, CallStatus.FAILED, at_ns=time.time_ns(), exit_code=None, error=exc.message)
            raise
        hit("engine.compensate.ran")
        not_begun = done.exit_code == NOT_BEGUN and argv[1:3] == OF_FUNCTION
        if not_begun:
            compensations.forget(entry.id)
        else:
            compensations.end(
                entry.id, done.call.status, at_ns=time.time_ns(), exit_code=done.exit_code, error=done.call.error
            )
        snapshot = self._step(sandbox, replace(done.call, name=COMPENSATE, arguments=arguments))
        if not_begun:
            raise SandboxFailed(
                f"the compensation of {entry.name} ({short(entry.id)}) did not begin: its file cannot be imported without "
                f"starting the program, or lacks the function (`snapshotd show --output stderr {short(snapshot.id)}`); mend "
                "the file and compensate again"
            )
        if done.exit_code != 0:
            how = (
                "was cut off"
                if done.call.status is CallStatus.INTERRUPTED
                else f"failed with exit code {done.exit_code}"
            )
            raise SandboxFailed(
                f"the compensation of {entry.name} ({short(entry.id)}) {how}; its output is with snapshot "
                f"{short(snapshot.id)}; it does not run again: make up for the call by hand"
            )

    def _step(self, sandbox: Sandbox, call: ToolCall) -> Snapshot:
        return commit_step(self._catalog, sandbox, call, self._listener)

    def _describe(self, entry: JournalEntry, reveal: Callable[[Any], Any]) -> str:
        """The call as JSON, in the size that a variable can have: without the result, and without the arguments too, if
        need be."""
        call = {
            "id": entry.id,
            "name": entry.name,
            "key": reveal(entry.key),
            "status": entry.status,
            "arguments": reveal(entry.arguments),
        }
        result, known = result_of(self._context, entry, MAX_CALL_BYTES)
        whole = json.dumps({**call, "result": reveal(result), "result_omitted": not known})
        for text in (whole, json.dumps({**call, "result": None, "result_omitted": True})):
            if len(text) <= MAX_CALL_BYTES:
                return text
        return json.dumps(
            {**call, "arguments": None, "arguments_omitted": True, "result": None, "result_omitted": True}
        )


def compensation_of(entry: JournalEntry) -> tuple[str, ...] | None:
    """The command that was registered for a call; None if there is none that could be run."""
    registered = entry.details.get("compensate")
    argv = registered.get("argv") if isinstance(registered, dict) else None
    if (
        not isinstance(argv, list)
        or not 1 <= len(argv) <= MAX_ARGV_ITEMS
        or not all(isinstance(item, str) for item in argv)
    ):
        return None
    if not argv[0] or sum(map(len, argv)) > MAX_ARGV_BYTES or any("\0" in item for item in argv):
        return None
    return tuple(argv)


def intent_of(call: CallID, arguments: dict[str, Any], after: SnapshotID) -> JournalEntry:
    """The intent of a call's compensation, as the fleet is told of it: always with the same id, so that it runs once."""
    made = CallID(hashlib.blake2s(f"compensation of {call}".encode()).hexdigest()[:32])
    return JournalEntry(made, EntryKind.TOOL, COMPENSATE, arguments, after, time.time_ns(), SideEffect.IRREVERSIBLE)


def compensated_call(intent: CallID, name: str, arguments: Any) -> CallID | None:
    """The call that an intent's compensation makes up for; None: the intent is of another kind."""
    call = arguments.get("call") if isinstance(arguments, dict) else None
    if name != COMPENSATE or not isinstance(call, str):
        return None
    return CallID(call) if intent_of(CallID(call), {}, SnapshotID("")).id == intent else None


def task_of(entry: JournalEntry) -> str | None:
    """The subtask that a call belongs to."""
    named = entry.details.get("task")
    return named if isinstance(named, str) else None


def _may_have_happened(entry: JournalEntry) -> bool:
    """True if the call happened or may have happened: a call that was cut off counts, until a person decides to skip
    it."""
    return entry.kind is EntryKind.TOOL and entry.details.get("decided") != "skip" and DENIED not in entry.details


def _find_effect(ref: str, effects: Sequence[Effect], trajectory: Trajectory) -> Effect:
    found = [effect for effect in effects if effect.entry.id.startswith(ref)] if ref else []
    if len(found) > 1 or (found and len(ref) < MIN_PREFIX_CHARS):
        raise Ambiguous(
            f"{ref} is not enough to name one call that was left behind: type more characters, {MIN_PREFIX_CHARS} at least"
        )
    if not found:
        raise NotFound(
            f"no call {ref[:40]!r} was left behind in {short(trajectory.id)}; `snapshotd effects` lists the ones that were"
        )
    return found[0]
