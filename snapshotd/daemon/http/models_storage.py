"""The API's words about durable storage: policies, usage, and the reports of prune, check, repair and import."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from snapshotd.daemon.http.models import Answer, Request, Trajectory, iso_time, path_json
from snapshotd.engine import base
from snapshotd.terms import PRUNE_GRACE_S
from snapshotd.types import SECONDS_MOST, SnapshotState

_COUNT_MAX = 1 << 53
"""Largest integer that every reader of JSON keeps exactly."""


class Policy(Request):
    """The rules that decide which snapshots keep their files: a snapshot keeps them if any rule keeps it. Without
    rules, all of them do."""

    keep_last: int | None = Field(None, ge=0, le=_COUNT_MAX, description="The newest of each trajectory.")
    keep_within_s: float | None = Field(
        None, gt=0, le=SECONDS_MOST, allow_inf_nan=False, description="Those younger than this, in seconds."
    )
    keep_every: int | None = Field(None, ge=1, le=_COUNT_MAX, description="Milestones: those whose seq it divides.")
    keep_failed: int | None = Field(None, ge=1, le=_COUNT_MAX, description="The newest whose tool call failed.")
    max_bytes: int | None = Field(
        None, ge=1, le=_COUNT_MAX, description="Of what the rules keep, the oldest go until the repository fits."
    )

    @staticmethod
    def of(policy: base.RetentionPolicy) -> Policy:
        return Policy(
            keep_last=policy.keep_last,
            keep_within_s=policy.keep_within_s,
            keep_every=policy.keep_every,
            keep_failed=policy.keep_failed,
            max_bytes=policy.max_bytes,
        )

    def policy(self) -> base.RetentionPolicy:
        return base.RetentionPolicy(
            keep_last=self.keep_last,
            keep_within_s=self.keep_within_s,
            keep_every=self.keep_every,
            keep_failed=self.keep_failed,
            max_bytes=self.max_bytes,
        )


class PruneRequest(Request):
    policy: Policy | None = Field(None, description="Instead of the policies that are set.")
    dry_run: bool = Field(False, description="Only say what would go.")
    grace_s: float = Field(
        PRUNE_GRACE_S,
        ge=0,
        le=SECONDS_MOST,
        allow_inf_nan=False,
        description="Packs younger than this stay as they are.",
    )


class CheckRequest(Request):
    read_data: bool = Field(False, description="Also decode every object and compare it with its id.")


class MountRequest(Request):
    directory: str = Field(description="Absolute path of a directory, in the mount namespace of the process that asks.")


class Usage(Answer):
    """Disk use in bytes, and the number of snapshots in each state."""

    layer_bytes: int
    layer_budget_bytes: int
    repository_bytes: int
    spool_bytes: int
    states: dict[str, int]
    unarchived: int = Field(description="Captured snapshots that are not stored yet.")

    @staticmethod
    def of(usage: base.Usage) -> Usage:
        states = {state.value: 0 for state in SnapshotState} | dict(usage.states)
        return Usage(
            layer_bytes=usage.layer_bytes,
            layer_budget_bytes=usage.layer_budget_bytes,
            repository_bytes=usage.repository_bytes,
            spool_bytes=usage.spool_bytes,
            states=states,
            unarchived=usage.unarchived,
        )


class PrunedSnapshot(Answer):
    snapshot: str
    trajectory: str
    seq: int
    created_at: str
    reason: str


class PruneAnswer(Answer):
    dry_run: bool
    pruned: list[PrunedSnapshot]
    kept: int
    freed_bytes: int
    evicted_layer_bytes: int
    repository_bytes: int

    @staticmethod
    def of(report: base.PruneReport) -> PruneAnswer:
        items = [
            PrunedSnapshot(
                snapshot=item.snapshot,
                trajectory=item.trajectory,
                seq=item.seq,
                reason=item.reason,
                created_at=iso_time(item.created_at_ns),
            )
            for item in report.snapshots
        ]
        return PruneAnswer(
            dry_run=report.dry_run,
            pruned=items,
            kept=report.kept,
            freed_bytes=report.freed_bytes,
            evicted_layer_bytes=report.evicted_layer_bytes,
            repository_bytes=report.repository_bytes,
        )


def check_json(report: base.CheckReport) -> dict[str, Any]:
    """Counts, `damages` (pack, object, what, snapshot, path and path_b64) and the ids of the damaged snapshots."""
    damages = [
        {
            "pack": item.pack,
            "object": item.object_id,
            "what": item.what,
            "snapshot": item.snapshot,
            **({"path": None} if item.path is None else path_json(item.path)),
        }
        for item in report.damages
    ]
    return {
        "objects": report.objects,
        "packs": report.packs,
        "bytes_read": report.bytes_read,
        "damages": damages,
        "unreadable": list(report.snapshots),
    }


class RepairAnswer(Answer):
    actions: list[str]
    lost: list[str]

    @staticmethod
    def of(report: base.RepairReport) -> RepairAnswer:
        return RepairAnswer(actions=list(report.actions), lost=list(report.lost))


class ImportAnswer(Answer):
    trajectories: list[Trajectory]
    snapshot_count: int
    warnings: list[str]

    @staticmethod
    def of(imported: base.Imported) -> ImportAnswer:
        lines = [Trajectory.of(item) for item in imported.trajectories]
        return ImportAnswer(trajectories=lines, snapshot_count=imported.snapshots, warnings=list(imported.warnings))
