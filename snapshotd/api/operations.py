"""The operations of the API: one row for each. The daemon registers its handlers by them, and both clients send what
they say; docs/openapi.json is made of them. A row stands beside its records."""

# ruff: noqa: F403 - all rows of a module, also one that it gets tomorrow

from __future__ import annotations

from typing import Any

from snapshotd.api.access import *
from snapshotd.api.approvals import *
from snapshotd.api.commands import *
from snapshotd.api.experiments import *
from snapshotd.api.files import *
from snapshotd.api.find import *
from snapshotd.api.fleet import *
from snapshotd.api.history import *
from snapshotd.api.operation import Operation
from snapshotd.api.service import *
from snapshotd.api.snapshots import *
from snapshotd.api.storage import *
from snapshotd.api.trajectories import *
from snapshotd.api.values import *

OPERATIONS: dict[str, Operation[Any]] = {
    name.lower(): row for name, row in list(globals().items()) if isinstance(row, Operation)
}
"""Name to row."""
for _name, _row in OPERATIONS.items():
    _row.name = _name
