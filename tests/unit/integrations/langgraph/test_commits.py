"""Changes that wait for the same commit: each is whole or not at all, and they share the disk's time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from snapshotd.integrations.langgraph.commits import Commits
from snapshotd.integrations.langgraph.file import open_file
from snapshotd.sqlite import Database


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(open_file(tmp_path / "a.db")) as database:
        database.write("CREATE TABLE seen (name TEXT UNIQUE)")
        yield database


def test_changes_that_come_during_a_commit_share_the_next_one(database: Database) -> None:
    failed: list[str] = []
    commits = Commits(database, lambda: failed.append("rolled back"))
    begun, go_on = threading.Event(), threading.Event()
    results: dict[str, object] = {}

    def add(name: str, *, broken: bool = False, waits: bool = False) -> Callable[[], str]:
        def change() -> str:
            if waits:
                begun.set()
                assert go_on.wait(30)
            database.write("INSERT INTO seen VALUES (?)", (name,))
            if broken:
                raise KeyError(name)
            return f"{name} in {database.connection.total_changes()}"

        return change

    def run(name: str, change: Callable[[], str]) -> None:
        try:
            results[name] = commits.run(change)
        except KeyError as exc:
            results[name] = exc

    def begin(name: str, **more: bool) -> threading.Thread:
        thread = threading.Thread(target=run, args=(name, add(name, **more)))
        thread.start()
        return thread

    threads = [begin("first", waits=True)]
    assert begun.wait(30)
    threads += [begin(f"later-{number}", broken=number == 1) for number in range(4)]
    while len(commits._waiting) < 4:
        threads[0].join(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    names = [f"later-{number}" for number in (0, 2, 3)]
    assert sorted(row[0] for row in database.read("SELECT name FROM seen")) == ["first", *names]
    assert isinstance(results.pop("later-1"), KeyError)
    assert all(str(result).startswith(f"{name} in") for name, result in results.items())
    assert failed == ["rolled back"]


def test_a_commit_that_fails_fails_all_of_its_changes(database: Database) -> None:
    failed: list[str] = []
    commits = Commits(database, lambda: failed.append("rolled back"))
    with pytest.raises(KeyError):
        commits.run(lambda: {}["none"])
    assert failed == ["rolled back"]
    assert commits.run(lambda: database.write("INSERT INTO seen VALUES ('x')")) == 1
    assert database.read("SELECT name FROM seen") == [("x",)]
    assert not database.connection.in_transaction
