"""Bundles: what is exported comes in the same; what is cut, damaged or hostile changes nothing."""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshotd.engine.secrecy import TENANT
from snapshotd.engine.transfer import bundle, import_layers, imports
from snapshotd.engine.transfer.bundle import StoredSource, export_bundle, line_of
from snapshotd.engine.transfer.import_layers import BundleLimits
from snapshotd.errors import Conflict, DataLoss, LimitExceeded, NotFound, SnapshotdError, UsageError, VersionMismatch
from snapshotd.types import Snapshot, SnapshotState, TrajectoryStatus
from tests import long
from tests.archives import archive, directory, entry, link, pax_record, raw_header
from tests.unit.engine import bundles
from tests.unit.engine.bundles import POLICY, STEPS, World, forged, members


@pytest.fixture
def line(worlds: tuple[World, World], tmp_path: Path) -> list[Snapshot]:
    return worlds[0].line(tmp_path / "root", STEPS)


def same(here: World, there: World, snapshot: Snapshot) -> None:
    expected, found = here.stored(snapshot), there.shown(snapshot.id)
    for path in expected.keys() | found.keys():
        assert found.get(path) == expected.get(path), path


def imported_whole(here: World, there: World, line: list[Snapshot]) -> None:
    """Files, calls, outputs and conversation are those of the original."""
    for number, original in enumerate(line):
        taken = there.catalog.snapshots.get(original.id)
        assert taken.state is SnapshotState.CAPTURED
        same(here, there, original)
        blobs = ("output", "stdout", "stderr")
        assert replace(taken.call, output=None, stdout=None, stderr=None) == replace(
            original.call, output=None, stdout=None, stderr=None
        )
        for name in blobs:
            ours, theirs = getattr(taken.call, name), getattr(original.call, name)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert b"".join(there.spool.load_blob(ours)) == b"".join(here.repo.load(theirs))
        assert (taken.seq, taken.messages, taken.created_at_ns, taken.method) == (
            original.seq,
            original.messages,
            original.created_at_ns,
            original.method,
        )
        assert taken.parent == (original.parent if number else None)
    assert list(there.catalog.conversations.read(line[-1].id)) == list(here.catalog.conversations.read(line[-1].id))


# -- round trips -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compress", [False, True])
def test_a_trajectory_comes_in_as_it_was(worlds: tuple[World, World], line: list[Snapshot], compress: bool) -> None:
    here, there = worlds
    data = here.export(line, compress=compress)
    result = there.take(data)
    assert (result.snapshots, result.warnings) == (4, ())
    imported_whole(here, there, line)
    (trajectory,) = result.trajectories
    assert trajectory == there.catalog.trajectories.get(line[0].trajectory)
    assert (trajectory.name, trajectory.head, trajectory.status) == ("line", line[-1].id, TrajectoryStatus.STOPPED)
    image = there.catalog.images.find(trajectory.spec.image)
    assert (image.env, image.workdir) == ((("PATH", "/x"), ("LANG", "C")), "/home")


def test_only_differences_are_in_it(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    names = [name for name, _ in members(worlds[0].export(line))]
    assert names[:3] == [b"snapshotd-bundle.json", b"snapshots/0.json", b"outputs/" + str(line[0].call.stdout).encode()]
    assert [name for name in names if name.startswith(b"layers/")] == [b"layers/0/0", b"layers/1/0", b"layers/3/0"]
    assert len([name for name in names if name.startswith(b"outputs/")]) == 3


def test_the_same_snapshots_give_the_same_bytes(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    assert worlds[0].export(line, compress=True) == worlds[0].export(line, compress=True)


def test_what_came_in_can_be_archived_and_exported_again(
    worlds: tuple[World, World], line: list[Snapshot], tmp_path: Path
) -> None:
    here, there = worlds
    there.take(here.export(line))
    there.archive_all()
    for snapshot in line:
        assert there.stored(there.catalog.snapshots.get(snapshot.id)) == here.stored(snapshot)
    assert there.catalog.snapshots.unstored() == []


def test_one_snapshot_from_the_middle_brings_its_whole_conversation(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    here, there = worlds
    there.take(here.export([line[3]]), name="alone")
    same(here, there, line[3])
    taken = there.catalog.snapshots.get(line[3].id)
    assert (taken.parent, taken.messages, taken.seq) == (None, line[3].messages, 3)
    assert list(there.catalog.conversations.read(taken.id)) == list(here.catalog.conversations.read(taken.id))
    assert there.catalog.refs.find_trajectory("alone").head == taken.id


def test_increments_stand_on_each_other(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export(line[:2]))
    second = there.take(here.export(line[2:3], since=line[1]))
    third = there.take(here.export(line[3:], since=line[2]))
    assert [len(result.trajectories) for result in (second, third)] == [1, 1]
    assert second.trajectories[0].forked_from == line[1].id
    assert "without its name" in second.warnings[0]
    for snapshot in line:
        same(here, there, snapshot)
    assert list(there.catalog.conversations.read(line[3].id)) == list(here.catalog.conversations.read(line[3].id))
    assert there.catalog.snapshots.get(line[2].id).own_layers == 0
    there.archive_all()
    assert there.stored(there.catalog.snapshots.get(line[3].id)) == here.stored(line[3])


def test_a_line_across_a_fork_makes_two_trajectories(
    worlds: tuple[World, World], line: list[Snapshot], tmp_path: Path
) -> None:
    here, there = worlds
    (tmp_path / "root/forked").write_text("in the fork")
    forked = here.forked(line[3], tmp_path / "root")
    result = there.take(here.export([*line, forked]), name="mine")
    assert [(t.name, t.forked_from, t.head) for t in result.trajectories] == [
        ("line", None, line[3].id),
        ("mine", line[3].id, forked.id),
    ]
    same(here, there, forked)


def test_snapshots_without_files_come_without(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    here.catalog.snapshots.set_pruned([line[1].id])
    here.catalog.snapshots.set_pruned([line[2].id])
    there.take(here.export([here.catalog.snapshots.get(snapshot.id) for snapshot in line]))
    assert [there.catalog.snapshots.get(snapshot.id).state for snapshot in line] == [
        SnapshotState.CAPTURED,
        SnapshotState.PRUNED,
        SnapshotState.PRUNED,
        SnapshotState.CAPTURED,
    ]
    same(here, there, line[3])
    there.archive_all()
    assert there.stored(there.catalog.snapshots.get(line[3].id)) == here.stored(line[3])


def test_a_long_line_stays_shallow(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_layers, "FAN_IN", 3)
    here, there = worlds

    def change(root: Path, number: int) -> None:
        (root / f"file-{number % 7}").write_text(f"{number}")
        if number % 5 == 4:
            for name in os.listdir(root)[:2]:
                (root / name).unlink()

    steps = [lambda root, number=number: change(root, number) for number in range(40)]
    line = here.line(tmp_path / "root", steps)
    there.take(here.export(line))
    assert max(len(there.catalog.snapshots.get(snapshot.id).stack.layers) for snapshot in line) <= 12
    for snapshot in line:
        same(here, there, snapshot)
    assert set(there.store.layers()) == there.catalog.snapshots.referenced_layers()


def test_a_layer_larger_than_a_piece(
    worlds: tuple[World, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "PIECE_BYTES", 4096)
    here, there = worlds
    (tmp_path / "root/big").write_bytes(os.urandom(50_000))
    line = here.line(tmp_path / "root", STEPS)
    data = here.export(line)
    assert sum(name.startswith(b"layers/0/") for name, _ in members(data)) > 10
    there.take(data)
    imported_whole(here, there, line)


def test_reads_of_any_length(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    for compress in (False, True):
        source = io.BytesIO(here.export(line, compress=compress))
        there.close()
        there.__init__(there.directory.parent / f"again-{compress}")  # type: ignore[misc]
        imports.import_bundle(
            there.context,
            lambda size, source=source: source.read(min(size, 7)),
            name=None,
            policy=POLICY,
            base_image=there.base_image,
            progress=lambda _: None,
        )
        imported_whole(here, there, line)


# -- what the importer decides -----------------------------------------------------------------------------------------


def test_the_importer_decides_runtime_network_and_limits(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    (trajectory,) = there.take(here.export(line)).trajectories
    assert replace(trajectory.spec, image=POLICY.image) == POLICY
    original = here.catalog.trajectories.get(trajectory.id)
    assert original.spec.limits != POLICY.limits
    assert (trajectory.agent, trajectory.env) == (original.agent, original.env)


def test_a_bundle_does_not_say_whose_values_its_agents_reach(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    data = here.export(line)
    for number in range(len(line)):
        data = _edited(members(data), number, _set("trajectory", env=[["A", "b"], [TENANT, "acme"]]))
    (trajectory,) = there.take(data).trajectories
    assert trajectory.env == (("A", "b"),)


def test_what_is_here_stays(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export(line[:3]))
    before = there.store.layers(), list(there.catalog.snapshots.all()), there.catalog.trajectories.list()
    for part in (line, line[2:]):
        with pytest.raises(Conflict, match=f"{part[0].id[:12]} of the bundle is here already and others are not"):
            there.take(here.export(part))
    for fields in ({"created_at_ns": 1}, {"id": line[3].id}):
        with pytest.raises((Conflict, UsageError), match="another"):
            there.take(_edited(members(here.export(line[2:3])), 0, _set("snapshot", **fields)))
    assert (there.store.layers(), list(there.catalog.snapshots.all()), there.catalog.trajectories.list()) == before


def test_the_same_again_changes_nothing(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    here.catalog.refs.tag(line[1].id, "good")
    data = here.export(tagged(here, line))
    taken = there.take(data, name="mine").trajectories
    before = there.store.layers(), list(there.catalog.snapshots.all()), there.catalog.trajectories.list()
    for again in (data, here.export(tagged(here, line[2:3])), here.export(tagged(here, line), compress=True)):
        result = there.take(again, name="mine")
        assert (result.trajectories, result.snapshots, result.warnings) == (taken, 0, ())
        assert (there.store.layers(), list(there.catalog.snapshots.all()), there.catalog.trajectories.list()) == before
    assert "keeps its name" in there.take(data, name="other").warnings[0]
    with pytest.raises(UsageError, match="cut off"):
        there.take(data[:-2048])
    there.catalog.refs.untag("good")
    assert there.take(data).snapshots == 0
    assert there.catalog.refs.tags() == {"good": line[1].id}
    there.archive_all()
    there.catalog.snapshots.set_pruned([line[2].id])
    with pytest.raises(Conflict, match="files are gone"):
        there.take(data)


# -- tags --------------------------------------------------------------------------------------------------------------


def tagged(world: World, line: list[Snapshot]) -> list[Snapshot]:
    """The snapshots with the tags that they have by now."""
    return [world.catalog.snapshots.get(snapshot.id) for snapshot in line]


def test_tags_come_along(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    for number, name in ((0, "before"), (1, "good"), (1, "also-good"), (3, "last")):
        here.catalog.refs.tag(line[number].id, name)
    there.take(here.export(tagged(here, line[:3])))
    assert there.catalog.refs.tags() == {"before": line[0].id, "good": line[1].id, "also-good": line[1].id}
    there.take(here.export(tagged(here, line[3:]), since=line[2]))
    assert there.catalog.refs.find_snapshot("last").id == line[3].id


def test_a_tag_that_is_taken_is_said_and_stays_where_it_is(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export(line[:1]), name="mine")
    there.catalog.refs.tag(line[0].id, "good")
    for name in ("good", "mine", "other", "new"):
        here.catalog.refs.tag(line[1].id, name)
    result = there.take(here.export(tagged(here, line[1:]), since=line[0]), name="other")
    assert there.catalog.refs.tags() == {"good": line[0].id, "new": line[1].id}
    good, mine, other = result.warnings
    assert "tag good was not taken" in good
    assert line[0].id[:12] in good
    assert f"snapshotd tag --move {line[1].id[:12]} good" in good
    assert "tag mine was not taken" in mine
    assert "tag other was not taken" in other


def test_a_name_that_could_be_taken_for_an_id_or_is_a_users_does_not_come(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    here, there = worlds
    with pytest.raises(UsageError, match="taken for an id"):
        there.take(here.export(line), name="beef")
    content = members(here.export(line))
    head = json.loads(content[0][1])
    head["tags"] = dict.fromkeys([line[0].id, line[0].id[:6], "good@1000", "good"], line[1].id)
    result = there.take(forged([(content[0][0], json.dumps(head).encode()), *content[1:]]))
    assert there.catalog.refs.tags() == {"good": line[1].id}
    assert len(result.warnings) == 3


def test_a_name_of_a_trajectory_that_is_a_tag_here_is_left_out(
    worlds: tuple[World, World], line: list[Snapshot], tmp_path: Path
) -> None:
    here, there = worlds
    there.take(here.export(line[:1]), name="mine")
    there.catalog.refs.tag(line[0].id, "line")
    result = there.take(here.export(line[1:], since=line[0]))
    assert result.trajectories[0].name is None
    assert "without its name" in result.warnings[0]


def test_an_increment_without_what_it_stands_on_is_not_taken(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    with pytest.raises(NotFound, match=f"{line[2].id}, which is not here"):
        there.take(here.export(line[3:], since=line[2]))
    assert there.is_empty()


def test_a_taken_name_is_a_conflict_before_anything_is_read(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export([line[0]]))
    with pytest.raises(Conflict, match="belongs to another"):
        there.take(here.export([line[1]]), name="line")
    with pytest.raises(UsageError, match="cannot be a name"):
        there.take(here.export([line[1]]), name="../x")


def test_a_base_without_files_is_a_conflict(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(here.export(line[:2]))
    there.archive_all()
    there.catalog.snapshots.set_pruned([line[1].id])
    with pytest.raises(Conflict, match="files are gone"):
        there.take(here.export(line[2:], since=line[1]))


# -- choosing what to export -------------------------------------------------------------------------------------------


def test_lines_are_found_by_their_parents(worlds: tuple[World, World], line: list[Snapshot], tmp_path: Path) -> None:
    here, _ = worlds
    forked = here.forked(line[3], tmp_path / "root")

    def chosen(snapshot: Snapshot, whole: bool, since: Snapshot | None) -> list[str]:
        return [
            one.id for one in line_of(here.catalog, snapshot, whole=whole, since=None if since is None else since.id)
        ]

    ids = [snapshot.id for snapshot in line]
    assert chosen(line[2], False, None) == ids[2:3]
    assert chosen(line[2], True, None) == ids[:3]
    assert chosen(line[3], False, line[1]) == ids[2:]
    assert chosen(line[3], True, line[1]) == ids[2:]
    assert chosen(forked, True, None) == [forked.id]
    assert chosen(forked, True, line[2]) == [ids[3], forked.id]
    for snapshot, since in ((line[1], line[2]), (line[1], line[1]), (line[0], line[0]), (line[1], forked)):
        with pytest.raises(UsageError, match="does not come before"):
            chosen(snapshot, True, since)


# -- refusing to export ------------------------------------------------------------------------------------------------


def test_only_lines_are_exported(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, _ = worlds
    with pytest.raises(UsageError, match="does not follow"):
        here.export([line[0], line[2]])
    with pytest.raises(UsageError, match="does not follow"):
        here.export(line[2:], since=line[0])
    with pytest.raises(UsageError, match="has no files"):
        here.export(line[2:], since=replace(line[1], tree=None, state=SnapshotState.PRUNED))
    with pytest.raises(LimitExceeded):
        here.export([])


def test_an_endless_conversation_is_refused(
    worlds: tuple[World, World], line: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundle, "MAX_RECORD_VALUES", 60)
    with pytest.raises(LimitExceeded, match="too long"):
        worlds[0].export(line)


def test_a_damaged_output_is_not_exported(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, _ = worlds
    blob = line[0].call.stdout
    assert blob is not None

    class Short(StoredSource):
        def output(self, blob: Any) -> Any:
            return 1000, iter([b"short"])

    with pytest.raises(DataLoss, match="1000"):
        export_bundle(
            line, Short(here.catalog, here.repo, lambda s: here.catalog.images.find(s.stack.image)), io.BytesIO().write
        )


# -- cut and damaged ---------------------------------------------------------------------------------------------------


def test_a_bundle_cut_anywhere_changes_nothing(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    for data in (here.export(line), here.export(line, compress=True)):
        step = long.size(3, 1) * 512 if data[:2] != b"\x1f\x8b" else long.size(160, 64)
        cuts = [*range(0, len(data), step), len(data) - 1, len(data) - 512]
        for cut in cuts:
            with pytest.raises(SnapshotdError) as caught:
                there.take(data[:cut])
            assert isinstance(caught.value, UsageError), cut
            assert there.is_empty()
    assert there.images == 0


@pytest.mark.parametrize(
    "data", [b"no bundle", bytes(range(256)) * 20, b"\x1f\x8b" + bytes(600), b"PK\3\4" + bytes(1000)]
)
def test_another_file_is_named_for_what_it_is_not(worlds: tuple[World, World], data: bytes) -> None:
    with pytest.raises(UsageError, match=r"no bundle of snapshotd, or .*; `snapshotd export` makes one"):
        worlds[1].take(data)


def test_something_after_the_end_is_refused(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    for data in (here.export(line), here.export(line, compress=True)):
        for more in (b"x", bytes(512), data):
            with pytest.raises(UsageError):
                there.take(data + more)
            assert there.is_empty()


@settings(max_examples=long.size(15, 2000), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_found_or_changes_nothing(
    worlds: tuple[World, World], line: list[Snapshot], data: st.DataObject
) -> None:
    here, there = worlds
    whole = bytearray(here.export(line, compress=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(whole) - 1))
        whole[position] ^= data.draw(st.integers(1, 255))
    try:
        there.take(bytes(whole))
    except SnapshotdError:
        assert there.is_empty()
    else:
        imported_whole(here, there, line)
        there.catalog.trajectories.remove(line[0].trajectory)
        there.store.sweep(there.catalog.snapshots.referenced_layers)


def test_no_damage_that_keeps_the_checksum_right_gets_further_than_a_typed_error(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    """One byte in 67 of every part (in the short set: in 157), changed, with the right checksum: an error of ours, or
    an import; never anything else."""
    here, there = worlds
    content = members(here.export(line[:2]))
    outcomes = set()
    for number, (name, data) in enumerate(content):
        for position in range(number % 3, min(len(data), 6000), long.size(157, 67)):
            changed = bytearray(data)
            changed[position] ^= 0x15
            try:
                there.take(forged([*content[:number], (name, bytes(changed)), *content[number + 1 :]]))
            except SnapshotdError as exc:
                outcomes.add(type(exc))
                assert there.is_empty()
            else:
                outcomes.add(None)
                for trajectory in there.catalog.trajectories.list():
                    there.catalog.trajectories.remove(trajectory.id)
                there.store.sweep(there.catalog.snapshots.referenced_layers)
    assert {None, UsageError} <= outcomes


# -- hostile -----------------------------------------------------------------------------------------------------------


def with_layer(content: list[tuple[bytes, bytes]], number: int, layer: bytes) -> bytes:
    name = b"layers/%d/0" % number
    assert name in dict(content)
    return forged([(one, layer if one == name else data) for one, data in content])


@pytest.mark.parametrize(
    "layer",
    [
        archive(entry("../../escaped", data=b"x")),
        archive(entry("/etc/escaped", data=b"x")),
        archive(entry("a/../../escaped", data=b"x")),
        archive(link("d", "/tmp"), entry("d/escaped", data=b"x")),
        archive(link("h", "../outside", tarfile.LNKTYPE)),
        archive(entry("w", tarfile.CHRTYPE, devmajor=0, devminor=0), entry("w/below", data=b"x")),
        archive(entry("s", tarfile.GNUTYPE_SPARSE)),
        archive(entry("x"))[:700],
        b"no tar at all" * 100,
        archive(entry("ok")) + archive(entry("more")),
        raw_header(b"x", pax_record(b"size", b"9" * 19)) + archive(entry("x")),
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_hostile_layers_are_refused(
    worlds: tuple[World, World], line: list[Snapshot], layer: bytes, number: int, tmp_path: Path
) -> None:
    here, there = worlds
    with pytest.raises((UsageError, LimitExceeded)):
        there.take(with_layer(members(here.export(line)), number, layer))
    assert there.is_empty()
    assert not (tmp_path / "escaped").exists()
    assert not Path("/tmp/escaped").exists()


def test_a_sparse_bomb_is_refused(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    facts = {b"major": b"1", b"minor": b"0", b"name": b"s", b"realsize": b"%d" % (1 << 63)}
    header = raw_header(b"x", b"".join(pax_record(b"GNU.sparse." + key, value) for key, value in facts.items()))
    with pytest.raises(UsageError, match="impossible"):
        there.take(
            with_layer(members(here.export(line)), 0, header + archive(entry("s", data=b"0\n".ljust(512, b"\0"))))
        )
    assert there.is_empty()


def test_a_first_layer_deletes_nothing(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    with pytest.raises(UsageError, match="0:0"):
        there.take(
            with_layer(members(here.export(line)), 0, archive(entry("w", tarfile.CHRTYPE, devmajor=0, devminor=0)))
        )
    assert there.is_empty()


def test_forged_deletions_reach_no_further_than_their_snapshot(
    worlds: tuple[World, World], line: list[Snapshot]
) -> None:
    """A deletion in a layer over a snapshot that is here hides a file in what is imported, and nowhere else."""
    here, there = worlds
    there.take(here.export(line[:1]))
    before = there.shown(line[0].id)
    layer = archive(
        entry("a", tarfile.CHRTYPE, devmajor=0, devminor=0),
        entry("never-there", tarfile.CHRTYPE, devmajor=0, devminor=0),
    )
    there.take(with_layer(members(here.export(line[1:2], since=line[0])), 0, layer))
    assert there.shown(line[0].id) == before
    shown = there.shown(line[1].id)
    assert b"a" not in shown
    assert b"a/file" not in shown
    assert b"d/pipe" in shown


@pytest.mark.parametrize(
    "name",
    [b"trusted.overlay.opaque", b"trusted.overlay.redirect", b"user.overlay.opaque", b"trusted.overlay.metacopy"],
)
def test_forged_overlay_attributes_are_stripped(worlds: tuple[World, World], line: list[Snapshot], name: bytes) -> None:
    here, there = worlds
    layer = raw_header(b"x", pax_record(b"SCHILY.xattr." + name, b"/etc" if b"redirect" in name else b"y")) + archive(
        directory("a")
    )
    result = there.take(with_layer(members(here.export(line[:2])), 1, layer))
    assert "was left out" in result.warnings[0]
    (sealed, _) = there.catalog.snapshots.get(line[1].id).stack.layers
    assert os.listxattr(there.directory / "layers" / sealed / "upper/a") == []
    assert b"a/file" in there.shown(line[1].id)


def test_bounds(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line))
    many = with_layer(content, 0, archive(*(entry(f"f{number}") for number in range(60))))
    with pytest.raises(LimitExceeded, match="more than 50 members"):
        there.take(many, limits=BundleLimits(entries=50))
    with pytest.raises(LimitExceeded, match="more than 30 members"):
        there.take(
            with_layer(content, 1, archive(*(entry(f"f{number}") for number in range(60)))),
            limits=BundleLimits(entries=48),
        )
    for compress in (False, True):
        with pytest.raises(LimitExceeded, match="since a snapshot"):
            there.take(here.export(line, compress=compress), limits=BundleLimits(bytes=20_000))
    huge = bytearray(archive(entry("snapshotd-bundle.json"))[:512])
    huge[124:136] = b"\x80" + (1 << 40).to_bytes(11, "big")
    huge[148:156] = b" " * 8
    huge[148:156] = b"%06o\0 " % sum(huge)
    with pytest.raises(LimitExceeded, match="1099511627776 bytes"):
        there.take(bytes(huge))
    assert there.is_empty()


def test_a_bomb_of_zeros_ends_at_the_limit(worlds: tuple[World, World]) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = (
        packer.compress(
            archive(entry("snapshotd-bundle.json", data=b"{}"))[:1024] + bytes(long.size(32 << 20, 200 << 20))
        )
        + packer.flush()
    )
    with pytest.raises(SnapshotdError):
        worlds[1].take(bomb, limits=BundleLimits(bytes=1 << 20))


def test_deep_json_is_refused(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line))
    for depth in (300, 100_000):
        deep = json.loads(content[1][1])
        deep["call"]["arguments"] = "@"
        text = json.dumps(deep).encode().replace(b'"@"', b"[" * depth + b"]" * depth)
        for broken in ((content[0][0], b"[" * depth), (content[1][0], text)):
            with pytest.raises(UsageError, match="malformed"):
                there.take(forged([broken if name == broken[0] else (name, data) for name, data in content]))
    assert there.is_empty()


def test_a_record_of_millions_of_values_is_not_decoded(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line))
    with pytest.raises(LimitExceeded, match="values"):
        there.take(forged([content[0], (content[1][0], b"[" + b"[]," * 2_100_000 + b"0]")]))


def _edited(content: list[tuple[bytes, bytes]], number: int, edit: Any) -> bytes:
    name = b"snapshots/%d.json" % number
    changed = []
    for one, data in content:
        if one == name:
            value = json.loads(data)
            edit(value)
            data = json.dumps(value).encode()
        changed.append((one, data))
    return forged(changed)


def _set(part: str, **fields: Any) -> Any:
    return lambda record: record[part].update(fields)


def _agent(**fields: Any) -> Any:
    return lambda record: record["trajectory"]["agent"].update(fields)


@pytest.mark.parametrize(
    ("number", "edit"),
    [
        (1, _set("snapshot", id="f" * 32)),
        (1, _set("snapshot", parent="f" * 32)),
        (1, _set("snapshot", messages=9)),
        (1, _set("snapshot", id="../../x")),
        (1, _set("snapshot", seq=0)),
        (1, _set("snapshot", state="captured")),
        (1, _set("snapshot", tree=None)),
        (1, _set("snapshot", state="pruned", tree=None)),
        (0, _set("snapshot", state="pruned", tree=None)),
        (1, _set("call", damaged=[])),
        (1, _set("call", damaged={"stdout": ["x", 1]})),
        (1, _set("call", damaged={"stdout": ["f" * 64, -1]})),
        (1, _set("call", damaged={"stdout": ["f" * 64]})),
        (1, _set("trajectory", id="x")),
        (1, _set("trajectory", id="e" * 32)),
        (1, _set("call", stdout="f" * 64)),
        (1, lambda v: v.clear()),
        (1, lambda v: v["messages"].append({"role": "x", "content": 1})),
        (1, lambda v: v.update(version=1.5)),
        (0, _agent(argv=[])),
        (0, _agent(argv=["a\0"])),
        (0, _agent(program=99)),
        (0, _agent(cwd="x")),
        (0, _agent(env=[["", "b"]])),
        (0, _set("trajectory", env=[["A\0", "b"]])),
        (0, _set("trajectory", env=[["A=", "b"]])),
        (0, _set("trajectory", env=[["A", "\ud800"]])),
        (0, _set("image", env=[["A\0", "b"]])),
        (0, _set("image", workdir="relative")),
        (0, _set("image", workdir="/\0")),
    ],
)
def test_records_that_do_not_fit_are_refused(
    worlds: tuple[World, World], line: list[Snapshot], number: int, edit: Any
) -> None:
    here, there = worlds
    with pytest.raises(UsageError):
        there.take(_edited(members(here.export(line)), number, edit))
    assert there.is_empty()


def test_an_environment_has_bounds(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line))
    for part in ("trajectory", "image"):
        for env in ([[f"N{n}", ""] for n in range(2000)], [["A", "x" * (1 << 20)]]):
            with pytest.raises(LimitExceeded, match="environment"):
                there.take(_edited(content, 0, _set(part, env=env)))
    with pytest.raises(LimitExceeded, match="command line"):
        there.take(_edited(content, 0, _agent(argv=["x" * (1 << 20)])))
    assert there.is_empty()


@pytest.mark.parametrize(
    "head",
    [
        {"format": "x"},
        {"version": 0.5},
        {"snapshots": []},
        {"snapshots": ["x"]},
        {"snapshots": "x"},
        {"since": "x"},
        {"since": 5},
        {"tags": None},
        {"tags": []},
        {"tags": {"../x": "LAST"}},
        {"tags": {"": "LAST"}},
        {"tags": {"x" * 65: "LAST"}},
        {"tags": {"a\n": "LAST"}},
        {"tags": {"a": "f" * 32}},
        {"tags": {"a": 5}},
        {"tags": {"a": ["LAST"]}},
        {"tags": {"\ud800": "LAST"}},
        {"snapshots": ["a" * 32, "a" * 32]},
        {"snapshots": ["a" * 32], "since": "a" * 32},
        {"snapshots": [["a" * 32]]},
    ],
)
def test_heads_that_make_no_sense_are_refused(
    worlds: tuple[World, World], line: list[Snapshot], head: dict[str, Any]
) -> None:
    here, there = worlds
    content = members(here.export(line))
    value = json.dumps({**json.loads(content[0][1]), **head}).replace("LAST", line[-1].id).encode()
    with pytest.raises(UsageError):  # another format, or the head of ours damaged
        there.take(forged([(content[0][0], value), *content[1:]]))
    assert there.is_empty()


@pytest.mark.parametrize(("version", "said"), [(1, "older snapshotd .format 1,"), (3, "newer snapshotd .format 3,")])
def test_another_version_is_named(worlds: tuple[World, World], line: list[Snapshot], version: int, said: str) -> None:
    here, there = worlds
    content = members(here.export(line))
    head = content[0][1].replace(b'"version":2', b'"version":%d' % version)
    with pytest.raises(VersionMismatch, match=f"the bundle was written by an? {said}"):
        there.take(forged([(content[0][0], head), *content[1:]]))


def test_members_out_of_place_are_refused(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    content = members(here.export(line))
    output = next(item for item in content if item[0].startswith(b"outputs/"))
    layer = next(item for item in content if item[0].startswith(b"layers/"))
    variants = [
        content[1:],
        [*content[:-1], content[0]],
        [*content, layer],
        [*content, output],
        [content[0], output, *content[1:]],
        [item for item in content if item != output],
        [item for item in content if item != layer],
        [content[0], content[2], *content[1:]],
        [*content[:2], (b"outputs/" + b"f" * 64, b"unwanted"), *content[2:]],
        [*content[:2], output, output, *content[3:]],
        [(b"./" + name, data) for name, data in content],
        [*content, (b"layers/3/1", b"more")],
        [*content, (b"x", b"")],
    ]
    for variant in variants:
        with pytest.raises(UsageError):
            there.take(forged(variant))
        assert there.is_empty()


def test_other_files_are_not_bundles(worlds: tuple[World, World]) -> None:
    there = worlds[1]
    tars = (archive(entry("a", data=b"x")), archive(link("snapshotd-bundle.json", "/x")))
    for data in (b"", b"x", b"\x1f\x8b", b"\x1f\x8b" + b"x" * 500, bytes(10240), *tars):
        with pytest.raises(UsageError):
            there.take(data)
    assert there.is_empty()


def test_a_failed_commit_leaves_nothing(
    worlds: tuple[World, World], line: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = worlds

    def fails(*_: Any) -> None:
        raise Conflict("somebody was faster")

    monkeypatch.setattr(there.catalog.others, "restore", fails)
    with pytest.raises(Conflict, match="faster"):
        there.take(here.export(line))
    assert there.is_empty()


def test_a_full_disk_is_named(
    worlds: tuple[World, World], line: list[Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = worlds

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    data = here.export(line)
    with monkeypatch.context() as patched:
        patched.setattr("snapshotd.formats.ingest_tar.os.pwrite", full)
        with pytest.raises(SnapshotdError, match="disk"):
            there.take(data)
    assert there.is_empty()


def test_the_records_kept_meanwhile_are_read_back(worlds: tuple[World, World], tmp_path: Path) -> None:
    """Messages of many snapshots, each its own."""
    here, there = worlds
    line = here.line(tmp_path / "root", [bundles.first, *[bundles.nothing] * 30])
    there.take(here.export(line))
    for snapshot in line:
        assert there.catalog.conversations.own(snapshot.id) == here.catalog.conversations.own(snapshot.id)


def test_facts_in_the_record_that_nobody_needs_are_not_taken(worlds: tuple[World, World], line: list[Snapshot]) -> None:
    here, there = worlds
    there.take(
        _edited(
            members(here.export(line)), 0, lambda v: v["trajectory"].update(forked_from="c" * 32, experiment="d" * 32)
        )
    )
    (trajectory,) = there.catalog.trajectories.list()
    assert (trajectory.forked_from, trajectory.experiment) == (None, None)
