"""The daemon's side of the in-sandbox library: it carries out an agent's requests."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.journal import store_requests
from snapshotd.engine.journal.call_output import CallOutput
from snapshotd.engine.journal.keyvalue import KeyValueStore
from snapshotd.engine.journal.pending import Open
from snapshotd.engine.journal.pipeline import Journal
from snapshotd.engine.protocol.agent_handler import (
    MESSAGE_LIMIT_BYTES,
    AgentHandler,
    Answer,
    BodyWriter,
    Intent,
    Outcome,
    Question,
    StoreOperation,
    StreamName,
)
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.secrecy import ConcealedWriter
from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.types import BlobID, CallID, EntryKind, Message

_QUESTION = "approve"
_STORE = "store"


class _Memory(io.BytesIO):
    """The reply of a model, which the journal holds itself."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MESSAGE_LIMIT_BYTES:
            raise LimitExceeded(f"a model's reply is over the limit of {MESSAGE_LIMIT_BYTES} bytes; return less of it")
        return super().write(data)

    def discard(self) -> None:
        self.close()


class AgentCalls(AgentHandler):
    """The handler of one live sandbox: its agents' requests go into its journal. Thread-safe."""

    def __init__(self, context: Context, journal: Journal, store: KeyValueStore) -> None:
        self._context, self._journal, self._sandbox = context, journal, journal.sandbox
        self._recorder, self._conversation = journal.recorder, journal.conversation
        self._output = CallOutput(context, self._sandbox.trajectory)
        self._carry_out = partial(store_requests.carry_out, context.secrecy, store, self._sandbox.trajectory)

    @property
    def closed(self) -> bool:
        return self._sandbox.closed

    def hello(self, pid: int) -> Answer:
        return {
            "trajectory": self._sandbox.trajectory.id,
            "snapshot": self._sandbox.head,
            "replaying": self._journal.is_answered,
        }

    # -- agents that come back -----------------------------------------------------------------------------------------

    def claim(self, pid: int, call_ids: tuple[str, ...]) -> set[str]:
        return self._recorder.pending.claim(call_ids)

    def find_end(self, call_id: str) -> str | None:
        entry = self._recorder.find(call_id)
        return None if entry is None or entry.status is None else entry.snapshot or self._sandbox.head

    def lose(self, pid: int, call_ids: tuple[str, ...]) -> None:
        self._recorder.pending.lose(call_ids)
        for call_id in call_ids:
            self._output.discard(call_id)

    def restore(self) -> None:
        """Restore the output so far of the open calls, from the events of the run."""
        for event in self._context.events.follow(self._sandbox.trajectory.id, wait=False):
            call_id = event.get("call")
            if (
                event["event"] == "output"
                and call_id is not None
                and self._recorder.pending.find_open(call_id) is not None
            ):
                self._output.restore(call_id, event["stream"], base64.b64decode(event["data_b64"]), event.get("rid"))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool = False) -> Answer:
        known = self._journal.repeat(intent) if again else None
        return self._journal.begin(intent, cancelled) if known is None else known

    def body_writer(self, call_id: str) -> BodyWriter:
        opened = self._recorder.pending.find_open(call_id)
        return _Memory() if opened is not None and opened.entry.kind is EntryKind.MODEL else self._writer()

    def _writer(self) -> ConcealedWriter:
        return ConcealedWriter(self._context.spool, self._recorder.funnel)

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        opened = self._recorder.pending.close(call_id)
        if opened.entry.kind is not EntryKind.TOOL:
            self._output.discard(call_id)
        if opened.entry.kind is EntryKind.MODEL:
            usage = {} if outcome.usage is None else {"usage": outcome.usage}
            self._recorder.end_model(opened, outcome.status, _json(outcome.result), outcome.error, usage)
            return self._sandbox.head
        if opened.entry.kind is EntryKind.TASK:
            return self._end_task(opened, outcome)
        call = opened.outcome(
            outcome.status,
            error=self._recorder.funnel.conceal(outcome.error),
            exit_code=outcome.exit_code,
            **self._output.save(call_id),
            output=self._save(outcome.result),
        )
        return self._recorder.end_step(opened, call).id

    def _end_task(self, opened: Open, outcome: Outcome) -> str:
        entry = opened.entry
        recorded = self._journal.replay.meet_call(EntryKind.TASK, entry.name, entry.arguments)
        if recorded is not None:
            return recorded.entry.snapshot or self._sandbox.head
        error = self._recorder.funnel.conceal(outcome.error)
        call = opened.outcome(
            outcome.status, error=error, exit_code=outcome.exit_code, output=self._save(outcome.result)
        )
        return self._recorder.complete(
            EntryKind.TASK,
            entry.name,
            entry.arguments,
            replace(call, name="task", arguments={"name": entry.name}),
            began_at_ns=entry.began_at_ns,
            details={"task": entry.details["task"]} if "task" in entry.details else {},
        ).id

    def _save(self, result: bytes | BodyWriter | None) -> BlobID | None:
        if result is None:
            return None
        writer = result if isinstance(result, ConcealedWriter) else self._writer()
        try:
            if isinstance(result, bytes):
                writer.write(result)
            return writer.save()
        finally:
            writer.discard()

    def output(self, call_id: str, stream: StreamName, data: bytes, rid: str | None = None) -> None:
        if self._recorder.pending.find_open(call_id) is not None:
            self._output.write(call_id, stream, data, rid)

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool = False) -> Answer:
        recorder = self._recorder
        taken = recorder.find_snapshot(call_id) if again else None
        if taken is not None:
            return {"snapshot": taken.id, "live": True}
        arguments = recorder.funnel.conceal({"name": name})
        call = replace(marker("checkpoint", arguments), id=CallID(call_id))
        recorder.pending.mark_beyond(within)
        if within is not None:
            return {"snapshot": recorder.step(call).id}
        recorded = self._journal.replay.meet_call(EntryKind.CHECKPOINT, "checkpoint", arguments)
        if recorded is not None:
            return {"snapshot": recorded.entry.snapshot}
        taken = recorder.complete(
            EntryKind.CHECKPOINT, "checkpoint", arguments, call, began_at_ns=time.time_ns(), details={}
        )
        return {"snapshot": taken.id, **self._live()}

    def approve(self, pid: int, question: Question, cancelled: threading.Event, *, again: bool = False) -> Answer:
        recorder, within = self._recorder, question.within
        reveal = recorder.funnel.reveal
        known = recorder.find(question.call_id) if again else None
        if known is not None:
            return {**reveal(known.result), "live": True}
        recorder.pending.mark_beyond(within)
        arguments = recorder.funnel.conceal({"question": question.question, "details": question.details})
        recorded = self._journal.replay.meet_call(EntryKind.QUESTION, _QUESTION, arguments) if within is None else None
        if recorded is not None:
            return dict(recorded.entry.result)
        began = time.time_ns()
        approval = self._journal.ask(replace(question, **arguments), cancelled)
        answer: Answer = {"approved": approval.status == "approved", "by": approval.by, "reason": approval.reason}
        if approval.edited is not None:
            answer["answer"] = approval.edited[0]
        if within is not None:
            return dict(reveal(answer))
        recorder.record_question(CallID(question.call_id), _QUESTION, arguments, answer, began_at_ns=began)
        return {**reveal(answer), **self._live()}

    def _live(self) -> Answer:
        return {"live": True} if self._journal.announce_live() else {}

    # -- conversation, state, store ------------------------------------------------------------------------------------

    def fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        return self._conversation.record_fact(kind, value, rid)

    def message(self, role: str, content: Any, within: str | None, rid: str | None = None) -> None:
        self._conversation.add(Message(role, content), within, rid)

    def messages(self, offset: int, limit: int) -> list[Message]:
        return self._conversation.page(offset, limit)

    def state(self) -> dict[str, Any]:
        return self._conversation.values()

    def state_set(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        self._conversation.set_value(key, value, within)

    def task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> Answer:
        return {"status": self._conversation.set_task(name, status, depends, note)}

    def tasks(self) -> list[dict[str, Any]]:
        return self._conversation.tasks()

    def store(self, op: StoreOperation, fields: dict[str, Any], within: str | None, rid: str | None = None) -> Answer:
        """A request that the program itself makes to the store is a recorded fact: a replay neither sees newer values
        nor writes again. A request from inside a call is not recorded: the replay answers the whole call."""
        self._recorder.pending.mark_beyond(within)
        if within is not None:
            return self._carry_out(op, fields, rid)
        known = self._conversation.find_fact(_STORE, rid)
        if known is not None:
            return known[0] if "body" not in known[0] else {"body": known[0]["body"].encode()}
        answer = self._carry_out(op, fields, rid)
        fact = {"body": answer["body"].decode()} if "body" in answer else answer
        self._conversation.record_fact(_STORE, fact, rid)
        return answer


def _json(result: bytes | BodyWriter | None) -> Any:
    data = result.getvalue() if isinstance(result, _Memory) else result
    if data is None:
        return None
    assert isinstance(data, bytes)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the reply of a model call is not JSON ({exc}); send its JSON text") from exc
