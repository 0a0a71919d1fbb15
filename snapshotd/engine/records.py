"""The engine's values as records of the API. Times become ISO 8601 in UTC, durations milliseconds, sandbox paths text from the root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache, partial, singledispatch
from operator import attrgetter
from typing import Any, TypeVar

from snapshotd import types as t
from snapshotd.api.approvals import ApprovalInfo
from snapshotd.api.commands import CommandInfo, ExecInfo
from snapshotd.api.files import FileInfo, WriteInfo
from snapshotd.api.forms import iso_time, milliseconds, path_text
from snapshotd.api.history import AppliedInfo, ConflictInfo, EffectInfo, JournalInfo, MergeInfo, RewindPreview
from snapshotd.api.record import ApiRecord, records_in
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
from snapshotd.api.trajectories import AgentInfo, ForkInfo, LimitsInfo, OverviewInfo, SandboxInfo, TrajectoryInfo
from snapshotd.api.values import ValueInfo
from snapshotd.catalog.base import CallFacts
from snapshotd.engine import base
from snapshotd.trees.base import Change, Entry, RestoreReport
from snapshotd.trees.three_way import Item, TreeConflict

R = TypeVar("R", bound=ApiRecord)


def _time(at_ns: int | None) -> str | None:
    return None if at_ns is None else iso_time(at_ns)


@singledispatch
def record_of(value: object) -> ApiRecord:
    """The record of the API for a value of the engine."""
    raise TypeError(f"{type(value).__name__} is nothing that the API says")


def make_record(kind: type[R], value: Any, /, **own: Any) -> R:
    """A record whose fields are those of a value by the same names, or by those in `_RENAMED`, and `own` where they differ:
    NAME_at is made of NAME_at_ns, NAME_ms of NAME_ns, and what has a record itself becomes one."""
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
    having, renamed = records_in(kind), _RENAMED.get(kind, {})
    for name in (field.name for field in fields(kind)):
        if name.endswith("_at"):
            found.append((name, attrgetter(renamed.get(name, f"{name}_ns")), _time))
        elif name.endswith("_ms"):
            found.append((name, attrgetter(f"{name.removesuffix('_ms')}_ns"), milliseconds))
        else:
            found.append((name, attrgetter(renamed.get(name, name)), as_records if name in having else None))
    return found


def as_records(value: Any) -> Any:
    """The record of a value, or those of each of a tuple. None stays None."""
    if isinstance(value, tuple):
        return tuple(map(as_records, value))
    return None if value is None else record_of(value)


_RENAMED: dict[Any, dict[str, str]] = {}
"""Record to field to the attribute of the value that it is made of, where that has another name."""


def _say(kind: type[Any], record: type[ApiRecord], **renamed: str) -> None:
    """Values of this kind become such records. `renamed`: as in `_RENAMED`."""
    _RENAMED[record] = renamed
    record_of.register(kind, partial(make_record, record))


_say(t.DamagedOutput, DamagedOutput, output="which")
_say(t.FileChanges, FileCounts)
_say(t.ModelUse, ModelUseInfo, call_count="calls")
_say(t.AgentSpec, AgentInfo)
_say(t.Message, MessageInfo)
_say(t.JournalEntry, JournalInfo, started_at="began_at_ns", parent="after")
_say(t.Approval, ApprovalInfo, call="entry", name="tool")
_say(t.StoredValue, ValueInfo, is_deleted="deleted")
_say(t.Image, ImageInfo, file_count="files")
_say(base.Overview, OverviewInfo, model_use="model")
_say(base.SandboxInfo, SandboxInfo)
_say(base.Forked, ForkInfo)
_say(base.ExecResult, ExecInfo)
_say(base.Written, WriteInfo, file_count="files")
_say(
    base.Effect,
    EffectInfo,
    started_at="entry.began_at_ns",
    call="entry.id",
    **{name: f"entry.{name}" for name in ("name", "arguments", "status", "result")},
)
_say(base.RewindPreview, RewindPreview, rewinds="mode", changes="files", change_count="file_count", untouched="left")
_say(base.Imported, ImportInfo, snapshot_count="snapshots")
_say(base.Merged, MergeInfo, changes="items")
_say(RestoreReport, RestoreInfo, file_count="files")
_say(TreeConflict, ConflictInfo)


@record_of.register
def tool(call: t.ToolCall) -> Tool:
    outputs = {"stdout": call.stdout, "stderr": call.stderr, "output": call.output}
    return make_record(Tool, call, outputs=tuple(name for name, output in outputs.items() if output is not None))


@record_of.register
def snapshot(
    taken: t.Snapshot, facts: CallFacts | None = None, kind: str | None = None, published: bool | None = None
) -> SnapshotInfo:
    told = facts or CallFacts()
    stack = taken.stack
    return make_record(
        SnapshotInfo,
        taken,
        tool=tool(taken.call),
        image=stack.image,
        layers=len(stack.layers),
        side_effect=told.side_effect,
        sub_agent=told.sub_agent,
        kind=kind,
        published=published,
        model_use=as_records(told.model),
    )


@record_of.register
def looked_at(found: base.LookedAt) -> SnapshotInfo:
    kind = "marker" if found.marker else "call"
    return snapshot(found.snapshot, found.facts, kind, found.published)


@record_of.register
def trajectory(item: t.Trajectory) -> TrajectoryInfo:
    spec = item.spec
    limits = make_record(LimitsInfo, spec.limits)
    ended = item.exit_code if item.status is not t.TrajectoryStatus.RUNNING else None  # an earlier program's, then
    return make_record(
        TrajectoryInfo,
        item,
        image=spec.image,
        runtime=spec.runtime,
        network=str(spec.network),
        limits=limits,
        exit_code=ended,
    )


@record_of.register
def command(info: base.CommandInfo) -> CommandInfo:
    return make_record(CommandInfo, info, started_at=iso_time(info.began_at_ns), status=info.status or "running")


@record_of.register
def entry(item: Entry) -> EntryInfo:
    return make_record(EntryInfo, item, mode=f"{item.mode:04o}")


def file_status(item: Entry, target: bytes | None) -> FileStatus:
    return make_record(FileStatus, item, mode=f"{item.mode:04o}", target=target)


@record_of.register
def change(item: Change) -> ChangeInfo:
    return make_record(ChangeInfo, item, change=item.kind, path=path_text(item.path))


@record_of.register
def file(found: base.FileEntry) -> FileInfo:
    item = found.entry
    return make_record(
        FileInfo,
        item,
        path=path_text(found.path),
        mode=f"{item.mode:04o}",
        modified_at=iso_time(max(0, item.mtime_ns)),
        target=None if found.target is None else found.target.decode(errors="surrogateescape"),
    )


@record_of.register
def applied(item: Item) -> AppliedInfo:  # type: ignore[type-arg]  # `register` reads the annotation
    return make_record(AppliedInfo, item, merged=item.merged is not None)
