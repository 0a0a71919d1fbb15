"""The client's results about the agent's mind. See results.py for the rules."""

from __future__ import annotations

from typing import Any

from snapshotd.client.records import record
from snapshotd.client.results import ApiRecord, ChangeInfo, Json, MessageInfo, TrajectoryInfo


@record(frozen=True)
class JournalInfo(ApiRecord):
    """One entry of a journal. `kind` is tool, model, question, task or checkpoint; `side_effect` local, idempotent or
    irreversible; `status` done, failed, unknown (cut off), or None: no end is recorded. `snapshot` binds it; None while
    none does."""

    id: str
    kind: str
    name: str
    arguments: Any
    side_effect: str
    key: str | None
    status: str | None
    started_at: str
    ended_at: str | None
    result: Any
    error: str | None
    facts: tuple[Any, ...]
    details: Json
    parent: str
    snapshot: str | None


@record(frozen=True)
class TaskInfo(ApiRecord):
    """A subtask. `status` is pending, in-progress, completed, failed or skipped; `started_in` the snapshot before its
    first call."""

    name: str
    status: str
    depends: tuple[str, ...]
    note: str | None
    started_in: str | None
    ended_in: str | None


@record(frozen=True)
class EffectInfo(ApiRecord):
    """An irreversible call that was left behind. `status` None: cut off. `compensation` is the command that undoes it;
    `compensated` is its outcome: None (not run), done, failed, interrupted (its sandbox was ended), or unknown (no end
    is recorded)."""

    trajectory: str
    call: str
    name: str
    arguments: Any
    status: str | None
    started_at: str
    result: Any
    compensation: tuple[str, ...] | None
    compensated: str | None


@record(frozen=True)
class RewindPreview(ApiRecord):
    """The effect that a rewind would have: `changes` of files (at most as many as the caller asked for; `change_count`
    is the number of all), `messages` that go, `effects` that cannot be undone, newest first. `untouched`: in a user's own
    folder, a sentence for each path that stays though an agent has changed it since."""

    head: str
    target: str
    rewinds: str
    changes: tuple[ChangeInfo, ...]
    change_count: int
    messages: tuple[MessageInfo, ...]
    effects: tuple[EffectInfo, ...]
    untouched: tuple[str, ...] = ()


@record(frozen=True)
class ApprovalInfo(ApiRecord):
    """A question that a person has to decide. `status` is pending, approved, denied, expired or stale (it no longer
    fits the call or the files). `edited`: the arguments that the approver put in their place, as a tuple of one."""

    id: str
    trajectory: str
    call: str
    name: str
    arguments: Any
    digest: str
    snapshot: str
    side_effect: str
    created_at: str
    question: str | None
    status: str
    expires_at: str | None
    decided_at: str | None
    by: str | None
    reason: str | None
    edited: tuple[Any, ...] | None


@record(frozen=True)
class ApprovalView(ApiRecord):
    """An approval with the files that changed since the trajectory's last one (`since`); `more`: not all of them are
    listed."""

    approval: ApprovalInfo
    trajectory: TrajectoryInfo
    changes: tuple[ChangeInfo, ...]
    more: bool
    since: str | None


@record(frozen=True)
class ValueInfo(ApiRecord):
    """One version of a value of the key-value store."""

    tenant: str
    namespace: str
    key: str
    version: int
    value: Any
    created_at: str
    expires_at: str | None
    is_deleted: bool
