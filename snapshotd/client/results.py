"""The client's results, typed, frozen records: those of the API, and what the client itself finds out. Times are
ISO 8601 text in UTC, durations milliseconds; a path begins with a slash (`SandboxPath`)."""

from __future__ import annotations

from snapshotd.api.approvals import *  # noqa: F403
from snapshotd.api.commands import *  # noqa: F403
from snapshotd.api.files import *  # noqa: F403
from snapshotd.api.find import *  # noqa: F403
from snapshotd.api.history import *  # noqa: F403
from snapshotd.api.history import AppliedInfo, ConflictInfo
from snapshotd.api.record import record
from snapshotd.api.service import *  # noqa: F403
from snapshotd.api.snapshots import *  # noqa: F403
from snapshotd.api.storage import *  # noqa: F403
from snapshotd.api.trajectories import *  # noqa: F403
from snapshotd.api.values import *  # noqa: F403


@record(frozen=True)
class ExportInfo:
    """The result of an export. `warnings` names everything that its form cannot hold."""

    bytes: int
    warnings: tuple[str, ...]


@record(frozen=True)
class ApplyInfo:
    """The effect of an apply, or with `dry_run` the effect that it would have. With `conflicts`, nothing was written.

    `same` is how many changes the folder had already; `warnings` names what is never brought; `commit` is the id of the
    git commit, None when none was asked for or git saw no change.
    """

    snapshot: str
    base: str
    dry_run: bool
    changes: tuple[AppliedInfo, ...]
    conflicts: tuple[ConflictInfo, ...]
    same: int
    warnings: tuple[str, ...]
    commit: str | None
