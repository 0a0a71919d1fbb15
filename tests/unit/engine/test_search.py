"""The index of texts: what is found, how a person's words are read, what follows a removal, a damage, another version."""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import pytest

from snapshotd import sqlite
from snapshotd.api.find import FindInfo
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.engine.search import filling as filling_module
from snapshotd.engine.search import index as index_module
from snapshotd.engine.search.filling import Filling
from snapshotd.engine.search.index import FORM, TextIndex, query_of
from snapshotd.engine.search.service import FindService
from snapshotd.engine.search.texts import TEXT_BYTES
from snapshotd.errors import DataLoss, NotFound, Unsupported, UsageError
from snapshotd.types import BlobID, Message, Snapshot, Trajectory
from tests.keeper_rig import eventually
from tests.records import committed, follow, fork, make_call, started


class World:
    """A catalog with an index that follows it. `outputs`: what each blob holds."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "find.db"
        self.catalog = SqliteCatalog(folder / "catalog.db")
        self.outputs: dict[BlobID | None, bytes] = {}
        self.catalog.trajectories.notify(lambda line: self.filling.tell({"event": "trajectory", "trajectory": line}))
        self.open()

    def open(self) -> None:
        context: Any = SimpleNamespace(catalog=self.catalog, recorded_output=self._recorded)
        self.index = TextIndex(self.path)
        self.filling = Filling(context, self.index)
        self.service = FindService(context, self.index, self.filling)
        self.filling.start()

    def close(self) -> None:
        self.filling.close()
        self.index.close()

    def _recorded(self, snapshot: Snapshot, which: str) -> Iterator[bytes] | None:
        blob = getattr(snapshot.call, which)
        if blob is not None and blob not in self.outputs:
            raise DataLoss("it is gone")
        return None if blob is None else iter([self.outputs[blob]])

    def step(self, parent: Snapshot, *said: str, output: bytes | None = None, **call: Any) -> Snapshot:
        blob = None if output is None else BlobID(f"{len(self.outputs):064x}")
        self.outputs[blob] = output or b""
        given = make_call(output=None, stderr=None, stdout=blob, error=None, **call)
        taken = committed(self.catalog, parent, *said, call=given)
        self.filling.tell({"event": "snapshot", "trajectory": parent.trajectory})
        return taken

    def find(self, text: str, ref: str | None = None, **told: Any) -> FindInfo:
        found = self.service.find(text, ref, **told)
        assert found.waiting == 0
        return found

    def places(self, text: str, ref: str | None = None) -> list[tuple[str, int, str, str]]:
        return [(hit.trajectory, hit.seq, hit.kind, hit.part) for hit in self.find(text, ref).hits]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
    world.catalog.close()


def begun(world: World, name: str | None = None) -> tuple[Trajectory, Snapshot]:
    return started(world.catalog, name)


def test_arguments_outputs_and_messages_are_found(world: World) -> None:
    line, first = begun(world, "agent")
    world.step(
        first,
        "Please fix the PARSER",
        name="shell",
        arguments={"argv": ["make", "-k"]},
        output=b"\x1b[31mconnection\x1b[0m refused\n",
    )
    assert world.places("parser fix") == [(line.id, 1, "message", "0")]
    assert world.places("shell make") == [(line.id, 1, "argument", "shell")]
    (hit,) = world.find('"connection refused"').hits
    assert (hit.name, hit.kind, hit.part, hit.cut) == ("agent", "output", "stdout", False)
    assert [hit.excerpt[begin:end] for begin, end in hit.matches] == ["connection refused"]
    assert world.places('"refused connection"') == []
    assert world.places("refused connection") == [(line.id, 1, "output", "stdout")]
    assert world.places("conn*") == [(line.id, 1, "output", "stdout")]
    assert world.places("conn") == []


@pytest.mark.parametrize(
    "text",
    [
        '"',
        '"unclosed',
        "AND",
        "a OR b",
        "NEAR(a b)",
        "text:a",
        "a^b",
        "(((",
        "*",
        "-a",
        "{a}",
        "a'b;--",
        "\x00",
        "'",
        '""*',
        "a" * 1000,
    ],
)
def test_no_text_is_a_syntax_error(world: World, text: str) -> None:
    _, first = begun(world)
    world.step(first, "nothing of that")
    assert world.find(text).hits == ()


def test_words_that_mean_something_to_the_index_are_words(world: World) -> None:
    line, first = begun(world)
    world.step(first, 'you OR me, NEAR(here): "quoted" -v foo.bar(x) naïve')
    for text in ("OR", "near(here)", '"quoted', "-v", "foo.bar(x)", "NAIVE", '"you or"', "foo.ba*"):
        assert len(world.places(text)) == 1, text
    assert query_of('say "x" "y z"* w*') == '"say" AND "x" AND "y z" * AND "w" *'
    assert world.places("not me", line.id) == []
    with pytest.raises(UsageError):
        world.find(" ")


def test_a_shared_history_is_found_once_and_a_forks_own_with_it(world: World) -> None:
    line, first = begun(world, "parent")
    second = world.step(first, "shared words")
    world.step(second, "later words")
    child = fork(second, line, "child")
    world.catalog.trajectories.add([(child, None)])
    own = follow(second, child.id, messages=1, seq=0, call=make_call(output=None, stderr=None, stdout=None))
    world.catalog.snapshots.commit(own, [Message("user", "own words")], expected_head=second.id)
    world.filling.tell({"event": "snapshot", "trajectory": child.id})
    assert world.places("words", "child") == [(child.id, 0, "message", "1"), (line.id, 1, "message", "0")], (
        "no later ones"
    )
    assert len(world.places("words")) == 3
    assert world.places("words", "parent") == [(line.id, 2, "message", "1"), (line.id, 1, "message", "0")]
    with pytest.raises(NotFound):
        world.find("words", "nobody")


def test_hits_come_in_pages(world: World) -> None:
    _, last = begun(world)
    for number in range(5):
        last = world.step(last, f"word {number}")
    seen, before = [], None
    while True:
        found = world.find("word", before=before, limit=2)
        seen += [hit.seq for hit in found.hits]
        before = found.next
        if before is None:
            break
    assert seen == [5, 4, 3, 2, 1]


def test_a_removed_trajectory_takes_its_rows_away(world: World) -> None:
    kept, first = begun(world)
    gone, last = begun(world)
    for _ in range(3):
        last = world.step(last, "secret plan")
    assert len(world.places("plan")) == 3
    world.catalog.trajectories.remove(gone.id)
    assert world.places("plan") == []
    first = world.step(first, "another plan")  # its row has the number of one that is gone
    assert world.places("plan") == [(kept.id, 1, "message", "0")]
    assert {row.trajectory for row in world.index.rows(0, None)} == {kept.id}


def test_long_texts_are_cut_and_say_so(world: World) -> None:
    _, first = begun(world)
    middle = b"x " * TEXT_BYTES
    world.step(first, "m " * TEXT_BYTES + "beyond", output=b"beginning " + middle + b" needle " + middle + b" theend")
    (hit,) = world.find("theend").hits
    assert (hit.cut, hit.excerpt.endswith("theend")) == (True, True)
    assert world.places("beginning")
    assert world.places("needle") == world.places("beyond") == []


def test_hostile_text_is_indexed(world: World) -> None:
    _, first = begun(world)
    world.step(
        first,
        "\ud800 surrogate \x00 zero \u202e turned",
        name="t\udfffool",
        arguments={"k\ud800ey": [[["deep"]], None, True, 7.5]},
        output=bytes(range(256)) + b" \x01marked\x02 end",
    )
    assert [hit.excerpt.count("\u202e") for hit in world.find("turned").hits] == [0]
    for text in ("surrogate", "zero", "deep", '"7.5"', "marked"):
        assert len(world.places(text)) == 1, text
    (hit,) = world.find("ool deep").hits
    assert (hit.part, "deep" in hit.excerpt) == ("t ool", True)
    (hit,) = world.find("marked").hits
    assert [hit.excerpt[begin:end] for begin, end in hit.matches] == ["marked"]


def test_a_record_that_is_gone_has_no_excerpt(world: World) -> None:
    _, first = begun(world)
    taken = world.step(first, output=b"vanishing")
    assert world.places("vanishing")
    del world.outputs[taken.call.stdout]
    (hit,) = world.find("vanishing").hits
    assert (hit.excerpt, hit.matches) == ("", ())


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _of_another_version(path: Path) -> None:
    with closing(apsw.Connection(str(path))) as connection:
        connection.execute(f"PRAGMA user_version = {FORM.version + 1}")


def _of_another_program(path: Path) -> None:
    path.write_bytes(b"not a database" * 1000)


@pytest.mark.parametrize(
    "harm", [sqlite.remove, _cut_off, _of_another_version, _of_another_program, lambda p: p.write_bytes(b"")]
)
def test_an_index_that_cannot_be_used_is_made_anew(world: World, harm: Callable[[Path], object]) -> None:
    _, first = begun(world)
    world.step(first, "word")
    assert world.places("word")
    world.close()
    for beside in ("-wal", "-shm"):
        Path(f"{world.path}{beside}").unlink(missing_ok=True)
    harm(world.path)
    world.open()
    assert len(world.places("word")) == 1
    assert stat.S_IMODE(world.path.stat().st_mode) == 0o600


def test_what_happened_without_the_index_is_caught_up(world: World) -> None:
    _, first = begun(world)
    gone, last = begun(world)
    world.step(last, "old word")
    world.places("word")
    world.close()
    world.catalog.trajectories.notify(lambda _: None)
    world.catalog.trajectories.remove(gone.id)
    committed(world.catalog, first, "new word", call=make_call(output=None, stderr=None, stdout=None))
    world.open()
    (hit,) = world.find("word").hits
    assert hit.excerpt.endswith("new word")


@pytest.mark.parametrize(("quiet_s", "most", "added"), [(3600, 500, 0), (3600, 4, 5), (0.05, 500, 5)])
def test_agents_come_before_the_index(
    world: World, monkeypatch: pytest.MonkeyPatch, quiet_s: float, most: int, added: int
) -> None:
    """It is filled when nothing happens, or when much waits; and when somebody looks for something, whatever waits."""
    world.close()
    monkeypatch.setattr(filling_module, "QUIET_S", quiet_s)
    monkeypatch.setattr(filling_module, "WAITING_MAX", most)
    world.open()
    _, last = begun(world)
    for number in range(4):
        last = world.step(last, f"word {number}")
    eventually(lambda: not added or world.index.count() == added, "it is filled")
    assert world.index.count() == added
    assert len(world.places("word")) == 4


def test_without_fts5_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "_SCRIPT", "CREATE VIRTUAL TABLE texts USING fts9(x)")
    with pytest.raises(Unsupported, match="FTS5"):
        TextIndex(tmp_path / "find.db").count()
