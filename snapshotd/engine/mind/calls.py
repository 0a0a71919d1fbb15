"""The daemon's side of the in-sandbox library: it carries out an agent's requests. One `AgentCalls` serves one
container."""

from __future__ import annotations

import base64
import io
import json
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from snapshotd.engine.context import Context
from snapshotd.engine.mind.answers import as_recorded
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.keyvalue import KeyValueStore
from snapshotd.engine.mind.pending import Open
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import DENIED, Elsewhere
from snapshotd.engine.protocol.agent_handler import MESSAGE_LIMIT_BYTES, Answer, BodyWriter, Intent, Outcome
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.engine.sandbox.step import marker
from snapshotd.engine.secrecy import ConcealedWriter
from snapshotd.errors import Conflict, Denied, LimitExceeded, NotFound, UsageError
from snapshotd.types import BlobID, CallID, EntryKind, Message, ToolCall

_QUESTION = "approve"
_STORE = "store"


@dataclass(slots=True)
class _Output:
    """Output so far of a running call."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    writers: dict[str, ConcealedWriter] = field(default_factory=dict)
    last: str | None = None
    """The request that brought the newest piece."""


class _Memory(io.BytesIO):
    """The reply of a model, which the journal holds itself."""

    def write(self, data: Any) -> int:
        if self.tell() + len(data) > MESSAGE_LIMIT_BYTES:
            raise LimitExceeded(f"a model's reply is over the limit of {MESSAGE_LIMIT_BYTES} bytes; return less of it")
        return super().write(data)

    def discard(self) -> None:
        self.close()


class AgentCalls:
    """Implements `agent_handler.AgentHandler`. Before `bind` a container has no trajectory and every call is
    refused."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.open = threading.Event()
        """The daemon answers no agent before this is set."""
        self.open.set()
        self._sandbox: Sandbox | None = None
        self._gate: Gate | None = None
        self._store: KeyValueStore | None = None
        self._output: dict[str, _Output] = {}
        self.recorder: Recorder | None = None

    def bind(
        self, sandbox: Sandbox, recorder: Recorder | None, gate: Gate | None = None, store: KeyValueStore | None = None
    ) -> None:
        """From now on calls are recorded for this sandbox's trajectory. Without a recorder (a throw-away sandbox) they
        are answered, so that programs run there as anywhere, and nothing is recorded."""
        self._sandbox, self.recorder, self._gate, self._store = sandbox, recorder, gate, store

    def _bound(self) -> Sandbox:
        if self._sandbox is None or self._sandbox.closed:
            raise Conflict("this sandbox belongs to no trajectory (yet, or any more); nothing was recorded")
        return self._sandbox

    def hello(self, pid: int) -> Answer:
        self.open.wait()
        sandbox = self._bound()
        replaying = self.recorder is not None and self.recorder.is_answered
        return {"trajectory": sandbox.trajectory.id, "snapshot": sandbox.head, "replaying": replaying}

    # -- agents that come back -----------------------------------------------------------------------------------------

    def claim(self, pid: int, call_ids: tuple[str, ...]) -> set[str]:
        return set(call_ids) if self.recorder is None else self.recorder.pending.claim(call_ids)

    def ended(self, call_id: str) -> str | None:
        entry = None if self.recorder is None else self.recorder.known(call_id)
        if entry is None or entry.status is None:
            return None
        return entry.snapshot or self._bound().head

    def restore(self) -> None:
        """Restore the output so far of the open calls, from the events of the run."""
        assert self.recorder is not None
        for event in self._context.events.follow(self._bound().trajectory.id, wait=False):
            call_id = event.get("call")
            if event["event"] == "output" and call_id is not None and self.recorder.pending.opened(call_id) is not None:
                output = self._output.setdefault(call_id, _Output())
                output.last = event.get("rid")
                self._stream(call_id, output, event["stream"]).restore(base64.b64decode(event["data_b64"]))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call_begin(self, pid: int, intent: Intent, cancelled: threading.Event, *, again: bool = False) -> Answer:
        sandbox, recorder = self._bound(), self.recorder
        if recorder is None:
            return {"key": intent.key or intent.call_id}
        opened = recorder.reopened(intent.call_id) if again else None
        if opened is not None:
            return self._begun(recorder, opened, intent)
        before = recorder.reused_before(intent.call_id) if again else None
        if before is not None:
            return as_recorded(self._context, recorder.funnel, before)
        if intent.kind is EntryKind.TASK:
            recorded = (
                recorder.replay.skipped_task(recorder.funnel.conceal_text(intent.name)) if intent.skippable else None
            )
        else:
            try:
                recorded = recorder.replay.replayed(
                    intent.kind, intent.name, intent.arguments, intent.task, waits=intent.waits
                )
            except Elsewhere:
                return {"later": True}
        if recorded is not None:
            if DENIED in recorded.entry.details:
                raise Denied(recorded.entry.error or f"{intent.name} was not let run")
            return as_recorded(self._context, recorder.funnel, recorded)
        answer: Answer = {}
        if intent.kind is EntryKind.TOOL and self._gate is not None:
            try:
                verdict = self._gate.admit(
                    sandbox,
                    CallID(intent.call_id),
                    intent.name,
                    recorder.funnel.conceal(intent.arguments),
                    intent.side_effect,
                    asked=recorder.funnel.conceal(intent.approve),
                    expires_s=None,
                    step=recorder.step,
                    cancelled=cancelled,
                )
            except Denied as denied:
                recorder.refused(intent, denied.message)
                raise
            if verdict.approval is not None and verdict.approval.edited is not None:
                answer["arguments"] = recorder.funnel.reveal(verdict.arguments)
                intent = replace(intent, arguments=answer["arguments"])
        reused = recorder.reused(intent)
        if reused is not None:
            return reused
        opened = recorder.begin(intent)
        if recorder.take_live():
            answer["live"] = True
        return {**answer, "key": recorder.funnel.reveal(opened.entry.key)}

    def _begun(self, recorder: Recorder, opened: Open, intent: Intent) -> Answer:
        """The answer that did not arrive: the call has begun."""
        reveal = recorder.funnel.reveal
        changed = opened.entry.arguments != recorder.funnel.conceal(intent.arguments)
        return {
            "key": reveal(opened.entry.key),
            **({"arguments": reveal(opened.entry.arguments)} if changed else {}),
            "live": True,
        }

    def body_writer(self, call_id: str) -> BodyWriter:
        opened = None if self.recorder is None else self.recorder.pending.opened(call_id)
        if opened is not None and opened.entry.kind is EntryKind.MODEL:
            return _Memory()
        return self._writer()

    def _writer(self) -> ConcealedWriter:
        return ConcealedWriter(self._context.spool, self._context.secrecy.of(self._bound().trajectory))

    def call_end(self, pid: int, call_id: str, outcome: Outcome) -> str:
        sandbox, recorder = self._bound(), self.recorder
        if recorder is None:
            return sandbox.head
        opened = recorder.pending.take(call_id)
        output = self._output.pop(call_id, None)
        try:
            if opened.entry.kind is EntryKind.MODEL:
                recorder.end_model(opened, outcome.status, _json(outcome.result), outcome.error, _usage(outcome))
                return sandbox.head
            if opened.entry.kind is EntryKind.TASK:
                return self._end_task(recorder, opened, outcome)
            saved = {} if output is None else {stream: writer.save() for stream, writer in output.writers.items()}
            call = ToolCall(
                id=opened.entry.id,
                name=opened.entry.name,
                arguments=opened.entry.arguments,
                status=outcome.status,
                started_at_ns=opened.entry.began_at_ns,
                duration_ns=time.perf_counter_ns() - opened.clock_ns,
                exit_code=outcome.exit_code,
                error=recorder.funnel.conceal(outcome.error),
                output=self._save(outcome.result),
                stdout=saved.get("stdout"),
                stderr=saved.get("stderr"),
            )
            return recorder.end_step(opened, call).id
        finally:
            if output is not None:
                for writer in output.writers.values():
                    writer.discard()

    def _end_task(self, recorder: Recorder, opened: Open, outcome: Outcome) -> str:
        entry = opened.entry
        recorded = recorder.replay.replayed(EntryKind.TASK, entry.name, entry.arguments)
        if recorded is not None:
            return recorded.entry.snapshot or recorder.sandbox.head
        call = ToolCall(
            id=entry.id,
            name="task",
            arguments={"name": entry.name},
            status=outcome.status,
            started_at_ns=entry.began_at_ns,
            duration_ns=time.perf_counter_ns() - opened.clock_ns,
            exit_code=outcome.exit_code,
            error=recorder.funnel.conceal(outcome.error),
            output=self._save(outcome.result),
        )
        details = {"task": entry.details["task"]} if "task" in entry.details else {}
        return recorder.complete(
            EntryKind.TASK, entry.name, entry.arguments, call, began_at_ns=entry.began_at_ns, details=details
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

    def output(self, call_id: str, stream: Literal["stdout", "stderr"], data: bytes, rid: str | None = None) -> None:
        self._bound()
        if self.recorder is None or self.recorder.pending.opened(call_id) is None:
            return
        written = self._output.get(call_id)
        if written is not None and rid is not None and written.last == rid:
            return
        output = self._output.setdefault(call_id, _Output())
        with output.lock:
            output.last = rid
            self._stream(call_id, output, stream).write(data)

    def _stream(self, call_id: str, output: _Output, stream: Literal["stdout", "stderr"]) -> ConcealedWriter:
        """The writer for one stream of a call. All pieces of the stream pass one concealer, because a secret may begin
        in one piece and end in another. If the daemon is killed, the bytes that the concealer holds back are neither
        shown nor kept."""
        trajectory = self._bound().trajectory

        def shown(data: bytes) -> None:
            log = self._context.events.live(trajectory.id)
            if log is not None:
                encoded = base64.b64encode(data).decode()
                log.append(
                    {"event": "output", "stream": stream, "data_b64": encoded, "call": call_id, "rid": output.last}
                )

        if stream not in output.writers:
            output.writers[stream] = ConcealedWriter(self._context.spool, self._context.secrecy.of(trajectory), shown)
        return output.writers[stream]

    def lost(self, pid: int, call_ids: tuple[str, ...]) -> None:
        """A connection ended with calls open. Their ends will never come."""
        if self.recorder is not None:
            self.recorder.pending.lost(call_ids)
        for call_id in call_ids:
            output = self._output.pop(call_id, None)
            for writer in output.writers.values() if output is not None else ():
                writer.discard()

    def checkpoint(self, pid: int, call_id: str, name: str, within: str | None, *, again: bool = False) -> Answer:
        sandbox, recorder = self._bound(), self.recorder
        if recorder is None:
            return {"snapshot": sandbox.head}
        arguments = recorder.funnel.conceal({"name": name})
        taken = recorder.taken(call_id) if again else None
        if taken is not None:
            return {"snapshot": taken.id, "live": True}
        call = replace(marker("checkpoint", arguments), id=CallID(call_id))
        recorder.pending.beyond(within)
        if within is not None:
            return {"snapshot": recorder.step(call).id}
        recorded = recorder.replay.replayed(EntryKind.CHECKPOINT, "checkpoint", arguments)
        if recorded is not None:
            return {"snapshot": recorded.entry.snapshot}
        taken = recorder.complete(
            EntryKind.CHECKPOINT, "checkpoint", arguments, call, began_at_ns=time.time_ns(), details={}
        )
        return {"snapshot": taken.id, **({"live": True} if recorder.take_live() else {})}

    def approve(
        self,
        pid: int,
        call_id: str,
        question: str,
        details: Any,
        expires_s: float | None,
        within: str | None,
        cancelled: threading.Event,
        *,
        again: bool = False,
    ) -> Answer:
        sandbox, recorder = self._bound(), self.recorder
        if recorder is None or self._gate is None:
            raise Denied("nobody can be asked in a throw-away sandbox; run the agent in a trajectory of its own")
        known = recorder.known(call_id) if again else None
        if known is not None:
            return {**recorder.funnel.reveal(known.result), "live": True}
        recorder.pending.beyond(within)
        arguments = recorder.funnel.conceal({"question": question, "details": details})
        recorded = recorder.replay.replayed(EntryKind.QUESTION, _QUESTION, arguments) if within is None else None
        if recorded is not None:
            return dict(recorded.entry.result)
        began = time.time_ns()
        approval = self._gate.question(
            sandbox,
            CallID(call_id),
            arguments["question"],
            arguments["details"],
            expires_s=expires_s,
            step=recorder.step,
            cancelled=cancelled,
        )
        answer: Answer = {"approved": approval.status == "approved", "by": approval.by, "reason": approval.reason}
        if approval.edited is not None:
            answer["answer"] = approval.edited[0]
        if within is not None:
            return {**recorder.funnel.reveal(answer)}
        recorder.answered(CallID(call_id), _QUESTION, arguments, answer, began_at_ns=began)
        return {**recorder.funnel.reveal(answer), **({"live": True} if recorder.take_live() else {})}

    # -- conversation, state, store ------------------------------------------------------------------------------------

    def fact(self, kind: str, value: Any, rid: str | None = None) -> Any:
        self._bound()
        return value if self.recorder is None else self.recorder.fact(kind, value, rid)

    def message(self, role: str, content: Any, within: str | None, rid: str | None = None) -> None:
        self._bound()
        if self.recorder is not None:
            self.recorder.message(Message(role, content), within, rid)

    def messages(self, offset: int, limit: int) -> list[Message]:
        self._bound()
        return [] if self.recorder is None else self.recorder.messages(offset, limit)

    def state(self) -> dict[str, Any]:
        self._bound()
        return {} if self.recorder is None else self.recorder.state.values()

    def state_set(self, key: str, value: tuple[Any] | None, within: str | None = None) -> None:
        self._bound()
        if self.recorder is not None:
            self.recorder.set_value(key, value, within)

    def task(self, name: str, status: str, depends: tuple[str, ...], note: str | None) -> Answer:
        self._bound()
        if self.recorder is None:
            return {"status": status}
        conceal = self.recorder.funnel.conceal
        return {
            "status": self.recorder.set_task(conceal(name), status, tuple(conceal(list(depends))), conceal(note))[
                "status"
            ]
        }

    def tasks(self) -> list[dict[str, Any]]:
        sandbox = self._bound()
        found = list(sandbox.mind.state.get("tasks", ()))
        return found if self.recorder is None else list(self.recorder.funnel.reveal(found))

    def store(
        self,
        op: Literal["get", "put", "delete", "search"],
        fields: dict[str, Any],
        within: str | None,
        rid: str | None = None,
    ) -> Answer:
        """A request that the program itself makes to the store is a recorded fact: a replay neither sees newer values
        nor writes again. A request from inside a call is not recorded: the replay answers the whole call."""
        self._bound()
        if self.recorder is not None:
            self.recorder.pending.beyond(within)
        if self.recorder is None or within is not None:
            return self._stored(op, fields, rid)
        known = self.recorder.recorded_fact(_STORE, rid)
        if known is not None:
            return known[0] if "body" not in known[0] else {"body": known[0]["body"].encode()}
        answer = self._stored(op, fields, rid)
        self.recorder.fact(_STORE, {"body": answer["body"].decode()} if "body" in answer else answer, rid)
        return answer

    def _stored(self, op: Literal["get", "put", "delete", "search"], fields: dict[str, Any], rid: str | None) -> Answer:
        sandbox = self._bound()
        if self._store is None:
            raise UsageError(
                "the store cannot be reached from a throw-away sandbox; run the agent in a trajectory of its own"
            )
        shared = self._context.secrecy.shared(sandbox.trajectory)
        fields = shared.conceal(fields)
        tenant, namespace = self._context.secrecy.tenant(sandbox.trajectory), fields["namespace"]
        if op == "put":
            put = self._store.put(
                tenant,
                namespace,
                fields["key"],
                fields["value"],
                ttl_s=fields["ttl_s"],
                expected_version=fields["expected_version"],
                request=rid,
            )
            return {"version": put.version}
        if op == "delete":
            self._store.delete(
                tenant, namespace, fields["key"], expected_version=fields["expected_version"], request=rid
            )
            return {}
        if op == "get":
            try:
                found = self._store.get(tenant, namespace, fields["key"], fields["version"])
            except NotFound:
                return {}
            return {"value": shared.reveal(found.value), "version": found.version}
        rows = self._store.search(
            tenant,
            namespace,
            prefix=fields["prefix"],
            where=fields["where"],
            limit=fields["limit"],
            after=fields["after"],
        )
        listed = [
            {"key": row.key, "value": row.value, "version": row.version, "namespace": row.namespace} for row in rows
        ]
        return {"body": json.dumps(shared.reveal(listed), ensure_ascii=False).encode(errors="backslashreplace")}


def _json(result: bytes | BodyWriter | None) -> Any:
    data = result.getvalue() if isinstance(result, _Memory) else result
    if data is None:
        return None
    assert isinstance(data, bytes)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"the reply of a model call is not JSON ({exc}); send its JSON text") from exc


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {} if outcome.usage is None else {"usage": outcome.usage}
