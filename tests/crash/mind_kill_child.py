"""What an engine was about to do when it died: the tests do it in a process of its own, which a failpoint ends."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from snapshotd.api.history import MergeRequest, PromoteRequest, RewindRequest
from snapshotd.api.trajectories import ForkRequest
from snapshotd.engine.base import EditRequest, FileEdit, Forked, Variant
from snapshotd.engine.engine import Engine
from snapshotd.errors import Conflict, SnapshotdError
from snapshotd.types import ApprovalStatus, ExperimentID, RequestKey, SideEffect
from tests import forked, mind_rig
from tests.mind_rig import Agent

CHILD_S = 120
EDIT = EditRequest(files=(FileEdit(b"workspace/y", b"y"),))


def change(engine: Engine, what: str, trajectory: str) -> None:
    if what == "promote":
        engine.branching.promote("branch", PromoteRequest())
        return
    engine.branching.merge(trajectory, MergeRequest("branch"))


def fork(engine: Engine, trajectory: str) -> Forked:
    """Each time under one key, as a client does that has lost the answer."""
    variants = (Variant("changed", edit=EDIT), Variant("same"))
    head = engine.snapshots.trajectory(trajectory).head

    def recall(made: tuple[str, ...]) -> Forked:
        found = tuple(map(engine.snapshots.trajectory, made))
        return Forked(found[0].experiment or ExperimentID(""), found)

    with engine.requests.asking(RequestKey(trajectory, "the same", time.time_ns())) as asking:
        return asking.once(lambda: engine.branching.fork(head, ForkRequest(n=2), variants), recall)


def _ask(agent: Agent, gone: threading.Event, **more: Any) -> None:
    with contextlib.suppress(Conflict):
        agent.begin("mail", {"to": "a"}, cancelled=gone, **more)


def main() -> int:
    """`STATE_DIR WHAT TRAJECTORY`. Returns when the failpoint was not reached."""
    _, state_dir, what, trajectory = sys.argv
    forked.fork_own_children()
    _do(mind_rig.reopened(Path(state_dir)), what, trajectory)
    return 0


def _do(engine: Engine, what: str, trajectory: str) -> None:
    agent = Agent(engine, trajectory)
    if what == "rewind":
        engine.branching.rewind(trajectory, RewindRequest(engine.snapshots.log(trajectory)[1].id, compensate=True))
        return
    if what in ("promote", "merge"):
        change(engine, what, trajectory)
        return
    if what == "edit":
        engine.branching.edit(engine.snapshots.trajectory(trajectory).head, EDIT, name="edited")
        return
    if what == "fork":
        fork(engine, trajectory)
        return
    more = {"side_effect": SideEffect.IRREVERSIBLE, "approve": True}
    gone = threading.Event()
    asking = threading.Thread(target=_ask, args=(agent, gone), kwargs=more, daemon=True)
    asking.start()
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        pending = (
            engine.approvals.list(ApprovalStatus.PENDING) if what == "approve" else ()
        )  # else it dies before anybody can decide
        for approval in pending:
            gone.set()
            asking.join(CHILD_S)  # who asked does not see the decision before this process dies of it
            try:
                engine.approvals.approve(approval.id, by="ann")
            except SnapshotdError as exc:
                sys.exit(exc.message)
        time.sleep(0.01)
