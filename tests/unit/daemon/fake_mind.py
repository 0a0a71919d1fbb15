"""The agent's mind of the fake engine: journals, approvals, effects and values in dictionaries.

Commands that `exec` understands, besides those of fake_engine.py (each ends with 0 and prints its words):

    effect NAME     an irreversible call NAME, with a compensation (`bad...`: one that fails)
    cutoff NAME     one whose outcome nobody knows
    ask TOOL        a pending approval of TOOL, for the arguments {"words": [...]}
    remember K V    sets a key of the state

Every other command is a `local` call of the journal. A resume replays what is in the journal, shows one step and
finishes with 0. Tasks are those that the state's `tasks` names (`remember tasks a,b`), all completed. Two messages are
in every conversation. A rewind to a snapshot that the trajectory does not have is a Conflict, one with a compensation
that fails is SandboxFailed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

from snapshotd import types as t
from snapshotd.engine import base
from snapshotd.engine.watch import Watch
from snapshotd.errors import Ambiguous, Conflict, NotFound, SandboxFailed, Undecided, UsageError
from snapshotd.trees.base import Change, ChangeKind, Entry

NOW_NS = 1_700_000_000_123_456_789
MIND_WORDS = ("effect", "cutoff", "ask", "remember")


class FakeMind:
    changed: threading.Condition
    lines: dict[str, t.Trajectory]
    taken: dict[str, t.Snapshot]
    contents: dict[str, dict[bytes, bytes]]
    log_of: dict[str, list[base.Event]]
    closed: bool

    def __init__(self) -> None:
        self.entries: dict[str, list[t.JournalEntry]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        self.messages: dict[str, list[t.Message]] = {}
        self.asked: dict[str, t.Approval] = {}
        self.compensated: dict[str, t.CallStatus] = {}
        self.kept: dict[tuple[str, str, str], list[t.StoredValue]] = {}
        self.secret_names: dict[str, list[str]] = {}
        self.providers: dict[str, tuple[base.Provider, ...]] = {}
        self.watching = Watch()

    # -- the test's side -----------------------------------------------------------------------------------------------

    def mind_word(self, line: t.Trajectory, argv: tuple[str, ...]) -> None:
        word, name = argv[0], argv[1]
        if word == "remember":
            self.states[line.head] = {**self.state(line.head), name: argv[2].split(",") if name == "tasks" else argv[2]}
        elif word == "ask":
            approval = t.Approval(
                t.ApprovalID(t.new_id()),
                line.id,
                t.CallID(t.new_id()),
                name,
                {"words": list(argv)},
                "d" * 64,
                line.head,
                t.SideEffect.IRREVERSIBLE,
                NOW_NS,
                question="really\x1b?",
                expires_at_ns=1 << 100,
            )
            self.asked[approval.id] = approval
            self._tell(approval)
        else:
            status = t.CallStatus.UNKNOWN if word == "cutoff" else t.CallStatus.DONE
            details = {"compensate": {"argv": ["undo", name]}} if word == "effect" else {}
            self._enter(line, name, status, t.SideEffect.IRREVERSIBLE, details)

    def _enter(
        self, line: t.Trajectory, name: str, status: t.CallStatus, side_effect: t.SideEffect, details: dict[str, Any]
    ) -> None:
        own = self.entries.setdefault(line.id, [])
        own.append(
            t.JournalEntry(
                t.CallID(t.new_id()),
                t.EntryKind.TOOL,
                name,
                {"n": len(own)},
                line.head,
                NOW_NS,
                side_effect,
                status=status,
                ended_at_ns=NOW_NS,
                details=details,
            )
        )

    def bind_entries(self, line: t.Trajectory, taken: t.Snapshot) -> None:
        """What was done since the last snapshot belongs to this one; the state goes on."""
        own = self.entries.setdefault(line.id, [])
        if not any(entry.snapshot is None for entry in own):
            self._enter(line, taken.call.name, taken.call.status, t.SideEffect.LOCAL, {})
        self.entries[line.id] = [
            entry if entry.snapshot else dataclasses.replace(entry, snapshot=taken.id) for entry in own
        ]

    def _tell(self, approval: t.Approval) -> None:
        event = {
            "event": "approval",
            "id": approval.id,
            "tool": approval.tool,
            "status": approval.status.value,
            "trajectory": approval.trajectory,
        }
        self.watching.publish(event)

    def _way(self, snapshot_id: str) -> list[str]:
        """The snapshot and those whose mind it continues, newest first."""
        way: list[str] = []
        at: str | None = snapshot_id
        while at is not None:
            way.append(at)
            at = self.taken[at].continues if at in self.taken else None
        return way

    # -- looking -------------------------------------------------------------------------------------------------------

    def journal(self, ref: str) -> list[t.JournalEntry]:
        way = set(self._way(self.get(ref).id))
        return [entry for own in list(self.entries.values()) for entry in own if entry.snapshot in way]

    def state(self, ref: str) -> dict[str, Any]:
        return next((self.states[each] for each in self._way(self.get(ref).id) if each in self.states), {})

    def tasks(self, ref: str) -> list[base.Task]:
        head = self.get(ref).id
        names = self.state(ref).get("tasks", [])
        before = [(), *[(name,) for name in names]]
        return [base.Task(name, "completed", before[i], None, head, head) for i, name in enumerate(names)]

    # -- going back and on ---------------------------------------------------------------------------------------------

    def resume(self, ref: str, *, decisions: tuple[base.Decision, ...] = ()) -> t.Trajectory:
        line = self.trajectory(ref)
        if line.agent is None:
            raise UsageError(
                f"no program ever ran in {t.short(line.id)}, so there is nothing to resume; `snapshotd exec` runs a command"
            )
        if line.status is t.TrajectoryStatus.RUNNING:
            raise Conflict(f"the program of {t.short(line.id)} runs; `snapshotd attach` follows it")
        done = self.journal(line.id)
        for entry in done:
            if entry.status is t.CallStatus.UNKNOWN and not any(entry.id.startswith(item.call) for item in decisions):
                raise Undecided(f"nobody knows whether {entry.name} ({entry.id}) happened")
        results = [item.result for item in decisions if item.action == "result"]
        events: list[base.Event] = [
            {"event": "started", "trajectory": line.id, "snapshot": line.head, "runtime": "runc", "image": "x"}
        ]
        events += [
            {"event": "replayed", "call": entry.id, "tool": entry.name, "snapshot": entry.snapshot} for entry in done
        ]
        events.append({"event": "live", "snapshot": line.head, "replayed": len(done)})
        arguments = {"decisions": [[item.call, item.action] for item in decisions], "results": results}
        taken = self._take(line, self._call("went_on", arguments), self.contents[line.head])  # type: ignore[attr-defined]
        events.append(
            {
                "event": "snapshot",
                "id": taken.id,
                "seq": taken.seq,
                "tool": "went_on",
                "status": "done",
                "files": None,
                "pause_ms": 1.0,
            }
        )
        with self.changed:
            self.log_of[line.id] = events
        self._finish(line.id, 0, t.TrajectoryStatus.FINISHED)  # type: ignore[attr-defined]
        return line

    def _target(self, ref: str, to: str) -> tuple[t.Trajectory, t.Snapshot]:
        line, target = self.trajectory(ref), self.get(to)
        if target.trajectory not in (line.id, self.taken[line.forked_from].trajectory if line.forked_from else None):
            raise Conflict(
                f"snapshot {t.short(target.id)} is not of the history of {t.short(line.id)}; fork it instead"
            )
        return line, target

    def _left(self, line: t.Trajectory, target: t.Snapshot) -> list[base.Effect]:
        stays = {entry.id for entry in self.journal(target.id)}
        return self._effects(line, [entry for entry in self.journal(line.head) if entry.id not in stays])

    def _effects(self, line: t.Trajectory, entries: list[t.JournalEntry]) -> list[base.Effect]:
        found = []
        for entry in reversed([entry for entry in entries if entry.side_effect is t.SideEffect.IRREVERSIBLE]):
            command = entry.details.get("compensate", {}).get("argv")
            found.append(
                base.Effect(line.id, entry, None if command is None else tuple(command), self.compensated.get(entry.id))
            )
        return found

    def preview_rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: base.RewindMode = "both",
        max_files: int = 1000,
        session: str | None = None,
        opener: base.Opener = base.ITSELF,
    ) -> base.RewindPreview:
        line, target = self._target(ref, to)
        changes = (
            ()
            if mode == "conversation"
            else tuple(Change(b"workspace/%d.txt" % i, ChangeKind.DELETED, _file(), None) for i in range(3))
        )
        left = () if mode == "files" else tuple(self._left(line, target))
        gone = () if mode == "files" else (t.Message("assistant", "to go\x1b[31m"),)
        return base.RewindPreview(line.head, target.id, mode, changes[:max_files], len(changes), gone, left)

    def rewind(
        self,
        ref: str,
        to: str,
        *,
        mode: base.RewindMode = "both",
        compensate: bool = False,
        session: str | None = None,
        opener: base.Opener = base.ITSELF,
    ) -> t.Snapshot:
        line, target = self._target(ref, to)
        if line.status is not t.TrajectoryStatus.RUNNING and line.agent is None:
            raise Conflict(f"the trajectory {t.short(line.id)} is not running; fork the snapshot instead")
        done = [effect.entry.name for effect in self._left(line, target)] if compensate else []
        if any(name.startswith("bad") for name in done):
            raise SandboxFailed("a compensation failed; nothing was rewound")
        arguments = {"to": target.id, "mode": mode, "compensated": done}
        files = self.contents[line.head if mode == "conversation" else target.id]
        follows = None if mode == "files" else target.id
        return self._take(line, self._call("rewind", arguments), files, follows)  # type: ignore[attr-defined,no-any-return]

    def undo(self, ref: str, *, opener: base.Opener = base.ITSELF) -> t.Snapshot:
        line = self.trajectory(ref)
        head = self.taken[line.head]
        if head.call.name not in ("rewind", "undo", "promote"):
            raise Conflict(
                f"the head of {t.short(line.id)} is no rewind, so there is nothing to undo; `snapshotd log` shows its snapshots"
            )
        assert head.parent is not None
        call = self._call("undo", {"of": head.id, "to": head.parent})  # type: ignore[attr-defined]
        return self._take(line, call, self.contents[head.parent], head.parent)  # type: ignore[attr-defined,no-any-return]

    def promote(
        self, ref: str, *, into: str | None = None, leave_behind: bool = False, compensate: bool = False
    ) -> t.Snapshot:
        branch = self.trajectory(ref)
        if branch.forked_from is None:
            raise Conflict(f"{t.short(branch.id)} was not forked, so nothing can take it over; promote a fork")
        line = self.trajectory(into or self.taken[branch.forked_from].trajectory)
        if line.head != branch.forked_from and not (leave_behind or compensate):
            raise Conflict(f"{t.short(line.id)} went on since the fork; `snapshotd promote --yes` leaves that behind")
        arguments = {"branch": branch.id, "of": branch.head, "since": branch.forked_from, "from": line.head}
        call = self._call("promote", arguments)  # type: ignore[attr-defined]
        return self._take(line, call, self.contents[branch.head], branch.forked_from)  # type: ignore[attr-defined,no-any-return]

    def edit(
        self, ref: str, request: base.EditRequest, *, name: str | None = None, resume: bool = False
    ) -> t.Trajectory:
        origin = self.get(ref)
        made = self.fork(origin.id, 1, args=None, name=None, resume=resume).trajectories[0]
        made = self._replace(made.id, name=name)  # type: ignore[attr-defined]
        files = dict(self.contents[origin.id])
        for item in request.files:
            if item.content is None:
                files.pop(item.path)
            else:
                files[item.path] = item.content
        old = list(self.conversation(origin.id) if request.messages is None else request.messages)
        kept = old[: len(old) - request.drop_messages]
        arguments = {"result": request.result, "env": dict(request.env)}
        taken = self._take(made, self._call("edit", arguments), files, origin.continues)  # type: ignore[attr-defined]
        self.messages[taken.id] = [*kept, *request.add_messages]
        state = {**self.state(origin.id), **dict(request.state)}
        self.states[taken.id] = {key: value for key, value in state.items() if value is not None}
        return self.lines[made.id]

    def retry(self, ref: str, task: str, *, compensate: bool = True, resume: bool = True) -> t.Snapshot:
        line = self.trajectory(ref)
        if task not in {item.name for item in self.tasks(ref)}:
            raise NotFound(f"there is no task {task!r} in {t.short(line.id)}; `snapshotd tasks` lists those there are")
        call = self._call("retry", {"task": task, "compensate": compensate, "resume": resume})  # type: ignore[attr-defined]
        return self._take(line, call, self.contents[line.head])  # type: ignore[attr-defined,no-any-return]

    def effects(self, ref: str) -> list[base.Effect]:
        line = self.trajectory(ref)
        stays = {entry.id for entry in self.journal(line.head)}
        return self._effects(line, [entry for entry in self.entries.get(line.id, []) if entry.id not in stays])

    def compensate(self, ref: str, calls: tuple[str, ...]) -> list[base.Effect]:
        left = self.effects(ref)
        chosen = [item for item in left if not calls or any(item.entry.id.startswith(call) for call in calls)]
        if calls and not chosen:
            raise NotFound(f"no call {calls[0]} was left behind; `snapshotd effects` lists those that were")
        for item in chosen:
            failed = item.entry.name.startswith("bad")
            self.compensated.setdefault(item.entry.id, t.CallStatus.FAILED if failed else t.CallStatus.DONE)
        return [dataclasses.replace(item, compensated=self.compensated[item.entry.id]) for item in chosen]

    # -- approvals -----------------------------------------------------------------------------------------------------

    def ask(
        self,
        ref: str,
        call: str,
        tool: str,
        arguments: Any,
        *,
        side_effect: t.SideEffect = t.SideEffect.LOCAL,
        question: str | None = None,
        expires_s: float | None = None,
    ) -> t.Approval | None:
        line = self.trajectory(ref)
        known = next((item for item in list(self.asked.values()) if item.entry == call), None)
        if known is not None and (known.tool, known.arguments) != (tool, arguments):
            raise Conflict(f"another call is called {call}; give it a name of its own")
        if known is not None or question is None:
            return known
        approval = t.Approval(
            t.ApprovalID(t.new_id()),
            line.id,
            t.CallID(call),
            tool,
            arguments,
            "0" * 64,
            line.head,
            side_effect,
            NOW_NS,
            question,
            expires_at_ns=None if expires_s is None else NOW_NS + int(expires_s * 1e9),
        )
        self.asked[approval.id] = approval
        self._tell(approval)
        return approval

    def all_asked(self, status: t.ApprovalStatus | None = None) -> list[t.Approval]:
        return [item for item in list(self.asked.values()) if status in (None, item.status)]

    def _approval(self, ref: str) -> t.Approval:
        found = [item for item in list(self.asked.values()) if item.id.startswith(ref)]
        if len(found) > 1:
            raise Ambiguous(f"{ref!r} fits {len(found)} approvals; type more of the id")
        if not found:
            raise NotFound(f"there is no approval {ref!r}; `snapshotd approvals --all` lists those there are")
        return found[0]

    def approval(self, ref: str, *, max_files: int = 1000) -> base.ApprovalView:
        item = self._approval(ref)
        changes = tuple(
            Change(b"workspace/%d\xff.txt" % i, ChangeKind.ADDED, None, _file()) for i in range(min(3, max_files))
        )
        return base.ApprovalView(item, self.lines[item.trajectory], changes, None)

    def approve(
        self, ref: str, *, by: str, reason: str | None = None, arguments: tuple[Any] | None = None
    ) -> t.Approval:
        if self.lines[self._approval(ref).trajectory].head not in self._after(self._approval(ref)):
            self._decide(ref, t.ApprovalStatus.STALE, by, reason, None)
            raise Conflict(
                "the files are others by now than those it was asked for, so the approval is stale; the agent asks anew"
            )
        return self._decide(ref, t.ApprovalStatus.APPROVED, by, reason, arguments)

    def _after(self, item: t.Approval) -> list[str]:
        """The snapshot that an approval is bound to, and the one of the command that asked."""
        return [item.snapshot, *(s.id for s in list(self.taken.values()) if s.parent == item.snapshot)]

    def deny(self, ref: str, *, by: str, reason: str | None = None) -> t.Approval:
        return self._decide(ref, t.ApprovalStatus.DENIED, by, reason, None)

    def _decide(
        self, ref: str, status: t.ApprovalStatus, by: str, reason: str | None, edited: tuple[Any] | None
    ) -> t.Approval:
        item = self._approval(ref)
        if item.status is not t.ApprovalStatus.PENDING:
            raise Conflict(
                f"approval {t.short(item.id)} is {item.status} already, by {item.by}; the agent has been told"
            )
        item = dataclasses.replace(item, status=status, by=by, reason=reason, decided_at_ns=NOW_NS, edited=edited)
        self.asked[item.id] = item
        self._tell(item)
        return item

    def watch(self) -> Iterator[base.Event]:
        """Subscribed when it returns. Ends when the engine is closed."""
        return self.watching.follow()

    def listen(self, told: Callable[[base.Event], object]) -> Callable[[], None]:
        return self.watching.listen(told)

    # -- key-value store -----------------------------------------------------------------------------------------------

    def put_value(
        self,
        tenant: str,
        namespace: str,
        key: str,
        value: Any,
        *,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> t.StoredValue:
        if not namespace or namespace.startswith("/"):
            raise UsageError(f"{namespace!r} cannot be a namespace: write parts separated by slashes")
        versions = self.kept.setdefault((tenant, namespace, key), [])
        now = versions[0].version if versions and not versions[0].deleted else 0
        if expected_version not in (None, now):
            raise Conflict(f"{key} has version {now}, not {expected_version}; read it and try again")
        expires = None if ttl_s is None else NOW_NS + int(ttl_s * 1e9)
        versions.insert(0, t.StoredValue(tenant, namespace, key, len(versions) + 1, value, NOW_NS, expires))
        return versions[0]

    def get_value(self, tenant: str, namespace: str, key: str, version: int | None = None) -> t.StoredValue:
        versions = self.kept.get((tenant, namespace, key), [])
        found = [item for item in versions if item.version == version] if version is not None else versions[:1]
        if not found or found[0].deleted:
            raise NotFound(f"there is no {key!r} in {namespace}; `snapshotd store ls {namespace}` lists what there is")
        return found[0]

    def delete_value(self, tenant: str, namespace: str, key: str, *, expected_version: int | None = None) -> None:
        newest = self.get_value(tenant, namespace, key)
        if expected_version not in (None, newest.version):
            raise Conflict(f"{key} has version {newest.version}, not {expected_version}; read it and try again")
        versions = self.kept[tenant, namespace, key]
        versions.insert(0, dataclasses.replace(newest, version=len(versions) + 1, value=None, deleted=True))

    def search_values(
        self,
        tenant: str,
        namespace: str,
        *,
        prefix: str = "",
        where: dict[str, Any] | None = None,
        limit: int = 100,
        after: str = "",
    ) -> list[t.StoredValue]:
        newest = [
            versions[0]
            for key, versions in sorted(self.kept.items())
            if key[0] == tenant and versions and not versions[0].deleted
        ]
        found = [
            item
            for item in newest
            if f"{item.namespace}/".startswith(f"{namespace}/")
            and item.key.startswith(prefix)
            and item.key > after
            and all(_field(item.value, path) == (True, wanted) for path, wanted in (where or {}).items())
        ]
        return found[:limit]

    def value_history(self, tenant: str, namespace: str, key: str) -> list[t.StoredValue]:
        return list(self.kept.get((tenant, namespace, key), []))


def _field(value: Any, path: str) -> tuple[bool, Any]:
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _file() -> Entry:
    return Entry(t.Kind.FILE, 0o644, 0, 0, 5, NOW_NS, 0, 1, (1, 1), NOW_NS)
