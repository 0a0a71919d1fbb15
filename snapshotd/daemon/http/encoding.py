"""The engine's values as records of the API. Everything that the API says in JSON goes through `json_bytes`.

Times become ISO 8601 in UTC, durations milliseconds, sandbox paths text from the root.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import singledispatch
from typing import Any

from snapshotd import types as t
from snapshotd.api.approvals import ApprovalInfo, ApprovalView
from snapshotd.api.commands import CommandInfo, ExecInfo
from snapshotd.api.experiments import AlignedCall, Bisection, BranchInfo, CompareInfo, PairInfo, Tried
from snapshotd.api.files import FileInfo, WriteInfo
from snapshotd.api.mind import EffectInfo, JournalInfo, RewindPreview, TaskInfo
from snapshotd.api.record import ApiRecord, Json, encode
from snapshotd.api.snapshots import (
    ChangeInfo,
    DamagedOutput,
    EntryInfo,
    FileCounts,
    FileStatus,
    MessageInfo,
    RestoreInfo,
    SnapshotInfo,
    Tool,
)
from snapshotd.api.storage import (
    CheckInfo,
    DamageInfo,
    ImageInfo,
    ImportInfo,
    Policy,
    PrunedInfo,
    PruneInfo,
    RepairInfo,
    UsageInfo,
)
from snapshotd.api.trajectories import AgentInfo, ForkInfo, LimitsInfo, SandboxInfo, TrajectoryInfo
from snapshotd.api.values import ValueInfo
from snapshotd.engine import base
from snapshotd.engine.experiments import base as trials
from snapshotd.scores import ScoredRun
from snapshotd.trees.base import Change, Entry, RestoreReport

_LATEST_NS = 253_402_300_799_999_999_999
"""The last instant that ISO 8601 with four digits can say."""


def json_bytes(value: Any) -> bytes:
    """JSON in ASCII; records and values of the engine may stand in `value`. Text that programs in sandboxes left may hold
    lone surrogates, for which UTF-8 has no bytes: here an escape stands for each."""
    return json.dumps(value, separators=(",", ":"), default=_encoded).encode()


def event(name: str, value: Any) -> Json:
    """An event with the members of a value's record."""
    return {"event": name, **_encoded(value)}


def _encoded(value: Any) -> Json:
    return encode(value if isinstance(value, ApiRecord) else record_of(value))


def iso_time(at_ns: int) -> str:
    """Nanoseconds since the epoch as `2025-01-31T12:00:00.123456Z`."""
    seconds, rest = divmod(min(at_ns, _LATEST_NS), 1_000_000_000)
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S") + f".{rest // 1000:06d}Z"


def _time(at_ns: int | None) -> str | None:
    return None if at_ns is None else iso_time(at_ns)


def milliseconds(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


def path_text(path: bytes) -> str:
    """A sandbox path from its root, as records have it."""
    return "/" + path.decode(errors="surrogateescape")


@singledispatch
def record_of(value: object) -> ApiRecord:
    """The record of the API for a value of the engine."""
    raise TypeError(f"{type(value).__name__} is nothing that the API says")


def _all(convert: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    return tuple(map(convert, values))


@record_of.register
def tool(call: t.ToolCall) -> Tool:
    outputs = {"stdout": call.stdout, "stderr": call.stderr, "output": call.output}
    return Tool(
        name=call.name,
        arguments=call.arguments,
        status=call.status,
        exit_code=call.exit_code,
        duration_ms=milliseconds(call.duration_ns),
        started_at=iso_time(call.started_at_ns),
        error=call.error,
        outputs=tuple(name for name, output in outputs.items() if output is not None),
        damaged=tuple(DamagedOutput(lost.which, lost.bytes, lost.hash) for lost in call.damaged),
    )


@record_of.register
def snapshot(s: t.Snapshot) -> SnapshotInfo:
    files = s.files
    return SnapshotInfo(
        id=s.id,
        parent=s.parent,
        trajectory=s.trajectory,
        seq=s.seq,
        tool=tool(s.call),
        files=None if files is None else FileCounts(files.added, files.changed, files.deleted, files.bytes),
        state=s.state,
        pause_ms=milliseconds(s.pause_ns),
        created_at=iso_time(s.created_at_ns),
        tags=s.tags,
        method=s.method,
        messages=s.messages,
        image=s.stack.image,
        layers=len(s.stack.layers),
        follows=s.follows,
        warnings=s.warnings,
        reused=s.reused,
    )


@record_of.register
def trajectory(item: t.Trajectory) -> TrajectoryInfo:
    spec, agent = item.spec, item.agent
    limits = spec.limits
    return TrajectoryInfo(
        id=item.id,
        name=item.name,
        status=item.status,
        head=item.head,
        image=spec.image,
        runtime=spec.runtime,
        network=spec.network,
        limits=LimitsInfo(limits.memory_bytes, limits.cpus, limits.pids, limits.disk_bytes),
        agent=None if agent is None else AgentInfo(agent.argv, agent.program, agent.cwd),
        created_at=iso_time(item.created_at_ns),
        forked_from=item.forked_from,
        experiment=item.experiment,
        exit_code=item.exit_code,
    )


@record_of.register
def sandbox(info: base.SandboxInfo) -> SandboxInfo:
    return SandboxInfo(
        trajectory=trajectory(info.trajectory),
        container=info.container,
        pid=info.pid,
        started_at=iso_time(info.started_at_ns),
        agent_running=info.agent_running,
    )


@record_of.register
def forks(forked: base.Forked) -> ForkInfo:
    return ForkInfo(forked.experiment, _all(trajectory, forked.trajectories))


@record_of.register
def executed(done: base.ExecResult) -> ExecInfo:
    taken = None if done.snapshot is None else snapshot(done.snapshot)
    return ExecInfo(exit_code=done.exit_code, snapshot=taken, call=tool(done.call))


@record_of.register
def command(info: base.CommandInfo) -> CommandInfo:
    return CommandInfo(
        id=info.id,
        trajectory=info.trajectory,
        argv=info.argv,
        cwd=info.cwd,
        stdin=info.stdin,
        timeout_s=info.timeout_s,
        started_at=iso_time(info.began_at_ns),
        status="running" if info.status is None else info.status,
        exit_code=info.exit_code,
        ended_at=_time(info.ended_at_ns),
        snapshot=info.snapshot,
        error=info.error,
        background=info.background,
    )


@record_of.register
def message(item: t.Message) -> MessageInfo:
    return MessageInfo(item.role, item.content)


def entry(item: Entry) -> EntryInfo:
    return EntryInfo(item.kind, f"{item.mode:04o}", item.uid, item.gid, item.size)


def file_status(item: Entry, target: bytes | None) -> FileStatus:
    return FileStatus(**vars(entry(item)), target=target)


@record_of.register
def change(item: Change) -> ChangeInfo:
    before, after = (None if side is None else entry(side) for side in (item.before, item.after))
    return ChangeInfo(change=item.kind, path=path_text(item.path), before=before, after=after)


@record_of.register
def file(found: base.FileEntry) -> FileInfo:
    return FileInfo(
        path=path_text(found.path),
        **vars(entry(found.entry)),
        modified_at=iso_time(max(0, found.entry.mtime_ns)),
        target=None if found.target is None else found.target.decode(errors="surrogateescape"),
    )


@record_of.register
def written(done: base.Written) -> WriteInfo:
    return WriteInfo(snapshot(done.snapshot), done.files, done.directories, done.bytes, done.warnings)


@record_of.register
def restored(report: RestoreReport) -> RestoreInfo:
    return RestoreInfo(report.files, report.directories, report.bytes, report.warnings)


@record_of.register
def journal_entry(item: t.JournalEntry) -> JournalInfo:
    return JournalInfo(
        id=item.id,
        kind=item.kind,
        name=item.name,
        arguments=item.arguments,
        side_effect=item.side_effect,
        key=item.key,
        status=item.status,
        started_at=iso_time(item.began_at_ns),
        ended_at=_time(item.ended_at_ns),
        result=item.result,
        error=item.error,
        facts=item.facts,
        details=item.details,
        parent=item.after,
        snapshot=item.snapshot,
    )


@record_of.register
def task(item: base.Task) -> TaskInfo:
    return TaskInfo(item.name, item.status, item.depends, item.note, item.began, item.ended)


@record_of.register
def effect(left: base.Effect) -> EffectInfo:
    item = left.entry
    return EffectInfo(
        trajectory=left.trajectory,
        call=item.id,
        name=item.name,
        arguments=item.arguments,
        status=item.status,
        started_at=iso_time(item.began_at_ns),
        result=item.result,
        compensation=left.compensation,
        compensated=left.compensated,
    )


@record_of.register
def rewind_preview(preview: base.RewindPreview) -> RewindPreview:
    return RewindPreview(
        head=preview.head,
        target=preview.target,
        rewinds=preview.mode,
        changes=_all(change, preview.files),
        change_count=preview.file_count,
        messages=_all(message, preview.messages),
        effects=_all(effect, preview.effects),
        untouched=preview.left,
    )


@record_of.register
def approval(item: t.Approval) -> ApprovalInfo:
    return ApprovalInfo(
        id=item.id,
        trajectory=item.trajectory,
        call=item.entry,
        name=item.tool,
        arguments=item.arguments,
        digest=item.digest,
        snapshot=item.snapshot,
        side_effect=item.side_effect,
        created_at=iso_time(item.created_at_ns),
        question=item.question,
        status=item.status,
        expires_at=_time(item.expires_at_ns),
        decided_at=_time(item.decided_at_ns),
        by=item.by,
        reason=item.reason,
        edited=item.edited,
    )


def approval_view(view: base.ApprovalView, most: int) -> ApprovalView:
    """At most so many changes are listed."""
    return ApprovalView(
        approval=approval(view.approval),
        trajectory=trajectory(view.trajectory),
        changes=_all(change, view.files[:most]),
        more=len(view.files) > most,
        since=view.since,
    )


@record_of.register
def value(item: t.StoredValue) -> ValueInfo:
    return ValueInfo(
        tenant=item.tenant,
        namespace=item.namespace,
        key=item.key,
        version=item.version,
        value=item.value,
        created_at=iso_time(item.created_at_ns),
        expires_at=_time(item.expires_at_ns),
        is_deleted=item.deleted,
    )


@record_of.register
def image(item: t.Image) -> ImageInfo:
    return ImageInfo(item.id, item.name, item.source, item.bytes, item.files, iso_time(item.created_at_ns))


@record_of.register
def policy(item: base.RetentionPolicy) -> Policy:
    return Policy(item.keep_last, item.keep_within_s, item.keep_every, item.keep_failed, item.max_bytes)


@record_of.register
def usage(item: base.Usage) -> UsageInfo:
    return UsageInfo(
        layer_bytes=item.layer_bytes,
        layer_budget_bytes=item.layer_budget_bytes,
        repository_bytes=item.repository_bytes,
        spool_bytes=item.spool_bytes,
        states={state.value: 0 for state in t.SnapshotState} | dict(item.states),
        unarchived=item.unarchived,
    )


@record_of.register
def prune_report(report: base.PruneReport) -> PruneInfo:
    pruned = (
        PrunedInfo(item.snapshot, item.trajectory, item.seq, iso_time(item.created_at_ns), item.reason)
        for item in report.snapshots
    )
    return PruneInfo(
        dry_run=report.dry_run,
        pruned=tuple(pruned),
        kept=report.kept,
        freed_bytes=report.freed_bytes,
        evicted_layer_bytes=report.evicted_layer_bytes,
        repository_bytes=report.repository_bytes,
    )


@record_of.register
def damage(item: base.Damage) -> DamageInfo:
    path = None if item.path is None else path_text(item.path)
    return DamageInfo(pack=item.pack, object=item.object_id, what=item.what, snapshot=item.snapshot, path=path)


@record_of.register
def check_report(report: base.CheckReport) -> CheckInfo:
    return CheckInfo(report.objects, report.packs, report.bytes_read, _all(damage, report.damages), report.snapshots)


@record_of.register
def repair_report(report: base.RepairReport) -> RepairInfo:
    return RepairInfo(report.actions, report.lost)


@record_of.register
def imported(done: base.Imported) -> ImportInfo:
    return ImportInfo(_all(trajectory, done.trajectories), done.snapshots, done.warnings)


def run_event(told: Json) -> Json:
    """An event of a run in the API's words. Event logs of earlier versions are read, too, so the engine keeps its own."""
    words = _EVENT_WORDS.get(told["event"], {})
    return {words.get(key, key): value for key, value in told.items()}


_EVENT_WORDS = {
    "started": {"image": "image_name"},
    "snapshot": {"tool": "name"},
    "approval": {"tool": "name"},
    "replayed": {"tool": "name"},
    "finished": {"snapshots": "snapshot_count", "reused": "reuse"},
}
"""Event to the words of the engine that mean something else elsewhere in the API."""


def command_event(told: Json) -> Json:
    """An event of a command with its times as text."""
    times = {f"{name}_at": f"{name}_at_ns" for name in ("began", "ended") if f"{name}_at_ns" in told}
    kept = {key: value for key, value in told.items() if key not in times.values()}
    return {**kept, **{name: iso_time(told[key]) for name, key in times.items()}}


# -- comparisons, scores, bisections -----------------------------------------------------------------------------------


@record_of.register
def comparison(found: trials.Comparison) -> CompareInfo:
    return CompareInfo(
        fork_point=None if found.fork_point is None else snapshot(found.fork_point),
        branches=_all(_branch, found.branches),
        pairs=_all(_pair, found.pairs),
    )


def _branch(one: trials.ComparedBranch) -> BranchInfo:
    return BranchInfo(
        ref=one.ref,
        head=snapshot(one.head),
        name=one.name,
        status=one.status,
        exit_code=one.exit_code,
        call_count=one.calls,
        failed=one.failed,
        seconds=one.seconds,
        tokens=one.tokens,
        added=one.added,
        changed=one.changed,
        deleted=one.deleted,
    )


def _pair(pair: trials.ComparedPair) -> PairInfo:
    first = pair.first_difference
    return PairInfo(None if first is None else _aligned(first), _all(_aligned, pair.calls), _all(change, pair.files))


def _aligned(call: trials.AlignedCall) -> AlignedCall:
    left, right = (None if one is None else snapshot(one) for one in (call.left, call.right))
    return AlignedCall(call.number, call.difference, left, right)


def run_json(row: trials.SnapshotScores, run: ScoredRun) -> Json:
    """One run, and the snapshot that it scored."""
    return {"ref": row.ref, "snapshot": row.snapshot, "run": asdict(run)}


def row_json(row: trials.SnapshotScores) -> Json:
    """A scored snapshot: its place, its runs and their statistics."""
    runs = [asdict(run) for run in row.runs]
    return {"ref": row.ref, "snapshot": row.snapshot, **row.statistics(), "error": row.error, "runs": runs}


@record_of.register
def tried(one: trials.Tried) -> Tried:
    return Tried(snapshot(one.snapshot), one.round, one.outcome, one.exit_code)


@record_of.register
def bisection(found: trials.Bisection) -> Bisection:
    first, last = snapshot(found.first_bad), snapshot(found.last_good)
    return Bisection(first, last, _all(snapshot, found.unknown), found.rounds, found.flaky)
