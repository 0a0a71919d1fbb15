"""The engine's values as records of the API. Everything that the API says in JSON goes through `json_bytes`.

Times become ISO 8601 in UTC, durations milliseconds, sandbox paths text from the root.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import cache, singledispatch
from operator import attrgetter
from typing import Any, TypeVar

from snapshotd import types as t
from snapshotd.api.approvals import ApprovalInfo, ApprovalView
from snapshotd.api.commands import CommandInfo, ExecInfo
from snapshotd.api.experiments import AlignedCall, Bisection, BranchInfo, CompareInfo, PairInfo, Tried
from snapshotd.api.files import FileInfo, WriteInfo
from snapshotd.api.forms import iso_time, milliseconds, path_text
from snapshotd.api.mind import AppliedInfo, ConflictInfo, EffectInfo, JournalInfo, MergeInfo, RewindPreview, TaskInfo
from snapshotd.api.record import ApiRecord, Json, encode, records_in
from snapshotd.api.snapshots import (
    ChangeInfo,
    DamagedOutput,
    EntryInfo,
    FileCounts,
    FileStatus,
    MessageInfo,
    ModelUseInfo,
    RestoreInfo,
    SnapshotInfo,
    Tool,
)
from snapshotd.api.storage import ImageInfo, ImportInfo
from snapshotd.api.trajectories import (
    AgentInfo,
    ForkInfo,
    LimitsInfo,
    OverviewInfo,
    QueuedFork,
    QueueInfo,
    SandboxInfo,
    TrajectoryInfo,
)
from snapshotd.api.values import ValueInfo
from snapshotd.catalog.base import CallFacts
from snapshotd.engine import base
from snapshotd.engine.experiments import base as trials
from snapshotd.scores import ScoredRun
from snapshotd.trees.base import Change, Entry, RestoreReport
from snapshotd.trees.three_way import Item, TreeConflict

R = TypeVar("R", bound=ApiRecord)


def json_bytes(value: Any) -> bytes:
    """JSON in ASCII; records and values of the engine may stand in `value`. Text that programs in sandboxes left may hold
    lone surrogates, for which UTF-8 has no bytes: here an escape stands for each."""
    return json.dumps(value, separators=(",", ":"), default=_encoded).encode()


def event(name: str, value: Any) -> Json:
    """An event with the members of a value's record."""
    return {"event": name, **_encoded(value)}


def _encoded(value: Any) -> Json:
    return encode(value if isinstance(value, ApiRecord) else record_of(value))


def _time(at_ns: int | None) -> str | None:
    return None if at_ns is None else iso_time(at_ns)


@singledispatch
def record_of(value: object) -> ApiRecord:
    """The record of the API for a value of the engine."""
    raise TypeError(f"{type(value).__name__} is nothing that the API says")


def _record(kind: type[R], value: Any, /, **own: Any) -> R:
    """A record whose fields are those of a value by the same names, and `own` where they differ: NAME_at is made of
    NAME_at_ns, NAME_ms of NAME_ns, and what has a record itself becomes one."""
    made = object.__new__(kind)
    members = vars(made)  # all of them, so `__init__`, which is slow in a frozen class, has nothing to do
    for name, get, form in _getters(kind):  # type: ignore[arg-type]
        if name in own:
            members[name] = own[name]
        else:
            members[name] = get(value) if form is None else form(get(value))
    return made


@cache
def _getters(kind: Any) -> list[tuple[str, Callable[[Any], Any], Callable[[Any], Any] | None]]:
    found: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any] | None]] = []
    nested = records_in(kind)
    for name in (field.name for field in fields(kind)):
        if name.endswith("_at"):
            found.append((name, attrgetter(f"{name}_ns"), _time))
        elif name.endswith("_ms"):
            found.append((name, attrgetter(f"{name.removesuffix('_ms')}_ns"), milliseconds))
        else:
            found.append((name, attrgetter(name), _nested if name in nested else None))
    return found


def _nested(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_nested, value))
    return None if value is None else record_of(value)


@record_of.register
def tool(call: t.ToolCall) -> Tool:
    outputs = {"stdout": call.stdout, "stderr": call.stderr, "output": call.output}
    return _record(Tool, call, outputs=tuple(name for name, output in outputs.items() if output is not None))


@record_of.register
def damaged_output(lost: t.DamagedOutput) -> DamagedOutput:
    return DamagedOutput(lost.which, lost.bytes, lost.hash)


@record_of.register
def snapshot(taken: t.Snapshot, facts: CallFacts | None = None, kind: str | None = None) -> SnapshotInfo:
    told = facts or CallFacts()
    stack = taken.stack
    return _record(
        SnapshotInfo,
        taken,
        tool=tool(taken.call),
        image=stack.image,
        layers=len(stack.layers),
        side_effect=told.side_effect,
        sub_agent=told.sub_agent,
        kind=kind,
        model_use=None if told.model is None else model_use(told.model),
    )


@record_of.register
def looked_at(found: base.LookedAt) -> SnapshotInfo:
    kind = "marker" if found.marker else "call"
    return snapshot(found.snapshot, found.facts, kind)


@record_of.register
def model_use(use: t.ModelUse) -> ModelUseInfo:
    return _record(ModelUseInfo, use, call_count=use.calls)


@record_of.register
def file_changes(files: t.FileChanges) -> FileCounts:
    return _record(FileCounts, files)


@record_of.register
def trajectory(item: t.Trajectory) -> TrajectoryInfo:
    spec = item.spec
    limits = _record(LimitsInfo, spec.limits)
    ended = item.exit_code if item.status is not t.TrajectoryStatus.RUNNING else None  # an earlier program's, then
    return _record(
        TrajectoryInfo,
        item,
        image=spec.image,
        runtime=spec.runtime,
        network=str(spec.network),
        limits=limits,
        exit_code=ended,
    )


@record_of.register
def overview(item: base.Overview) -> OverviewInfo:
    return _record(OverviewInfo, item, model_use=model_use(item.model))


@record_of.register
def agent(item: t.AgentSpec) -> AgentInfo:
    return _record(AgentInfo, item)


@record_of.register
def sandbox(info: base.SandboxInfo) -> SandboxInfo:
    return _record(SandboxInfo, info)


@record_of.register
def forks(forked: base.Forked) -> ForkInfo:
    return _record(ForkInfo, forked)


@record_of.register
def executed(done: base.ExecResult) -> ExecInfo:
    return _record(ExecInfo, done)


@record_of.register
def command(info: base.CommandInfo) -> CommandInfo:
    return _record(CommandInfo, info, started_at=iso_time(info.began_at_ns), status=info.status or "running")


@record_of.register
def message(item: t.Message) -> MessageInfo:
    return MessageInfo(item.role, item.content)


@record_of.register
def entry(item: Entry) -> EntryInfo:
    return _record(EntryInfo, item, mode=f"{item.mode:04o}")


def file_status(item: Entry, target: bytes | None) -> FileStatus:
    return _record(FileStatus, item, mode=f"{item.mode:04o}", target=target)


@record_of.register
def change(item: Change) -> ChangeInfo:
    return _record(ChangeInfo, item, change=item.kind, path=path_text(item.path))


@record_of.register
def file(found: base.FileEntry) -> FileInfo:
    item = found.entry
    return _record(
        FileInfo,
        item,
        path=path_text(found.path),
        mode=f"{item.mode:04o}",
        modified_at=iso_time(max(0, item.mtime_ns)),
        target=None if found.target is None else found.target.decode(errors="surrogateescape"),
    )


@record_of.register
def written(done: base.Written) -> WriteInfo:
    return _record(WriteInfo, done, file_count=done.files)


@record_of.register
def restored(report: RestoreReport) -> RestoreInfo:
    return _record(RestoreInfo, report, file_count=report.files)


@record_of.register
def journal_entry(item: t.JournalEntry) -> JournalInfo:
    return _record(JournalInfo, item, started_at=iso_time(item.began_at_ns), parent=item.after)


@record_of.register
def task(item: base.Task) -> TaskInfo:
    return _record(TaskInfo, item, started_in=item.began, ended_in=item.ended)


@record_of.register
def effect(left: base.Effect) -> EffectInfo:
    item = left.entry
    return _record(
        EffectInfo,
        item,
        trajectory=left.trajectory,
        call=item.id,
        started_at=iso_time(item.began_at_ns),
        compensation=left.compensation,
        compensated=left.compensated,
    )


@record_of.register
def rewind_preview(preview: base.RewindPreview) -> RewindPreview:
    return _record(
        RewindPreview,
        preview,
        rewinds=preview.mode,
        changes=_nested(preview.files),
        change_count=preview.file_count,
        untouched=preview.left,
    )


@record_of.register
def approval(item: t.Approval) -> ApprovalInfo:
    return _record(ApprovalInfo, item, call=item.entry, name=item.tool)


def approval_view(view: base.ApprovalView, most: int) -> ApprovalView:
    """At most so many changes are listed."""
    return _record(ApprovalView, view, changes=_nested(view.files[:most]), more=len(view.files) > most)


@record_of.register
def value(item: t.StoredValue) -> ValueInfo:
    return _record(ValueInfo, item, is_deleted=item.deleted)


@record_of.register
def image(item: t.Image) -> ImageInfo:
    return _record(ImageInfo, item, file_count=item.files)


@record_of.register
def imported(done: base.Imported) -> ImportInfo:
    return _record(ImportInfo, done, snapshot_count=done.snapshots)


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


@record_of.register
def merged(done: base.Merged) -> MergeInfo:
    return _record(MergeInfo, done, changes=tuple(map(applied, done.items)))


@record_of.register
def applied(item: Item) -> AppliedInfo:  # type: ignore[type-arg]  # `register` reads the annotation
    return _record(AppliedInfo, item, merged=item.merged is not None)


@record_of.register
def conflict(found: TreeConflict) -> ConflictInfo:
    return _record(ConflictInfo, found)


@record_of.register
def queued_fork(child: trials.QueuedFork) -> QueuedFork:
    return _record(QueuedFork, child)


@record_of.register
def fork_queue(made: trials.ForkQueue) -> QueueInfo:
    return _record(QueueInfo, made)


# -- comparisons, scores, bisections -----------------------------------------------------------------------------------


@record_of.register
def comparison(found: trials.Comparison) -> CompareInfo:
    return _record(CompareInfo, found)


@record_of.register
def compared_branch(one: trials.ComparedBranch) -> BranchInfo:
    return _record(BranchInfo, one, call_count=one.calls)


@record_of.register
def compared_pair(pair: trials.ComparedPair) -> PairInfo:
    return _record(PairInfo, pair, changes=_nested(pair.files))


@record_of.register
def aligned_call(call: trials.AlignedCall) -> AlignedCall:
    return _record(AlignedCall, call)


@record_of.register
def tried(one: trials.Tried) -> Tried:
    return _record(Tried, one)


@record_of.register
def bisection(found: trials.Bisection) -> Bisection:
    return _record(Bisection, found)


def run_json(row: trials.SnapshotScores, run: ScoredRun) -> Json:
    """One run, and the snapshot that it scored."""
    return {"ref": row.ref, "snapshot": row.snapshot, "run": asdict(run)}


def row_json(row: trials.SnapshotScores) -> Json:
    """A scored snapshot: its place, its runs and their statistics."""
    runs = [asdict(run) for run in row.runs]
    return {"ref": row.ref, "snapshot": row.snapshot, **row.statistics(), "error": row.error, "runs": runs}
