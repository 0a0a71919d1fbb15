"""The opening of a fleet's database, by its address."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from snapshotd.catalog.postgres.catalog import open_driver
from snapshotd.fleet.coordination import PostgresCoordination
from snapshotd.fleet.tables import FleetTables


@contextmanager
def open_coordination(url: str) -> Iterator[PostgresCoordination]:
    """The coordination of the fleet in the database at `url`. No table is made or brought up to date: a look does not change what
    the nodes use. Errors: as `catalog.postgres.catalog.open_driver`; NotFound: no daemon has joined a fleet there yet;
    VersionMismatch."""
    with closing(open_driver(url)) as database:
        tables = FleetTables(database)
        tables.check()
        yield PostgresCoordination(tables)
