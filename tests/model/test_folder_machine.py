"""A person and two sessions of an agent write in one folder at random, at calls and between; rules of ignored files
change, agents and the daemon are killed, and rewinds and undos come at any time. No byte that only the person wrote ever
goes, what the person touched stays as it is, and every path that a rewind left is named."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from folder_world import World
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests import long
from tests.capabilities import require
from tests.e2e.support import Snap, ended

WHO = st.integers(0, 1)
SEEDS = st.integers(0, 1 << 30)
EXAMPLES = long.size(2, 100)
POINTS = ("engine.folders.put", "engine.folders.exchanged", "engine.folders.put_back", "engine.folders.captured")
_snaps: list[Snap] = []
_happened: Counter[str] = Counter()
"""Of all examples."""
MUST_HAPPEN = {
    *(f"{who}: {what}" for who in ("person", "agent") for what in ("rules", "link", "linked file")),
    "agent killed in a call",
    "daemon killed in a call",
    "rewind in a call",
    "rewind that changed something",
    "rewind that left something",
    "rewind cut off",
    "undo that changed something",
    "names of one file went back",
}


class FolderMachine(RuleBasedStateMachine):
    """Each step is one thing that the person, an agent or the machine does."""

    @initialize(seed=SEEDS)
    def begin(self, seed: int) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="snapshotd-folder-", dir="/var/tmp"))
        (self.place / "project").mkdir()
        self.world = World(_snaps[0], self.place / "project", random.Random(seed))
        self.world.begin()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()
            _happened.update(self.world.happened)
            if self.world.trajectory:
                self.world.snap("rm", "--force", self.world.trajectory)
            shutil.rmtree(self.place)

    @rule(times=st.integers(1, 3))
    def person_writes(self, times: int) -> None:
        for _ in range(times):
            self.world.person_writes()

    @rule(who=WHO, times=st.integers(1, 3))
    def one_call(self, who: int, times: int) -> None:
        agent = self.world.agents[who]
        if agent.call is None:
            self.world.begin_call(agent)
        for _ in range(times):
            self.world.agent_writes(agent)
        self.world.end_call(agent)

    @rule(who=WHO)
    def begin_call(self, who: int) -> None:
        agent = self.world.agents[who]
        if agent.call is None:
            self.world.begin_call(agent)
        self.world.agent_writes(agent)

    @rule(who=WHO)
    def prompt(self, who: int) -> None:
        self.world.prompt(self.world.agents[who])

    @rule(who=WHO)
    def kill_agent(self, who: int) -> None:
        self.world.kill_agent(self.world.agents[who])

    @rule(chance=st.integers(0, 3))
    def kill_daemon(self, chance: int) -> None:
        if chance == 3:
            self.world.kill_daemon()

    @rule(which=st.integers(0, 1 << 16), who=st.none() | WHO)
    def rewind(self, which: int, who: int | None) -> None:
        targets = self.world.targets
        session = None if who is None else self.world.agents[who].session
        self.world.rewind(targets[which % len(targets)], session)

    @rule(back=st.integers(1, 3))
    def rewind_a_little(self, back: int) -> None:
        self.world.rewind(self.world.targets[-back:][0], None)

    @rule(
        chance=st.integers(0, 7), which=st.integers(0, 1 << 16), point=st.sampled_from(POINTS), hits=st.integers(1, 4)
    )
    def rewind_cut_off(self, chance: int, which: int, point: str, hits: int) -> None:
        if chance == 7:
            targets = self.world.targets
            self.world.rewind_cut_off(targets[which % len(targets)], f"{point}:{hits}")

    @rule()
    def undo(self) -> None:
        self.world.undo()


@pytest.fixture
def snap(tmp_path: Path) -> Iterator[Snap]:
    require("root")
    with ended(Snap(tmp_path / "state")) as found:
        found("ls")
        _snaps.append(found)
        yield found
        _snaps.clear()


@pytest.mark.timeout(120 + EXAMPLES * 15)
def test_a_rewind_takes_nothing_that_a_person_made(snap: Snap) -> None:
    run_state_machine_as_test(
        FolderMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=long.size(12, 40),
            deadline=None,
            phases=(Phase.generate,),  # the world draws from a seed, which cannot be shrunk
            suppress_health_check=list(HealthCheck),
            derandomize=not long.LONG,
            database=None,
        ),
    )
    if long.LONG:
        assert not MUST_HAPPEN - {what for what, times in _happened.items() if times}, _happened
