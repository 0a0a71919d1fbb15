"""The step after a tool call: one function takes it, in one order.

    1 outputs are complete in the repository (the caller has done this)
    2 files: seal the live upper as a layer, or copy it, or nothing changed
    3 one catalog transaction: snapshot, tool call, new messages, head      <- the commit point
    4 tell followers; count, merge and archive in the background

Before 3 nothing is visible and everything made is rubbish that `sweep` takes; after it everything can be redone. A
crash between 2 and 3 loses the step as a whole: files, conversation and call together.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.sandbox.root import Captured
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import NO_ROOM, DataLoss, OutOfSpace, SandboxFailed
from snapshotd.failpoints import hit
from snapshotd.kernel import turns
from snapshotd.layers.proof import FAILED
from snapshotd.types import (
    BlobID,
    CallID,
    CallStatus,
    Ended,
    FileChanges,
    JournalEntry,
    RequestKey,
    Snapshot,
    SnapshotID,
    SnapshotState,
    ToolCall,
    new_id,
    short,
)

StepListener = Callable[[Snapshot, Captured], None]


def commit_step(
    catalog: Catalog,
    sandbox: Sandbox,
    call: ToolCall,
    listener: StepListener,
    *,
    ended: Ended | None = None,
    entries: Sequence[JournalEntry] = (),
    follows: Snapshot | None = None,
    keep_messages: int | None = None,
    request: RequestKey | None = None,
    captured: Captured | None = None,
    tags: tuple[str, ...] = (),
) -> Snapshot:
    """Take the snapshot after `call`. Safe from any thread; steps of one sandbox happen one after the other.

    `ended`, `entries`: journal entries that end with it (`SnapshotTable.commit`). `follows`: the mind goes on from
    that snapshot and not from the head: its journal, its state and its conversation, cut to the first `keep_messages`
    (None: all of them). Pending messages are appended to it. `request`: the client's, if this step is what it asks for.
    `captured`: the sandbox's files are recorded already; else they are captured. `tags`: of the new snapshot.

    Raises Conflict when another writer moved the head or a tag is taken, SandboxFailed, OutOfSpace, DataLoss (the layers'
    file system has failed); then no snapshot exists and the sandbox goes on.
    Durability: on return the snapshot is `captured` (survives kill -9); `stored` follows in the background.
    """
    hit("engine.step.begin")
    with sandbox.lock, turns.first():
        if follows is not None and not sandbox.mind.changed:
            sandbox.mind.put(catalog.conversations.state(follows.id), changed=False)
        if sandbox.closed:
            raise SandboxFailed(
                f"the sandbox of {short(sandbox.trajectory.id)} has ended; its last snapshot is {short(sandbox.head)}"
            )
        refused = sandbox.refused  # before anything is captured: it can fail
        captured = captured or _capture(sandbox)
        hit("engine.step.sealed")
        messages = tuple(sandbox.mind.messages)
        kept = sandbox.writer.messages
        if follows is not None:
            kept = follows.messages if keep_messages is None else keep_messages
        snapshot = Snapshot(
            id=SnapshotID(new_id()),
            parent=sandbox.head,
            trajectory=sandbox.trajectory.id,
            seq=sandbox.writer.seq + 1,
            stack=captured.stack,
            call=call,
            messages=kept + len(messages),
            state=SnapshotState.CAPTURED,
            pause_ns=captured.pause_ns,
            created_at_ns=time.time_ns(),
            method=captured.method,
            base=captured.base,
            own_layers=captured.own_layers,
            follows=None if follows is None else follows.id,
            tags=tags,
            refused=refused,
            files=FileChanges() if captured.base == sandbox.head and not captured.own_layers else None,
        )
        try:
            sandbox.survival.prepare_commit(snapshot.id)
            catalog.snapshots.commit(
                snapshot,
                messages,
                expected_head=sandbox.head,
                entries=entries,
                ended=ended,
                fence=sandbox.writer.fence,
                state=sandbox.mind.state if sandbox.mind.changed else None,
                request=request,
            )
        except BaseException:
            sandbox.root.abandon_capture(captured)
            raise
        hit("engine.step.committed")
        sandbox.writer.move_to(snapshot)
        sandbox.root.adopt_capture(captured, snapshot.id)
        sandbox.mind.drop_saved(len(messages))
        if refused and sandbox.way_out is not None:
            sandbox.way_out.forget_refused(refused)
    listener(snapshot, captured)
    return snapshot


def _capture(sandbox: Sandbox) -> Captured:
    sandbox.root.store.proof.check()
    try:
        return sandbox.root.capture()
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(
                f"cannot take a snapshot of {short(sandbox.trajectory.id)}: the state directory's disk is full; "
                "free space or remove trajectories with `snapshotd rm`"
            ) from exc
        if exc.errno not in (errno.EIO, errno.EROFS):
            raise
        sandbox.root.store.proof.fail()
        raise DataLoss(FAILED) from exc


def marker(
    name: str,
    arguments: Any,
    *,
    status: CallStatus = CallStatus.DONE,
    exit_code: int | None = None,
    stdout: BlobID | None = None,
    stderr: BlobID | None = None,
    started_at_ns: int | None = None,
    error: str | None = None,
) -> ToolCall:
    """A call record for something the daemon itself did (start, exit, stop, checkpoint, exec)."""
    now = time.time_ns()
    began = started_at_ns or now
    return ToolCall(
        CallID(new_id()), name, arguments, status, began, now - began, exit_code, error, None, stdout, stderr
    )
