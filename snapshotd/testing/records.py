"""Valid records with every field filled in, for tests of whatever stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.types import (
    AgentSpec,
    BlobID,
    CallID,
    CallStatus,
    Image,
    ImageID,
    LayerID,
    Limits,
    Message,
    Network,
    SandboxSpec,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    new_id,
)

CREATED_AT_NS = 1_760_000_000_123_456_789


def make_image(name: str = "default", **fields: Any) -> Image:
    image = Image(
        ImageID(new_id()), name, "recipe default", "sha256:0123", 123_456_789, 4_321, CREATED_AT_NS,
        (("PATH", "/usr/bin:/bin"), ("EMPTY", "")), "/workspace",
    )  # fmt: skip
    return replace(image, **fields)


def make_call(name: str = "shell", **fields: Any) -> ToolCall:
    call = ToolCall(
        CallID(new_id()), name, {"argv": ["make", "test"], "n": 1.5, "none": None}, CallStatus.FAILED, CREATED_AT_NS, 1_234_567, 2,
        "exit status 2", BlobID("a" * 64), BlobID("b" * 64), BlobID("c" * 64),
    )  # fmt: skip
    return replace(call, **fields)


def begin(image: Image, name: str | None = None, **fields: Any) -> tuple[Trajectory, Snapshot]:
    """A trajectory and its first snapshot, not recorded anywhere yet."""
    snapshot_id, trajectory_id = SnapshotID(new_id()), TrajectoryID(new_id())
    snapshot = Snapshot(
        snapshot_id, None, trajectory_id, 0, Stack(image.id), make_call("start"), 0, SnapshotState.CAPTURED, 2_000_000, CREATED_AT_NS
    )
    trajectory = Trajectory(
        trajectory_id, name, SandboxSpec(image.id, "runc", Network.BRIDGE, Limits(1 << 30, 0.5, 99)),
        AgentSpec(("python3", "agent.py", "--x"), 2, "/workspace/sub", (("A", "1"),)), snapshot_id, TrajectoryStatus.RUNNING,
        CREATED_AT_NS, env=(("KEY", "välue"),),
    )  # fmt: skip
    return replace(trajectory, **fields), snapshot


def fork(origin: Snapshot, of: Trajectory, name: str | None = None, **fields: Any) -> Trajectory:
    """A trajectory that begins at `origin`, not recorded anywhere yet."""
    forked = replace(of, id=TrajectoryID(new_id()), name=name, head=origin.id, forked_from=origin.id, experiment=None)
    return replace(forked, **fields)


def follow(parent: Snapshot, trajectory: TrajectoryID | None = None, *, messages: int = 0, **fields: Any) -> Snapshot:
    """The snapshot after `parent` with one new layer and `messages` new messages, in `parent`'s trajectory or in a fork."""
    snapshot = replace(
        parent, id=SnapshotID(new_id()), parent=parent.id, trajectory=trajectory or parent.trajectory, seq=parent.seq + 1,
        stack=parent.stack.push(LayerID(new_id())), call=make_call(), messages=parent.messages + messages,
    )  # fmt: skip
    return replace(snapshot, **fields)


def started(catalog: Catalog, name: str | None = None, **fields: Any) -> tuple[Trajectory, Snapshot]:
    """A recorded trajectory with its first snapshot, on an image of its own."""
    image = make_image(f"image-{new_id()}")
    catalog.add_image(image)
    trajectory, snapshot = begin(image, name, **fields)
    catalog.add_trajectories([(trajectory, snapshot)])
    return trajectory, snapshot


def committed(catalog: Catalog, parent: Snapshot, *texts: str, **fields: Any) -> Snapshot:
    """A recorded snapshot after `parent`, which must be the head; one user message per text."""
    snapshot = follow(parent, messages=len(texts), **fields)
    catalog.commit_snapshot(snapshot, [Message("user", text) for text in texts], expected_head=parent.id)
    return snapshot
