"""Machines of a fleet whose messages, clocks and processes a test commands, and what must be true of them.

The machines obey `fleet.protocol` as a daemon does; the database is any `Coordination`. `World.faults` are defects that
a test puts into the machines to see them caught.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from snapshotd.errors import Conflict, NotFound, SnapshotdError, Undecided
from snapshotd.fleet import protocol
from snapshotd.fleet.base import (
    SECOND_NS,
    Claim,
    Coordination,
    IntentState,
    LeaseTerms,
    NodeID,
    NodeLease,
    OwnedTrajectory,
    Renewed,
    Sighting,
    Taken,
)
from snapshotd.types import CallID, SnapshotID, TrajectoryID

TERMS = LeaseTerms()


@dataclass(frozen=True)
class Captured:
    """A snapshot. `step`: the number of steps of its trajectory up to it."""

    id: SnapshotID
    parent: SnapshotID | None
    step: int
    calls: tuple[CallID, ...] = ()


@dataclass
class Box:
    """A sandbox on one machine, with the snapshots that are not published yet."""

    claim: Claim
    since_ns: int
    """When the machine got the claim."""
    head: SnapshotID | None
    step: int
    queue: list[Captured] = field(default_factory=list)
    frozen: bool = False
    call: CallID | None = None
    """The irreversible call that it is about to make or has asked for."""
    granted: bool = False
    """The intent of `call` is durable."""


@dataclass
class Leftover:
    """Snapshots that their machine could not publish where they belong."""

    lost: Claim
    queue: list[Captured]
    side: Claim | None = None
    name: TrajectoryID | None = None


@dataclass
class Message:
    """A request under way, or its answer, for which its machine waits."""

    machine: Machine
    channel: str
    ask: Callable[[], Any]
    then: Callable[[Any], None]
    daemon: int
    answer: Any = None
    applied: bool = False


@dataclass
class Machine:
    host: str
    node: NodeID
    rate: float = 1.0
    clock_ns: int = 7 * SECOND_NS
    paused: bool = False
    daemon: int = 1
    """Number of the daemon's process."""
    epoch: int = 0
    lease: protocol.HeldLease | None = None
    deposed: bool = False
    waiting: set[str] = field(default_factory=set)
    """Each of the channels, `lease` and `work`, has one request at a time."""
    seen: dict[NodeID, Sighting] = field(default_factory=dict)
    boxes: dict[TrajectoryID, Box] = field(default_factory=dict)
    leftovers: list[Leftover] = field(default_factory=list)

    @property
    def may_act(self) -> bool:
        return self.lease is not None and self.lease.may_act(self.clock_ns)


class World:
    def __init__(
        self, coordination: Coordination, advance: Callable[[int], None], faults: frozenset[str] = frozenset()
    ) -> None:
        self.coordination, self.jump, self.faults = coordination, advance, faults
        self.machines = [
            Machine("host-a", NodeID("a"), 0.96),
            Machine("host-b", NodeID("b")),
            Machine("host-c", NodeID("c"), 1.04),
            Machine("host-copy", NodeID("a")),
        ]
        self.database_up = self.bucket_up = True
        self.under_way: list[Message] = []
        self.bucket: set[SnapshotID] = set()
        self.captured: dict[SnapshotID, Captured] = {}
        self.published: dict[TrajectoryID, list[SnapshotID]] = {}
        self.bases: dict[TrajectoryID, SnapshotID | None] = {}
        self.effects: Counter[tuple[TrajectoryID, int]] = Counter()
        self.calls: dict[CallID, tuple[TrajectoryID, int]] = {}
        self.done: set[CallID] = set()
        self.numbers = iter(range(1, 1 << 40))

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(
        self, machine: Machine, fate: str, ask: Callable[[], Any], then: Callable[[Any], None], channel: str = "work"
    ) -> None:
        """Ask the database. `fate`: `ok`; `lost`; `deaf`: done, and the answer is lost; `late`: the machine has given up
        before the request arrives; `slow`: it waits for the answer."""
        if machine.paused or channel in machine.waiting:
            return
        message = Message(machine, channel, ask, then, machine.daemon)
        if fate in ("ok", "deaf"):
            self.arrive(message)
        if fate == "ok":
            self.answer(message)
        elif fate == "late":
            message.daemon = 0
            self.under_way.append(message)
        elif fate == "slow":
            machine.waiting.add(channel)
            self.under_way.append(message)

    def arrive(self, message: Message) -> None:
        """The request is at the database."""
        if not self.database_up or message.applied:
            return
        message.applied = True
        try:
            message.answer = message.ask()
        except SnapshotdError as exc:
            message.answer = exc

    def answer(self, message: Message) -> None:
        """The answer is at the machine, if its daemon is the one that asked."""
        machine = message.machine
        if message.daemon != machine.daemon or machine.paused:
            return
        machine.waiting.discard(message.channel)
        self._tick(machine)
        if message.applied:  # else it has given up
            message.then(message.answer)
            self._tick(machine)

    def settle(self, message: Message) -> None:
        """The end of a message that is under way."""
        self.arrive(message)
        if not message.machine.paused:
            self.under_way.remove(message)
            self.answer(message)

    # -- time ----------------------------------------------------------------------------------------------------------

    def advance(self, ns: int) -> None:
        self.jump(ns)
        for machine in self.machines:
            machine.clock_ns += int(ns * machine.rate)
            self._tick(machine)

    def pause(self, machine: Machine) -> None:
        machine.paused = True

    def wake(self, machine: Machine) -> None:
        machine.paused = False
        self._tick(machine)

    def _tick(self, machine: Machine) -> None:
        """Whatever a machine that runs does by its clock."""
        if not machine.paused and not machine.may_act and "no freezing" not in self.faults:
            for box in machine.boxes.values():
                box.frozen = True

    # -- a node --------------------------------------------------------------------------------------------------------

    def start_daemon(self, machine: Machine, fate: str) -> None:
        """A daemon begins, in place of one that was killed. Sandboxes outlive it."""
        if machine.paused:
            return
        machine.daemon += 1
        machine.lease, machine.epoch = None, 0
        machine.waiting.clear()
        for box in machine.boxes.values():
            box.frozen, box.granted = True, False
        sent, node = machine.clock_ns, machine.node
        seen = self._ready(machine, node)
        try:
            after = self.coordination.watch(node).epoch
        except NotFound:
            after = 0

        def registered(answer: Renewed | SnapshotdError) -> None:
            if isinstance(answer, Renewed):
                machine.epoch, machine.deposed = answer.lease.epoch, False
                by_fence = {(one.trajectory, one.fence): one for one in answer.owned}
                for box in machine.boxes.values():
                    box.claim = by_fence.get((box.claim.trajectory, box.claim.fence), box.claim)
                self._renewed(machine, answer, sent)

        self.send(machine, fate, lambda: self.coordination.register(node, machine.host, after, seen=seen), registered)

    def rename(self, machine: Machine) -> None:
        """A machine whose node another one has taken begins as a node of its own."""
        if machine.deposed:
            machine.node = NodeID(f"{machine.host}-{next(self.numbers)}")
            machine.deposed = False
            for one in machine.leftovers:
                one.side = one.name = None
            self.start_daemon(machine, "ok")

    def renew(self, machine: Machine, fate: str) -> None:
        if not machine.epoch or machine.deposed:
            return
        node, epoch, sent = machine.node, machine.epoch, machine.clock_ns

        def renewed(answer: Renewed | SnapshotdError) -> None:
            if epoch != machine.epoch:
                return
            if isinstance(answer, Renewed):
                self._renewed(machine, answer, sent)
            elif isinstance(answer, Conflict):
                machine.deposed, machine.lease = True, None
                for trajectory in list(machine.boxes):
                    self._lose(machine, trajectory)

        self.send(machine, fate, lambda: self.coordination.renew(node, epoch), renewed, "lease")

    def _renewed(self, machine: Machine, answer: Renewed, sent: int) -> None:
        counted = machine.clock_ns if "counts from the answer" in self.faults else sent
        lease = protocol.hold_lease(answer.lease.epoch, counted, TERMS)
        if machine.lease is None or machine.lease.freeze_at_ns < lease.freeze_at_ns:
            machine.lease = lease
        elif machine.lease.freeze_at_ns > lease.freeze_at_ns:
            return  # an older answer than the last one
        for row in answer.late:
            self._see(machine, row)
        for trajectory, box in list(machine.boxes.items()):
            if box.since_ns >= sent:
                continue  # the answer may be older than the claim
            if box.claim in answer.owned or "thaws everything" in self.faults:
                box.frozen = not machine.may_act
            else:
                self._lose(machine, trajectory)

    def _lose(self, machine: Machine, trajectory: TrajectoryID) -> None:
        """End a sandbox whose trajectory is another node's."""
        box = machine.boxes.pop(trajectory)
        if box.queue and "drops what is unpublished" not in self.faults:
            machine.leftovers.append(Leftover(box.claim, box.queue))

    def _see(self, machine: Machine, row: NodeLease) -> None:
        seen = machine.seen.get(row.node)
        if "watches carelessly" in self.faults and seen is not None:
            machine.seen[row.node] = Sighting(row.node, row.renewals, seen.since_ns)
        else:
            machine.seen[row.node] = protocol.watch_node(row, seen, machine.clock_ns)

    def look(self, machine: Machine, node: NodeID, fate: str) -> None:
        """Watch a node."""

        def watched(row: NodeLease | SnapshotdError) -> None:
            if isinstance(row, NodeLease):
                self._see(machine, row)

        self.send(machine, fate, lambda: self.coordination.watch(node), watched)

    def _ready(self, machine: Machine, node: NodeID | None) -> Sighting | None:
        """A sighting that allows a takeover."""
        seen = None if node is None else machine.seen.get(node)
        if seen is None or not (protocol.has_run_out(seen, machine.clock_ns, TERMS) or "does not wait" in self.faults):
            return None
        return seen

    # -- trajectories --------------------------------------------------------------------------------------------------

    def begin(self, machine: Machine, fate: str) -> None:
        if not machine.may_act or machine.deposed:
            return
        trajectory, node, epoch = TrajectoryID(f"t{next(self.numbers)}"), machine.node, machine.epoch
        self.bases[trajectory] = None

        def owned(answer: Claim | SnapshotdError) -> None:
            if isinstance(answer, Claim) and machine.may_act and machine.epoch == epoch:
                machine.boxes[trajectory] = Box(answer, machine.clock_ns, None, 0)

        self.send(machine, fate, lambda: self.coordination.own(trajectory, node, epoch), owned)

    def step(self, machine: Machine, box: Box, fate: str) -> None:
        """The agent's next call: every third is irreversible and asks first."""
        if box.frozen or machine.paused or not machine.may_act:
            return
        trajectory = box.claim.trajectory
        if box.step % 3 != 2:
            self._capture(box)
        elif not box.granted and self._has_happened(trajectory, box.step):
            box.call = None  # a person has said so, or a side branch, perhaps since it was asked for and no answer came
            self._capture(box)
        elif not box.granted:
            box.call = box.call or CallID(f"call{next(self.numbers)}")
            call, claim = box.call, box.claim
            self.calls[call] = (trajectory, box.step)

            def recorded(answer: SnapshotdError | None) -> None:
                if machine.boxes.get(trajectory) is box and box.call == call:
                    if answer is None:
                        box.granted = True
                    elif isinstance(answer, Undecided):
                        box.call = None

            self.send(machine, fate, lambda: self.coordination.record_intent(claim, call), recorded)

    def _has_happened(self, trajectory: TrajectoryID, step: int) -> bool:
        rows = self.coordination.intents(trajectory)
        return any(one.state is IntentState.HAPPENED and self.calls[one.call][1] == step for one in rows)

    def run(self, machine: Machine, box: Box) -> None:
        """The irreversible call whose intent is durable."""
        careless = "runs without a look at the clock" in self.faults
        if (
            machine.paused
            or not box.granted
            or box.call is None
            or not (careless or (machine.may_act and not box.frozen))
        ):
            return
        self.effects[box.claim.trajectory, box.step] += 1
        self.done.add(box.call)
        self._capture(box, (box.call,))
        if "binds early" in self.faults:
            rows = self.coordination.calls  # type: ignore[attr-defined]
            rows[box.call] = protocol.bind_intent(rows[box.call], box.claim.trajectory)
        box.call, box.granted = None, False

    def _capture(self, box: Box, calls: tuple[CallID, ...] = ()) -> None:
        box.step += 1
        made = Captured(SnapshotID(f"s{next(self.numbers)}"), box.head, box.step, calls)
        self.captured[made.id] = made
        box.head = made.id
        box.queue.append(made)

    def publish(self, machine: Machine, box: Box, fate: str) -> None:
        """The oldest snapshot that is not published: bytes, then rows."""
        if not machine.paused and box.queue:
            self._publish(machine, box.claim, box.queue, fate)

    def _publish(self, machine: Machine, claim: Claim, queue: list[Captured], fate: str) -> None:
        first = queue[0]
        if self.bucket_up:
            self.bucket.add(first.id)
        elif "rows before bytes" not in self.faults:
            return

        def write() -> bool:
            with self.coordination.publishing(claim, first.parent, first.id, first.calls) as fresh:
                pass
            if fresh:
                self.published.setdefault(claim.trajectory, []).append(first.id)
            return fresh

        def written(answer: bool | SnapshotdError) -> None:
            if isinstance(answer, bool) and queue and queue[0] == first:
                del queue[0]

        self.send(machine, fate, write, written)

    def take_over(self, machine: Machine, trajectory: TrajectoryID, fate: str) -> None:
        row = self.owner(trajectory)
        if not machine.may_act or machine.deposed or row is None or trajectory in machine.boxes:
            return
        if any(one.name == trajectory for one in machine.leftovers):
            return  # a node does not take what it owns (`NodeRights.take_over`), and this side branch is not published yet
        node, epoch, seen = machine.node, machine.epoch, self._ready(machine, row.node)

        def taken(answer: Taken | SnapshotdError) -> None:
            if (
                isinstance(answer, Taken)
                and machine.may_act
                and machine.epoch == epoch
                and trajectory not in machine.boxes
            ):
                step = 0 if answer.head is None else self.captured[answer.head].step
                machine.boxes[trajectory] = Box(answer.claim, machine.clock_ns, answer.head, step)

        self.send(machine, fate, lambda: self.coordination.take_over(row, node, epoch, seen), taken)

    def hand_over(self, machine: Machine, box: Box, fate: str) -> None:
        """Drain one trajectory: its sandbox ends first."""
        if machine.paused or box.queue or box.call or box.frozen:
            return
        del machine.boxes[box.claim.trajectory]
        self.send(machine, fate, lambda: self.coordination.hand_over(box.claim), lambda _: None)

    def branch(self, machine: Machine, fate: str) -> None:
        """A node that has returned gives its unpublished snapshots a branch, and publishes them there."""
        if machine.paused or machine.deposed or not machine.may_act or not machine.leftovers:
            return
        one, node, epoch = machine.leftovers[0], machine.node, machine.epoch
        if not one.queue:
            del machine.leftovers[0]
            return
        if one.side is not None and one.side.epoch == epoch:
            self._publish(machine, one.side, one.queue, fate)
            return
        one.name = side = one.name or TrajectoryID(f"side{next(self.numbers)}")

        def make() -> tuple[Claim, list[SnapshotID]]:
            there = self.coordination.find_published([snapshot.id for snapshot in one.queue])
            rest = [snapshot for snapshot in one.queue if snapshot.id not in there]
            base = rest[0].parent if rest else None
            claim = self.coordination.branch_off(one.lost, side, base, node, epoch)
            self.bases.setdefault(side, base)
            return claim, there

        def made(answer: tuple[Claim, list[SnapshotID]] | SnapshotdError) -> None:
            if not isinstance(answer, SnapshotdError):
                one.side, there = answer
                one.queue[:] = [snapshot for snapshot in one.queue if snapshot.id not in there]

        self.send(machine, fate, make, made)

    def decide(self, trajectory: TrajectoryID) -> None:
        """A person looks at the world and says what has happened."""
        for row in self.coordination.intents(trajectory):
            if row.state is IntentState.UNDECIDED and self.database_up:
                self.coordination.decide_intent(row.call, happened=row.call in self.done)

    def owner(self, trajectory: TrajectoryID) -> OwnedTrajectory | None:
        try:
            return self.coordination.owner(trajectory)
        except NotFound:
            return None

    # -- what must be true ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_heads()
        assert all(count == 1 for count in self.effects.values()), "an irreversible call ran twice"
        for line in self.published.values():
            assert self.bucket.issuperset(line), "a published snapshot cannot be read"
        self._check_freezing()
        kept = {one.id for machine in self.machines for box in machine.boxes.values() for one in box.queue}
        kept |= {one.id for machine in self.machines for left in machine.leftovers for one in left.queue}
        kept |= {one for line in self.published.values() for one in line}
        assert kept >= set(self.captured), "a snapshot is lost"

    def _check_heads(self) -> None:
        for trajectory, line in self.published.items():
            row, parent = self.owner(trajectory), self.bases[trajectory]
            for one in line:
                assert self.captured[one].parent == parent, "the published snapshots are no line"
                parent = one
            assert row is not None
            assert row.head == parent, "the head is not the last published snapshot"
        for machine in self.machines:
            for trajectory, box in machine.boxes.items():
                row = self.owner(trajectory)
                if row is not None and protocol.claim_of(row) == box.claim:
                    line_of_owner = [box.queue[0].parent, *(one.id for one in box.queue)] if box.queue else [box.head]
                    assert row.head in line_of_owner, "the owner goes on from another head: there are two"

    def _check_freezing(self) -> None:
        for machine in self.machines:
            for trajectory, box in machine.boxes.items():
                if not box.frozen and not machine.paused:
                    row = self.owner(trajectory)
                    assert row is not None
                    assert protocol.claim_of(row) == box.claim, "a sandbox runs whose trajectory was taken over"

    def heal(self) -> None:
        """All failures end; then every snapshot that was captured is published somewhere."""
        self.database_up = self.bucket_up = True
        for machine in self.machines:
            self.wake(machine)
        for message in list(self.under_way):
            self.settle(message)
        for _ in range(3):
            self.advance(4 * SECOND_NS)
            for machine in self.machines:
                self._heal(machine)
            self.check()
        left = set(self.captured) - {one for line in self.published.values() for one in line}
        assert not left, f"{left} cannot be published"

    def _heal(self, machine: Machine) -> None:
        self.renew(machine, "ok")
        self.rename(machine)
        if machine.daemon > 1 and not machine.epoch:
            self.start_daemon(machine, "ok")
        if machine.daemon > 1 and not machine.epoch:  # another machine holds its node's lease
            machine.deposed = True
            self.rename(machine)
        for box in list(machine.boxes.values()):
            while box.queue:
                before = len(box.queue)
                self.publish(machine, box, "ok")
                assert len(box.queue) < before, f"{box} cannot be published"
        for _ in range(100):
            self.branch(machine, "ok")
        assert not machine.leftovers, f"{machine} cannot publish what is left"
