"""What only holds for a catalog in a PostgreSQL server: several processes, a server that goes away, its errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from snapshotd.catalog import schema
from snapshotd.catalog.base import SnapshotRow
from snapshotd.catalog.database import TextBytes
from snapshotd.catalog.migration import migrate
from snapshotd.catalog.postgres import driver
from snapshotd.catalog.postgres.catalog import PostgresCatalog, open_database
from snapshotd.catalog.postgres.driver import PostgresDatabase
from snapshotd.catalog.sqlite import SqliteCatalog
from snapshotd.errors import (
    Conflict,
    DataLoss,
    InternalError,
    LimitExceeded,
    NotFound,
    NotPermitted,
    OutOfSpace,
    SnapshotdError,
    Unavailable,
    Unsupported,
    UsageError,
    VersionMismatch,
)
from snapshotd.failpoints import EXIT_CODE
from snapshotd.types import CallStatus, Ended, Message, RecordID, SnapshotState, TreeID
from tests import long
from tests.node_rig import await_that
from tests.postgres_server import PostgresServer
from tests.records import begin, committed, ended_entry, follow, make_entry, make_image, started


@pytest.fixture
def database(postgres_url: str) -> Iterator[PostgresDatabase]:
    with closing(open_database(postgres_url)) as opened:
        yield opened


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """One that a test may kill. It syncs, as real ones do."""
    with closing(PostgresServer(durable=True)) as server:
        yield server


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "plain", "\0", "a\0b", "\x01", "\x01{}", '\x01"a"', "\ud800", "x\udc80y", "\U0001f600", "\\x41", "'%s$1?"],
)
def test_any_text_comes_back(database: PostgresDatabase, text: str) -> None:
    with database.transaction():
        database.write("INSERT INTO meta VALUES (?, ?)", ("key " + text, text))
    assert database.read("SELECT value FROM meta WHERE key = ?", ("key " + text,)) == [(text,)]
    odd = TextBytes(text.encode(errors="surrogatepass"))
    assert database.read_one("SELECT key FROM meta WHERE value = ?", (odd,)) == ("key " + text,)


def test_json_that_postgresql_cannot_read_is_read(database: PostgresDatabase) -> None:
    """An environment or a model's details hold any text, and what is beside it is found all the same."""
    said = r'{"a":"\u0000 \\u0000 \\\u0000","usage":{"n":1e400,"t":"\ud83d\ude00"},"name":"\ud800."}'
    assert database.read_one("SELECT CAST(? AS TEXT) -> 'usage'", (said,)) == (r'{"n":1e400,"t":"\ud83d\ude00"}',)
    assert database.read_one("SELECT CAST(? AS TEXT) ->> 'name'", (said,)) == ("\ufffd.",)
    assert database.read_one("SELECT CAST(? AS TEXT) ->> 'a'", (said,)) == ("\ufffd \\u0000 \\\ufffd",)
    assert database.read_one("SELECT CAST(? AS TEXT) ->> 'none'", (said,)) == (None,)
    hidden = r'{"a":"\\ud83d\udc00","b":"\udc00 \ud83d\ud83d\ude00","c":1e200000,"d":"e"}'
    assert database.read_one("SELECT CAST(? AS TEXT) ->> 'd'", (hidden,)) == ("e",)
    pairs = r'[["A","\u0000"],["B","c"]]'
    assert database.read("SELECT e.value ->> 1 FROM json_each(?) e WHERE e.value ->> 0 = 'B'", (pairs,)) == [("c",)]


# -- several processes -------------------------------------------------------------------------------------------------


def test_of_two_that_move_one_head_one_does(postgres_url: str) -> None:
    with closing(PostgresCatalog(postgres_url)) as one, closing(PostgresCatalog(postgres_url)) as other:
        trajectory, first = started(one)
        done, failed = [], []

        def go_on(catalog: PostgresCatalog) -> None:
            try:
                done.append(committed(catalog, first))
            except Conflict as exc:
                failed.append(exc)

        threads = [threading.Thread(target=go_on, args=(catalog,)) for catalog in (one, other) * 5]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(done), len(failed)) == (1, 9)
        assert other.trajectories.get(trajectory.id).head == done[0].id
        fence = other.trajectories.draw_fence(trajectory.id)
        with pytest.raises(Conflict, match=f"under fence {fence - 1}"):
            committed(one, done[0], fence=fence - 1)
        committed(other, done[0], fence=fence)


def test_numbers_are_the_order_in_which_commits_are_seen(postgres_url: str) -> None:
    """A reader that goes on behind the largest number that it saw misses nothing."""
    with ExitStack() as opened:
        catalogs = [opened.enter_context(closing(PostgresCatalog(postgres_url))) for _ in range(4)]
        lines = [started(catalog)[1] for catalog in catalogs]
        ended = threading.Event()

        def grow(catalog: PostgresCatalog, number: int) -> None:
            for _ in range(25):
                lines[number] = committed(catalog, lines[number], "text")

        threads = [threading.Thread(target=grow, args=(catalog, n)) for n, catalog in enumerate(catalogs)]
        seen, last = [], 0

        def watch() -> None:
            nonlocal last
            with closing(PostgresCatalog(postgres_url)) as watcher:
                while not ended.is_set() or watcher.figures.rows(last, 1):
                    for row in watcher.figures.rows(last, 10):
                        seen.append(row.id)
                        last = row.pk

        watcher = threading.Thread(target=watch)
        for thread in (*threads, watcher):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        watcher.join()
        assert seen == [one.id for one in catalogs[0].snapshots.all()]
        assert len(seen) == 104


def test_what_is_read_under_the_lock_is_of_one_moment(database: PostgresDatabase, postgres_url: str) -> None:
    with closing(PostgresCatalog(postgres_url)) as other:
        with database.lock, database.lock:
            assert database.read("SELECT value FROM meta WHERE key = 'a'") == []
            other.set_meta("a", "b")
            assert database.read("SELECT value FROM meta WHERE key = 'a'") == []
            assert database.read_page("SELECT value FROM meta", (), rows=10, size=100) == []
        assert database.read("SELECT value FROM meta WHERE key = 'a'") == [("b",)]


def test_another_writer_is_waited_for_and_then_named(
    database: PostgresDatabase, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_WAIT_S", 0.1)
    with closing(PostgresCatalog(postgres_url)) as other, database.transaction():
        with pytest.raises(Conflict, match="locked by another process"):
            other.set_meta("a", "b")
        update = PostgresDatabase(postgres_url)  # who takes no lock does not wait
        with closing(update), update.transaction(alone=False):
            update.write("INSERT INTO meta VALUES ('c', 'd')")
        assert database.read_one("SELECT value FROM meta WHERE key = 'c'") == ("d",)


def test_a_transaction_has_all_or_nothing(database: PostgresDatabase) -> None:
    with pytest.raises(ZeroDivisionError), database.transaction():  # noqa: PT012
        database.write("INSERT INTO meta VALUES ('a', 'b')")
        raise ZeroDivisionError
    with pytest.raises(InternalError, match="refused a statement"), database.transaction():  # noqa: PT012
        database.write("INSERT INTO meta VALUES ('a', 'b')")
        database.write("INSERT INTO meta VALUES ('a', 'b')")
    with pytest.raises(InternalError, match="within another"), database.transaction(), database.transaction():
        pass
    assert database.read("SELECT * FROM meta") == []


@pytest.mark.parametrize("alone", [True, False])
def test_several_methods_are_one_transaction(postgres_url: str, alone: bool) -> None:
    with closing(PostgresCatalog(postgres_url)) as one, closing(PostgresCatalog(postgres_url)) as other:
        trajectory, first = started(one)
        with one.database.transaction(alone=alone, nests=True):
            one.database.write("INSERT INTO meta VALUES ('a', 'b')")
            head = committed(one, first)
            with pytest.raises(Conflict):  # it is undone by itself
                committed(one, first)
            assert one.trajectories.get(trajectory.id).head == head.id
            assert other.trajectories.get(trajectory.id).head == first.id
            assert other.get_meta("a") is None
        assert other.trajectories.get(trajectory.id).head == head.id
        assert other.get_meta("a") == "b"
        with pytest.raises(ZeroDivisionError), one.database.transaction(alone=alone, nests=True):  # noqa: PT012
            committed(one, head)
            raise ZeroDivisionError
        assert other.trajectories.get(trajectory.id).head == head.id


def test_more_threads_than_connections_wait(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_MOST", 3)
    with closing(open_database(postgres_url)) as database:
        counted = []

        def count() -> None:
            sql = "SELECT count(*), pg_sleep(0.02) FROM pg_stat_activity WHERE application_name = 'snapshotd'"
            counted.extend(row[0] for row in database.read(sql))

        threads = [threading.Thread(target=count) for _ in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(counted) == 12
        assert max(counted) <= 3


def test_no_statement_of_a_commit_or_lookup_scans(postgres_url: str, tmp_path: Path) -> None:
    """Rows that were read one after the other, by what the server counts."""
    path = tmp_path / "long.db"
    with closing(SqliteCatalog(path)) as made:
        image = make_image()
        trajectory, first = begin(image, "long")
        rows, line = [SnapshotRow(first)], [first]
        for n in range(3000):
            line.append(
                follow(
                    line[-1],
                    messages=1,
                    stack=first.stack,
                    own_layers=0,
                    state=SnapshotState.STORED,
                    tree=TreeID("1" * 64),
                )
            )
            entry = ended_entry(line[-2], snapshot=line[-1].id, number=n)
            rows.append(SnapshotRow(line[-1], (Message("user", f"{n}"),), RecordID("2" * 64), (entry,), {"n": n}))
        made.others.restore([image], [replace(trajectory, head=line[-1].id, began=first.id)], rows)
    migrate(str(path), postgres_url, str, lambda _: nullcontext())
    head = line[-1]
    with closing(PostgresCatalog(postgres_url)) as catalog:

        def scanned(action: Callable[[], object]) -> int:
            return -(count() - (action(), count())[1])

        def count() -> int:
            catalog.database.read("SELECT pg_stat_force_next_flush()")
            sql = "SELECT coalesce(sum(seq_tup_read), 0)::bigint FROM pg_stat_user_tables WHERE relname <> 'sessions'"
            return int(catalog.database.read(sql)[0][0])

        open_entry = make_entry(head)
        actions: dict[str, Callable[[], object]] = {
            "begin": lambda: catalog.journal.begin(trajectory.id, open_entry),
            "unbound": lambda: catalog.journal.unbound(trajectory.id),
            "commit": lambda: committed(catalog, head, "new", ended=Ended(open_entry.id, CallStatus.DONE, 5, "result")),
            "fence": lambda: catalog.trajectories.draw_fence(trajectory.id),
            "prefix": lambda: catalog.refs.find_snapshot(head.id[:12]),
            "name": lambda: catalog.refs.find_trajectory("long"),
            "some": lambda: catalog.snapshots.get_many([one.id for one in line[5:25]]),
            "newest": lambda: catalog.snapshots.of_trajectory(trajectory.id, 50),
            "messages": lambda: list(catalog.conversations.read(head.id, 2990)),
            "journal": lambda: list(catalog.journal.read(head.id, line[-5].id)),
            "own": lambda: (
                catalog.journal.own(head.id),
                catalog.conversations.own(head.id),
                catalog.conversations.own_state(head.id),
            ),
            "figures": lambda: catalog.figures.facts([one.id for one in line[5:25]]),
            "tag": lambda: catalog.refs.tag(head.id, "tag"),
            "unstored": lambda: (catalog.snapshots.unstored(), catalog.snapshots.unstored_blobs()),
        }
        assert scanned(lambda: catalog.database.read("SELECT sum(seq) FROM snapshots")) > 3000, "rows are counted"
        costs = {name: scanned(action) for name, action in actions.items()}
        assert {name: cost for name, cost in costs.items() if cost > 100} == {}
        for _ in range(12):  # statements that came often are planned once for all values
            actions["newest"](), actions["some"](), actions["messages"](), actions["journal"](), actions["figures"]()
        assert {
            name: cost
            for name in actions
            if name in ("newest", "some", "messages", "journal", "figures") and (cost := scanned(actions[name])) > 100
        } == {}


# -- a server that goes away -------------------------------------------------------------------------------------------


def test_a_server_that_was_started_again_is_no_error(own_server: PostgresServer) -> None:
    with closing(PostgresCatalog(own_server.url)) as catalog:
        _, head = started(catalog)
        own_server.stop()
        with pytest.raises(Unavailable, match="does not answer"):
            catalog.snapshots.get(head.id)
        with pytest.raises(Unavailable, match="does not answer"):
            catalog.set_meta("a", "b")
        own_server.start()
        assert catalog.snapshots.get(head.id) == head
        head = committed(catalog, head, "on")
        own_server.stop()
        own_server.start()
        committed(catalog, head, "and on")  # the first statement finds the broken connection


def test_a_transaction_whose_server_dies_has_changed_nothing(own_server: PostgresServer) -> None:
    with closing(open_database(own_server.url)) as database:
        with pytest.raises(Unavailable), database.transaction():  # noqa: PT012
            database.write("INSERT INTO meta VALUES ('a', 'b')")
            own_server.kill()
            database.write("INSERT INTO meta VALUES ('c', 'd')")
        own_server.start()
        assert database.read("SELECT * FROM meta") == []
        with pytest.raises(Unavailable), database.transaction():  # noqa: PT012
            database.write("INSERT INTO meta VALUES ('a', 'b')")  # COMMIT finds it out, and the answer is: not made
            own_server.kill()
            own_server.start()
        assert database.read("SELECT * FROM meta") == []


class CuttingProxy:
    """Carries connections to a server. From `arm` on it cuts the one over which COMMIT goes: `before` the server gets it,
    or when the server has answered."""

    def __init__(self, server: PostgresServer, folder: Path) -> None:
        self._to = f"{server.folder}/.s.PGSQL.{server.port}"
        self.url = f"postgresql://postgres@/postgres?host={folder}&port={server.port}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/.s.PGSQL.{server.port}")
        self._listener.listen()
        self.cut: str | None = None
        self.refuses = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refuses:
                client.close()
                continue
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._to)
            ends = threading.Event()
            for work in (self._forward, self._back):
                thread = threading.Thread(target=work, args=(client, server, ends))
                self._threads.append(thread)
                thread.start()

    def _forward(self, client: socket.socket, server: socket.socket, ends: threading.Event) -> None:
        while data := _received(client):
            if self.cut and b"COMMIT" in data:
                if self.cut == "before":
                    break
                ends.set()
            server.sendall(data)
        _shut(client, server)

    def _back(self, client: socket.socket, server: socket.socket, ends: threading.Event) -> None:
        while data := _received(server):
            if ends.is_set():
                break
            client.sendall(data)
        _shut(client, server)
        client.close()
        server.close()


def _received(end: socket.socket) -> bytes:
    try:
        return end.recv(1 << 16)
    except OSError:
        return b""


def _shut(*ends: socket.socket) -> None:
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is already


@pytest.fixture
def proxy(postgres: PostgresServer, postgres_url: str, tmp_path: Path) -> Iterator[CuttingProxy]:
    with closing(CuttingProxy(postgres, tmp_path)) as made:
        yield made


def test_a_commit_whose_answer_is_lost_was_made(proxy: CuttingProxy) -> None:
    with closing(PostgresCatalog(proxy.url)) as catalog:
        _, head = started(catalog)
        proxy.cut = "after"
        new = committed(catalog, head)
        proxy.cut = None
        assert catalog.snapshots.get(new.id) == new
        committed(catalog, new)


def test_a_commit_that_did_not_arrive_was_not_made(proxy: CuttingProxy) -> None:
    with closing(PostgresCatalog(proxy.url)) as catalog:
        trajectory, head = started(catalog)
        proxy.cut = "before"
        with pytest.raises(Unavailable, match="does not answer"):
            committed(catalog, head)
        proxy.cut = None
        assert catalog.trajectories.get(trajectory.id).head == head.id
        committed(catalog, head)


def test_a_commit_whose_outcome_nobody_can_say_is_called_so(proxy: CuttingProxy) -> None:
    with closing(PostgresCatalog(proxy.url)) as catalog:
        _, head = started(catalog)
        proxy.cut, proxy.refuses = "after", True
        with pytest.raises(Unavailable, match="not known whether"):
            committed(catalog, head)
        proxy.cut, proxy.refuses = None, False
        assert len(catalog.snapshots.of_trajectory(head.trajectory)) == 2


CHILD = """
import sys
from snapshotd.catalog.postgres.catalog import PostgresCatalog
from tests.records import begin, committed, ended_entry, follow, make_entry, make_image, started
catalog = PostgresCatalog(sys.argv[1])
_, head = started(catalog, "line")
print("begun", flush=True)
while True:
    head = committed(catalog, head, "a", "b")
    print(head.id, flush=True)
"""


@pytest.mark.long  # a transaction whose server dies has changed nothing, above
@pytest.mark.parametrize("victim", ["server", pytest.param("process", marks=pytest.mark.long)])
def test_a_kill_in_the_midst_of_commits_leaves_whole_ones(own_server: PostgresServer, victim: str) -> None:
    for number in range(long.size(1, 3)):
        child = subprocess.Popen([sys.executable, "-c", CHILD, own_server.url], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        with child.stdout:
            said = [child.stdout.readline().strip() for _ in range(20 + 7 * number)]
            if victim == "server":
                own_server.kill()
            child.send_signal(signal.SIGKILL)
            said += [line.strip() for line in child.stdout if line.endswith("\n")]
        child.wait()
        if victim == "server":
            own_server.start()
        with closing(PostgresCatalog(own_server.url)) as catalog:
            line = catalog.refs.find_trajectory("line")
            there = catalog.snapshots.of_trajectory(line.id)
            ids = [one.id for one in there[1:]]
            assert ids[: len(said) - 1] == said[1:]
            assert len(ids) - len(said[1:]) in (0, 1)
            assert line.head == there[-1].id
            assert [message.content for message in catalog.conversations.read(line.head)] == ["a", "b"] * len(ids)
            assert catalog.problems() == []
            committed(catalog, there[-1])
            catalog.trajectories.remove(line.id)


@pytest.mark.parametrize("time", [1, 2, 3])
def test_a_process_that_dies_before_its_commit_has_changed_nothing(
    postgres: PostgresServer, postgres_url: str, time: int
) -> None:
    """At the image, at the trajectory, at a snapshot of it; and the next writer does not wait for the dead one."""
    PostgresCatalog(postgres_url).close()
    child = subprocess.run(
        [sys.executable, "-c", CHILD, postgres_url],
        env={**os.environ, "SNAPSHOTD_FAILPOINT": f"catalog.postgres.commit:{time + 1}"},  # the first opens the catalog
        capture_output=True,
        check=False,
    )
    assert child.returncode == EXIT_CODE
    tables = ("images", "trajectories", "snapshots", "stacks", "messages")
    found = [postgres.ask(f"SELECT count(*) FROM snapshotd.{table}")[0][0] for table in tables]
    assert found == [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]][time - 1]
    with closing(PostgresCatalog(postgres_url)) as catalog:
        committed(catalog, started(catalog)[1])


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_newer_catalog_and_other_tables_are_refused(postgres: PostgresServer, postgres_url: str) -> None:
    PostgresCatalog(postgres_url).close()
    postgres.ask("UPDATE snapshotd.format SET version = version + 1")
    with pytest.raises(VersionMismatch, match="newer snapshotd"):
        PostgresCatalog(postgres_url)
    postgres.ask("DROP TABLE snapshotd.format")
    with pytest.raises(DataLoss, match="another program"):
        PostgresCatalog(postgres_url)


def test_an_upgrade_is_all_or_nothing(
    postgres: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(PostgresCatalog(postgres_url)) as catalog:
        catalog.set_meta("kept", "yes")
    newer = schema.VERSION + 1
    monkeypatch.setattr(schema, "VERSION", newer)
    good = "CREATE TABLE later (pk INTEGER PRIMARY KEY,\n a ANY REFERENCES meta\n) STRICT;"
    monkeypatch.setattr(schema, "MIGRATIONS", {**schema.MIGRATIONS, newer: f"{good} CREATE TABLE meta (b TEXT);"})
    with pytest.raises(InternalError, match="already exists"):
        PostgresCatalog(postgres_url)
    assert postgres.ask("SELECT version FROM snapshotd.format") == [(newer - 1,)]
    assert postgres.ask("SELECT to_regclass('snapshotd.later')") == [(None,)]
    monkeypatch.setattr(schema, "MIGRATIONS", {**schema.MIGRATIONS, newer: good})
    with closing(PostgresCatalog(postgres_url)) as catalog:
        assert catalog.get_meta("kept") == "yes"
        with pytest.raises(InternalError, match="foreign key"), catalog.database.transaction():
            catalog.database.write("INSERT INTO later (a) VALUES ('nothing')")
    PostgresCatalog(postgres_url).close()
    assert postgres.ask("SELECT version FROM snapshotd.format") == [(newer,)]


def _raised(state: str) -> Callable[[PostgresDatabase], object]:
    """A statement that fails as the server would with that SQLSTATE."""
    return lambda database: database.run_script(f"DO $$ BEGIN RAISE EXCEPTION 'so' USING ERRCODE = '{state}'; END $$")


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (_raised("53100"), OutOfSpace),
        (_raised("XX001"), DataLoss),
        (_raised("58030"), DataLoss),
        (lambda database: database.read("SELECT * FROM nothing"), DataLoss),
        (_raised("40001"), Conflict),
        (_raised("42501"), NotPermitted),
        (_raised("57P01"), Unavailable),
        (_raised("25006"), Unavailable),
        (_raised("53300"), Unavailable),
        (lambda database: database.read("SELECT 1 / 0"), InternalError),
        (
            lambda database: database.write("INSERT INTO tags VALUES (?, 1)", ("".join(map(chr, range(300, 5000))),)),
            LimitExceeded,
        ),
    ],
)
def test_what_the_server_says_is_said_in_our_words(
    database: PostgresDatabase, work: Callable[[PostgresDatabase], object], error: type[SnapshotdError]
) -> None:
    with pytest.raises(error), database.transaction():
        work(database)


@contextmanager
def asking_for_passwords(server: PostgresServer) -> Iterator[None]:
    """The server wants passwords, and nobody has one."""
    rules = server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    with closing(psycopg.connect(server.url, autocommit=True)) as known:
        rules.write_text("local all all scram-sha-256\n")
        known.execute("SELECT pg_reload_conf()")
        try:
            await_that(lambda: not _lets_in(server), "it asks for no password")
            yield
        finally:
            rules.write_text(before)
            known.execute("SELECT pg_reload_conf()")
            await_that(lambda: _lets_in(server), "it still asks for passwords")


def _lets_in(server: PostgresServer) -> bool:
    try:
        psycopg.connect(server.url).close()
    except psycopg.OperationalError:
        return False
    return True


def test_what_cannot_be_opened_is_named(postgres: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="create it first"):
        PostgresCatalog(postgres.url_of("nowhere"))
    with pytest.raises(NotPermitted, match='role "nobody-here" does not exist'):
        PostgresCatalog(postgres.url.replace("postgres@", "nobody-here@"))
    with asking_for_passwords(postgres), pytest.raises(NotPermitted, match="no password supplied"):
        PostgresCatalog(postgres.url)
    with pytest.raises(Unavailable, match="does not answer"):
        PostgresCatalog(f"postgresql://postgres@/postgres?host={tmp_path}")
    with pytest.raises(UsageError, match="cannot be read"):
        PostgresCatalog("postgresql://[/x")
    with pytest.raises(UsageError, match="name of a schema"):
        PostgresCatalog(postgres.url, schema_name='a"; DROP')


def test_a_password_is_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        PostgresCatalog(f"postgresql://me:hunter2@/base?host={tmp_path}")
    assert "hunter2" not in caught.value.message
    assert f"{tmp_path}/base" in caught.value.message


def test_it_is_said_when_the_driver_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for name in [name for name in sys.modules if name.startswith("snapshotd.catalog.postgres.")]:
        monkeypatch.delitem(sys.modules, name)
    from snapshotd.catalog.postgres.catalog import open_database as fresh

    with pytest.raises(Unsupported, match=r"pip install 'snapshotd\[fleet\]'"):
        fresh("postgresql:///x")


def test_the_daemon_and_the_commands_do_not_load_the_driver() -> None:
    program = "import sys, snapshotd.daemon.wiring, snapshotd.cli.commands.storage.catalog as _; print('psycopg' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_all_tables_have_their_references(postgres: PostgresServer, database: PostgresDatabase) -> None:
    """As many as `schema.py` names; those that may be open until the end of a transaction are so here, too."""
    found = postgres.ask(
        "SELECT condeferred FROM pg_constraint WHERE contype = 'f' AND connamespace = 'snapshotd'::regnamespace"
    )
    text = schema.tables()
    assert len(found) == text.count(" REFERENCES ")
    assert sum(bool(row[0]) for row in found) == text.count("DEFERRABLE INITIALLY DEFERRED")
    assert "?" not in text
