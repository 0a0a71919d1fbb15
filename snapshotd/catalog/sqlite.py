"""The catalog in one SQLite file: `file.py` has the file, `sql.py` all the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from snapshotd.catalog.file import open_database
from snapshotd.catalog.sql import SqlCatalog
from snapshotd.sqlite import Database


class SqliteCatalog(SqlCatalog):
    _db: Database

    def __init__(self, path: Path | Literal[":memory:"]) -> None:
        """Open the catalog at `path`, creating it (mode 0600) if there is none. ":memory:" is private to this object
        and gone with it. Errors: as `file.open_database`."""
        super().__init__(open_database(path))
