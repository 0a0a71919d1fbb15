"""The state machine of a fleet: whatever machines, messages, clocks and people do. Its invariants are the promises of
`fleet.base`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from snapshotd.fleet.base import SECOND_NS
from tests.fleet_memory import MemoryCoordination
from tests.fleet_world import TERMS, Box, Machine, World

WHICH = st.integers(0, 1 << 10)
FATE = st.sampled_from(["ok"] * 6 + ["lost", "deaf", "late", "slow"])
ACT = st.sampled_from(["go"] * 5 + ["ask", "publish", "publish", "publish", "hand over"])
SECONDS = st.sampled_from([0.1, 1, 4, 4, 4, 4, 9, 17, 21])


class Fleet(RuleBasedStateMachine):
    """Every rule is something that a machine, a message, a clock or a person does."""

    faults: frozenset[str] = frozenset()

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make_world()
        for machine in self.world.machines[:3]:
            self.world.start_daemon(machine, "ok")
        self.world.begin(self.world.machines[0], "ok")

    def make_world(self) -> World:
        coordination = MemoryCoordination(TERMS)

        def advance(ns: int) -> None:
            coordination.now_ns += ns

        return World(coordination, advance, self.faults)

    def teardown(self) -> None:
        self.world.heal()

    # -- work ----------------------------------------------------------------------------------------------------------

    @rule(which=WHICH, fate=FATE, acts=st.lists(ACT, min_size=3, max_size=8))
    def work(self, which: int, fate: str, acts: list[str]) -> None:
        """A sandbox takes steps; irreversible ones ask first, and run later. The last message has the fate."""
        boxes = self.boxes()
        if not boxes or (len(self.world.bases) < 4 and which % 8 == 0):
            self.world.renew(self.machine(which), "ok")
            self.world.begin(self.machine(which), fate)
            return
        machine, box = boxes[which % len(boxes)]
        for number, act in enumerate(acts):
            own = fate if number == len(acts) - 1 else "ok"
            if machine.boxes.get(box.claim.trajectory) is not box:
                break
            match act:
                case "go" | "ask":
                    self.world.step(machine, box, own)
                    if act == "go":
                        self.world.run(machine, box)
                case "publish":
                    self.world.publish(machine, box, own)
                case "hand over":
                    self.world.hand_over(machine, box, own)

    @rule(fate=FATE, seconds=SECONDS)
    def renew(self, fate: str, seconds: float) -> None:
        """All machines renew, after some time."""
        self.world.advance(int(seconds * SECOND_NS))
        for machine in self.world.machines:
            self.world.renew(machine, fate)

    @rule(which=WHICH, what=WHICH, fate=FATE)
    def take_over(self, which: int, what: int, fate: str) -> None:
        machine = self.machine(which)
        self.world.renew(machine, "ok")
        if self.world.bases:
            self.world.take_over(machine, sorted(self.world.bases)[what % len(self.world.bases)], fate)

    @rule(which=WHICH, fate=FATE)
    def branch_or_decide(self, which: int, fate: str) -> None:
        for machine in self.world.machines:
            self.world.branch(machine, fate)
        for trajectory in self.world.bases:
            if which % 2:
                self.world.decide(trajectory)

    # -- failures ------------------------------------------------------------------------------------------------------

    @rule(what=st.sampled_from(["pause", "kill", "database", "bucket", "jump", "jump back"]), which=WHICH, fate=FATE)
    def fail(self, what: str, which: int, fate: str) -> None:
        world, machine = self.world, self.machine(which)
        match what:
            case "pause":
                world.pause(machine)
            case "kill":
                world.start_daemon(machine, fate)
            case "database":
                world.database_up = False
            case "bucket":
                world.bucket_up = False
            case "jump":
                world.jump(60 * SECOND_NS)
            case "jump back":
                world.jump(-60 * SECOND_NS)

    @rule(wake=st.booleans(), database=st.booleans(), bucket=st.booleans())
    def end_failures(self, wake: bool, database: bool, bucket: bool) -> None:
        world = self.world
        world.database_up |= database
        world.bucket_up |= bucket
        for machine in world.machines:
            if wake and machine.paused:
                world.wake(machine)
            world.rename(machine)

    @rule(seconds=SECONDS, wake=st.booleans())
    def stay_away(self, seconds: float, wake: bool) -> None:
        """The owner of a sandbox stands still for a while, and the others go on."""
        boxes = self.boxes()
        away = boxes[0][0] if boxes else self.world.machines[0]
        self.world.pause(away)
        for _ in range(7):
            self.world.advance(4 * SECOND_NS)
            for machine in self.world.machines:
                self.world.look(machine, away.node, "ok")
                self.world.renew(machine, "ok")
        if wake:
            self.world.wake(away)

    @rule(which=WHICH, whole=st.booleans())
    def settle(self, which: int, whole: bool) -> None:
        if not self.world.under_way:
            return
        message = self.world.under_way[which % len(self.world.under_way)]
        if whole:
            self.world.settle(message)
        else:
            self.world.arrive(message)

    # -- what must be true ---------------------------------------------------------------------------------------------

    @invariant()
    def promises_hold(self) -> None:
        self.world.check()

    # -- choosing ------------------------------------------------------------------------------------------------------

    def machine(self, which: int) -> Machine:
        return self.world.machines[which % len(self.world.machines)]

    def boxes(self) -> list[tuple[Machine, Box]]:
        return [(machine, box) for machine in self.world.machines for box in machine.boxes.values()]
