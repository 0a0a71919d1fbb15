"""SIGKILL at random moments of a committing process: what it was told is committed is there, whole; nothing is half
there."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from snapshotd.catalog import schema
from snapshotd.catalog.base import Catalog
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.repo.spool import Spool
from snapshotd.types import SnapshotID, SnapshotState, TrajectoryID
from tests import long
from tests.capabilities import require

CHILD = """
import os, random, sys
from dataclasses import replace
from pathlib import Path
from snapshotd import sqlite
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.repo.spool import Spool
from tests.records import begin, follow, fork, make_call, make_image
from snapshotd.types import Message, RecordID, TreeID

sqlite._CHECKPOINT_PAGES = 30  # many checkpoints, so that many kills fall into one
sqlite._CHECKPOINT_LIMIT_PAGES = 50
catalog = PostgresCatalog(sys.argv[3]) if sys.argv[3] else SqliteCatalog(Path(sys.argv[1]) / "catalog.db")
repository = Spool(Path(sys.argv[1]) / "repo")
rng = random.Random(int(sys.argv[2]))
report = lambda *words: os.write(1, (" ".join(words) + "\\n").encode())
image = make_image()
catalog.images.add(image)
lines = []
report("ready")
while True:
    if not lines or rng.random() < 0.05:
        trajectory, head = begin(image)
        catalog.trajectories.add([(trajectory, head)])
    elif rng.random() < 0.05:
        origin, parent = rng.choice(lines)
        trajectory = fork(head := parent, origin)
        catalog.trajectories.add([(trajectory, None)])
    elif rng.random() < 0.03 and not {one.forked_from for one, _ in lines} & {
        one.id for one in catalog.snapshots.of_trajectory(lines[-1][0].id)
    }:
        report("removing", lines[-1][0].id)
        catalog.trajectories.remove(lines.pop()[0].id)
        continue
    else:
        trajectory, head = lines.pop(rng.randrange(len(lines)))
        output = repository.save_blob(rng.randbytes(rng.randrange(3000)))
        texts = [str(head.messages + n) for n in range(rng.randrange(4))]
        new = follow(head, trajectory.id, messages=len(texts))
        new = replace(new, call=make_call(output=output), stack=replace(new.stack, layers=new.stack.layers[:32]))
        catalog.snapshots.commit(new, [Message("user", text) for text in texts], expected_head=head.id)
        head = new
        if rng.random() < 0.5:
            ids = [one.id for one in catalog.snapshots.of_trajectory(trajectory.id, 3)]
            catalog.snapshots.set_stored(rng.choice(ids), TreeID("1" * 64), RecordID("2" * 64))
            if rng.random() < 0.3:
                catalog.snapshots.set_pruned([rng.choice(ids)])
    report("committed", trajectory.id, head.id)
    lines.append((trajectory, head))
    if rng.random() < 0.1:
        catalog.flush()
        repository.flush()
"""


def run_and_kill(
    directory: Path, seed: int, after_bytes: int, url: str = "", kill_server: Callable[[], object] = lambda: None
) -> list[str]:
    """Start a child, kill it once it has reported so much, and return its complete lines."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(directory), str(seed), url], stdout=subprocess.PIPE)
    assert child.stdout is not None
    said = b""
    try:
        while len(said) < after_bytes:
            data = os.read(child.stdout.fileno(), 4096)
            assert data, "the child ended by itself"
            said += data
        kill_server()
    finally:
        child.send_signal(signal.SIGKILL)
        while data := os.read(child.stdout.fileno(), 65536):
            said += data
        child.stdout.close()
        assert child.wait(timeout=60) == -signal.SIGKILL
    return said.decode().split("\n")[:-1]


@pytest.mark.parametrize("seed", long.seeds(1, 60))
def test_kill_at_any_time_loses_nothing_reported(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    committed: dict[str, str] = {}
    for round_number in range(3):  # the same catalog again: a restart after a crash works too
        lines = run_and_kill(tmp_path, seed * 100 + round_number, rng.randrange(6, 30_000))
        note(lines, committed)
        check_file(tmp_path, committed)


@pytest.mark.parametrize("seed", long.seeds(1, 20))
@pytest.mark.parametrize("victim", ["server", pytest.param("process", marks=pytest.mark.long)])
def test_kill_at_any_time_loses_nothing_that_postgresql_has(tmp_path: Path, seed: int, victim: str) -> None:
    """The process alone, or every process of the server before it."""
    require("postgres")
    from tests.postgres_server import PostgresServer

    rng = random.Random(seed)
    committed: dict[str, str] = {}
    with closing(PostgresServer(durable=victim == "server")) as server:
        for round_number in range(3):
            kill = server.kill if victim == "server" else lambda: None
            lines = run_and_kill(tmp_path, seed * 100 + round_number, rng.randrange(6, 10_000), server.url, kill)
            if victim == "server":
                server.start()
            note(lines, committed)
            with closing(PostgresCatalog(server.url)) as catalog, closing(Spool(tmp_path / "repo")) as repository:
                assert catalog.problems() == []
                check(catalog, repository, committed)


def note(lines: list[str], committed: dict[str, str]) -> None:
    """Add and remove what a child reported, snapshot to trajectory."""
    for line in lines:
        kind, *ids = line.split()
        if kind == "committed":
            committed[ids[1]] = ids[0]
        elif kind == "removing":
            for snapshot in [snapshot for snapshot, owner in committed.items() if owner == ids[0]]:
                del committed[snapshot]


def check_file(directory: Path, committed: dict[str, str]) -> None:
    with closing(SqliteCatalog(directory / "catalog.db")) as catalog, closing(Spool(directory / "repo")) as repository:
        # Comes after the catalog is open: a connection without the checksum layer would write the log's pages without.
        connection = apsw.Connection(str(directory / "catalog.db"), flags=apsw.SQLITE_OPEN_READWRITE)
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        connection.close()
        check(catalog, repository, committed)
    assert os.listdir(directory / "repo" / "tmp") == []


def check(catalog: Catalog, repository: Spool, committed: dict[str, str]) -> None:
    snapshots = {snapshot.id: snapshot for snapshot in catalog.snapshots.all()}
    assert committed.keys() <= snapshots.keys()
    assert catalog.snapshots.unstored() == [one.id for one in snapshots.values() if one.state is SnapshotState.CAPTURED]
    for snapshot in snapshots.values():
        assert (snapshot.tree is not None) is (snapshot.state is SnapshotState.STORED)
        assert (catalog.snapshots.record(snapshot.id) is None) is (snapshot.state is SnapshotState.CAPTURED)
        said = [message.content for message in catalog.conversations.read(snapshot.id)]
        assert said == [str(number) for number in range(snapshot.messages)]
        if snapshot.call.output and snapshot.call.output != "a" * 64:  # what the records of a first snapshot name
            assert sum(len(piece) for piece in repository.load_blob(snapshot.call.output)) < 3000
    for trajectory in catalog.trajectories.list():
        own = catalog.snapshots.of_trajectory(TrajectoryID(trajectory.id))
        line = [trajectory.forked_from, *(snapshot.id for snapshot in own)]
        assert [snapshot.parent for snapshot in own] == line[:-1]
        assert trajectory.head == SnapshotID(line[-1] or "")


MIGRATING = """
import os, signal, sys
from pathlib import Path
from snapshotd import sqlite
from snapshotd.catalog.sqlite import SqliteCatalog

steps, connect = int(sys.argv[2]), sqlite._connect

def counting(*how):
    connection = connect(*how)
    if steps:
        connection.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), steps)
    return connection

sqlite._connect = counting
SqliteCatalog(Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def version_of(path: Path) -> int:
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    version = connection.pragma("user_version")
    connection.close()
    assert isinstance(version, int)
    return version


def test_kill_during_a_migration_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    """After so many of SQLite's steps, ever more, until it gets through; the last kill comes right after the commit."""
    golden = Path(__file__).parents[1] / "golden" / f"catalog-v{schema.OLDEST}.db"
    path = Path(shutil.copyfile(golden, tmp_path / "catalog.db"))
    whole = SqliteCatalog(Path(shutil.copyfile(golden, tmp_path / "whole.db")))
    expected = (whole.images.list(), whole.trajectories.list(), list(whole.snapshots.all()))
    whole.close()
    kills, steps = 0, 20  # opening takes some, too
    while version_of(path) == schema.OLDEST:
        child = subprocess.run([sys.executable, "-c", MIGRATING, str(path), str(steps)], check=False, timeout=60)
        assert child.returncode == -signal.SIGKILL
        kills, steps = kills + 1, steps + steps // 3
        assert steps < 1_000_000
    assert kills > 5
    assert version_of(path) == schema.VERSION
    catalog = SqliteCatalog(path)
    assert (catalog.images.list(), catalog.trajectories.list(), list(catalog.snapshots.all())) == expected
    catalog.close()
