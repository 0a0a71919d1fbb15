"""The fleet's tables, beside the catalog's in the same PostgreSQL database: one schema more, so that the catalog's stays as
it is. Columns ending in `_ns` are nanoseconds, by the server's clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapshotd.errors import NotFound, check_format

if TYPE_CHECKING:
    from snapshotd.catalog.database import Row
    from snapshotd.catalog.postgres.driver import PostgresDatabase

VERSION = 1
CLOCK = "(extract(epoch FROM clock_timestamp()) * 1000000000)::bigint"
"""The database's clock. Not `now()`, which stands still in a transaction that waits for a row."""

STATEMENTS = """
CREATE TABLE {schema}.format (version BIGINT NOT NULL);
INSERT INTO {schema}.format VALUES (1);
CREATE TABLE {schema}.nodes (
    node               TEXT PRIMARY KEY,
    host               TEXT NOT NULL,      -- the machine and its boot
    epoch              BIGINT NOT NULL,    -- the node's latest daemon
    renewals           BIGINT NOT NULL,
    until_ns           BIGINT NOT NULL,
    draining           BOOLEAN NOT NULL DEFAULT false,
    room               TEXT NOT NULL,      -- JSON: what the node said of itself when it renewed
    free_bytes         BIGINT NOT NULL,    -- memory, as of the last renewal
    starting           BIGINT NOT NULL,    -- sandboxes, as of the last renewal
    starting_most      BIGINT NOT NULL,
    reserved_bytes     BIGINT NOT NULL DEFAULT 0,
    reserved           BIGINT NOT NULL DEFAULT 0  -- sandboxes that are reserved and not begun
) WITH (fillfactor = 50);
CREATE INDEX nodes_by_lease ON {schema}.nodes (until_ns);
CREATE TABLE {schema}.owners (
    trajectory TEXT PRIMARY KEY,
    node       TEXT,                       -- NULL: handed over
    epoch      BIGINT NOT NULL,
    fence      BIGINT NOT NULL,
    head       TEXT,                       -- the last published snapshot
    side_of    TEXT
) WITH (fillfactor = 50);
CREATE INDEX owners_by_node ON {schema}.owners (node);
CREATE TABLE {schema}.published (
    snapshot   TEXT PRIMARY KEY,
    trajectory TEXT NOT NULL
);
CREATE TABLE {schema}.segments (
    node     TEXT PRIMARY KEY,
    number   BIGINT NOT NULL               -- its last index segment in the bucket
);
CREATE TABLE {schema}.intents (
    call       TEXT PRIMARY KEY,
    trajectory TEXT NOT NULL,
    fence      BIGINT NOT NULL,
    state      TEXT NOT NULL,              -- base.IntentState
    said       TEXT NOT NULL               -- JSON: the call
);
CREATE INDEX intents_by_trajectory ON {schema}.intents (trajectory) WHERE state <> 'bound';
CREATE TABLE {schema}.reservations (
    id       TEXT PRIMARY KEY,
    node     TEXT NOT NULL,
    bytes    BIGINT NOT NULL,
    count    BIGINT NOT NULL,
    until_ns BIGINT NOT NULL
);
CREATE INDEX reservations_by_node ON {schema}.reservations (node, until_ns);
CREATE TABLE {schema}.collector (          -- one row
    one      BIGINT PRIMARY KEY CHECK (one = 1),
    node     TEXT NOT NULL,
    epoch    BIGINT NOT NULL,
    fence    BIGINT NOT NULL,
    until_ns BIGINT NOT NULL
);
INSERT INTO {schema}.collector VALUES (1, '', 0, 0, 0);
CREATE TABLE {schema}.pins (
    snapshot TEXT NOT NULL,
    node     TEXT NOT NULL,
    since_ns BIGINT NOT NULL,
    until_ns BIGINT NOT NULL,
    PRIMARY KEY (snapshot, node)
);
"""


class FleetTables:
    """Statements on the fleet's tables: `{}` stands for their schema, and `clock` is SQL for the time in nanoseconds."""

    def __init__(self, database: PostgresDatabase, schema: str = "snapshotd_fleet", clock: str = CLOCK) -> None:
        self.database, self.schema, self.clock = database, schema, clock

    def make(self) -> None:
        """Make the tables where there are none. VersionMismatch."""
        with self.database.transaction():
            if not self.database.read("SELECT 1 FROM pg_namespace WHERE nspname = ?", (self.schema,)):
                self.database.run_script(f"CREATE SCHEMA {self.schema}")
                self.database.run_script(STATEMENTS.format(schema=self.schema))
            self.check()

    def check(self) -> None:
        """NotFound: there are no tables; VersionMismatch."""
        if not self.database.read("SELECT to_regclass(?)", (f"{self.schema}.format",))[0][0]:
            raise NotFound(
                f"{self.database.name} has no fleet: the first daemon with SNAPSHOTD_FLEET=postgresql://... of this database makes it"
            )
        (version,) = self.read("SELECT version FROM {}.format")[0]
        check_format(f"schema {self.schema} of {self.database.name}", version, VERSION)

    def now_ns(self) -> int:
        return int(self.read(f"SELECT {self.clock}")[0][0])

    def read(self, sql: str, *values: object) -> list[Row]:
        return self.database.read(sql.replace("{}", self.schema), values)  # type: ignore[arg-type]

    def write(self, sql: str, values: Sequence[object]) -> int:
        return self.database.write(sql.replace("{}", self.schema), values)  # type: ignore[arg-type]
