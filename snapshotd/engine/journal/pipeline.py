"""The journal of one live sandbox: the way of every intent of its agents, whoever speaks for them (calls.py: the library
in the sandbox; wire/model_calls.py: the wire to a model).

    admit     policy and people let the call run, or not (approval/). A call that a replay answers is not asked about again
    answer    the answer comes from one of three sources: the replay of the program's own past (retracing.py), an earlier
              run (reused_calls.py), or the call itself, which runs
    record    intent and outcome are written (recorder.py), and the program's words (conversation.py)
    step      files, conversation and call are committed (sandbox/step.py)

Each stage calls only the ones below it.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal.approval.gate import Gate
from snapshotd.engine.journal.approval.records import WaitingCaller
from snapshotd.engine.journal.conversation import ProgramConversation
from snapshotd.engine.journal.idempotency import Keys
from snapshotd.engine.journal.recorder import Recorder
from snapshotd.engine.journal.replay import Resumption
from snapshotd.engine.journal.retracing import NoReplay, Retracing
from snapshotd.engine.journal.reuse import Reuse
from snapshotd.engine.journal.reused_calls import NoReuse, ReusedCalls
from snapshotd.engine.protocol.agent_handler import Answer, Intent, Question
from snapshotd.engine.sandbox.places import Places
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import StepListener
from snapshotd.errors import Denied
from snapshotd.types import Approval, CallID, EntryKind


class Journal:
    """See the module's text. From `adopt` to the sandbox's end. Thread-safe."""

    def __init__(
        self,
        context: Context,
        sandbox: Sandbox,
        listener: StepListener,
        places: Places,
        gate: Gate,
        resumption: Resumption | None = None,
        keys: Keys | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """`resumption`: the past that the program meets again; `keys`: of calls that it makes again; `reuse`: the
        earlier runs that may answer it."""
        catalog, funnel = context.catalog, context.secrecy.of(sandbox.trajectory)
        self.sandbox, self._gate = sandbox, gate
        self.recorder = Recorder(catalog, funnel, sandbox, listener, keys, context.ownership)
        self.replay = (
            NoReplay(sandbox, catalog) if resumption is None else Retracing(context, places, self.recorder, resumption)
        )
        self.reuse = NoReuse() if reuse is None else ReusedCalls(context, places, self.recorder, self.replay, reuse)
        self.conversation = ProgramConversation(catalog, self.recorder, self.replay)
        self._was_answered = self.is_answered
        """The program has been told so."""

    @property
    def is_answered(self) -> bool:
        """True if the program's next calls may be answered from records: its own, or those of earlier runs."""
        return self.replay.replaying or self.reuse.active

    def announce_live(self) -> bool:
        """Returns True once: with the first answer after which nothing is answered from records."""
        with self.replay.lock:
            before, self._was_answered = self._was_answered, self.is_answered
            return before and not self._was_answered

    def begin(self, intent: Intent, cancelled: threading.Event) -> Answer:
        """Carry out `call_begin`. `cancelled` is set when the caller is gone. Denied, Diverged, Conflict,
        LimitExceeded, OutOfSpace."""
        answer = self.replay.answer(intent)
        if answer is not None:
            return answer
        admitted = self.admit(intent, cancelled) if intent.kind is EntryKind.TOOL else intent
        return self.reuse.answer(admitted) or self._run(admitted, edited=admitted is not intent)

    def admit(self, intent: Intent, cancelled: threading.Event, details: dict[str, Any] | None = None) -> Intent:
        """Ask policy and people, and return the intent as it may run: a person may have edited its arguments. Denied,
        which is recorded, with `details`; Conflict."""
        recorder = self.recorder
        conceal = recorder.funnel.conceal
        try:
            approval = self._gate.admit(
                WaitingCaller(self.sandbox, recorder.step, cancelled),
                CallID(intent.call_id),
                intent.name,
                conceal(intent.arguments),
                intent.side_effect,
                asked=conceal(intent.approve),
            )
        except Denied as denied:
            recorder.record_denial(intent, denied.message, details)
            raise
        if approval is None or approval.edited is None:
            return intent
        return replace(intent, arguments=recorder.funnel.reveal(approval.edited[0]))

    def _run(self, intent: Intent, *, edited: bool) -> Answer:
        """Record that the call begins, and have it run."""
        opened = self.recorder.begin(intent)
        answer: Answer = {"arguments": intent.arguments} if edited else {}
        if self.announce_live():
            answer["live"] = True
        return {**answer, "key": self.recorder.funnel.reveal(opened.entry.key)}

    def repeat(self, intent: Intent) -> Answer | None:
        """The answer to a `call_begin` that is sent again, as far as the first one was carried out; None: it was not."""
        opened = self.recorder.reopen(intent.call_id)
        if opened is None:
            return self.reuse.repeat(intent.call_id)
        entry, funnel = opened.entry, self.recorder.funnel
        edited = entry.arguments != funnel.conceal(intent.arguments)
        return {
            "key": funnel.reveal(entry.key),
            **({"arguments": funnel.reveal(entry.arguments)} if edited else {}),
            "live": True,
        }

    def ask(self, question: Question, cancelled: threading.Event) -> Approval:
        """Ask a person, and wait for the answer. The words have gone through the funnel. Conflict."""
        return self._gate.ask(WaitingCaller(self.sandbox, self.recorder.step, cancelled), question)
