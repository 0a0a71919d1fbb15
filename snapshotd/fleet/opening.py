"""The opening of a fleet's database, by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from snapshotd.catalog.postgres.catalog import open_database
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.tables import FleetTables


@contextmanager
def open_coordination(url: str) -> Iterator[PostgresCoordination]:
    """The coordination of the fleet in the database at `url`, whose tables are made where there are none. Errors: as
    `catalog.postgres.catalog.open_database`."""
    with closing(open_database(url)) as database:
        tables = FleetTables(database)
        tables.make()
        yield PostgresCoordination(tables)
