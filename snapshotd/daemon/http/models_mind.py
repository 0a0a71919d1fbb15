"""The API's words about the agent's mind: journal, tasks, rewinds, edits, effects, approvals, and the key-value
store."""

from __future__ import annotations

import base64
import binascii
import math
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from snapshotd import types as t
from snapshotd.daemon.http.models import Answer, Message, Request, Trajectory, change_json, environment, iso_time
from snapshotd.daemon.http.routes.shared import sandbox_path
from snapshotd.engine import base
from snapshotd.engine.base import MergeRequest
from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.types import DEFAULT_TENANT

Json = dict[str, Any]
_DEPTH_MAX = 64
_VALUES_MAX = 200_000
"""The bounds of an agent's records (docs/agent-protocol.md), so that a person cannot make a record that no agent could
read."""
_ITEMS_MAX = 10_000
_MERGED_MAX = 200_000
_TTL_MAX_S = 100 * 366 * 86400
_NAME_MAX = 1024


def time_or_none(at_ns: int | None) -> str | None:
    return None if at_ns is None else iso_time(at_ns)


# -- answers -----------------------------------------------------------------------------------------------------------


def entry_json(entry: t.JournalEntry) -> Json:
    """One entry of a journal. `status` null: no end is recorded; `snapshot` null: no snapshot binds it yet."""
    return {
        "id": entry.id,
        "kind": entry.kind.value,
        "name": entry.name,
        "arguments": entry.arguments,
        "side_effect": entry.side_effect.value,
        "key": entry.key,
        "status": None if entry.status is None else entry.status.value,
        "started_at": iso_time(entry.began_at_ns),
        "ended_at": time_or_none(entry.ended_at_ns),
        "result": entry.result,
        "error": entry.error,
        "facts": list(entry.facts),
        "details": entry.details,
        "parent": entry.after,
        "snapshot": entry.snapshot,
    }


class Task(Answer):
    """A subtask of an agent."""

    name: str
    status: str = Field(description="pending, in-progress, completed, failed or skipped.")
    depends: list[str]
    note: str | None
    started_in: str | None = Field(description="The snapshot before its first call.")
    ended_in: str | None = Field(description="The snapshot of its end.")

    @staticmethod
    def of(task: base.Task) -> Task:
        return Task(
            name=task.name,
            status=task.status,
            depends=list(task.depends),
            note=task.note,
            started_in=task.began,
            ended_in=task.ended,
        )


class Effect(Answer):
    """An irreversible call that was left behind: it cannot be taken back, at most compensated."""

    trajectory: str
    call: str
    name: str
    arguments: Any
    status: t.CallStatus | None = Field(description="Null: it was cut off.")
    started_at: str
    result: Any
    compensation: list[str] | None = Field(description="The command that undoes it, if there is one.")
    compensated: t.CallStatus | None = Field(
        description="How the compensation ended. Null: it was not run; unknown: its end is not recorded."
    )

    @staticmethod
    def of(effect: base.Effect) -> Effect:
        entry = effect.entry
        return Effect(
            trajectory=effect.trajectory,
            call=entry.id,
            name=entry.name,
            arguments=entry.arguments,
            status=entry.status,
            started_at=iso_time(entry.began_at_ns),
            result=entry.result,
            compensated=effect.compensated,
            compensation=None if effect.compensation is None else list(effect.compensation),
        )


class RewindPreview(Answer):
    """The effect that a rewind would have."""

    head: str
    target: str
    rewinds: base.RewindMode
    changes: list[Json] = Field(
        description="Changes as in /diff, from the head to what would be there; at most as many as were asked for."
    )
    change_count: int = Field(description="Number of all changes.")
    messages: list[Message] = Field(description="The messages that would go.")
    effects: list[Effect] = Field(description="Irreversible calls that would be left behind, newest first.")
    untouched: list[str] = Field(
        description="In a user's own folder: a sentence for each path that stays though an agent has changed it since."
    )

    @staticmethod
    def of(preview: base.RewindPreview) -> RewindPreview:
        return RewindPreview(
            head=preview.head,
            target=preview.target,
            rewinds=preview.mode,
            changes=[change_json(item) for item in preview.files],
            change_count=preview.file_count,
            messages=[Message.of(item) for item in preview.messages],
            effects=[Effect.of(item) for item in preview.effects],
            untouched=list(preview.left),
        )


class Approval(Answer):
    """A question that a person has to decide."""

    id: str
    trajectory: str
    call: str = Field(description="The journal entry that waits.")
    name: str = Field(description="The tool's.")
    arguments: Any
    digest: str = Field(
        description="SHA-256 of the canonical JSON of [tool, arguments], hexadecimal; of [tool, [call, arguments]] for a call from "
        "outside of the sandbox."
    )
    snapshot: str = Field(
        description="It holds for these files only; for a call from outside, the head when it was asked."
    )
    side_effect: t.SideEffect
    created_at: str
    question: str | None
    status: t.ApprovalStatus
    expires_at: str | None
    decided_at: str | None
    by: str | None
    reason: str | None
    edited: list[Any] | None = Field(
        description="The arguments that the approver put in their place, as a list of one; null: as asked."
    )

    @staticmethod
    def of(item: t.Approval) -> Approval:
        return Approval(
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
            expires_at=time_or_none(item.expires_at_ns),
            decided_at=time_or_none(item.decided_at_ns),
            by=item.by,
            reason=item.reason,
            edited=None if item.edited is None else list(item.edited),
        )


class ApprovalView(Answer):
    """An approval, with the facts that a person needs for a decision."""

    approval: Approval
    trajectory: Trajectory
    changes: list[Json] = Field(
        description="Changes as in /diff, since the trajectory's last approval; at most as many as were asked for."
    )
    more: bool = Field(description="There are more of them.")
    since: str | None

    @staticmethod
    def of(view: base.ApprovalView, most: int) -> ApprovalView:
        return ApprovalView(
            approval=Approval.of(view.approval),
            trajectory=Trajectory.of(view.trajectory),
            more=len(view.files) > most,
            changes=[change_json(item) for item in view.files[:most]],
            since=view.since,
        )


class StoredValue(Answer):
    """One version of a value of the key-value store."""

    tenant: str
    namespace: str
    key: str
    version: int
    value: Any
    created_at: str
    expires_at: str | None
    is_deleted: bool

    @staticmethod
    def of(item: t.StoredValue) -> StoredValue:
        return StoredValue(
            tenant=item.tenant,
            namespace=item.namespace,
            key=item.key,
            version=item.version,
            value=item.value,
            created_at=iso_time(item.created_at_ns),
            expires_at=time_or_none(item.expires_at_ns),
            is_deleted=item.deleted,
        )


# -- requests ----------------------------------------------------------------------------------------------------------


class DecisionFields(Request):
    call: str = Field(min_length=4, max_length=32, description="Its id, or a unique prefix.")
    action: Literal["retry", "skip", "result"] = Field(
        description="Run it again; go on as if it had returned null; this is its result."
    )
    result: Any = Field(None, description="With `result`: any JSON value.")

    def decision(self) -> base.Decision:
        if self.action != "result" and "result" in self.model_fields_set:
            raise UsageError(
                f"a result was given for call {self.call}, which is to {self.action}; a result belongs to the action `result`"
            )
        return base.Decision(self.call, self.action, check_json(self.result, f"the result of call {self.call}"))


class ResumeRequest(Request):
    decisions: list[DecisionFields] = Field(default_factory=list, max_length=_ITEMS_MAX)

    def chosen(self) -> tuple[base.Decision, ...]:
        calls = [item.call for item in self.decisions]
        twice = next((call for call in calls if calls.count(call) > 1), None) if len(set(calls)) < len(calls) else None
        if twice is not None:
            raise UsageError(f"call {twice} is decided twice; say one thing about each call")
        return tuple(item.decision() for item in self.decisions)


class RewindRequest(Request):
    to: str = Field(description="The snapshot to go back to: tag, name or id prefix.")
    mode: base.RewindMode = Field("both", description="What goes back: the files, the agent's mind, or both.")
    compensate: bool = Field(
        False, description="Run the compensations of the irreversible calls that are left behind, newest first."
    )
    session: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="In a user's own folder: take back the changes of this session of the agent alone, or of `all`. "
        "Null: there may be one only.",
    )


class PromoteRequest(Request):
    into: str | None = Field(None, description="The trajectory that takes it over; null: the one it was forked from.")
    leave_behind: bool = Field(False, description="Also if that one has taken steps since the fork.")
    compensate: bool = Field(
        False, description="The same, and run the compensations of the irreversible calls among them first."
    )


class RetryRequest(Request):
    task: str = Field(min_length=1, max_length=_NAME_MAX)
    compensate: bool = Field(True, description="Compensate what the task did.")
    resume: bool = Field(True, description="Let the program go on.")


class CompensateRequest(Request):
    calls: list[str] = Field(
        default_factory=list,
        max_length=_ITEMS_MAX,
        description="Ids or unique prefixes; none: all that were left behind.",
    )


class MessageFields(Request):
    role: str = Field(min_length=1, max_length=64)
    content: Any

    def message(self) -> t.Message:
        if not self.role.isprintable():
            raise UsageError(f"{self.role!r} cannot be the role of a message: use printable characters")
        return t.Message(self.role, check_json(self.content, f"the content of a message of {self.role}"))


class FileFields(Request):
    path_b64: str = Field(description="Path in the sandbox, relative to its root, as base64 of its bytes.")
    content_b64: str | None = Field(description="Its new content; null removes it.")
    mode: int | None = Field(None, ge=0, le=0o7777, description="Null: that of the file that is there, or 0644.")

    def edit(self) -> base.FileEdit:
        path = sandbox_path(self.path_b64)
        if not path:
            raise UsageError("the root itself cannot be edited; name a file")
        if self.content_b64 is None:
            return base.FileEdit(path, None)
        try:
            content = base64.b64decode(self.content_b64, validate=True)
        except (binascii.Error, ValueError) as exc:
            raise UsageError(f"the content of {path!r} is not base64 ({exc}); encode the file's bytes") from exc
        return base.FileEdit(path, content, self.mode)


class ModeFields(Request):
    path_b64: str
    mode: int = Field(ge=0, le=0o7777)


class MergeFields(Request):
    """Paths are relative to the sandbox's root, as base64 of their bytes."""

    source: str = Field(description="The snapshot that files are taken from.")
    base: str = Field(pattern="^[0-9a-f]{32}$", description="The snapshot that both were compared with.")
    head: str = Field(pattern="^[0-9a-f]{32}$", description="The head that was compared; any other is a conflict.")
    take_b64: list[str] = Field(
        default_factory=list, max_length=_MERGED_MAX, description="To be as they are in `source`."
    )
    delete_b64: list[str] = Field(default_factory=list, max_length=_MERGED_MAX, description="To go, with all in them.")
    edits: list[FileFields] = Field(
        default_factory=list, max_length=_ITEMS_MAX, description="Files and their contents."
    )
    modes: list[ModeFields] = Field(default_factory=list, max_length=_MERGED_MAX, description="Permissions to set.")

    def request(self) -> MergeRequest:
        return MergeRequest(
            t.SnapshotID(self.head),
            t.SnapshotID(self.base),
            tuple(map(_below_root, self.take_b64)),
            tuple(map(_below_root, self.delete_b64)),
            tuple(item.edit() for item in self.edits),
            tuple((_below_root(item.path_b64), item.mode) for item in self.modes),
        )


def _below_root(path_b64: str) -> bytes:
    path = sandbox_path(path_b64)
    if not path or any(part in (b"", b".", b"..") for part in path.split(b"/")):
        raise UsageError(f"{path[:200]!r} cannot be merged: it is no path below the root")
    return path


class EditFields(Request):
    """The differences between the new snapshot and its source."""

    files: list[FileFields] = Field(default_factory=list, max_length=_ITEMS_MAX)
    messages: list[MessageFields] | None = Field(None, description="A whole conversation in place of the old one.")
    drop_messages: int = Field(0, ge=0, le=1 << 53, description="How many messages to leave out at the end.")
    add_messages: list[MessageFields] = Field(default_factory=list, description="Messages to append.")
    result: Any = Field(
        None,
        description="Another result of the snapshot's tool call, also null; leave it out to keep the recorded one.",
    )
    state: Json = Field(default_factory=dict, description="Keys of the state to set; null removes one.")

    def request(self) -> base.EditRequest:
        """UsageError names the malformed part."""
        if self.messages is not None and self.drop_messages:
            raise UsageError(
                "a whole conversation was given, so there is nothing to drop; give `messages` or `drop_messages`"
            )
        edit = base.EditRequest(
            files=tuple(item.edit() for item in self.files),
            messages=None if self.messages is None else tuple(item.message() for item in self.messages),
            drop_messages=self.drop_messages,
            add_messages=tuple(item.message() for item in self.add_messages),
            result=(check_json(self.result, "the result"),) if "result" in self.model_fields_set else None,
            state=tuple(check_json(self.state, "the state").items()),
        )
        paths = [item.path for item in edit.files]
        if len(set(paths)) < len(paths):
            raise UsageError("the same path is edited twice; say one thing about each path")
        return edit


class EditRequest(EditFields):
    env: dict[str, str] = Field(default_factory=dict)
    name: str | None = Field(None, description="Name of the new trajectory.")
    resume: bool = Field(False, description="Let the program go on from there.")

    def request(self) -> base.EditRequest:
        """UsageError names the malformed part."""
        if self.name is not None and not t.NAME_PATTERN.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot be a name: use up to 64 letters, digits and ._- , starting with a letter or digit"
            )
        return replace(super().request(), env=environment(self.env))


class AskRequest(Request):
    trajectory: str = Field(max_length=_NAME_MAX, description="The trajectory that the call belongs to.")
    call: str = Field(
        min_length=1, max_length=64, description="The program's name for it: letters, digits, '.', '_' and '-'."
    )
    tool: str = Field(min_length=1, max_length=_NAME_MAX)
    arguments: Any = None
    side_effect: t.SideEffect = t.SideEffect.LOCAL
    question: str | None = Field(
        None, max_length=10_000, description="Left out, the policy decides if a person is asked."
    )
    expires_s: float | None = Field(None, gt=0, le=_TTL_MAX_S, allow_inf_nan=False)


class ApproveRequest(Request):
    by: str | None = Field(
        None, min_length=1, max_length=200, description="Name of the decider; default: the requesting user."
    )
    reason: str | None = Field(None, max_length=10_000)
    arguments: Any = Field(None, description="Run it with these instead; leave them out to run it as asked.")

    def edited(self) -> tuple[Any] | None:
        return (check_json(self.arguments, "the arguments"),) if "arguments" in self.model_fields_set else None


class DenyRequest(Request):
    by: str | None = Field(
        None, min_length=1, max_length=200, description="Name of the decider; default: the requesting user."
    )
    reason: str | None = Field(None, max_length=10_000, description="The agent is told.")


class PutValueRequest(Request):
    value: Any
    ttl_s: float | None = Field(
        None, gt=0, le=_TTL_MAX_S, allow_inf_nan=False, description="It is gone after so many seconds."
    )
    expected_version: int | None = Field(None, ge=0, le=1 << 53, description="The version that must be there; 0: none.")


class SearchRequest(Request):
    tenant: str = Field(DEFAULT_TENANT, max_length=_NAME_MAX)
    namespace: str = Field(max_length=8 * _NAME_MAX, description="Those below it are searched, too.")
    prefix: str = Field("", max_length=_NAME_MAX, description="Of the key.")
    where: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, max_length=100, description="Fields of the value (dotted paths) that must equal these."
    )
    limit: int = Field(100, ge=1, le=10_000)
    after: str = Field("", max_length=_NAME_MAX, description="Only keys behind this one.")


def check_json(value: Any, what: str) -> Any:
    """`value`, if every reader of JSON can keep it: finite numbers, text without lone surrogates, bounded depth and
    count. UsageError and LimitExceeded call it `what`."""
    level, count = [value], 0
    for _ in range(_DEPTH_MAX + 1):
        below: list[Any] = []
        for item in level:
            count += 1
            if isinstance(item, dict):
                below += item.values()
                _check_text("".join(item), what)
            elif isinstance(item, list):
                below += item
            elif isinstance(item, str):
                _check_text(item, what)
            elif isinstance(item, float) and not math.isfinite(item):
                raise UsageError(f"{what} has a number that JSON does not know ({item}); use null or text")
        if count + len(below) > _VALUES_MAX:
            raise LimitExceeded(f"{what} has more than {_VALUES_MAX} values; put large data into a file")
        if not below:
            return value
        level = below
    raise LimitExceeded(f"{what} is nested deeper than {_DEPTH_MAX} levels; make it flatter")


def _check_text(text: str, what: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise UsageError(
                f"{what} has text that is not Unicode ({exc.reason} at character {exc.start}); leave that out"
            ) from exc
