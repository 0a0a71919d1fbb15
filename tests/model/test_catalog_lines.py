"""Conversation, journal and state across forks and rewinds, against an oracle that keeps whole lists for every
snapshot."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import Conflict, NotFound
from snapshotd.types import CallID, CallStatus, Ended, Message, Snapshot, SnapshotID, Trajectory, TrajectoryID
from tests import long
from tests.postgres_server import PostgresServer
from tests.records import begin, ended_entry, follow, fork, make_call, make_entry, make_image

PICK = st.integers(0, 1 << 20)
"""Chooses one of a list, by what is left of it."""


@dataclass
class Mind:
    """All that is true of one snapshot."""

    snapshot: Snapshot
    said: list[str]
    path: list[SnapshotID]
    """The snapshots whose conversation it continues, from the first to itself."""
    line: Line
    state: dict[str, Any]
    own: tuple[list[str], list[CallID], dict[str, Any] | None]

    @property
    def journal(self) -> list[tuple[CallID, SnapshotID | None]]:
        bound = [(one, self.line.bound.get(one)) for one in self.line.begun]
        return self.line.before + [(one, by) for one, by in bound if by in self.path]


@dataclass
class Line:
    """Calls in the order in which they began, after what the line goes on from."""

    before: list[tuple[CallID, SnapshotID | None]]
    begun: list[CallID] = field(default_factory=list)
    bound: dict[CallID, SnapshotID] = field(default_factory=dict)
    open: set[CallID] = field(default_factory=set)


class Lines(RuleBasedStateMachine):
    """Every rule changes the catalog and the oracle alike."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = self.open()
        self.image = make_image()
        self.catalog.images.add(self.image)
        self.minds: dict[SnapshotID, Mind] = {}
        self.trajectories: dict[TrajectoryID, tuple[Trajectory, SnapshotID, Line]] = {}
        self.count = 0
        self.new: list[SnapshotID] = []
        """What the next check has to look at closely."""

    def open(self) -> Catalog:
        return SqliteCatalog(":memory:")

    def teardown(self) -> None:
        for one in self.minds:
            self.look_closely(one)
        self.catalog.close()

    # -- what can happen -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.trajectories) < 4)
    @rule()
    def begin(self) -> None:
        trajectory, first = begin(self.image)
        self.catalog.trajectories.add([(trajectory, first)])
        line = Line([])
        self.minds[first.id] = Mind(first, [], [first.id], line, {}, ([], [], None))
        self.trajectories[trajectory.id] = (trajectory, first.id, line)
        self.new = [first.id]

    @precondition(lambda self: self.trajectories and len(self.trajectories) < 8)
    @rule(where=PICK, changed=st.booleans(), back=PICK, keep=PICK)
    def fork(self, where: int, changed: bool, back: int, keep: int) -> None:
        origin = self.pick(where)
        made = fork(origin.snapshot, self.trajectories[origin.snapshot.trajectory][0])
        if not changed:
            self.catalog.trajectories.add([(made, None)])
            self.trajectories[made.id] = (made, origin.snapshot.id, Line(origin.journal))
            return
        source = self.pick(back)
        kept = keep % (len(source.said) + 1)
        first = follow(origin.snapshot, made.id, after=source.snapshot, keep=kept)
        self.catalog.trajectories.add([(replace(made, head=first.id), first)])
        line = Line(source.journal)
        self.minds[first.id] = Mind(
            first, source.said[:kept], [*source.path, first.id], line, source.state, ([], [], None)
        )
        self.trajectories[made.id] = (made, first.id, line)
        self.new = [first.id]

    @precondition(lambda self: self.trajectories)
    @rule(which=PICK, complete=st.lists(st.booleans(), min_size=1, max_size=3))
    def begin_calls(self, which: int, complete: list[bool]) -> None:
        trajectory, head, line = self.trajectory(which)
        for whole in complete:
            entry = (ended_entry if whole else make_entry)(self.minds[head].snapshot)
            self.catalog.journal.begin(trajectory.id, entry)
            line.begun.append(entry.id)
            if not whole:
                line.open.add(entry.id)

    @precondition(lambda self: self.trajectories)
    @rule(which=PICK, call=PICK)
    def end_call(self, which: int, call: int) -> None:
        trajectory, _, line = self.trajectory(which)
        if line.open:
            one = sorted(line.open)[call % len(line.open)]
            self.catalog.journal.end(trajectory.id, Ended(one, CallStatus.DONE, 1))
            line.open.discard(one)

    @precondition(lambda self: self.trajectories)
    @rule(
        which=PICK,
        texts=st.integers(0, 3),
        ends=st.none() | PICK,
        calls=st.integers(0, 2),
        back=st.none() | PICK,
        keep=st.none() | PICK,
        state=st.none() | st.dictionaries(st.sampled_from("ab"), st.integers(0, 2), max_size=2),
    )
    def step(
        self,
        which: int,
        texts: int,
        ends: int | None,
        calls: int,
        back: int | None,
        keep: int | None,
        state: dict[str, Any] | None,
    ) -> None:
        trajectory, head, line = self.trajectory(which)
        parent, source = self.minds[head], self.minds[head] if back is None else self.pick(back)
        kept = len(source.said) if back is None or keep is None else keep % (len(source.said) + 1)
        own = [f"{self.count}.{n}" for n in range(texts)]
        self.count += 1
        ended = None if ends is None or not line.open else sorted(line.open)[ends % len(line.open)]
        entries = [ended_entry(parent.snapshot) for _ in range(calls)]
        after = None if back is None else source.snapshot
        call = (
            make_call() if ended is None else make_call(id=ended, arguments=self.catalog.journal.get(ended).arguments)
        )
        new = follow(parent.snapshot, trajectory.id, messages=texts, after=after, keep=kept, call=call)
        self.catalog.snapshots.commit(
            new,
            [Message("user", text) for text in own],
            expected_head=head,
            entries=entries,
            ended=None if ended is None else Ended(ended, CallStatus.DONE, 1),
            state=state,
        )
        if ended is not None:
            line.open.discard(ended)
        if back is not None:
            line = Line(source.journal)
        line.begun += [entry.id for entry in entries]
        binds = [one for one in line.begun if one not in line.open and one not in line.bound]
        line.bound |= dict.fromkeys(binds, new.id)
        saved = source.state if state is None else state
        changes = (
            None if json.dumps(saved) == json.dumps(source.state) else saved
        )  # the order of its keys is a part of it
        self.minds[new.id] = Mind(
            new, source.said[:kept] + own, [*source.path, new.id], line, saved, (own, binds, changes)
        )
        self.trajectories[trajectory.id] = (trajectory, new.id, line)
        self.new = [new.id, head]

    @precondition(lambda self: len(self.trajectories) > 2)
    @rule(which=PICK)
    def remove(self, which: int) -> None:
        trajectory, _, _ = self.trajectory(which)
        mine = {one for one, mind in self.minds.items() if mind.snapshot.trajectory == trajectory.id}
        others = [mind.snapshot for one, mind in self.minds.items() if one not in mine]
        used = any({one.parent, one.follows} & mine for one in others) or any(
            made.forked_from in mine for other, (made, _, _) in self.trajectories.items() if other != trajectory.id
        )
        try:
            self.catalog.trajectories.remove(trajectory.id)
            assert not used
        except Conflict:
            assert used
            return
        gone = [entry for one in mine for entry in self.minds[one].own[1]]
        for one in mine:
            del self.minds[one]
        del self.trajectories[trajectory.id]
        for call in gone[:2]:
            try:
                self.catalog.journal.get(call)
            except NotFound:
                continue
            raise AssertionError(f"{call} is still there")

    # -- what must be true ---------------------------------------------------------------------------------------------

    @invariant()
    def the_new_is_as_it_should_be(self) -> None:
        for one in self.new:
            if one in self.minds:
                self.look(one)
        for trajectory, _, line in self.trajectories.values():
            waiting = [one for one in line.begun if one not in line.bound]
            assert [entry.id for entry in self.catalog.journal.unbound(trajectory.id)] == waiting
        self.new = []

    def look(self, one: SnapshotID) -> None:
        mind, catalog = self.minds[one], self.catalog
        assert catalog.snapshots.get(one) == mind.snapshot
        assert [message.content for message in catalog.conversations.read(one)] == mind.said
        assert [(entry.id, entry.snapshot) for entry in catalog.journal.read(one)] == mind.journal
        assert catalog.conversations.state(one) == mind.state
        own = (
            [message.content for message in catalog.conversations.own(one)],
            [entry.id for entry in catalog.journal.own(one)],
        )
        assert (*own, catalog.conversations.own_state(one)) == mind.own

    def look_closely(self, one: SnapshotID) -> None:
        self.look(one)
        mind = self.minds[one]
        for start in (1, len(mind.said) // 2, len(mind.said)):
            assert [message.content for message in self.catalog.conversations.read(one, start)] == mind.said[start:]
        for since, other in self.minds.items():
            before = set(other.path) if since in mind.path else set()
            wanted = [entry for entry, by in mind.journal if by not in before]
            assert [entry.id for entry in self.catalog.journal.read(one, since)] == wanted

    # -- choosing ------------------------------------------------------------------------------------------------------

    def pick(self, number: int) -> Mind:
        return list(self.minds.values())[number % len(self.minds)]

    def trajectory(self, number: int) -> tuple[Trajectory, SnapshotID, Line]:
        return list(self.trajectories.values())[number % len(self.trajectories)]


TestLines = Lines.TestCase
TestLines.settings = settings(
    max_examples=long.size(12, 600), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.long  # contract/test_catalog.py is over PostgreSQL
def test_lines_in_postgresql(postgres: PostgresServer) -> None:
    class InPostgres(Lines):
        def open(self) -> Catalog:
            postgres.ask("DROP SCHEMA IF EXISTS snapshotd CASCADE")
            return PostgresCatalog(postgres.url)

    few = settings(TestLines.settings, max_examples=long.size(3, 60))
    run_state_machine_as_test(InPostgres, settings=few)
    postgres.ask("DROP SCHEMA IF EXISTS snapshotd CASCADE")
