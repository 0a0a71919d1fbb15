"""The catalog in one SQLite file: `file.py` has the file, `base.py` all the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from snapshotd.catalog.base import Catalog
from snapshotd.catalog.file import open_database


class SqliteCatalog(Catalog):
    def __init__(self, path: Path | Literal[":memory:"]) -> None:
        """Open the catalog at `path`, creating it (mode 0600) if there is none. ":memory:" is private to this object
        and gone with it. Errors: as `file.open_database`."""
        super().__init__(open_database(path))
