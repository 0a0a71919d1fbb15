"""Records: bytes and back, and what they make of anything else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.storage.record_fields import nests_deeper
from snapshotd.engine.storage.records import Record, Tags, decode, decode_any, encode, encode_from, encode_tags
from snapshotd.errors import DataLoss, InternalError, VersionMismatch
from snapshotd.types import (
    CallStatus,
    EntryKind,
    FileChanges,
    Image,
    Message,
    Snapshot,
    SnapshotID,
    SnapshotState,
    Trajectory,
    TrajectoryStatus,
    TreeID,
    new_id,
)
from tests import long
from tests.records import World, begin, encoded, ended_entry, follow, fork, make_image

Facts = tuple[Snapshot, Trajectory, Image, tuple[Message, ...]]


def full() -> Record:
    """A record with every field filled in."""
    snapshot, trajectory, image, messages = facts()
    snapshot = replace(snapshot, follows=SnapshotID("f" * 32), messages=7, warnings=("a", "b"))
    own = ended_entry(snapshot, id=snapshot.call.id, kind=EntryKind.TOOL, arguments=snapshot.call.arguments, number=3)
    entries = (own, ended_entry(snapshot, name="\ud800", result={"z": [1.5]}, number=9))
    bound = tuple(replace(entry, snapshot=snapshot.id) for entry in entries)
    return Record(
        snapshot, replace(trajectory, began=SnapshotID("9" * 32)), image, messages, bound, {"b": 1, "a": [None]}
    )


def facts() -> Facts:
    image = make_image(tree=TreeID("1" * 64))
    trajectory, first = begin(image, "line", status=TrajectoryStatus.INTERRUPTED)
    messages = (Message("user", {"text": "\ud800\x00é", "n": [1, 2.5, None, True]}), Message("assistant", None))
    snapshot = follow(first, messages=2, files=FileChanges(1, 2, 3, 4))
    snapshot = replace(snapshot, state=SnapshotState.STORED, tree=TreeID("2" * 64))
    return snapshot, replace(trajectory, head=snapshot.id), image, messages


def changed(data: bytes, *path: Any, to: Any) -> bytes:
    """A record with the field at `path` replaced, or removed (Ellipsis)."""
    document = json.loads(data)
    place = document
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(document, separators=(",", ":")).encode()


def again(record: Record | Tags) -> bytes:
    if isinstance(record, Tags):
        return encode_tags(record.tags, record.at_ns, record.unknown)
    return encoded(record)


def test_a_record_comes_back_whole() -> None:
    snapshot, trajectory, image, messages = facts()
    data = encode(snapshot, trajectory, image, messages)
    assert decode(data) == Record(snapshot, trajectory, image, messages)
    assert decode_any(data) == decode(data)
    assert again(decode(data)) == data
    assert data.isascii()
    assert b"\n" not in data


def test_a_full_record_comes_back_whole() -> None:
    record = full()
    data = encoded(record)
    assert decode(data) == record
    assert [entry.number for entry in decode(data).entries] == [3, 9]
    assert again(decode(data)) == data
    document = json.loads(data)
    assert ["arguments" in entry for entry in document["entries"]] == [False, True], "the call has them already"
    assert document["state"] == {"b": 1, "a": [None]}


def test_arguments_that_are_not_the_calls_are_kept() -> None:
    """A person may have put others in their place: what was asked for and what ran are both recorded."""
    record = full()
    for arguments in ({"other": 1}, None, {**record.snapshot.call.arguments, "n": True}):
        entry = replace(record.entries[0], arguments=arguments)
        assert decode(encoded(replace(record, entries=(entry,)))).entries == (entry,)
    one = replace(record.snapshot, call=replace(record.snapshot.call, arguments={"n": 1}))
    entry = replace(record.entries[0], arguments={"n": True})
    assert decode(encoded(replace(record, snapshot=one, entries=(entry,)))).entries[0].arguments["n"] is True


def test_what_does_not_belong_to_it_is_refused() -> None:
    record = full()
    for wrong in ({"snapshot": None}, {"snapshot": SnapshotID("1" * 32)}, {"status": None, "ended_at_ns": None}):
        with pytest.raises(InternalError):
            encoded(replace(record, entries=(replace(record.entries[0], **wrong),)))


def test_what_changes_later_is_no_part_of_it() -> None:
    snapshot, trajectory, image, messages = facts()
    data = encode(snapshot, trajectory, image, messages)
    later = replace(trajectory, head=SnapshotID(new_id()), status=TrajectoryStatus.FINISHED, exit_code=0)
    assert encode(replace(snapshot, tags=("best",)), later, image, list(messages)) == data


@pytest.mark.parametrize("state", [SnapshotState.PRUNED, SnapshotState.LOST])
def test_optional_fields_stay_empty(state: SnapshotState) -> None:
    snapshot, trajectory, image, _ = facts()
    call = replace(snapshot.call, exit_code=None, error=None, output=None, stdout=None, stderr=None, arguments=None)
    snapshot = replace(snapshot, call=call, files=None, state=state, tree=None, base=None, messages=0)
    trajectory = replace(fork(snapshot, trajectory), id=trajectory.id, agent=None, status=TrajectoryStatus.STOPPED)
    trajectory = replace(trajectory, forked_from=snapshot.parent)
    image = replace(image, tree=None, name="")
    assert decode(encode(snapshot, trajectory, image, ())) == Record(snapshot, trajectory, image, ())


def test_equal_facts_give_equal_bytes_and_values_keep_their_order() -> None:
    snapshot, trajectory, image, messages = facts()
    snapshot = replace(snapshot, call=replace(snapshot.call, arguments={"z": 1, "a": {"y": 2, "b": 3}}))
    data = encode(snapshot, trajectory, image, messages)
    assert data == encode(*(decode(data).snapshot, decode(data).trajectory, decode(data).image, decode(data).messages))
    assert b'{"z":1,"a":{"y":2,"b":3}}' in data


def test_what_is_not_stored_has_no_record() -> None:
    snapshot, trajectory, image, messages = facts()
    for wrong in (
        replace(snapshot, state=SnapshotState.CAPTURED, tree=None),
        replace(snapshot, tree=None),
        replace(snapshot, state=SnapshotState.PRUNED),
        replace(snapshot, messages=1),
    ):
        with pytest.raises(InternalError):
            encode(wrong, trajectory, image, messages)
    with pytest.raises(InternalError):
        encode(snapshot, trajectory, make_image(), messages)


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("image",),
        ("trajectory",),
        ("trajectory", "spec"),
        ("trajectory", "spec", "limits"),
        ("trajectory", "agent"),
        ("snapshot",),
        ("snapshot", "files"),
        ("call",),
        ("messages", 1),
        ("entries", 0),
        ("entries", 1),
    ],
)
def test_unknown_fields_survive(path: tuple[Any, ...]) -> None:
    whole = full()
    data = changed(encoded(whole), *path, "zz-new", to={"x": [1, {"y": "\ud800"}]})
    record = decode(data)
    assert replace(record, unknown={}) == whole
    assert again(record) == data
    assert (
        again(replace(record, snapshot=replace(whole.snapshot, state=SnapshotState.PRUNED, tree=None))).count(b"zz-new")
        == 1
    )


def test_tags_come_back() -> None:
    tags = {"b": SnapshotID("1" * 32), "a.1": SnapshotID("2" * 32)}
    data = encode_tags(tags, 17)
    assert data == encode_tags(dict(reversed(tags.items())), 17)
    assert decode_any(data) == Tags(tags, 17)
    more = changed(data, "note", to=[1])
    assert again(decode_any(more)) == more
    with pytest.raises(DataLoss):
        decode(data)
    wrong: Any
    for wrong in ({"a/b": "1" * 32}, {"a": "1" * 31}, {"a": None}, {"": "1" * 32}, []):
        with pytest.raises(DataLoss, match="tags"):
            decode_any(changed(data, "tags", to=wrong))


@pytest.mark.parametrize(("path", "to"), [("version", 3), ("version", 10**9), ("kind", "policy")])
def test_what_a_newer_one_wrote_is_refused(path: str, to: Any) -> None:
    with pytest.raises(VersionMismatch, match="newer"):
        decode(changed(encode(*facts()), path, to=to))


def test_a_newer_version_need_not_look_like_this_one() -> None:
    with pytest.raises(VersionMismatch):
        decode_any(b'{"format": "snapshotd record", "version": 7, "kind": "snapshot"}')


WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("version",), 0),
    (("version",), True),
    (("version",), "1"),
    (("format",), "other"),
    (("kind",), None),
    (("snapshot", "id"), "../../etc/passwd"),
    (("snapshot", "id"), "A" * 32),
    (("snapshot", "id"), "a" * 33),
    (("snapshot", "id"), "a" * 32 + "\n"),
    (("snapshot", "layers"), ["../x"]),
    (("snapshot", "layers"), {}),
    (("snapshot", "layers", 0), 7),
    (("snapshot", "tree"), "2" * 32),
    (("snapshot", "tree"), None),
    (("snapshot", "state"), "captured"),
    (("snapshot", "state"), "pruned"),
    (("snapshot", "state"), "x"),
    (("snapshot", "seq"), -1),
    (("snapshot", "seq"), 1 << 63),
    (("snapshot", "seq"), 1.0),
    (("snapshot", "seq"), True),
    (("snapshot", "messages"), 1),
    (("snapshot", "own_layers"), 2),
    (("snapshot", "own_layers"), -1),
    (("snapshot", "files"), [1, 2, 3, 4]),
    (("snapshot", "image"), "e" * 32),
    (("snapshot", "method"), "a b"),
    (("snapshot", "created_at_ns"), None),
    (("snapshot", "parent"), ""),
    (("start",), 1),
    (("start",), None),
    (("messages",), None),
    (("messages", 0), "text"),
    (("messages", 0, "role"), 1),
    (("call",), None),
    (("call", "id"), "x"),
    (("call", "output"), "/etc"),
    (("call", "status"), "fine"),
    (("call", "exit_code"), 1 << 64),
    (("call", "name"), None),
    (("image", "name"), "x" * 256),
    (("image", "name"), "\n"),
    (("image", "bytes"), -1),
    (("image", "env"), [["a"]]),
    (("image", "env"), [["a", 1]]),
    (("image",), []),
    (("trajectory", "name"), "a/b"),
    (("trajectory", "name"), ""),
    (("trajectory", "spec", "network"), "all"),
    (("trajectory", "spec", "runtime"), "\ud800"),
    (("trajectory", "spec", "limits", "cpus"), "1"),
    (("trajectory", "spec", "limits", "cpus"), -1),
    (("trajectory", "spec", "limits", "cpus"), float("inf")),
    (("trajectory", "agent", "argv"), [1]),
    (("trajectory", "agent"), "x"),
    (("trajectory", "experiment"), "e"),
    (("trajectory", "env"), None),
    (("trajectory", "began"), "x"),
    (("snapshot", "follows"), "../x"),
    (("state",), [1]),
    (("state",), "x"),
    (("entries",), None),
    (("entries",), {}),
    (("entries", 0), 7),
    (("entries", 0, "id"), "x"),
    (("entries", 0, "id"), "1" * 32),
    (("entries", 0, "kind"), "x"),
    (("entries", 0, "name"), None),
    (("entries", 0, "after"), None),
    (("entries", 0, "began_at_ns"), None),
    (("entries", 0, "side_effect"), "none"),
    (("entries", 0, "key"), 7),
    (("entries", 0, "status"), None),
    (("entries", 0, "facts"), {}),
    (("entries", 0, "ended_at_ns"), None),
    (("entries", 0, "error"), 1),
    (("entries", 0, "details"), []),
    (("entries", 0, "number"), -1),
    (("entries", 0, "number"), 9),
    (("entries", 0, "number"), 10),
    (("entries", 1, "number"), (1 << 53) + 1),
    (("entries", 1, "arguments"), ...),
]


@pytest.mark.parametrize(("path", "to"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_damage(path: tuple[Any, ...], to: Any) -> None:
    with pytest.raises(DataLoss, match="a record is damaged"):
        decode(changed(encoded(full()), *path, to=to))


def test_one_entry_stands_in_it_once() -> None:
    record = full()
    twice = replace(record.entries[1], id=record.entries[0].id)
    with pytest.raises(DataLoss, match="twice"):
        decode(encoded(replace(record, entries=(record.entries[0], twice))))


def test_a_missing_field_is_damage_or_reads_as_null() -> None:
    data = encode(*facts())
    may_be_missing = {
        "base",
        "name",
        "parent",
        "exit_code",
        "error",
        "output",
        "stdout",
        "stderr",
        "arguments",
        "files",
        "agent",
        "forked_from",
        "experiment",
        "tree",
        "began",
        "follows",
        "key",
        "result",
    }
    for section in (None, "image", "trajectory", "snapshot", "call"):
        for name in json.loads(data) if section is None else json.loads(data)[section]:
            path = (name,) if section is None else (section, name)
            try:
                decode(changed(data, *path, to=...))
            except DataLoss:
                continue
            assert name in may_be_missing or path == ("state",), path


def test_it_cannot_come_from_itself() -> None:
    data = encode(*facts())
    own = json.loads(data)["snapshot"]["id"]
    for path in (("snapshot", "parent"), ("snapshot", "base"), ("snapshot", "follows"), ("trajectory", "forked_from")):
        with pytest.raises(DataLoss, match="itself"):
            decode(changed(data, *path, to=own))


@pytest.mark.parametrize(
    "place",
    [
        ("call", "arguments"),
        ("messages", 0, "content"),
        ("entries", 1, "result"),
        ("entries", 1, "facts"),
        ("state",),
        ("unknown",),
    ],
)
@pytest.mark.parametrize(
    "text",
    [
        "[" * 205 + "]" * 205,
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 500 + "1" + "}" * 500,
        "NaN",
        "Infinity",
        "1e999",
        "9" * 5000,
    ],
)
def test_a_hostile_value_is_damage(place: tuple[Any, ...], text: str) -> None:
    if place == ("unknown",) and len(text) == 410:
        text = "[" * 300 + "]" * 300  # fits within the document, where nothing reads it
    data = changed(encoded(full()), *place, to="MARK").replace(b'"MARK"', text.encode())
    with pytest.raises(DataLoss):
        decode(data)


@pytest.mark.parametrize(
    "data", [b"", b"null", b"[]", b"7", b"{", b"\xff\xfe", b'{"a":"\xc3\xa9"}', b"{}" * 2, b"\0" * 100]
)
def test_what_is_no_record_is_damage(data: bytes) -> None:
    with pytest.raises(DataLoss, match="a record is damaged"):
        decode_any(data)


def test_nesting_is_counted_exactly() -> None:
    for depth in range(4):
        lists: Any = "x"
        empty: Any = []
        for _ in range(depth):
            lists = [lists, {"a": 1}] if depth == 1 else {"k": lists}
        for _ in range(depth - 1):
            empty = [empty]
        limit = depth + 1 if depth == 1 else depth
        assert not nests_deeper(lists, limit)
        assert nests_deeper(lists, limit - 1) or depth == 0
        if depth:
            assert not nests_deeper(empty, depth)
            assert nests_deeper(empty, depth - 1)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=long.size(15, 600), deadline=None)
@given(
    json_values,
    st.lists(st.tuples(st.text(), json_values), max_size=4),
    json_values,
    st.text(),
    st.sampled_from(CallStatus),
)
def test_any_value_comes_back(
    arguments: Any, said: list[tuple[str, Any]], extra: Any, text: str, status: CallStatus
) -> None:
    snapshot, trajectory, image, _ = facts()
    messages = tuple(Message(role, content) for role, content in said)
    call = replace(snapshot.call, arguments=arguments, name=text, error=text, status=status)
    snapshot = replace(snapshot, call=call, messages=5 + len(said))
    trajectory = replace(trajectory, env=((text, text),))
    data = encode(snapshot, trajectory, replace(image, source=text), messages, {"zz": extra, "call": {"zz": extra}})
    record = decode(data)
    assert replace(record, unknown={}) == Record(snapshot, trajectory, replace(image, source=text), messages)
    assert again(record) == data


@settings(max_examples=long.size(40, 2000), deadline=None)
@given(st.data())
def test_damaged_bytes_never_do_worse_than_an_error(data: st.DataObject) -> None:
    whole = bytearray(encoded(full()))
    at = data.draw(st.integers(0, len(whole) - 1))
    action: Callable[[], Any] = data.draw(
        st.sampled_from(
            [
                lambda: whole.__setitem__(at, data.draw(st.integers(0, 255))),
                lambda: whole.__delitem__(slice(at, at + data.draw(st.integers(1, 50)))),
                lambda: whole.__delitem__(slice(at, None)),
                lambda: whole.insert(at, data.draw(st.sampled_from(b'{}[]",:0-e'))),
            ]
        )
    )
    action()
    try:
        record = decode_any(bytes(whole))
    except (DataLoss, VersionMismatch):
        return
    assert decode_any(again(record)) == record


def test_everything_in_a_random_world_comes_back() -> None:
    for seed in range(long.size(1, 6)):
        catalog = SqliteCatalog(":memory:")
        world = World(catalog, random.Random(seed))
        for snapshot in [world.store(one) for one in world.grow(80)]:
            trajectory = catalog.trajectories.get(snapshot.trajectory)
            image = catalog.images.find(snapshot.stack.image)
            own = tuple(catalog.conversations.own(snapshot.id))
            record = decode(encode_from(catalog, snapshot, image))
            assert (record.snapshot, record.image, record.messages) == (replace(snapshot, tags=()), image, own)
            assert list(record.entries) == catalog.journal.own(snapshot.id)
            assert [entry.number for entry in record.entries] == [
                entry.number for entry in catalog.journal.own(snapshot.id)
            ]
            assert record.state == catalog.conversations.own_state(snapshot.id)
            status = TrajectoryStatus.INTERRUPTED if trajectory.agent else TrajectoryStatus.STOPPED
            assert record.trajectory == replace(trajectory, head=snapshot.id, status=status, exit_code=None)
        catalog.close()
