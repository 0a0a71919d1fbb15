"""A snapshot of a running sandbox as it is now, without a call of an agent or a client."""

from __future__ import annotations

from typing import Any

from snapshotd.api.snapshots import SnapshotRequest
from snapshotd.engine import requests
from snapshotd.engine.context import Context
from snapshotd.engine.runs.launch import is_alive
from snapshotd.engine.runs.sessions import Sessions
from snapshotd.engine.sandbox.step import StepListener, commit_step, marker
from snapshotd.errors import Conflict, UsageError
from snapshotd.types import DURING, FOLDER, SNAPSHOT_NOW, Snapshot, Trajectory, short

_MOST_CALLS = 16
"""Open calls that a snapshot names."""


def take_snapshot(
    context: Context, sessions: Sessions, listener: StepListener, trajectory: Trajectory, request: SnapshotRequest
) -> Snapshot:
    """See `RunService.take_snapshot`. `listener` is told of the step."""
    name = request.name
    if name is not None and request.if_changed:
        raise UsageError("a snapshot with a name is taken in any case; leave out the name, or `if_changed`")
    sandbox = sessions.find(trajectory.id)
    if sandbox is None or not is_alive(sandbox):
        raise _not_running(trajectory)
    sessions.check_place(sandbox)
    with sandbox.lock:
        if request.if_changed and not sandbox.closed and not sandbox.root.changed:
            return context.catalog.snapshots.get(sandbox.head)
        told: dict[str, Any] = {} if name is None else {"name": name}
        during = sessions.open_calls(sandbox)
        if during:
            told[DURING] = during[:_MOST_CALLS]
        return commit_step(
            context.catalog,
            sandbox,
            marker(SNAPSHOT_NOW, context.secrecy.of(trajectory).conceal(told)),
            listener,
            request=requests.present(),
            tags=() if name is None else (name,),
        )


def _not_running(trajectory: Trajectory) -> Conflict:
    shown, head = trajectory.shown_name, short(trajectory.head)
    why = (
        "is a folder of this machine, whose snapshots its hooks take"
        if trajectory.spec.runtime == FOLDER
        else f"is not running, so its files are those of its head {head}"
    )
    return Conflict(f"{shown} {why}; `snapshotd tag {head} NAME` names its newest snapshot")
