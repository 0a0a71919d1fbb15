"""The journal of an agent that does not use our library: the recording gateway reads its mind from the wire.

    a request with tool results   ends the tool calls of the turn before it, each with a snapshot, while the model already thinks
    a request                     is a MODEL entry: its outline (the messages themselves are the conversation)
    a reply                       is that entry's result, as it came; what the model says joins the conversation, tools are intents

In a replay recorded replies are sent again. The agent runs its tools itself, and when it hands in their results its
files are made the recorded ones; where the journal ends with a reply, they go live before the agent has it. Requests
are compared by what the model and the user said first, not by what tools answered: times and paths differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.mind.approvals import Gate
from snapshotd.engine.mind.pending import Open
from snapshotd.engine.mind.recorder import Recorder
from snapshotd.engine.mind.replay import OF_MODEL, REPLY_DENIED
from snapshotd.engine.protocol.agent_handler import Intent
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord
from snapshotd.errors import Denied, SnapshotdError, Unsupported
from snapshotd.gateway.base import (
    REPLAY_LIMIT_BYTES,
    ModelCall,
    RecordedReply,
    ReplyContent,
    ToolResult,
    TurnReply,
    TurnRequest,
)
from snapshotd.types import CallID, CallStatus, EntryKind, JournalEntry, Message, ToolCall, new_id

MAX_DIALOGS = 16
"""Conversations of one sandbox that are told apart (an agent may have sub-agents); the one used longest ago is
forgotten."""
MAX_OPEN_TOOLS = 1000
_OUTLINE_CHARS = 300


@dataclass(slots=True)
class _Dialog:
    """One conversation as the agent sends it: the digests of its messages, in order."""

    number: int
    digests: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Turn:
    """A turn in the course of forwarding."""

    opened: Open
    dialog: _Dialog
    step: threading.Thread | None = None
    failure: SnapshotdError | None = None


class ModelCalls:
    """Implements `gateway.base.GatewayHandler` for one sandbox. Thread-safe."""

    def __init__(self, context: Context, recorder: Recorder, gate: Gate) -> None:
        self._context, self._recorder, self._gate = context, recorder, gate
        self._dialogs: list[_Dialog] = []
        self._began = 0
        """Number of conversations so far."""
        self._tools: dict[str, Open] = {}
        """Tool calls that the model has asked for and the agent not answered, by the provider's id."""
        self._unclosed: set[str] = set()
        """The calls among them that an earlier daemon opened: the agent may have sent it their results."""
        self._resumed: set[int] = set()
        """Conversations of an earlier daemon that no request has continued yet."""
        self._turns: dict[int, _Turn] = {}
        self._lock = threading.Lock()

    def turn(self, request: TurnRequest) -> RecordedReply | None:
        """See `GatewayHandler.turn`."""
        dialog, known = self._dialog(request)
        replaying = self._recorder.replaying
        results = [result for result in self._results(request, known) if not self._replayed_result(result)]
        outline = _outline(request)
        replayed = self._recorder.replayed(EntryKind.MODEL, request.model[:200], outline)
        if replayed is not None:
            return self._again(request, dialog, known, replayed.entry)
        if dialog.number in self._resumed:
            unheard = self._unheard(request, dialog, known, outline)
            if unheard is not None:
                return unheard
        if replaying:  # it has just gone live: the tools' results, for one, may be in the conversation already
            self._recorder.met(request.new_messages(known))
        else:
            for number, message in enumerate(request.new_messages(known)):
                self._recorder.message(message, rid=_rid(dialog, known, number, message))
        self._heard(dialog, known, request.digests[known:])
        opened = self._recorder.begin(Intent(new_id(), request.model[:200], outline, EntryKind.MODEL))
        self._note({"turn": opened.entry.id})
        turn = _Turn(opened, dialog)
        with self._lock:
            self._turns[id(request)] = turn
        if results:
            turn.step = threading.Thread(target=self._close_tools, args=(turn, results), name="gateway-step")
            turn.step.start()
        return None

    def replied(self, request: TurnRequest, reply: TurnReply) -> None:
        """See `GatewayHandler.replied`."""
        with self._lock:
            turn = self._turns.pop(id(request))
        if turn.step is not None:
            turn.step.join()
        self._recorder.pending.take(turn.opened.entry.id)
        content = reply.content
        calls = [] if reply.failed else list(content.calls)
        details = {"gateway": True, "usage": _usage(reply), "stop_reason": content.stop_reason}
        result = _result(reply, calls)
        status = CallStatus.FAILED if reply.failed or turn.failure is not None else CallStatus.DONE
        error = reply.error or content.error or (f"the provider answered {reply.status}" if reply.failed else None)
        if turn.failure is not None:  # its snapshot is missing, so the agent must not go on from it: it gets the error
            error = turn.failure.message
        self._recorder.end_model(turn.opened, status, result, error, details)
        if turn.failure is not None:
            raise turn.failure
        if reply.failed:
            return
        self._said(turn.dialog, content)
        for call in calls:
            self._open_tool(call, turn.opened.entry)

    # -- tools ---------------------------------------------------------------------------------------------------------

    def _open_tool(self, call: ModelCall, model: JournalEntry) -> None:
        """The model asks for a tool, and the agent has not heard of it yet: the moment to ask a person. Denied."""
        with self._lock:
            if call.id in self._tools:
                return
            while len(self._tools) >= MAX_OPEN_TOOLS:
                self._recorder.pending.lost([self._tools.pop(next(iter(self._tools))).entry.id])
        intent = Intent(new_id(), call.name[:200] or "tool", call.arguments)
        try:
            self._gate.admit(
                self._recorder.sandbox,
                CallID(intent.call_id),
                intent.name,
                self._recorder.funnel.conceal(call.arguments),
                intent.side_effect,
                asked=False,
                expires_s=None,
                step=self._recorder.step,
                cancelled=threading.Event(),  # the gate notices the sandbox's end
            )
        except Denied as denied:
            self._recorder.refused(intent, denied.message, {"gateway": True, OF_MODEL: model.id})
            raise
        opened = self._recorder.begin(intent)
        self._note({"tool": call.id, "entry": opened.entry.id})
        with self._lock:
            self._tools[call.id] = opened

    def _results(self, request: TurnRequest, known: int) -> list[ToolResult]:
        """The tool results that a request brings, and the ones that an earlier daemon received and did not process."""
        with self._lock:
            missed = (
                [result for result in request.results_since(0) if result.id in self._unclosed] if self._unclosed else []
            )
            self._unclosed.difference_update(result.id for result in missed)
        new = {result.id for result in missed}
        return [*missed, *(result for result in request.results_since(known) if result.id not in new)]

    def _close_tools(self, turn: _Turn, results: list[ToolResult]) -> None:
        try:
            for result in results:
                self._close_tool(result)
        except SnapshotdError as exc:
            turn.failure = exc

    def _close_tool(self, result: ToolResult) -> None:
        with self._lock:
            opened = self._tools.pop(result.id, None)
        if opened is None:
            opened = self._recorder.begin(Intent(new_id(), (result.name or "tool")[:200], None))
        self._recorder.pending.take(opened.entry.id)
        writer = self._context.spool.writer()
        try:
            writer.write(
                json.dumps(self._recorder.funnel.conceal(result.content), ensure_ascii=False).encode("utf-8", "replace")
            )
            call = ToolCall(
                id=opened.entry.id,
                name=opened.entry.name,
                arguments=opened.entry.arguments,
                status=CallStatus.FAILED if result.is_error else CallStatus.DONE,
                started_at_ns=opened.entry.began_at_ns,
                duration_ns=time.perf_counter_ns() - opened.clock_ns,
                output=writer.save(),
            )
        finally:
            writer.discard()
        self._recorder.end_step(opened, call)

    # -- replay --------------------------------------------------------------------------------------------------------

    def _replayed_result(self, result: ToolResult) -> bool:
        """True if the journal records the tool's end. The files are then as they were."""
        with self._lock:
            met = self._tools.get(result.id)
        if not self._recorder.replaying or met is None:
            return False
        if self._recorder.replayed(EntryKind.TOOL, met.entry.name, met.entry.arguments) is None:
            return False
        with self._lock:
            self._tools.pop(result.id, None)
        return True

    def _again(self, request: TurnRequest, dialog: _Dialog, known: int, entry: JournalEntry) -> RecordedReply:
        """A recorded reply, with the tools that it asks for: the agent runs them again, and a tool whose end is not
        recorded runs for real."""
        recorded = _recorded(entry)
        content = request.reader.read_again(request, recorded) if entry.status is CallStatus.DONE else ReplyContent()
        self._heard(dialog, known, [*request.digests[known:], *content.digests])
        self._recorder.met([*request.new_messages(known), *content.messages])
        if REPLY_DENIED in entry.details:
            return replace(recorded, status=Denied.http_status, error=entry.details[REPLY_DENIED])
        live = self._recorder.live_if_exhausted()
        for call in entry.result["calls"]:
            if live:
                self._open_tool(ModelCall(call["id"], call["name"], call["arguments"]), entry)
            else:
                with self._lock:
                    self._tools[call["id"]] = self._recorder.unrecorded(call["name"], call["arguments"])
        return recorded

    # -- conversations -------------------------------------------------------------------------------------------------

    def _said(self, dialog: _Dialog, content: ReplyContent) -> None:
        """The model's words join the conversation."""
        at = len(dialog.digests)
        for number, message in enumerate(content.messages):
            self._recorder.message(message, rid=_rid(dialog, at, number, message))
        self._heard(dialog, at, content.digests)

    def _unheard(
        self, request: TurnRequest, dialog: _Dialog, known: int, outline: dict[str, Any]
    ) -> RecordedReply | None:
        """Returns a recorded reply that the agent never received: the daemon was killed in between, and the agent
        repeats its request. The rest of the reply's recording is completed here, as far as it is missing."""
        self._resumed.discard(dialog.number)
        entry = self._recorder.reply(request.model[:200], outline) if known == len(request.digests) else None
        if entry is None:
            return None
        recorded = _recorded(entry)
        if len(dialog.digests) == known:
            self._said(dialog, request.reader.read_again(request, recorded))
        for call in entry.result["calls"]:
            self._open_tool(ModelCall(call["id"], call["name"], call["arguments"]), entry)
        return recorded

    def _heard(self, dialog: _Dialog, at: int, digests: Sequence[bytes]) -> None:
        """A conversation goes on, from message number `at`."""
        dialog.digests[at:] = digests
        self._note({"dialog": dialog.number, "at": at, "digests": [digest.hex() for digest in digests]})

    def _note(self, fields: dict[str, Any]) -> None:
        """Something that the gateway of another daemon has to know."""
        if self._recorder.sandbox.live is not None:
            self._recorder.sandbox.live.wire(fields)

    def restore(self, record: LiveRecord) -> None:
        """Go on where the gateway of an earlier daemon was killed. A request that was being forwarded is repeated by
        its client."""
        dialogs: dict[int, _Dialog] = {}
        for line in live.wire(record.directory):
            if "dialog" in line:
                dialog = dialogs.pop(line["dialog"], None) or _Dialog(line["dialog"])
                dialog.digests[line["at"] :] = map(bytes.fromhex, line["digests"])
                dialogs[dialog.number] = dialog  # the one used last comes last
            elif "turn" in line:
                self._recorder.cut_off(line["turn"])
            else:
                opened = self._recorder.pending.opened(line["entry"])
                if opened is not None:
                    self._tools[line["tool"]] = opened
                    self._unclosed.add(line["tool"])
        self._dialogs = list(dialogs.values())[-MAX_DIALOGS:]
        self._resumed = set(dialogs)
        self._began = max(dialogs, default=-1) + 1

    def _dialog(self, request: TurnRequest) -> tuple[_Dialog, int]:
        """The conversation that a request continues, and the number of its messages that are known."""
        with self._lock:
            found = max(self._dialogs, key=lambda one: request.matching_prefix(one.digests), default=None)
            known = 0 if found is None else request.matching_prefix(found.digests)
            if found is None or known == 0:
                found = _Dialog(self._began)
                self._began += 1
                self._dialogs.append(found)
                del self._dialogs[:-MAX_DIALOGS]
            else:
                self._dialogs.remove(found)
                self._dialogs.append(found)
        return found, known


def _rid(dialog: _Dialog, at: int, number: int, message: Message) -> str:
    """Name under which a message is recognised if it comes again: its place and a hash of its content, since an agent
    may take back its last messages."""
    text = json.dumps([message.role, message.content], sort_keys=True)
    return f"{dialog.number}:{at}:{number}:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _outline(request: TurnRequest) -> dict[str, Any]:
    """A short form of a request: a replay compares it, and a person sees it where the two differ. It leaves out the
    results of tools."""
    first = next(
        (number for number, item in enumerate(request.items) if request.reader.from_model(item)), len(request.items)
    )
    fixed = hashlib.sha256()
    for number, (item, digest) in enumerate(zip(request.items, request.digests, strict=True)):
        fixed.update(digest if number < first or request.reader.from_model(item) else b"answer")
    opening = request.new_messages(max(0, first - 1), limit=1)
    return {
        "api": str(request.api),
        "stream": request.stream,
        "messages": len(request.items),
        "digest": fixed.hexdigest(),
        "prompt": _shown(opening[0]) if opening else None,
    }


def _shown(message: Message) -> str:
    content = message.content
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text[:_OUTLINE_CHARS]


def _usage(reply: TurnReply) -> dict[str, int]:
    usage = reply.content.usage
    numbers = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cached_tokens": usage.cached_tokens,
    }
    return {name: number for name, number in numbers.items() if number is not None}


def _result(reply: TurnReply, calls: list[ModelCall]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    if reply.body is not None:
        try:
            body = {"body": reply.body.decode()}
        except UnicodeDecodeError:
            body = {"body_b64": base64.b64encode(reply.body).decode()}
    return {
        "status": reply.status,
        "content_type": reply.content_type,
        "complete": reply.complete,
        **body,
        "calls": [{"id": call.id, "name": call.name[:200] or "tool", "arguments": call.arguments} for call in calls],
    }


def _recorded(entry: JournalEntry) -> RecordedReply:
    """The reply of an entry, to be sent again. Unsupported: it was not kept."""
    result = entry.result
    if "body_b64" in result:
        return RecordedReply(
            result["status"], result["content_type"], base64.b64decode(result["body_b64"]), result["complete"]
        )
    if "body" in result:
        return RecordedReply(result["status"], result["content_type"], result["body"].encode(), result["complete"])
    if entry.status is CallStatus.DONE:
        raise Unsupported(
            f"a reply of more than {REPLAY_LIMIT_BYTES} bytes was not kept, so nothing behind it can be replayed; fork a snapshot "
            "without resuming, and start an agent there"
        )
    return RecordedReply(result["status"], "application/json", b"", error=entry.error or "the provider did not answer")
