"""The calls of a run that are answered from earlier runs (reuse.py finds them): each becomes a step of this run."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.answers import as_recorded, reveal_entry
from snapshotd.engine.journal.recorder import Recorder
from snapshotd.engine.journal.replay import Recorded
from snapshotd.engine.journal.retracing import NoReplay
from snapshotd.engine.journal.reuse import REUSED, EarlierCall, Reuse
from snapshotd.engine.protocol.agent_handler import Answer, Intent
from snapshotd.engine.sandbox.places import Places
from snapshotd.errors import DataLoss, LimitExceeded, NotFound
from snapshotd.failpoints import hit
from snapshotd.secrets.base import MARKER, MARKER_BYTES
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, Snapshot


class NoReuse:
    """The source of a run that was not started with reuse: it has no answers."""

    active = False
    """False: no tool's call is answered from here on."""

    def answer(self, intent: Intent) -> Answer | None:
        """The answer to a call of a tool or a model, recorded as this run's; the sandbox's files are switched to those
        after it. None: it has to run, and so has everything after it. Errors: as `Recorder.end_step`."""
        return None

    def find_reply(self, name: str, arguments: Any, lane: int | None) -> JournalEntry | None:
        """The entry of an earlier run's reply to this model request, in a conversation; None: the model has to be
        asked."""
        return None

    def repeat(self, call_id: str) -> Answer | None:
        """The answer that this call has had already, and did not hear; None if it had none."""
        return None


class ReusedCalls(NoReuse):
    """See the module's text. Thread-safe."""

    def __init__(self, context: Context, places: Places, recorder: Recorder, replay: NoReplay, reuse: Reuse) -> None:
        self._context, self._places, self._recorder = context, places, recorder
        self._replay, self._reuse, self._funnel = replay, reuse, recorder.funnel

    @property
    def active(self) -> bool:  # type: ignore[override]
        return self._reuse.active

    def answer(self, intent: Intent) -> Answer | None:
        if intent.kind is EntryKind.MODEL:
            return self._answer_model(intent)
        if intent.kind is not EntryKind.TOOL:
            return None
        with self._replay.lock:
            if self._replay.replaying or not self._reuse.active:
                return None
            conceal = self._funnel.conceal
            asked = replace(intent, name=conceal(intent.name), arguments=conceal(intent.arguments))
            for step in self._reuse.find_steps(asked):
                answer = self._read(step)
                taken = None if answer is None else self._take_over(asked, step)
                if answer is not None and taken is not None:
                    self._reuse.go_along(step, taken)
                    answer["replayed"]["snapshot"] = taken.id
                    return answer
            self._reuse.end()
            return None

    def _answer_model(self, intent: Intent) -> Answer | None:
        entry = self.find_reply(intent.name, intent.arguments, None)
        if entry is None:
            return None
        opened = self._recorder.begin(intent, {REUSED: entry.id})
        self._recorder.pending.close(opened.entry.id)
        self._recorder.end_model(opened, CallStatus.DONE, entry.result, None, {})
        return as_recorded(self._context, self._funnel, Recorded(entry, None))

    def find_reply(self, name: str, arguments: Any, lane: int | None) -> JournalEntry | None:
        with self._replay.lock:
            if self._replay.replaying:
                return None
            entry = self._reuse.find_reply(self._funnel.conceal_text(name), self._funnel.conceal(arguments), lane)
        if entry is None:
            return None
        entry = reveal_entry(self._funnel, entry)
        return None if MARKER.search(json.dumps(entry.result)) else entry

    def repeat(self, call_id: str) -> Answer | None:
        entry = self._recorder.find(call_id)
        if entry is None or entry.status is None or REUSED not in entry.details:
            return None
        with_files = entry.kind is not EntryKind.MODEL and entry.snapshot is not None
        own = self._context.catalog.snapshots.get(entry.snapshot) if with_files and entry.snapshot else None
        return as_recorded(self._context, self._funnel, Recorded(reveal_entry(self._funnel, entry), own))

    def _read(self, step: EarlierCall) -> Answer | None:
        """The outcome of a step as the program is answered. None: its result is gone, too large, or holds a secret that
        this run does not know."""
        try:
            entry = reveal_entry(self._funnel, step.entry)
            answer = as_recorded(self._context, self._funnel, Recorded(entry, step.snapshot))
        except (NotFound, DataLoss, LimitExceeded):
            return None
        return None if MARKER_BYTES.search(answer.get("body", b"")) else answer

    def _take_over(self, intent: Intent, step: EarlierCall) -> Snapshot | None:
        """Make a step of an earlier run this run's next one. None: its files are gone."""
        sandbox = self._recorder.sandbox
        began_at_ns, clock_ns = time.time_ns(), time.perf_counter_ns()
        with contextlib.ExitStack() as held:
            held.enter_context(sandbox.lock)
            try:
                source = held.enter_context(self._context.pins.pinned(step.snapshot.id))
            except NotFound:
                return None
            captured = self._places.take_over(sandbox, source)
            if captured is None:
                return None
            hit("engine.reuse.moved")
            call = replace(
                source.call,
                id=CallID(intent.call_id),
                started_at_ns=began_at_ns,
                duration_ns=time.perf_counter_ns() - clock_ns,
            )
            details = {REUSED: step.snapshot.id, **self._recorder.details_of(intent)}
            return self._recorder.complete(
                EntryKind.TOOL,
                call.name,
                call.arguments,
                call,
                began_at_ns=began_at_ns,
                details=details,
                captured=captured,
            )
