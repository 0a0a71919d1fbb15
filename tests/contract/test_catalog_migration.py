"""`snapshotd catalog migrate`: a whole catalog goes from a file into a real PostgreSQL server and back, or not at all."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from snapshotd.catalog.base import Catalog, as_tenant
from snapshotd.catalog.migration import TABLES
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.daemon.lock import StateLock
from snapshotd.daemon.wiring import migrate_catalog
from snapshotd.errors import Conflict, DataLoss, NotFound, OutOfSpace, SnapshotdError, Unavailable
from snapshotd.failpoints import EXIT_CODE
from snapshotd.scores import ExperimentBranch
from snapshotd.terms import TENANT_VARIABLE
from snapshotd.types import BlobID, Compensation, EntryKind, Experiment, RequestKey, Snapshot, SnapshotState
from tests.json_words import faults
from tests.postgres_server import PostgresServer
from tests.records import World, committed, ended_entry, fork, make_approval, make_call, make_entry, started

ODD = "half \ud800 a pair, \0 and \x01"


def fill(catalog: Catalog) -> None:
    """At least one row of every table."""
    catalog.set_meta("fact", "value")
    trajectory, first = started(catalog, "origin")
    head = committed(catalog, first, ODD, "b", entries=[ended_entry(first, name=ODD)], saved={"text": ODD})
    catalog.refs.tag(head.id, "best")
    catalog.trajectories.add([(fork(head, trajectory, "branch"), None)])
    catalog.journal.begin(trajectory.id, make_entry(head, name=ODD))
    catalog.approvals.add(make_approval(head, tool=ODD))
    catalog.compensations.begin(Compensation(head.call.id, trajectory.id, None, 1, None, None, ODD))
    catalog.values.put("tenant", "space", ODD, {"text": ODD}, now_ns=1)
    catalog.requests.add(RequestKey("key", "digest", 1), [head.id])
    catalog.snapshots.set_state([head.id], SnapshotState.LOST)
    damaged = committed(catalog, head, call=make_call(output=BlobID("f" * 64)))
    assert damaged.call.output is not None
    catalog.snapshots.set_state([damaged.id], SnapshotState.LOST)
    catalog.snapshots.forget_outputs({damaged.call.output: 3})
    catalog.experiments.add(
        Experiment("e" * 32, "trial", head.id, 1, "d" * 64, {"a": [1, 2.5]}, ODD),
        [ExperimentBranch("label", 0, "queued")],
        files=b"\0\xff tar",
    )
    started(catalog, "hidden", env=(("A", ODD), (TENANT_VARIABLE, "acme"), ("B", "\U0001f600")))
    usage = {"input_tokens": 7, "cost_usd": 0.5, "name": ODD}
    asked = ended_entry(damaged, kind=EntryKind.MODEL, details={"usage": usage, "text": ODD})
    done = ended_entry(damaged, details={"sub_agent": "helper \U0001f600", "text": ODD})
    reused = make_call(id=done.id, arguments=done.arguments)
    committed(catalog, damaged, entries=[asked, done], call=reused, warnings=(ODD,), refused=("host",))
    gone, _ = started(catalog, "gone")
    catalog.trajectories.remove(gone.id)
    for _ in World(catalog, random.Random(1)).grow(60):
        pass


def seen(catalog: Catalog) -> list[Any]:
    """All that a catalog says."""
    found: list[Any] = [
        catalog.images.list(),
        catalog.trajectories.list(),
        catalog.refs.tags(),
        catalog.approvals.list(),
    ]
    everything = list(catalog.snapshots.all())
    ids = [snapshot.id for snapshot in everything]
    for snapshot in everything:
        found += [snapshot, catalog.refs.find_snapshot(snapshot.id[:20]), catalog.conversations.state(snapshot.id)]
        found += [list(catalog.conversations.read(snapshot.id)), list(catalog.conversations.read(snapshot.id, 1))]
        found += [
            catalog.conversations.own(snapshot.id),
            catalog.journal.own(snapshot.id),
            catalog.conversations.own_state(snapshot.id),
        ]
        found += [list(catalog.journal.read(snapshot.id)), list(catalog.journal.read(snapshot.id, ids[0]))]
        found += [catalog.journal.left_running(snapshot.id), catalog.snapshots.record(snapshot.id)]
        found += [catalog.compensations.get(snapshot.call.id)]
        found += [catalog.approvals.of_entry(snapshot.trajectory, snapshot.call.id)]
        found += [catalog.journal.find(entry.id[:20]) for entry in catalog.journal.own(snapshot.id)]
    for line in catalog.trajectories.list():
        found += [
            catalog.journal.unbound(line.id),
            catalog.snapshots.of_trajectory(line.id, 3, before=4),
            catalog.snapshots.count(line.id),
        ]
        found += [catalog.refs.find_trajectory(line.id[:20]), catalog.trajectories.list(line.status)]
    with as_tenant("acme"):
        found += [[outcome(catalog.refs.find_snapshot, snapshot.id[:20]) for snapshot in everything]]
    found += [sorted(catalog.trajectories.of_tenant("acme")), sorted(catalog.trajectories.of_tenant("default"))]
    found += [
        catalog.snapshots.get_many(ids),
        catalog.snapshots.unstored(),
        sorted(catalog.snapshots.referenced_layers()),
    ]
    found += [
        sorted(catalog.snapshots.unstored_blobs()),
        sorted(catalog.snapshots.referenced_records()),
        catalog.get_meta("fact"),
    ]
    found += [
        catalog.figures.totals(),
        catalog.figures.facts(ids),
        catalog.figures.rows(2, 10),
        catalog.figures.states(),
    ]
    found += [catalog.values.search("tenant", "space", now_ns=2), catalog.values.history("tenant", "space", ODD)]
    found += [catalog.requests.find(RequestKey("key", "digest", 1)), catalog.trajectories.removed()]
    found += [catalog.experiments.list(), catalog.experiments.branches("trial"), catalog.experiments.files("trial")]
    return found


def outcome(find: Callable[[str], Snapshot], ref: str) -> Snapshot | str:
    try:
        return find(ref)
    except SnapshotdError as exc:
        return f"{type(exc).__name__}: {exc}"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old.db"
    with closing(SqliteCatalog(path)) as catalog:
        fill(catalog)
    return path


def test_a_catalog_goes_into_a_server_and_back(tmp_path: Path, old: Path, postgres_url: str) -> None:
    said: list[str] = []
    there = migrate_catalog(tmp_path, str(old), postgres_url, said.append)
    assert [table.name for table in there] == list(TABLES)
    assert [table.name for table in there if not table.row_count] == []
    assert {"approvals: 1 of 1 rows", "verifying messages"} <= {*said}
    back = migrate_catalog(tmp_path, postgres_url, str(tmp_path / "new.db"), said.append)
    assert back == there
    with (
        closing(SqliteCatalog(old)) as first,
        closing(PostgresCatalog(postgres_url)) as second,
        closing(SqliteCatalog(tmp_path / "new.db")) as third,
    ):
        assert seen(first) == seen(second) == seen(third)
        assert third.problems() == []
        for catalog in (second, third):  # rows that come later are numbered behind those that came
            newest = list(catalog.snapshots.all())[-1]
            trajectory, begun = started(catalog, "later")
            committed(catalog, begun, "c")
            assert [one.id for one in catalog.trajectories.list()][-1] == trajectory.id
            assert catalog.snapshots.get(newest.id) == newest
    assert sorted(path.name for path in tmp_path.iterdir() if "migrating" in path.name) == []


def test_a_target_that_has_something_is_left_alone(tmp_path: Path, old: Path, postgres_url: str) -> None:
    with closing(PostgresCatalog(postgres_url)) as catalog:
        catalog.set_meta("a", "b")
        with pytest.raises(Conflict, match="not empty"):
            migrate_catalog(tmp_path, str(old), postgres_url, str)
        assert catalog.get_meta("a") == "b"
        assert catalog.trajectories.list() == []
    before = old.read_bytes()
    with pytest.raises(Conflict, match="is there already"):
        migrate_catalog(tmp_path, postgres_url, str(old), str)
    assert old.read_bytes() == before
    with pytest.raises(NotFound, match="name one that exists"):
        migrate_catalog(tmp_path, None, postgres_url, str)


def test_a_catalog_in_use_is_not_migrated(tmp_path: Path, old: Path, postgres_url: str) -> None:
    lock = StateLock(tmp_path)
    try:
        with pytest.raises(Conflict, match="already serves"):
            migrate_catalog(tmp_path, str(old), postgres_url, str)
    finally:
        lock.release()
    migrate_catalog(tmp_path, str(old), postgres_url, str)


def test_what_comes_otherwise_than_it_left_is_refused(
    tmp_path: Path, old: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    PostgresCatalog(postgres_url).close()
    postgres.ask(
        "CREATE FUNCTION snapshotd.change() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.content = '\"other\"'; RETURN NEW; END $$;"
        "CREATE TRIGGER change BEFORE INSERT ON snapshotd.messages FOR EACH ROW EXECUTE FUNCTION snapshotd.change()"
    )
    with pytest.raises(DataLoss, match="messages"):
        migrate_catalog(tmp_path, str(old), postgres_url, str)
    assert postgres.ask("SELECT count(*) FROM snapshotd.trajectories") == [(0,)]
    postgres.ask("DROP TRIGGER change ON snapshotd.messages")
    migrate_catalog(tmp_path, str(old), postgres_url, str)


def run(*words: str, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "snapshotd", "catalog", "migrate", *words],
        env={**os.environ, "SNAPSHOTD_FAILPOINT": failpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.long  # a server that dies in the midst leaves nothing, below
def test_a_migration_that_is_killed_leaves_nothing_and_can_be_repeated(
    tmp_path: Path, old: Path, postgres: PostgresServer, postgres_url: str
) -> None:
    killed = run("--from", str(old), "--to", postgres_url, failpoint="catalog.migrate.filled")
    assert killed.returncode == EXIT_CODE, killed.stderr
    assert postgres.ask("SELECT count(*) FROM snapshotd.messages") == [(0,)]
    done = run("--from", str(old), "--to", postgres_url, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert list(faults(said, "object", "the answer")) == []
    assert said["row_count"] == sum(table["row_count"] for table in said["tables"]) > len(TABLES)

    new = tmp_path / "new.db"
    killed = run("--from", postgres_url, "--to", str(new), failpoint="catalog.migrate.filled")
    assert killed.returncode == EXIT_CODE, killed.stderr
    assert not new.exists()
    done = run("--from", postgres_url, "--to", str(new))
    assert (done.returncode, done.stdout) == (
        0,
        f"copied and verified {said['row_count']} rows in {len(TABLES)} tables\n",
    )
    with closing(SqliteCatalog(old)) as first, closing(SqliteCatalog(new)) as second:
        assert seen(first) == seen(second)


@pytest.mark.parametrize(
    "table", ["messages", *(pytest.param(table, marks=pytest.mark.long) for table in ("images", "experiment_branches"))]
)
def test_a_server_that_dies_in_the_midst_leaves_nothing(tmp_path: Path, old: Path, table: str) -> None:
    with closing(PostgresServer(durable=True)) as server:

        def die(line: str) -> None:
            if line.startswith(f"{table}:"):
                server.kill()

        with pytest.raises(Unavailable):
            migrate_catalog(tmp_path, str(old), server.url, die)
        server.start()
        assert server.ask("SELECT count(*) FROM snapshotd.images") == [(0,)]
        there = migrate_catalog(tmp_path, str(old), server.url, str)
        if table == "messages":  # the other way: the last tables may be read already when it dies
            with pytest.raises(Unavailable):
                migrate_catalog(tmp_path, server.url, str(tmp_path / "new.db"), die)
            assert [path.name for path in tmp_path.glob("new*")] == []
            server.start()
            assert migrate_catalog(tmp_path, server.url, str(tmp_path / "new.db"), str) == there


def test_a_file_on_a_full_disk_leaves_nothing(small_disk: Path, tmp_path: Path, postgres_url: str) -> None:
    with closing(PostgresCatalog(postgres_url)) as catalog:
        committed(catalog, started(catalog)[1], "x" * 4_000_000)
    with pytest.raises(OutOfSpace, match="free some space"):
        migrate_catalog(tmp_path, postgres_url, str(small_disk / "new.db"), str)
    assert list(small_disk.iterdir()) == []
