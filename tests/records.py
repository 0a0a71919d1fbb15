"""Valid records with every field filled in, and whole random histories of them, for tests of whatever stores them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from snapshotd.catalog.base import Catalog
from snapshotd.engine.storage.records import Record, encode
from snapshotd.errors import NotFound
from snapshotd.types import (
    AgentSpec,
    Approval,
    ApprovalID,
    BlobID,
    CallID,
    CallStatus,
    Ended,
    EntryKind,
    ExperimentID,
    FileChanges,
    Image,
    ImageID,
    JournalEntry,
    LayerID,
    Limits,
    Message,
    Network,
    RecordID,
    SandboxSpec,
    SideEffect,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Stack,
    ToolCall,
    Trajectory,
    TrajectoryID,
    TrajectoryStatus,
    TreeID,
    new_id,
)

CREATED_AT_NS = 1_760_000_000_123_456_789


def make_image(name: str = "default", **fields: Any) -> Image:
    image = Image(
        ImageID(new_id()),
        name,
        "recipe default",
        "sha256:0123",
        123_456_789,
        4_321,
        CREATED_AT_NS,
        (("PATH", "/usr/bin:/bin"), ("EMPTY", "")),
        "/workspace",
    )
    return replace(image, **fields)


def make_call(name: str = "shell", **fields: Any) -> ToolCall:
    call = ToolCall(
        CallID(new_id()),
        name,
        {"argv": ["make", "test"], "n": 1.5, "none": None},
        CallStatus.FAILED,
        CREATED_AT_NS,
        1_234_567,
        2,
        "exit status 2",
        BlobID("a" * 64),
        BlobID("b" * 64),
        BlobID("c" * 64),
    )
    return replace(call, **fields)


def make_entry(after: Snapshot, **fields: Any) -> JournalEntry:
    """A tool call that began at the head `after` and is open."""
    entry = JournalEntry(
        CallID(new_id()), EntryKind.TOOL, "shell", {"argv": ["make"], "n": 1.5}, after.id, CREATED_AT_NS
    )
    return replace(entry, **fields)


def ended_entry(after: Snapshot, **fields: Any) -> JournalEntry:
    """A complete entry with every field filled in."""
    entry = make_entry(
        after,
        kind=EntryKind.MODEL,
        side_effect=SideEffect.IDEMPOTENT,
        key="key-1",
        status=CallStatus.DONE,
        ended_at_ns=CREATED_AT_NS + 5,
        result={"reply": ["hi", None]},
        error="tried twice",
        facts=(1.5, "x", None),
        details={"usage": {"tokens": 7}},
    )
    return replace(entry, **fields)


def make_approval(snapshot: Snapshot, **fields: Any) -> Approval:
    """A question that waits, asked at the head `snapshot`."""
    approval = Approval(
        ApprovalID(new_id()),
        snapshot.trajectory,
        CallID(new_id()),
        "deploy",
        {"to": ["prod", None]},
        "d" * 64,
        snapshot.id,
        SideEffect.IRREVERSIBLE,
        CREATED_AT_NS,
    )
    return replace(approval, **fields)


def begin(image: Image, name: str | None = None, **fields: Any) -> tuple[Trajectory, Snapshot]:
    """A trajectory and its first snapshot, not recorded anywhere yet."""
    snapshot_id, trajectory_id = SnapshotID(new_id()), TrajectoryID(new_id())
    snapshot = Snapshot(
        snapshot_id,
        None,
        trajectory_id,
        0,
        Stack(image.id),
        make_call("start"),
        0,
        SnapshotState.CAPTURED,
        2_000_000,
        CREATED_AT_NS,
    )
    trajectory = Trajectory(
        trajectory_id,
        name,
        SandboxSpec(image.id, "runc", Network.BRIDGE, Limits(1 << 30, 0.5, 99)),
        AgentSpec(("python3", "agent.py", "--x"), 2, "/workspace/sub", (("A", "1"),), "nobody"),
        snapshot_id,
        TrajectoryStatus.RUNNING,
        CREATED_AT_NS,
        env=(("KEY", "välue"),),
    )
    return replace(trajectory, **fields), snapshot


def fork(origin: Snapshot, of: Trajectory, name: str | None = None, **fields: Any) -> Trajectory:
    """A trajectory that begins at `origin`, not recorded anywhere yet."""
    forked = replace(of, id=TrajectoryID(new_id()), name=name, head=origin.id, forked_from=origin.id, experiment=None)
    return replace(forked, **fields)


def follow(
    parent: Snapshot,
    trajectory: TrajectoryID | None = None,
    *,
    messages: int = 0,
    after: Snapshot | None = None,
    keep: int | None = None,
    **fields: Any,
) -> Snapshot:
    """The captured snapshot after `parent` with one new layer and `messages` new messages, in `parent`'s trajectory or
    in a fork. With `after` it follows that one, and keeps so many (None: all) of its messages."""
    kept = parent.messages if after is None else after.messages if keep is None else keep
    snapshot = replace(
        parent,
        id=SnapshotID(new_id()),
        parent=parent.id,
        trajectory=trajectory or parent.trajectory,
        seq=parent.seq + 1,
        stack=parent.stack.push(LayerID(new_id())),
        call=make_call(),
        messages=kept + messages,
        state=SnapshotState.CAPTURED,
        base=parent.id,
        own_layers=1,
        tree=None,
        tags=(),
        follows=None if after is None else after.id,
    )
    return replace(snapshot, **fields)


def started(catalog: Catalog, name: str | None = None, **fields: Any) -> tuple[Trajectory, Snapshot]:
    """A recorded trajectory with its first snapshot, on an image of its own."""
    image = make_image(f"image-{new_id()}")
    catalog.images.add(image)
    trajectory, snapshot = begin(image, name, **fields)
    catalog.trajectories.add([(trajectory, snapshot)])
    return trajectory, snapshot


def committed(
    catalog: Catalog,
    parent: Snapshot,
    *texts: str | Message,
    entries: Sequence[JournalEntry] = (),
    ended: Ended | None = None,
    saved: dict[str, Any] | None = None,
    fence: int | None = None,
    **fields: Any,
) -> Snapshot:
    """A recorded snapshot after `parent`, which must be the head; one user message per text, or whole messages. `fields`: as `follow`;
    `saved`: the state."""
    snapshot = follow(parent, messages=len(texts), **fields)
    catalog.snapshots.commit(
        snapshot,
        [Message("user", text) if isinstance(text, str) else text for text in texts],
        expected_head=parent.id,
        entries=entries,
        ended=ended,
        state=saved,
        fence=fence,
    )
    return snapshot


def new_digest() -> str:
    """64 random hexadecimal characters, as the ids of contents, trees and records have."""
    return new_id() + new_id()


class World:
    """A random history in a catalog: images that take each other's names, lines, forks of forks, rewinds of files and
    of conversations (also to other lines' snapshots), parallel calls, steps without changes, hostile texts, tags. Every
    trajectory has a snapshot of its own, every image was used, and times go up."""

    def __init__(self, catalog: Catalog, rng: random.Random) -> None:
        self.catalog, self.rng = catalog, rng
        self.heads: dict[TrajectoryID, Snapshot] = {}
        self.all: list[Snapshot] = []
        self._images: list[Image] = []
        self._now_ns = CREATED_AT_NS
        self._tree = [TreeID(new_digest()) for _ in range(4)]

    def grow(self, steps: int) -> Iterator[Snapshot]:
        """Add so many snapshots, captured; each as it is made."""
        for _ in range(steps):
            kind = self.rng.random()
            if not self.heads or kind < 0.08:
                snapshot = self._begin()
            elif kind < 0.25:
                snapshot = self._fork()
            else:
                snapshot = self._step(self.rng.choice(list(self.heads.values())))
            self.heads[snapshot.trajectory] = snapshot
            self.all.append(snapshot)
            if self.rng.random() < 0.3:
                self.catalog.refs.tag(self.rng.choice(self.all).id, f"tag-{self.rng.randrange(9)}", move=True)
            yield self.catalog.snapshots.get(snapshot.id)

    def store(self, snapshot: Snapshot) -> Snapshot:
        """Give a snapshot (and its image) a tree, as the archive does. Its record is a random id."""
        image = self.catalog.images.find(snapshot.stack.image)
        self.catalog.images.set_tree(image.id, image.tree or TreeID(new_digest()))
        files = self.rng.choice([None, FileChanges(*(self.rng.randrange(1 << 40) for _ in range(4)))])
        if files is not None:
            self.catalog.snapshots.set_files(snapshot.id, files)
        self.catalog.snapshots.set_stored(
            snapshot.id, self.rng.choice([*self._tree, TreeID(new_digest())]), RecordID(new_digest())
        )
        return self.catalog.snapshots.get(snapshot.id)

    def tags(self) -> dict[str, SnapshotID]:
        """All tags."""
        return {name: one.id for one in self.catalog.snapshots.all() for name in one.tags}

    def _time_ns(self) -> int:
        self._now_ns += self.rng.randrange(1, 10**9)
        return self._now_ns

    def _begin(self) -> Snapshot:
        image = self.rng.choice(self._images) if self._images else None
        if image is None or self.rng.random() < 0.5:
            image = make_image(f"image-{self.rng.randrange(3)}", created_at_ns=self._time_ns(), source_id=self._text())
            self.catalog.images.add(image)
            self._images.append(image)
        trajectory, snapshot = begin(image, self._name(), created_at_ns=self._time_ns())
        snapshot = replace(snapshot, created_at_ns=trajectory.created_at_ns, method="build")
        trajectory = replace(trajectory, began=self.rng.choice([None, snapshot.id]))
        self.catalog.trajectories.add([(trajectory, snapshot)])
        return snapshot

    def _fork(self) -> Snapshot:
        origin = self.rng.choice(self.all)
        of = self.catalog.trajectories.get(origin.trajectory)
        experiment = self.rng.choice([None, ExperimentID(new_id())])
        forked = fork(
            origin, of, self._name(), created_at_ns=self._time_ns(), experiment=experiment, env=((self._text(), ""),)
        )
        forked = replace(forked, agent=self.rng.choice([None, of.agent]))
        self.catalog.trajectories.add([(forked, None)])
        return self._step(origin, forked.id)

    def _step(self, parent: Snapshot, trajectory: TrajectoryID | None = None) -> Snapshot:
        line, texts = trajectory or parent.trajectory, [self._text() for _ in range(self.rng.choice([0, 1, 1, 3]))]
        self._journal(parent, line)
        ended = self._ended(line)
        call = make_call(
            self._text(), arguments={self._text(): [None, 1.5, {"deep": [self._text()]}]}, output=BlobID(new_digest())
        )
        if ended is not None and self.rng.random() < 0.8:
            entry = self.catalog.journal.get(ended.id)
            call = replace(
                call, id=entry.id, name=entry.name, arguments=self.rng.choice([entry.arguments, call.arguments])
            )
        after = self.rng.choice(self.all) if self.rng.random() < 0.2 else None
        keep = None if after is None else self.rng.choice([after.messages, self.rng.randint(0, after.messages)])
        new = follow(
            parent, line, messages=len(texts), call=call, created_at_ns=self._time_ns(), after=after, keep=keep
        )
        kind = self.rng.random()
        target = self.rng.choice(self.all)
        if kind < 0.15:
            new = replace(new, stack=parent.stack, base=parent.id, own_layers=0, method="unchanged")
        elif kind < 0.25 and target.stack.image == parent.stack.image:
            new = replace(new, stack=target.stack, base=target.id, own_layers=0, method="unchanged")
        elif kind < 0.3:
            new = replace(new, base=None, own_layers=len(new.stack.layers))
        self.catalog.snapshots.commit(
            new,
            [Message("user", {"text": text}) for text in texts],
            expected_head=parent.id,
            ended=ended,
            entries=[ended_entry(parent, name=self._text()) for _ in range(self.rng.choice([0, 0, 2]))],
            state=self.rng.choice([None, None, {}, {self._text(): [self._text()]}]),
        )
        return new

    def _journal(self, head: Snapshot, line: TrajectoryID) -> None:
        """Calls begin, in parallel; some end by themselves."""
        for _ in range(self.rng.choice([0, 1, 2])):
            self.catalog.journal.begin(
                line, make_entry(head, name=self._text(), arguments=[self._text()], facts=(self._text(),))
            )
        ended = self._ended(line) if self.rng.random() < 0.3 else None
        if ended is not None:
            self.catalog.journal.end(line, ended)

    def _ended(self, line: TrajectoryID) -> Ended | None:
        """The end of one of the open calls; None where none is open, or for a change."""
        waiting = [None, *(entry.id for entry in self.catalog.journal.unbound(line) if entry.status is None)]
        chosen = self.rng.choice(waiting)
        return (
            None
            if chosen is None
            else Ended(chosen, self.rng.choice([*CallStatus]), self._time_ns(), [self._text()], self._text())
        )

    def _name(self) -> str | None:
        name = f"name-{self.rng.randrange(1000)}"
        try:
            self.catalog.refs.find_trajectory(name)
        except NotFound:
            return self.rng.choice([None, name])
        return None

    def _text(self) -> str:
        return self.rng.choice(
            ["", "plain", "välue \u2028", "\ud800\x00\x1b[31m", "'; DROP TABLE", "\U0001f600", '\\"' * 3]
        )


def blobs_of(catalog: Catalog) -> set[BlobID]:
    """Every blob that a call refers to."""
    return {blob for one in catalog.snapshots.all() for blob in one.call.outputs}


def trees_of(catalog: Catalog) -> set[TreeID]:
    """The trees of all snapshots and images."""
    every = (*catalog.snapshots.all(), *catalog.images.list())
    return {one.tree for one in every if one.tree is not None}


def encoded(record: Record) -> bytes:
    """A record as it is stored."""
    return encode(
        record.snapshot,
        record.trajectory,
        record.image,
        record.messages,
        record.unknown,
        entries=record.entries,
        state=record.state,
    )
