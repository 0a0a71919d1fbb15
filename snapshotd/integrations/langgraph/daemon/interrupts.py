"""A graph's interrupts and the daemon's approvals are one list.

An `interrupt()` whose write has been stored is asked of a person: an approval of the tool "interrupt", under a name that
is made of the thread and the interrupt's id. LangGraph makes the id of the task's place in its checkpoint, so the same
interrupt has the same name in every process, and no other one has it. The person's decision becomes the answer when the
checkpoint is read the next time: True, the person's own JSON, or False if it was denied.

The other way round, a call that the daemon's policy gates is an interrupt of the task that makes it, and an answer that
the graph itself is resumed with decides the approval.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from langgraph.checkpoint.base import WRITES_IDX_MAP, CheckpointTuple, PendingWrite
from langgraph.types import Interrupt, interrupt

from snapshotd.client import Snapshotd
from snapshotd.client.results import ApprovalInfo
from snapshotd.errors import Conflict, Denied, NotFound, UsageError

INTERRUPT, RESUME, _ERROR = "__interrupt__", "__resume__", "__error__"
"""LangGraph's channels of a task's newest interrupt, of all answers to its interrupts, and of its error
(`WRITES_IDX_MAP`)."""
NO_TASK = "00000000-0000-0000-0000-000000000000"
"""LangGraph's task of what `Command(resume=...)` writes."""
_TOOL = "interrupt"
_QUESTION_CHARS, _VALUE_BYTES = 4000, 1 << 20
_LOOK_S = 0.25
_APPROVAL = "approval"
"""The key that names an approval in the value of an interrupt that stands for it."""


class Interrupts:
    """The interrupts of a saver's threads. Thread-safe. Errors: the daemon's."""

    def __init__(self, client: Snapshotd, has_inner: Callable[[str, str], bool]) -> None:
        """`has_inner` tells if a task, named by its thread and id, runs a graph of its own."""
        self._client, self._has_inner = client, has_inner

    # -- interrupts become approvals -----------------------------------------------------------------------------------

    def settle_writes(
        self, thread: str, trajectory: str, task: str, writes: Sequence[tuple[str, Any]], before: Sequence[PendingWrite]
    ) -> None:
        """Settle the writes of a task that have just been stored: answers among them, with which the graph was resumed, decide
        the approvals of its interrupts, and a person is asked about its new interrupts. `before`: what was pending in the
        checkpoint."""
        own = [(channel, value) for owner, channel, value in before if owner == task]
        known, new = _answers(own), _answers(writes)
        with contextlib.suppress(NotFound):  # the sandbox was removed: the graph's own program may still answer
            for one, answer in zip(_interrupts(own), new[len(known) :], strict=False):
                self._decide(self._approval(thread, trajectory, one), answer)
            for one in _interrupts(writes):
                self._approval(thread, trajectory, one)

    def with_answers(self, found: CheckpointTuple, trajectory: str) -> CheckpointTuple:
        """A checkpoint of the outermost graph, with the answers to its pending interrupts that a person has given. The answer
        to an interrupt of a graph within a task is given as `Command(resume=...)` gives it, which finds its way inwards
        if it is the only one; where several wait, such a one stays for `Command(resume={id: answer})`."""
        pending = [
            write for write in found.pending_writes or () if write[:2] != (NO_TASK, RESUME) or write[2] is not None
        ]
        thread = found.config["configurable"]["thread_id"]
        done = {task for task, channel, _ in pending if channel not in WRITES_IDX_MAP}
        waiting: dict[str, tuple[Interrupt, list[str]]] = {}
        for task, channel, value in pending:
            for one in _interrupts([(channel, value)]) if task not in done else ():
                waiting.setdefault(one.id, (one, []))[1].append(task)
        for one, tasks in waiting.values():
            try:
                approval = self._approval(thread, trajectory, one)
            except NotFound:
                continue
            if approval.status == "pending":
                continue
            if len(tasks) == 1 and not self._has_inner(thread, tasks[0]):
                _give(pending, tasks[0], _answer(approval))
            elif len(waiting) == 1 and not any(task == NO_TASK and channel == RESUME for task, channel, _ in pending):
                pending.append((NO_TASK, RESUME, _answer(approval)))
        return found._replace(pending_writes=pending)

    def wait(self, found: CheckpointTuple, trajectory: str) -> None:
        """Wait until a person has decided about all pending interrupts of a checkpoint, or their time is over."""
        for one in _interrupts([write[1:] for write in found.pending_writes or ()]):
            while self._approval(found.config["configurable"]["thread_id"], trajectory, one).status == "pending":
                time.sleep(_LOOK_S)

    # -- approvals become interrupts -----------------------------------------------------------------------------------

    def admit(
        self, trajectory: str, call: str, argv: Sequence[str], *, irreversible: bool, made: bool
    ) -> list[str] | None:
        """The command that a task may run, in place of this one. None: as it is. Interrupts the graph if a person has to
        be asked first, and goes on when it is resumed. `made`: the call is recorded, so nobody is asked now. Denied."""
        effect, arguments = "irreversible" if irreversible else "local", {"argv": list(argv)}
        if made:
            approval = next((one for one in self._client.approvals() if one.call == call), None)
        else:
            approval = self._client.ask(trajectory, call, "exec", arguments, side_effect=effect)
        if approval is None:
            return None
        # Also if it is decided: a task's interrupts are told apart by their order.
        answer = interrupt({_APPROVAL: approval.id, "tool": "exec", **arguments, "question": approval.question})
        if approval.status == "pending":
            approval = self._decide(approval, answer)
        if approval.status != "approved":
            why = f": {approval.reason}" if approval.reason else ""
            raise Denied(
                f"{approval.by or 'nobody'} let this command run (approval {approval.id[:12]} is {approval.status}{why})"
            )
        return _other_command(approval)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _approval(self, thread: str, trajectory: str, one: Interrupt) -> ApprovalInfo:
        """The approval of an interrupt, asked for if it is none yet."""
        if isinstance(one.value, Mapping) and _APPROVAL in one.value:
            return self._client.approval(str(one.value[_APPROVAL]), max_files=0).approval
        value = _json(one.value)
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        asked = self._client.ask(
            trajectory,
            hashlib.blake2b(json.dumps([thread, one.id]).encode(), digest_size=16).hexdigest(),
            _TOOL,
            {"thread": thread, "value": value},
            question=text[:_QUESTION_CHARS] or "?",
        )
        assert asked is not None
        return asked

    def _decide(self, approval: ApprovalInfo, answer: Any) -> ApprovalInfo:
        """Decide an approval by the graph's answer, unless somebody has decided it meanwhile: then that decision stays."""
        if approval.status != "pending":
            return approval
        why = "answered by the program that runs the graph"
        try:
            if answer is False:
                return self._client.deny(approval.id, reason=why)
            if answer is True:
                return self._client.approve(approval.id, reason=why)
            return self._client.approve(approval.id, reason=why, arguments=_json(answer))
        except Conflict:
            return self._client.approval(approval.id, max_files=0).approval


def _interrupts(writes: Sequence[tuple[str, Any]]) -> list[Interrupt]:
    """The interrupts among a task's writes. LangGraph writes a tuple of them; any other value is not LangGraph's."""
    values = [value for channel, value in writes if channel == INTERRUPT and isinstance(value, list | tuple)]
    return [one for value in values for one in value if isinstance(one, Interrupt)]


def _answers(writes: Sequence[tuple[str, Any]]) -> list[Any]:
    """A task's answers so far: the last write has all of them."""
    found = [value for channel, value in writes if channel == RESUME]
    return found[-1] if found and isinstance(found[-1], list) else found[-1:]


def is_taken(before: Sequence[PendingWrite], task: str) -> bool:
    """True if the answer of `Command(resume=...)` is among what was pending when a task had an interrupt or an answer: an
    interrupt takes it if it is still there. LangGraph leaves it, and the next run would give it to another interrupt."""
    return task != NO_TASK and any(write[:2] == (NO_TASK, RESUME) and write[2] is not None for write in before)


def _answer(approval: ApprovalInfo) -> Any:
    if approval.status != "approved":
        return False
    return approval.edited[0] if approval.edited else True


def _give(pending: list[PendingWrite], task: str, answer: Any) -> None:
    """Add an answer to those of a task. A task that failed after it had got this very answer has it already."""
    known = _answers([write[1:] for write in pending if write[0] == task])
    failed = any((owner, channel) == (task, _ERROR) for owner, channel, _ in pending)
    if failed and known and known[-1] == answer:
        return
    pending[:] = [write for write in pending if write[:2] != (task, RESUME)]
    pending.append((task, RESUME, [*known, answer]))


def _json(value: Any) -> Any:
    """`value` as JSON that the daemon takes; what is none is shown as text."""
    try:
        text = json.dumps(value, default=_text, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(repr(value), ensure_ascii=False)
    text = text.encode("utf-8", "replace").decode()
    return text[:_QUESTION_CHARS] if len(text) > _VALUE_BYTES else json.loads(text)


def _text(value: Any) -> str:
    """A value that JSON has no form for. A set has one text, whatever the order in which it was filled."""
    return "{" + ", ".join(sorted(map(repr, value))) + "}" if isinstance(value, set | frozenset) else str(value)


def _other_command(approval: ApprovalInfo) -> list[str] | None:
    if not approval.edited:
        return None
    arguments = approval.edited[0]
    argv = arguments.get("argv") if isinstance(arguments, Mapping) else None
    if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
        raise UsageError(
            f"approval {approval.id[:12]} was given other arguments that are no command: they have to be like "
            '{"argv": ["ls", "-l"]}; interrupt the task and let it ask anew'
        )
    return argv
