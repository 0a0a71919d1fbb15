"""Bundles: journal, state and rewound conversations come in as they were; forged ones change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotd.engine.transfer.bundle import line_of
from snapshotd.errors import Conflict, UsageError, VersionMismatch
from snapshotd.types import CallStatus, Ended, Message, RecordID, Snapshot
from tests.records import begin, committed, ended_entry, follow, fork, make_call, make_entry
from tests.unit.engine.bundles import STEPS, World, forged, members

NO_OUTPUTS = {"output": None, "stdout": None, "stderr": None}


@pytest.fixture
def line(worlds: tuple[World, World], tmp_path: Path) -> list[Snapshot]:
    """A trajectory with parallel calls, a changing state and a conversation that went back twice; its files are those
    of `STEPS`."""
    here, _ = worlds
    snapshots = here.line(tmp_path / "root", STEPS)
    here.catalog.trajectories.set_began(snapshots[0].trajectory, snapshots[0].id)
    one, two, never = (make_entry(snapshots[-1], facts=(number, "\ud800")) for number in range(3))
    for entry in (one, two, never):
        here.catalog.journal.begin(snapshots[0].trajectory, entry)
    snapshots.append(
        taken(here, snapshots[-1], "a", ended=ending(two.id), call=called(two.id, two.arguments), saved={"n": 1})
    )
    snapshots.append(
        taken(here, snapshots[-1], "b", ended=ending(one.id), call=called(one.id), entries=[ended_entry(snapshots[-1])])
    )
    snapshots.append(taken(here, snapshots[-1], "c", "d", after=snapshots[2], keep=0, saved={"n": 2}))
    snapshots.append(taken(here, snapshots[-1], "e", entries=[ended_entry(snapshots[-1]), ended_entry(snapshots[-1])]))
    snapshots.append(taken(here, snapshots[-1], after=snapshots[4]))
    return snapshots


def called(call_id: str | None = None, arguments: Any = None) -> Any:
    return replace(make_call("called", **NO_OUTPUTS), **({"id": call_id, "arguments": arguments} if call_id else {}))


def ending(entry_id: Any) -> Ended:
    return Ended(entry_id, CallStatus.DONE, 7, None, None, {"more": [1]})


def taken(world: World, parent: Snapshot, *texts: str, call: Any = None, **fields: Any) -> Snapshot:
    """The stored snapshot after `parent`, with its files."""
    one = committed(world.catalog, parent, *texts, call=call or called(), **fields)
    assert parent.tree is not None
    world.catalog.snapshots.set_stored(one.id, parent.tree, RecordID("7" * 64))
    return world.catalog.snapshots.get(one.id)


def same(here: World, there: World, snapshots: list[Snapshot]) -> None:
    """What there is in the mind of the agent at each of them."""
    for one in snapshots:
        ours, theirs = there.catalog, here.catalog
        assert list(ours.conversations.read(one.id)) == list(theirs.conversations.read(one.id))
        assert ours.conversations.state(one.id) == theirs.conversations.state(one.id)
        assert ours.journal.own(one.id) == theirs.journal.own(one.id)
        assert [entry.number for entry in ours.journal.own(one.id)] == [
            entry.number for entry in theirs.journal.own(one.id)
        ]


def edited(content: list[tuple[bytes, bytes]], number: int, change: Callable[[Any], object]) -> bytes:
    """The bundle with the record of a snapshot changed."""

    def again(data: bytes) -> bytes:
        document = json.loads(data)
        change(document)
        return json.dumps(document, separators=(",", ":")).encode()

    return forged([(name, again(data) if name == b"snapshots/%d.json" % number else data) for name, data in content])


def test_a_whole_line_comes_in_as_it_was(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    (trajectory,) = there.take(here.export(line)).trajectories
    same(here, there, line)
    for one in line:
        assert list(there.catalog.journal.read(one.id)) == list(here.catalog.journal.read(one.id))
        assert there.catalog.conversations.own_state(one.id) == here.catalog.conversations.own_state(one.id)
        assert there.catalog.snapshots.get(one.id).follows == one.follows
    assert [len(list(there.catalog.journal.read(one.id))) for one in line] == [0, 0, 0, 0, 1, 3, 0, 2, 1], (
        "the test sees something"
    )
    assert trajectory.began == line[0].id
    assert there.catalog.journal.unbound(trajectory.id) == []
    new = committed(there.catalog, there.catalog.snapshots.get(line[-1].id), "on", entries=[ended_entry(line[-1])])
    assert [message.content for message in there.catalog.conversations.own(new.id)] == ["on"]


def test_one_snapshot_brings_conversation_and_state_but_no_calls_of_others(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    here, there = worlds
    (trajectory,) = there.take(here.export([line[7]])).trajectories
    same(here, there, line[7:8])
    assert there.catalog.conversations.own_state(line[7].id) == {"n": 2}
    assert list(there.catalog.journal.read(line[7].id)) == here.catalog.journal.own(line[7].id)
    assert there.catalog.snapshots.get(line[7].id).follows is None
    assert trajectory.began is None, "the snapshot at which its program began is not here"


def test_increments_go_on_from_what_is_here(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export(line[:6]))
    there.take(here.export(line[6:8], since=line[5]))
    (last,) = there.take(here.export(line[8:], since=line[7])).trajectories
    same(here, there, line)
    for one in line:
        assert list(there.catalog.journal.read(one.id)) == list(here.catalog.journal.read(one.id))
    assert last.began == line[0].id


def test_a_line_begins_as_early_as_its_conversation_went_back(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    here, there = worlds
    branch = fork(line[5], here.catalog.trajectories.get(line[0].trajectory), "branch")
    here.catalog.trajectories.add([(branch, None)])
    own = [taken(here, line[5], "x", trajectory=branch.id)]
    own.append(taken(here, own[-1], "y", after=line[3]))

    def chosen(since: Snapshot | None) -> list[Snapshot]:
        return line_of(here.catalog, own[-1], whole=True, since=None if since is None else since.id)

    assert [one.id for one in line_of(here.catalog, own[0], whole=True, since=None)] == [own[0].id]
    assert [one.id for one in chosen(None)] == [one.id for one in (*line[3:6], *own)]
    assert [one.id for one in chosen(line[4])] == [line[5].id, *(one.id for one in own)]
    assert [one.name for one in there.take(here.export(chosen(None))).trajectories] == ["line", "branch"]
    same(here, there, own)


def test_what_went_on_from_another_line_is_exported_alone(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    image = here.catalog.images.find(line[0].stack.image)
    other, first = begin(image, "other", began=line[0].id)
    first = replace(first, call=called())
    here.catalog.trajectories.add([(other, first)])
    assert line[0].tree is not None
    here.catalog.snapshots.set_stored(first.id, line[0].tree, RecordID("7" * 64))
    first = here.catalog.snapshots.get(first.id)
    gone_back = taken(here, first, "z", after=line[6])
    for since in (None, first.id):
        with pytest.raises(UsageError, match="went on from") as caught:
            line_of(here.catalog, gone_back, whole=True, since=since)
        assert line[6].id[:12] in caught.value.message
    there.take(here.export(line_of(here.catalog, gone_back, whole=False, since=None)))
    same(here, there, [gone_back])


@pytest.mark.parametrize("version", [1, 3])
def test_records_of_another_version_are_not_taken(
    worlds: tuple[World, World], line: list[Snapshot], version: int
) -> None:
    here, there = worlds
    with pytest.raises(VersionMismatch, match="a record was written by"):
        there.take(edited(members(here.export(line[:4])), 0, lambda document: document.update(version=version)))


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (6, lambda d: d["snapshot"].update(follows="c" * 32)),
        (6, lambda d: d["snapshot"].update(follows=None)),
        (6, lambda d: d["snapshot"].update(follows=d["snapshot"]["id"])),
        (6, lambda d: (d.update(start=9), d["snapshot"].update(messages=9 + len(d["messages"])))),
        (5, lambda d: (d.update(start=d["start"] - 1), d["snapshot"].update(messages=d["snapshot"]["messages"] - 1))),
        (5, lambda d: d["entries"][0].update(status=None)),
        (5, lambda d: d["entries"].reverse()),
        (5, lambda d: d.update(state=[])),
    ],
)
def test_forged_lines_are_refused(
    worlds: tuple[World, World], line: list[Snapshot], number: int, change: Callable[[Any], object]
) -> None:
    here, there = worlds
    with pytest.raises(UsageError, match="malformed"):
        there.take(edited(members(here.export(line)), number, change))
    assert there.is_empty()


def test_calls_are_recorded_once(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    """Neither twice in a bundle, nor in place of one that is here."""
    here, there = worlds
    content = members(here.export(line))
    stolen = here.catalog.journal.own(line[4].id)[0].id
    with pytest.raises(Conflict, match=stolen):
        there.take(edited(content, 7, lambda d: d["entries"][0].update(id=stolen)))
    assert there.is_empty()
    image = there.base_image((), "/")
    mine, first = begin(image, "mine")
    there.catalog.trajectories.add([(mine, first)])
    entry = make_entry(first)
    there.catalog.journal.begin(mine.id, entry)
    before = list(there.catalog.snapshots.all())
    with pytest.raises(Conflict, match=entry.id):
        there.take(edited(content, 7, lambda d: d["entries"][0].update(id=entry.id)))
    assert list(there.catalog.snapshots.all()) == before
    assert there.catalog.journal.get(entry.id) == entry


def test_what_is_here_is_not_read_into_a_forged_line(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    """A bundle cannot have another trajectory's conversation, nor its files."""
    here, there = worlds
    image = there.base_image((), "/")
    mine, first = begin(image, "mine")
    there.catalog.trajectories.add([(mine, first)])
    secret = follow(first, messages=1)
    there.catalog.snapshots.commit(secret, [Message("user", "a secret")], expected_head=first.id)
    with pytest.raises(UsageError, match="malformed"):
        there.take(edited(members(here.export(line)), 6, lambda d: d["snapshot"].update(follows=secret.id)))
    (imported,) = there.take(
        edited(members(here.export(line)), 0, lambda d: d["trajectory"].update(began=secret.id))
    ).trajectories
    assert imported.began is None


def test_a_program_began_on_the_way_to_its_trajectorys_head(
    worlds: tuple[World, World], line: list[Snapshot], tmp_path: Path
) -> None:
    """One that is said to have begun in a later trajectory would make two that can never be removed."""
    here, there = worlds
    later = here.forked(line[-1], tmp_path / "root")
    content = members(here.export([*line, later]))
    taken_in = there.take(edited(content, 0, lambda d: d["trajectory"].update(began=later.id))).trajectories
    assert [trajectory.began for trajectory in taken_in] == [None, line[0].id]
    there.archive_all()
    for trajectory in reversed(taken_in):
        there.catalog.trajectories.remove(trajectory.id)
    assert not there.catalog.trajectories.list()


def test_numbers_that_leave_no_room_are_refused(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line[:1]))
    with pytest.raises(UsageError, match="malformed"):
        there.take(edited(content, 0, lambda d: d["snapshot"].update(seq=(1 << 53) + 1)))
    assert there.is_empty()
    there.take(edited(content, 0, lambda d: d["snapshot"].update(seq=1 << 53)))
