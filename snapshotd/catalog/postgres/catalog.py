"""The catalog in PostgreSQL: opened, made where there is none, and what it says to one that is too old or too new."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from snapshotd.catalog import schema
from snapshotd.catalog.base import Catalog
from snapshotd.errors import DataLoss, Unsupported, check_format

if TYPE_CHECKING:
    from snapshotd.catalog.postgres.driver import PostgresDatabase

_OLDEST = 7
"""The first version that was in PostgreSQL."""


class PostgresCatalog(Catalog):
    def __init__(self, url: str, *, schema_name: str = "snapshotd") -> None:
        """Open the catalog in the schema `schema_name` of the database at `url`, creating it if there is none. Errors: as
        `open_database`."""
        self.database = open_database(url, schema_name)
        """For transactions that have more in them than one method's rows (`PostgresDatabase.transaction(nests=True)`)."""
        super().__init__(self.database)


def open_database(url: str, schema_name: str = "snapshotd") -> PostgresDatabase:
    """Open the catalog's database. Missing tables are made, and those of an earlier version brought to the present one.
    Errors: as `PostgresDatabase`; Unsupported (psycopg is missing), VersionMismatch (a newer version made the tables)."""
    driver, tables = _modules()
    with closing(driver(url, schema_name)) as database, database.transaction():
        if not database.read("SELECT 1 FROM pg_namespace WHERE nspname = ?", (schema_name,)):
            database.run_script(f'CREATE SCHEMA "{schema_name}"')
        if not database.read("SELECT 1 FROM pg_tables WHERE schemaname = ? LIMIT 1", (schema_name,)):
            database.run_script(tables(0))
        version = _read_version(database)
        if version < schema.VERSION:
            database.run_script(tables(version))
        database.write("DELETE FROM sessions WHERE used_at < now() - interval '1 day'")
    return driver(url, schema_name)  # its connections know of the tables


def open_driver(url: str) -> PostgresDatabase:
    """The database as it is, whatever tables it has. Errors: as `PostgresDatabase`; Unsupported."""
    return _modules()[0](url)


def _read_version(database: PostgresDatabase) -> int:
    """DataLoss: no catalog is there; VersionMismatch."""
    if not database.read("SELECT 1 FROM pg_tables WHERE schemaname = ? AND tablename = 'format'", (database.schema,)):
        raise DataLoss(
            f"{database.name} has tables of another program in schema {database.schema}: use another database"
        )
    found = database.read_one("SELECT version FROM format")
    version = int(found[0]) if found else 0
    check_format(database.name, version, schema.VERSION, _OLDEST)
    return version


def settle(database: PostgresDatabase) -> None:
    """After many rows came with their numbers: number new ones behind them, and count what the planner goes by. Inside a
    transaction of the caller."""
    numbered = database.read(
        "SELECT table_name FROM information_schema.columns WHERE table_schema = ? AND is_identity = 'YES' AND column_name = 'pk'",
        (database.schema,),
    )
    for (table,) in numbered:
        database.read(
            f"SELECT setval(pg_get_serial_sequence('\"{database.schema}\".{table}', 'pk'), max(pk)) FROM {table} HAVING max(pk) > 0"
        )
        database.run_script(f"ANALYZE {table}")


def _modules() -> tuple[type[PostgresDatabase], Callable[[int], str]]:
    """The driver and the tables; here and not at the top because few need the extra. Unsupported."""
    try:
        from snapshotd.catalog.postgres.driver import PostgresDatabase
        from snapshotd.catalog.postgres.schema import statements
    except ImportError as exc:
        raise Unsupported(
            f"a catalog in PostgreSQL needs the package psycopg, which cannot be loaded ({exc}): "
            "pip install 'snapshotd[fleet]'"
        ) from exc
    return PostgresDatabase, statements
