"""The catalog's database in a PostgreSQL server, over psycopg 3.

**One writer.** What a transaction of the catalog checks and then writes spans tables (a name is no tag of another, the
head is the expected one), and `pk` is the order in which commits become visible: a reader that goes on behind the largest
it saw must not miss a row whose transaction took a smaller number and ended later. Constraints and snapshot isolation
give neither. So a transaction begins with an advisory lock, which is its own until it ends, and reads at READ COMMITTED what
the one before has written. Nothing fails to serialise, so nothing is to be repeated. A `transaction(alone=False)` takes no
lock: for single guarded updates, which must not wait for a long commit (the renewal of a lease).

**The outcome of a commit is known.** A transaction writes its number into a row of its connection (`sessions`). When the
connection breaks while COMMIT is on its way, that row is read over another one. Only if it cannot be read is the error's
message "not known". The server's own numbers of transactions will not do: after a crash it gives them again.

**Connections** are kept, at most `_KEPT` of them. A thread has one for the time of a statement, of `transaction` and of
`lock`. One that broke since its last use is found out by its first statement, which then runs again over a new one; so a
server that was restarted is no error.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import psycopg
from psycopg import RawCursor, RawServerCursor
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus

from snapshotd import failpoints
from snapshotd.catalog.database import Row, Value
from snapshotd.catalog.postgres.failures import meaning
from snapshotd.catalog.postgres.values import adapt
from snapshotd.errors import InternalError, SnapshotdError, Unavailable, UsageError
from snapshotd.kernel import turns

_KEPT, _MOST = 8, 24
"""Most idle connections that are kept; most that are open, so that a server's 100 are enough for several machines. A
thread waits for one."""
_WAIT_S = 10
"""Longest wait for the lock of the one writer, as with SQLite."""
_DEFAULTS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "snapshotd",
}
"""A server that vanished is found out in some ten seconds. The user's address may say otherwise."""
_IDLE_S = 60
"""A transaction of a process that stands still ends after so long, so that it holds up no other writer for ever."""
_MARK = "INSERT INTO sessions VALUES ($1, $2, now()) ON CONFLICT (token) DO UPDATE SET number = $2, used_at = now()"
_FETCHED = 50
"""Rows that `read_page` asks for at once."""

_Result = TypeVar("_Result")


class _Session(psycopg.Connection[Row]):
    """A connection. `token`: its row in `sessions`; `number`: that of its last transaction."""

    token, number, has_tables = "", 0, False
    answer_s: float | None = None
    """Longest time for one statement; None: any."""

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **told: Any) -> Any:
        if self.answer_s is None:
            return super().wait(gen, *args, **told)
        return super().wait(self._drive_until(gen, time.monotonic() + self.answer_s), *args, **told)

    def _drive_until(self, gen: Generator[Any, Any, Any], deadline: float) -> Generator[Any, Any, Any]:
        """Give up a server that is there and says nothing: a kernel that acknowledges for a stopped process keeps the
        connection alive, so that no timeout of TCP ends it. psycopg goes on with `gen` some times a second, ready or not."""
        try:
            state = next(gen)
            while True:
                ready = yield state
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise psycopg.OperationalError(f"it said nothing for {self.answer_s:.0f} s")
                state = gen.send(ready)
        except StopIteration as ended:
            return ended.value


@dataclass(slots=True)
class _ThreadState:
    """A thread's connection. `depth`: how often the thread holds `lock`; `writes`: within `transaction`; `nests`, `alone`: as it
    was asked for."""

    connection: _Session | None = None
    depth: int = 0
    writes: bool = False
    nests: bool = False
    alone: bool = False


class PostgresDatabase:
    """See `catalog.database.CatalogDatabase`."""

    def __init__(self, url: str, schema: str = "snapshotd") -> None:
        """`url`: any address that libpq takes (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-CONNSTRING).
        `schema`: where the tables are; it need not exist. Errors: Unavailable, NotFound (no such database),
        NotPermitted, UsageError (no address)."""
        try:
            given = conninfo_to_dict(url)
        except psycopg.ProgrammingError as exc:
            raise UsageError(
                f"the address of a PostgreSQL database cannot be read ({exc}): use postgresql://host/name"
            ) from exc
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,62}", schema):
            raise UsageError(f"{schema!r} cannot be the name of a schema: use small letters, digits and '_'")
        self.schema = schema
        self.name = f"the catalog in PostgreSQL ({_without_password(given)})"
        self.lock = _Moment(self)
        self._address = make_conninfo(**{**_DEFAULTS, **given})
        self._take_turn = f"SELECT pg_advisory_xact_lock({zlib.crc32(f'snapshotd {schema}'.encode())})"
        """The advisory lock of this schema's writers, held until the end of the transaction."""
        self._guard = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST)
        self._idle: list[_Session] = []
        self._closed = False
        self._answer_s: float | None = None
        self._threads = threading.local()
        self._give_back(self._connect())

    def close(self) -> None:
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        with self._guard:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def give_up_after(self, seconds: float) -> None:
        """Wait so long at most for a statement, a free connection, and a process that stands still in a transaction."""
        self._answer_s = seconds
        self._close_idle()

    # -- statements ----------------------------------------------------------------------------------------------------

    def read(self, sql: str, values: Sequence[Value] = ()) -> list[Row]:
        return self._run(lambda connection: _rows(connection.execute(_translate_sql(sql), values)))

    def read_one(self, sql: str, values: Sequence[Value] = ()) -> Row | None:
        rows = self.read(sql, values)
        return rows[0] if rows else None

    def read_page(self, sql: str, values: Sequence[Value], *, rows: int, size: int) -> list[Row]:
        turns.give_way()

        def fetch(connection: _Session) -> list[Row]:
            page: list[Row] = []
            left = size
            with connection.transaction(), RawServerCursor(connection, "page") as cursor:
                cursor.execute(_translate_sql(sql), values)
                while len(page) < rows and left > 0:
                    found = cursor.fetchmany(min(_FETCHED, rows - len(page)))
                    for row in found:
                        page.append(row)
                        left -= sum(len(value) for value in row if isinstance(value, str))
                        if left <= 0:
                            break
                    if not found:
                        break
            return page

        return self._run(fetch)

    def insert(self, sql: str, values: Sequence[Value]) -> int:
        return int(self.read(f"{sql} RETURNING pk", values)[0][0])

    def write(self, sql: str, values: Sequence[Value] = ()) -> int:
        return self._run(lambda connection: connection.execute(_translate_sql(sql), values).rowcount)

    def write_many(self, sql: str, values: Iterable[Sequence[Value]]) -> None:
        items = list(values)

        def run(connection: _Session) -> None:
            with connection.cursor() as cursor:
                cursor.executemany(_translate_sql(sql), items)

        if items:
            self._run(run)

    def run_script(self, sql: str) -> None:
        """Run statements without values, one after the other. Inside `transaction`."""
        self._run(lambda connection: connection.execute(sql, prepare=False))

    # -- transactions --------------------------------------------------------------------------------------------------

    @contextmanager
    def transaction(self, *, alone: bool = True, nests: bool = False) -> Iterator[None]:
        """As in `CatalogDatabase`. With `alone=False` others write at the same time: each statement sees what was
        committed before it, and an update of a row waits for another's. With `nests=True` transactions of this thread
        inside are parts of this one: what a method of the catalog writes there is committed with the rest, and is undone by
        itself when it raises."""
        held = self._own_state()
        if held.writes and held.nests:
            with self._part(held, alone):
                yield
            return
        if held.writes or held.connection is not None:
            raise InternalError(
                f"{self.name} cannot begin a transaction within another, or after a read under its lock"
            )
        self._retry(lambda connection: self._begin(connection, alone))
        held.writes, held.nests, held.alone = True, nests, alone
        try:
            yield
            failpoints.hit("catalog.postgres.commit")
            self._commit()
        finally:
            held.writes = False
            self._release()

    @contextmanager
    def _part(self, held: _ThreadState, alone: bool) -> Iterator[None]:
        """A transaction within another."""
        assert held.connection is not None
        try:
            if alone and not held.alone:
                held.connection.execute(self._take_turn)
                held.alone = True
            with held.connection.transaction():
                yield
        except psycopg.Error as exc:
            raise meaning(exc, self.name) from exc

    def _begin(self, connection: _Session, alone: bool) -> None:
        """Begin to write, with a number that tells afterwards whether it was committed."""
        if connection.has_tables and not connection.number:
            connection.execute(_MARK, (connection.token, 0))  # a row of its own, which `_was_committed` can wait for
        connection.number += 1
        connection.execute("BEGIN")
        if alone:  # a statement of its own, so that the next one sees what the last writer has committed
            connection.execute(self._take_turn)
        if connection.has_tables:
            connection.execute(_MARK, (connection.token, connection.number))

    def _commit(self) -> None:
        held = self._own_state()
        connection = held.connection
        assert connection is not None
        try:
            connection.execute("COMMIT")
        except psycopg.Error as exc:
            if not connection.broken and not connection.closed:
                raise meaning(exc, self.name) from exc
            held.writes = False
            self._release()
            if not self._was_committed(connection):
                raise meaning(exc, self.name) from exc

    def _was_committed(self, connection: _Session) -> bool:
        """True if the last transaction of a connection that broke was committed. Waits for the server's process that may
        be at it. Unavailable: this cannot be found out now."""

        def look(other: _Session) -> list[Row]:
            other.execute("BEGIN")
            other.execute(self._take_turn)
            return other.execute(
                "SELECT number FROM sessions WHERE token = $1 FOR UPDATE", (connection.token,)
            ).fetchall()

        try:
            if not connection.has_tables:
                raise Unavailable("its number is not recorded")
            found = self._retry(look)
            self._release()
        except SnapshotdError as exc:
            raise Unavailable(
                f"{self.name} went away during a commit, and it is not known whether that was made: look at what there is "
                "when the server runs, before you repeat it"
            ) from exc
        return found == [(connection.number,)]

    def flush(self) -> None:
        """Nothing to do: a commit is durable when it returns, unless the server's `synchronous_commit` says otherwise."""

    def checkpoint(self) -> None:
        """Nothing to do: the server does that."""

    def problems(self) -> list[str]:
        """Pages whose checksums did not match since the server counts, and tables that cannot be read."""
        found = []
        failed = self.read_one(
            "SELECT coalesce(checksum_failures, 0) FROM pg_stat_database WHERE datname = current_database()"
        )
        if failed is not None and failed[0]:
            found.append(f"the server found {failed[0]} pages that do not match their checksums: see its log")
        for (table,) in self.read("SELECT tablename FROM pg_tables WHERE schemaname = ? ORDER BY 1", (self.schema,)):
            try:
                self.read(f'SELECT sum(octet_length(t::text)) FROM "{table}" t')
            except (psycopg.Error, InternalError) as exc:
                found.append(f"table {table} cannot be read: {exc}")
        return found

    # -- connections ---------------------------------------------------------------------------------------------------

    def _run(self, work: Callable[[_Session], _Result]) -> _Result:
        """Do work over the thread's connection, or over one that it has for this alone."""
        held = self._own_state()
        if held.writes:
            assert held.connection is not None
            return self._run_on(work, held.connection)
        if held.depth:
            if held.connection is None:
                self._retry(lambda connection: connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
            assert held.connection is not None
            return self._run_on(work, held.connection)
        try:
            return self._retry(work)
        finally:
            self._release()

    def _retry(self, work: Callable[[_Session], _Result]) -> _Result:
        """Give the thread a connection and do work over it; again over another one, if the first broke since its last use."""
        held = self._own_state()
        while True:
            held.connection, used = self._take()
            try:
                return work(held.connection)
            except psycopg.Error as exc:
                gone = held.connection.broken or held.connection.closed
                self._release()
                if not (used and gone):
                    raise meaning(exc, self.name) from exc
            except BaseException:
                self._release()
                raise

    def _run_on(self, work: Callable[[_Session], _Result], connection: _Session) -> _Result:
        try:
            return work(connection)
        except psycopg.Error as exc:
            raise meaning(exc, self.name) from exc

    def _own_state(self) -> _ThreadState:
        held: _ThreadState | None = getattr(self._threads, "held", None)
        if held is None:
            held = self._threads.held = _ThreadState()
        return held

    def _take(self) -> tuple[_Session, bool]:
        """A connection, and whether it has been used before."""
        if not self._free.acquire(timeout=self._answer_s):
            raise Unavailable(
                f"{self.name} does not answer (all connections wait for it): try again when the server runs"
            )
        try:
            with self._guard:
                if self._closed:
                    raise InternalError(f"{self.name} was used after it was closed")
                idle = self._idle.pop() if self._idle else None
            return idle or self._connect(), idle is not None
        except BaseException:
            self._free.release()
            raise

    def _release(self) -> None:
        """Take the connection from the thread, and what is not committed back."""
        held = self._own_state()
        connection, held.connection = held.connection, None
        if connection is not None:
            with suppress(psycopg.Error):
                if connection.info.transaction_status not in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
                    connection.execute("ROLLBACK")
            self._give_back(connection)
            self._free.release()

    def _give_back(self, connection: _Session) -> None:
        with self._guard:
            usable = not connection.closed and connection.info.transaction_status is TransactionStatus.IDLE
            if usable and not self._closed and len(self._idle) < _KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> _Session:
        idle_ms = int((self._answer_s or _IDLE_S) * 1000)
        try:
            connection = _Session.connect(self._address, autocommit=True, cursor_factory=RawCursor)
            adapt(connection)
            connection.answer_s = self._answer_s
            connection.execute(
                f'SET search_path = "{self.schema}", pg_catalog; SET lock_timeout = {_WAIT_S * 1000}; SET jit = off;'
                f" SET idle_in_transaction_session_timeout = {idle_ms}; SET default_transaction_isolation = 'read committed'",
                prepare=False,
            )
            row = connection.execute("SELECT to_regclass('sessions') IS NOT NULL").fetchone()
            connection.token, connection.has_tables = secrets.token_hex(16), row is not None and bool(row[0])
        except psycopg.Error as exc:
            raise meaning(exc, self.name) from exc
        return connection


class _Moment:
    """The `lock` of a `PostgresDatabase`: within, a thread reads as of its first read there."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database

    def __enter__(self) -> None:
        self._database._own_state().depth += 1

    def __exit__(self, *_: object) -> None:
        held = self._database._own_state()
        held.depth -= 1
        if not held.depth and not held.writes:
            self._database._release()


def _rows(cursor: psycopg.Cursor[Row]) -> list[Row]:
    return cursor.fetchall() if cursor.description is not None else []


@lru_cache(maxsize=1000)
def _translate_sql(sql: str) -> str:
    """Translate a statement of the catalog for PostgreSQL: placeholders get numbers, hints for SQLite's planner go."""
    number = 0

    def number_next(found: re.Match[str]) -> str:
        nonlocal number
        number += 1
        return f"${found[1] or number}"

    return re.sub(r"\?(\d*)", number_next, re.sub(r" INDEXED BY \w+", "", sql))


def _without_password(address: dict[str, Any]) -> str:
    """The address as people see it, without the password."""
    place = f"{address.get('host') or 'localhost'}/{address.get('dbname') or address.get('user') or ''}"
    return place if "port" not in address else f"{place}, port {address['port']}"
