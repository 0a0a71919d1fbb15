"""A graph's checkpoints and the files of its sandboxes.

Each checkpoint is bound to the snapshot that its sandbox had when it was stored. A call goes to the sandbox of the
checkpoint that its step began with, and finds that one's files there:

    the sandbox stands at the checkpoint, or at calls of this step      the call is made there
    later checkpoints went on from it (time travel)                     the sandbox is rewound to it first
    the checkpoint was made from an earlier one by `update_state`,      it gets a fork of its own
    or copied

A call is made once. Its name (the task, the command, and how often the task has made it) is in the file before it is
made, with the snapshot that it begins from; and the daemon lets one command go on from a snapshot (`if_head`). After a
kill the same call therefore finds its snapshot there, and its recorded output is the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig

from snapshotd.client import ExecFailed, ExecResult, Sandbox, Snapshotd
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import (
    CommandNotFound,
    CommandNotRunnable,
    Conflict,
    NotFound,
    SnapshotdError,
    Undecided,
    UsageError,
)
from snapshotd.failpoints import hit
from snapshotd.integrations.langgraph.daemon.bindings import Bindings, Bound
from snapshotd.integrations.langgraph.daemon.interrupts import Interrupts
from snapshotd.types import new_id

_WAIT_S, _HELD_S, _LOOK_S = 30.0, 3600.0, 0.05
_ATTEMPTS = 256
"""Tasks whose calls are counted."""
_FAILURES = 64
"""Checkpoints that could not be stored, and whose error is remembered for calls that come later."""
_FIRST_LOOK = 16
"""Snapshots of a sandbox's log that are asked for at first."""
_REFUSED = (UsageError, NotFound, CommandNotFound, CommandNotRunnable)
"""Errors of a call that was not made."""
_MARKER = re.compile(r"\[secret:[A-Za-z0-9][A-Za-z0-9_.-]{0,63}:[0-9a-f]{16}\]")
"""Stands in a record for a secret (docs/secrets.md)."""
_CUT_OFF = ("interrupted", "unknown")


class Line(NamedTuple):
    """The snapshots from a checkpoint's to the head of its sandbox, without the first one."""

    head: str
    since: list[SnapshotInfo]


class Sandboxes:
    """The sandboxes of a saver. Thread-safe. Every method may raise the daemon's errors (`snapshotd.client.Snapshotd`);
    NotFound: the files of the checkpoint are gone."""

    def __init__(self, bindings: Bindings, sandbox: Sandbox, client: Snapshotd) -> None:
        self._bindings, self._client, self._home = bindings, client, sandbox.id
        self.interrupts = Interrupts(client, bindings.has_inner)
        self._stored = threading.Condition()
        self._failed: OrderedDict[tuple[str, str, str], Exception] = OrderedDict()
        self._attempts: OrderedDict[int, tuple[object, Counter[str]]] = OrderedDict()
        self._busy: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def next_place(
        self, thread: str, ns: str, parent: str | None, metadata: Mapping[str, Any]
    ) -> tuple[str | None, str]:
        """(trajectory, snapshot) of a checkpoint that is about to be stored after `parent`."""
        root = (metadata.get("parents") or {}).get("")
        above = None if parent is None else self._bindings.find(thread, ns, parent)
        if above is None and ns and root is not None:
            above = self._bindings.find(thread, "", root)
        if above is None:
            return self._first_place(thread)
        if above.trajectory is None:
            return None, above.snapshot
        last = self._bindings.last_call(above) if metadata.get("source") == "loop" else None
        try:
            line = self._standing(above, last)
        except NotFound:  # the sandbox was removed: the state goes on, and a call will say so
            line = None
        if line is not None:
            return above.trajectory, line.head
        return None if metadata.get("source") == "update" else above.trajectory, last or above.snapshot

    def owner_of(self, thread: str, ns: str, checkpoint: str) -> str:
        """The sandbox whose approvals a checkpoint's interrupts are: the one that goes on from it, or the one that the
        saver was given as long as there is none."""
        bound = self._bindings.find(thread, ns, checkpoint)
        return self._home if bound is None or bound.trajectory is None else bound.trajectory

    def release_calls(self, thread: str, ns: str, checkpoint: str, failed: Exception | None = None) -> None:
        """A checkpoint has been stored, or could not be: calls that wait for it go on, or fail as it did."""
        with self._stored:
            self._failed.pop((thread, ns, checkpoint), None)
            if failed is not None:
                self._failed[thread, ns, checkpoint] = failed
            if len(self._failed) > _FAILURES:
                self._failed.popitem(last=False)
            self._stored.notify_all()

    def _first_place(self, thread: str) -> tuple[str | None, str]:
        home = self._bindings.home(self._home)
        if home is None:
            home = self._bindings.settle(self._home, self._client.snapshot(self._home).id)
        return self._home if self._bindings.owner(self._home) in (None, thread) else None, home

    # -- calls ---------------------------------------------------------------------------------------------------------

    def at(self, config: RunnableConfig) -> Sandbox:
        """The sandbox of a checkpoint, with its files."""
        bound = self._find(config)
        with self._lock(bound):
            bound, _ = self._go_to(bound, in_step=False)
        return Sandbox.connect(str(bound.trajectory), client=self._client)

    def exec(
        self, config: RunnableConfig, command: str | Sequence[str], irreversible: bool, **options: Any
    ) -> ExecResult:
        """See `SnapshotdSaver.exec`."""
        argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        bound = self._find(config)
        name = self._name(config, argv, options)
        deadline, admitted = time.monotonic() + _HELD_S, False
        with self._lock(bound):
            while True:
                bound, line = self._go_to(bound, in_step="__pregel_task_id" in config["configurable"])
                known = self._find_made_call(bound, name, argv, line, irreversible)
                if not admitted:
                    other = self._admit(config, bound, name, argv, irreversible, made=known is not None)
                    admitted = True
                    if other is not None:
                        argv, known = other, self._find_made_call(bound, name, other, line, irreversible)
                if known is not None:
                    return self._repeat_result(known, argv, options)
                sandbox = Sandbox.connect(str(bound.trajectory), client=self._client)
                call = self._bindings.begin(bound, name, sandbox.id, line.head)
                hit("langgraph.call.begun")
                try:
                    result = sandbox.exec(argv, if_head=line.head, **options)
                except Conflict:
                    # The same call, of a process that was killed, or a parallel task's: its snapshot is there soon.
                    self._bindings.end(call, None)
                    if self._client.snapshot(sandbox.id).id == line.head:
                        if time.monotonic() > deadline:
                            raise
                        time.sleep(_LOOK_S)
                    continue
                except _REFUSED:
                    self._bindings.end(call, None)
                    raise
                except ExecFailed as exc:
                    self._bindings.end(call, exc.result.snapshot_id)
                    raise
                hit("langgraph.call.made")
                self._bindings.end(call, result.snapshot_id)
                return result

    def _admit(
        self, config: RunnableConfig, bound: Bound, name: str, argv: Sequence[str], irreversible: bool, *, made: bool
    ) -> list[str] | None:
        """See `Interrupts.admit`. A call outside of a task is a person's own. One that was made is looked at only if its
        task has been interrupted, and so may have asked about it."""
        names = config["configurable"]
        if "__pregel_task_id" not in names:
            return None
        answers = names["__pregel_scratchpad"]
        if made and not answers.resume and answers.get_null_resume(False) is None:
            return None
        call = hashlib.blake2b(json.dumps([bound.thread, bound.id, name]).encode(), digest_size=16).hexdigest()
        return self.interrupts.admit(str(bound.trajectory), call, argv, irreversible=irreversible, made=made)

    def _find_made_call(
        self, bound: Bound, name: str, argv: Sequence[str], line: Line, irreversible: bool
    ) -> SnapshotInfo | None:
        """The snapshot of this call, if it has been made on this line. Undecided: it was cut off and must not be made
        twice."""
        for call in self._bindings.calls(bound, name):
            for place, info in enumerate(line.since):
                before = line.since[place - 1].id if place else bound.snapshot
                is_it = info.id == call.after if call.after else before == call.before and _is_of(info, argv)
                if is_it and info.tool.status not in _CUT_OFF:
                    self._bindings.end(call.pk, info.id)
                    return info
                if is_it and irreversible:
                    raise _undecided(bound, argv)
            if call.after is None and call.trajectory == bound.trajectory and irreversible:
                raise _undecided(bound, argv)
        return None

    def _repeat_result(self, info: SnapshotInfo, argv: Sequence[str], options: Mapping[str, Any]) -> ExecResult:
        found = {}
        for which in ("stdout", "stderr"):
            listener = options.get(f"on_{which}") or (lambda _: None)
            found[which] = b"".join(self._client.output(info.id, which)) if which in info.tool.outputs else b""
            listener(found[which])
        code = -1 if info.tool.exit_code is None else info.tool.exit_code
        result = ExecResult(code, found["stdout"], found["stderr"], info.id)
        if options.get("check") and code != 0:
            raise ExecFailed(f"the command `{shlex.join(argv)}` ended with exit code {code}, as is recorded", result)
        return result

    def _go_to(self, bound: Bound, *, in_step: bool) -> tuple[Bound, Line]:
        """Bring the sandbox to the checkpoint's files (in a step, to those of its last call), or leave it at the calls of
        its step. Another process with the same thread may use it, too, so it is looked at again after a rewind. Conflict:
        something has been running in it for 30 s."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            try:
                if bound.trajectory is None:
                    made = self._client.fork(bound.snapshot).trajectories[0].id
                    bound = self._bindings.take(bound, made)
                    if bound.trajectory != made:  # another process was faster
                        self._client.remove(made, force=True)
                assert bound.trajectory is not None
                last = self._bindings.last_call(bound) if in_step else None
                line = self._standing(bound, last)
                if line is not None:
                    return bound, line
                self._client.rewind(bound.trajectory, last or bound.snapshot, mode="files")
            except SnapshotdError as exc:
                gone = self._explain_loss(bound)
                if gone is not None or not isinstance(exc, Conflict) or time.monotonic() > deadline:
                    raise gone or exc from exc
                time.sleep(_LOOK_S)

    def _standing(self, bound: Bound, last: str | None) -> Line | None:
        """The snapshots since a checkpoint, if its sandbox stands at the checkpoint's step. None: other steps went on in
        the sandbox, or the snapshot `last` of the step's last call is not among those since."""
        line = self._line(str(bound.trajectory), bound.snapshot)
        if line is None:
            return None
        since = [one.id for one in line.since]
        if last is not None:
            if last not in since:
                return None
            since = since[since.index(last) + 1 :]
        return None if self._bindings.has_moved_on(bound, last or bound.snapshot, since) else line

    def _explain_loss(self, bound: Bound) -> NotFound | None:
        """The error to raise if a checkpoint's files are gone; None: they are there."""
        try:
            state = self._client.snapshot(bound.snapshot).state
        except NotFound:
            state = "removed"
        if state in ("captured", "stored"):
            return None
        return NotFound(
            f"the files of checkpoint {bound.id} of thread {bound.thread!r} are gone because snapshot {bound.snapshot[:12]} was "
            f"{state}; its state is there: go on from another checkpoint, or without files"
        )

    def _line(self, trajectory: str, snapshot: str) -> Line | None:
        """The snapshots from one to the sandbox's head; None: the head does not come from it."""
        last = _FIRST_LOOK
        while True:
            log = self._client.log(trajectory, last)
            head = log[-1].id if log else self._client.snapshot(trajectory).id
            by_id, since, at = {info.id: info for info in log}, list[SnapshotInfo](), head
            while at != snapshot and at in by_id:
                since.append(by_id[at])
                info = by_id[at]
                at = _before(info)
            if at == snapshot:
                return Line(head, since[::-1])
            if len(log) < last:
                return None
            last *= 8

    def _find(self, config: RunnableConfig) -> Bound:
        """The checkpoint that the step of `config` began with; waits until it is stored. UsageError: it is none."""
        thread, ns, checkpoint = _where(config)
        deadline = time.monotonic() + _WAIT_S
        with self._stored:
            while True:
                find = (
                    self._bindings.latest(thread, ns)
                    if checkpoint is None
                    else self._bindings.find(thread, ns, checkpoint)
                )
                if find is not None:
                    return find
                failed = self._failed.get((thread, ns, checkpoint or ""))
                if failed is not None:
                    raise failed
                if checkpoint is not None and time.monotonic() < deadline:
                    self._stored.wait(_LOOK_S)  # another saver may be the one that stores it
                else:
                    raise UsageError(
                        f"thread {thread!r} has no checkpoint {checkpoint or ''} with files: run the graph with this saver, and with "
                        "durability 'sync' or 'async'"
                    )

    def _name(self, config: RunnableConfig, argv: Sequence[str], options: Mapping[str, Any]) -> str:
        """The same for the same call after a kill: calls of a task that are equal are told apart by their order. A retry
        within the task (LangGraph's `RetryPolicy`) goes on counting, so it makes its calls again. Outside of a task
        every call has a name of its own."""
        names = config["configurable"]
        task, attempt = names.get("__pregel_task_id"), names.get("__pregel_scratchpad")
        if task is None:
            return new_id()
        kept = {name: options[name] for name in ("cwd", "env", "user") if options.get(name) is not None}
        digest = hashlib.blake2b(json.dumps([task, argv, kept]).encode(), digest_size=16).hexdigest()
        with self._guard:
            _, counts = self._attempts.setdefault(
                id(attempt), (attempt, Counter())
            )  # held, so that its id stays its own
            if len(self._attempts) > _ATTEMPTS:
                self._attempts.popitem(last=False)
            counts[digest] += 1
            return f"{digest}.{counts[digest]}"

    def _lock(self, bound: Bound) -> threading.Lock:
        """One call at a time in one sandbox."""
        with self._guard:
            return self._busy.setdefault(bound.trajectory or f"checkpoint {bound.pk}", threading.Lock())


def _is_of(info: SnapshotInfo, argv: Sequence[str]) -> bool:
    """True if a step ran this command. The recorded command has markers in place of secrets, which match any text."""
    arguments = info.tool.arguments
    recorded = arguments.get("argv") if info.tool.name == "exec" and isinstance(arguments, dict) else None
    if not isinstance(recorded, list) or len(recorded) != len(argv):
        return False
    patterns = (".+".join(map(re.escape, _MARKER.split(word))) for word in recorded)
    return all(re.fullmatch(pattern, word, re.DOTALL) for pattern, word in zip(patterns, argv, strict=True))


def _before(info: SnapshotInfo) -> str:
    """The snapshot whose files a step began with. A rewind's are those of its target."""
    arguments = info.tool.arguments
    back = arguments.get("to") if info.tool.name == "rewind" and isinstance(arguments, dict) else None
    return str(back or info.parent)


def _where(config: RunnableConfig) -> tuple[str, str, str | None]:
    """(thread, namespace, checkpoint) of a config, which may be that of a task: then of the graph that runs it."""
    names = config.get("configurable", {})
    if "thread_id" not in names:
        raise UsageError("the config names no thread: call this in a node or tool of a graph, or give a config")
    thread, ns = str(names["thread_id"]), str(names.get("checkpoint_ns", ""))
    above = names.get("checkpoint_map") or {}
    if "__pregel_task_id" not in names or not above:
        return thread, ns, names.get("checkpoint_id") or None
    inner = max((name for name in above if not name or ns == name or ns.startswith(f"{name}|")), key=len)
    return thread, inner, above[inner]


def _undecided(bound: Bound, argv: Sequence[str]) -> Undecided:
    return Undecided(
        f"the call {argv[-1][:80]!r} after checkpoint {bound.id} was cut off, so it may or may not have happened: look at its effect, "
        "then go on with `update_state`, or make it again as one that is not irreversible"
    )
