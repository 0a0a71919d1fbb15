"""The agent's actions and words since the head of its trajectory: open calls, recorded values that wait for the next
entry, and messages, which the next snapshot binds.

All of it is in memory, and noted in the sandbox's live record as it happens, so that the daemon that comes after this
one goes on with it. Requests that an agent sends again, because it does not know whether they were heard, are
recognised by their `rid`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import Conflict, LimitExceeded, NotFound
from snapshotd.types import (
    BlobID,
    CallID,
    CallStatus,
    EntryKind,
    JournalEntry,
    Message,
    SideEffect,
    SnapshotID,
    ToolCall,
)

T = TypeVar("T")
MAX_OPEN_CALLS = 1024
MAX_PENDING_BYTES = 64 << 20
"""Limit for the messages since the last snapshot, as JSON: the daemon holds them in memory for one sandbox."""
MAX_FACTS = 100_000
"""Recorded values since the last entry."""
_REMEMBERED = 64
"""Requests that a process may send again: each has one on its way, and few processes live in a sandbox."""


@dataclass(slots=True)
class Open:
    """A call that has begun. `entry` of a task is recorded when it ends."""

    entry: JournalEntry
    clock_ns: int
    said: int = 0
    """Messages that were appended from within it."""
    beyond: bool = False
    """It did more than change files: state, store, a question or a checkpoint. No other run is answered with
    it."""

    def outcome(
        self,
        status: CallStatus,
        *,
        error: str | None = None,
        exit_code: int | None = None,
        output: BlobID | None = None,
        stdout: BlobID | None = None,
        stderr: BlobID | None = None,
    ) -> ToolCall:
        """The call as it ends now."""
        entry, duration_ns = self.entry, time.perf_counter_ns() - self.clock_ns
        return ToolCall(
            entry.id,
            entry.name,
            entry.arguments,
            status,
            entry.began_at_ns,
            duration_ns,
            exit_code,
            error,
            output,
            stdout,
            stderr,
        )


@dataclass(frozen=True, slots=True)
class _Fact:
    kind: str
    value: Any
    rid: str | None = None


class Pending:
    """The pending records of one sandbox; the sandbox's lock guards everything. All input has gone through the
    funnel."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._open: dict[str, Open] = {}
        self._facts: list[_Fact] = []
        self._requests: deque[str] = deque(maxlen=_REMEMBERED)
        self.unclaimed: set[str] = set()
        """Open calls that an earlier daemon recorded, and whose process has not come back yet."""
        sandbox.survival.noting(self._residue)

    # -- calls ---------------------------------------------------------------------------------------------------------

    def begin(self, entry: JournalEntry, record: Callable[[JournalEntry], None]) -> Open:
        """Open a call: `record` writes the intent, with the values that were waiting. A task is recorded when it ends:
        events inside it have entries of their own, and the first of them takes the values. LimitExceeded, Conflict;
        errors of `record`: the values then wait on."""
        with self._sandbox.lock:
            if len(self._open) >= MAX_OPEN_CALLS:
                raise LimitExceeded(f"{MAX_OPEN_CALLS} tool calls are open at once; end some before beginning another")
            if entry.id in self._open:
                raise Conflict(f"tool call {entry.id[:40]!r} has begun already")
            if entry.kind is EntryKind.TASK:
                for fact in entry.facts:
                    self.add_fact(fact["kind"], fact["value"], None)
                entry = replace(entry, facts=())
                self._note({"begun": entry.id, "task": _of_task(entry)})
            else:
                entry, _ = self._record(entry, record)
            opened = self._open[entry.id] = Open(entry, time.perf_counter_ns())
        return opened

    def record(self, entry: JournalEntry, record: Callable[[JournalEntry], T]) -> T:
        """Record an entry, with the values that were waiting. If `record` raises, the values go on waiting."""
        with self._sandbox.lock:
            return self._record(entry, record)[1]

    def _record(self, entry: JournalEntry, record: Callable[[JournalEntry], T]) -> tuple[JournalEntry, T]:
        facts, self._facts = self._facts, []
        entry = replace(entry, facts=(*({"kind": fact.kind, "value": fact.value} for fact in facts), *entry.facts))
        self._note({"begun": entry.id})
        try:
            return entry, record(entry)
        except BaseException:
            self._facts[:0] = facts
            raise

    def find_open(self, call_id: str) -> Open | None:
        """The open call of this id; None if there is none."""
        return self._open.get(call_id)

    def open_tools(self) -> list[str]:
        """Names of the open tool calls."""
        return [opened.entry.name for opened in self._open.values() if opened.entry.kind is EntryKind.TOOL]

    def close(self, call_id: str) -> Open:
        """Close an open call, and return it. NotFound."""
        with self._sandbox.lock:
            opened = self._open.pop(call_id, None)
            self.unclaimed.discard(call_id)
        if opened is None:
            raise NotFound(f"no open tool call {call_id[:40]!r}: it never began, or it has ended already")
        return opened

    def mark_beyond(self, call_id: str | None) -> None:
        """Mark a running call as doing more than change files. None, or no open call: nothing happens."""
        with self._sandbox.lock:
            opened = None if call_id is None else self._open.get(call_id)
            if opened is not None and not opened.beyond:
                opened.beyond = True
                self._note({"beyond": call_id})

    def lose(self, call_ids: Iterable[str]) -> None:
        """Forget open calls whose ends will never come: their outcome is unknown, and their files belong to the next
        snapshot."""
        with self._sandbox.lock:
            for call_id in call_ids:
                self._open.pop(call_id, None)

    def claim(self, call_ids: Iterable[str]) -> set[str]:
        """Take the calls among these whose own process has come back, and return them: no other one goes on with them."""
        with self._sandbox.lock:
            claimed = self.unclaimed.intersection(call_ids)
            self.unclaimed -= claimed
        return claimed

    # -- values and messages -------------------------------------------------------------------------------------------

    def add_fact(self, kind: str, value: Any, rid: str | None) -> Any:
        """Have a value recorded with the next entry, and return it: the one that was recorded, where the request is one
        sent again."""
        with self._sandbox.lock:
            known = self.find_answer(rid)
            if known is not None:
                return known[0]
            if len(self._facts) >= MAX_FACTS:
                raise LimitExceeded(
                    f"more than {MAX_FACTS} recorded values since the last call; make a call or a checkpoint in between"
                )
            self._facts.append(_Fact(kind, value, rid))
            self._note({"fact": {"kind": kind, "value": value, "rid": rid}})
        return value

    def find_answer(self, rid: str | None) -> tuple[Any] | None:
        """The recorded answer of a repeated request, as a one-element tuple; None for a new request."""
        with self._sandbox.lock:
            return next(((fact.value,) for fact in self._facts if rid is not None and fact.rid == rid), None)

    def reopen(self, entry: JournalEntry) -> Open:
        """Open a call again that is open in the catalog alone."""
        with self._sandbox.lock:
            return self._open.get(entry.id) or self._reopen(entry, 0)

    def add_message(self, message: Message, within: str | None = None, rid: str | None = None) -> None:
        """Append to the conversation. LimitExceeded."""
        sandbox = self._sandbox
        with sandbox.lock:
            if rid is not None and rid in self._requests:
                return
            size = len(message.role) + len(json.dumps(message.content))
            if sandbox.mind.bytes + size > MAX_PENDING_BYTES:
                raise LimitExceeded(
                    f"the messages since the last snapshot exceed {MAX_PENDING_BYTES} bytes; take one with a tool call or `checkpoint`"
                )
            self._note({"message": {"role": message.role, "content": message.content}, "within": within, "rid": rid})
            self._append(message, size, within, rid)

    def _append(self, message: Message, size: int, within: str | None, rid: str | None) -> None:
        self._sandbox.mind.say(message, size)
        opened = None if within is None else self._open.get(within)
        if opened is not None:
            opened.said += 1
        if rid is not None:
            self._requests.append(rid)

    # -- from daemon to daemon -----------------------------------------------------------------------------------------

    def _note(self, fields: dict[str, Any]) -> None:
        self._sandbox.survival.note(self._sandbox.head, fields)

    def _residue(self) -> dict[str, Any]:
        """The pending records that the snapshot just taken does not bind."""
        tasks = {
            call_id: {
                "said": opened.said,
                "beyond": opened.beyond,
                **({"task": _of_task(opened.entry)} if opened.entry.kind is EntryKind.TASK else {}),
            }
            for call_id, opened in self._open.items()
            if opened.said or opened.beyond or opened.entry.kind is EntryKind.TASK
        }
        residue = {"facts": [asdict(fact) for fact in self._facts], "open": tasks, "requests": list(self._requests)}
        return {key: value for key, value in residue.items() if value}

    def restore(
        self, record: live.LiveRecord, head: SnapshotID, entries: Iterable[JournalEntry], known: Callable[[str], bool]
    ) -> None:
        """Go on with the notes of an earlier daemon since `head`. `entries`: the catalog's open ones. `known`: tells if
        the catalog has an entry of that id."""
        with self._sandbox.lock:
            for entry in entries:
                self._reopen(entry, 0)
            for line in live.pending(record.directory, head):
                self._redo(line, known)
            self.unclaimed = set(self._open)
            state = live.state(record.directory, head)
            if state is not None:
                self._sandbox.mind.put(state, changed=True)

    def _redo(self, line: dict[str, Any], known: Callable[[str], bool]) -> None:
        if "message" in line:
            message = Message(line["message"]["role"], line["message"]["content"])
            self._append(message, len(message.role) + len(json.dumps(message.content)), line["within"], line["rid"])
        elif "fact" in line:
            self._facts.append(_Fact(**line["fact"]))
        elif "beyond" in line:
            if line["beyond"] in self._open:
                self._open[line["beyond"]].beyond = True
        elif "answered" in line:
            pass  # older live records note the store's answers here; the catalog has them now
        elif "begun" in line:
            if "task" in line:
                self._reopen(_as_task(line["begun"], line["task"]), 0)
            elif known(line["begun"]):
                self._facts = []
        else:
            self._facts = [_Fact(**fact) for fact in line.get("facts", ())]
            self._requests.extend(line.get("requests", ()))
            for call_id, what in line.get("open", {}).items():
                if "task" in what:
                    self._reopen(_as_task(call_id, what["task"]), what["said"])
                elif call_id in self._open:
                    self._open[call_id].said = what["said"]
                    self._open[call_id].beyond = what.get("beyond", False)

    def _reopen(self, entry: JournalEntry, said: int) -> Open:
        opened = Open(entry, time.perf_counter_ns() - max(0, time.time_ns() - entry.began_at_ns), said)
        self._open[entry.id] = opened
        return opened


def _of_task(entry: JournalEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "arguments": entry.arguments,
        "after": entry.after,
        "began_at_ns": entry.began_at_ns,
        "side_effect": entry.side_effect,
        "key": entry.key,
        "details": entry.details,
    }


def _as_task(call_id: str, fields: dict[str, Any]) -> JournalEntry:
    return JournalEntry(
        CallID(call_id),
        EntryKind.TASK,
        fields["name"],
        fields["arguments"],
        SnapshotID(fields["after"]),
        fields["began_at_ns"],
        side_effect=SideEffect(fields["side_effect"]),
        key=fields["key"],
        details=fields["details"],
    )
