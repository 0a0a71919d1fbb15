"""A sandbox that runc made, as the pattern for more of its kind, which the starter makes (starting/sandbox.py).

The pattern gives what only runc knows: its own record of a container, without which `runc exec` finds none; the compiled
system call filter; and the settings of the cgroups, with the allowed devices, which in version 2 are a program of the
kernel's. All else is in the OCI configuration.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.kernel.holding.cgroup import GroupSettings
from snapshotd.kernel.processes import stat_fields
from snapshotd.types import ContainerID

_OWN_FIELDS = ("init_process_pid", "init_process_start", "created", "namespace_paths")
"""Fields of runc's record that differ from sandbox to sandbox; the rest has nothing but the id of it."""
_CREATED = "%Y-%m-%dT%H:%M:%S.000000000Z"


@dataclass(frozen=True, slots=True)
class Pattern:
    """`record`: runc's, without the sandbox's own fields; `namespaces`: the names in it and in /proc; `filters`: as the
    starter tells and takes them."""

    id: ContainerID
    record: str
    namespaces: dict[str, str]
    filters: list[tuple[str, int]]
    settings: GroupSettings

    def order(self, config: dict[str, Any], owner: int) -> dict[str, Any]:
        """The starter's order for another sandbox of the kind, but for its cgroup."""
        linux = {name: config["linux"][name] for name in ("readonlyPaths", "maskedPaths")}
        return {"config": {**config, "linux": linux}, "owner": owner, "filters": self.filters}

    def record_of(self, container: ContainerID, pid: int) -> str:
        """Runc's record of another sandbox, whose init is `pid`. FileNotFoundError, ProcessLookupError: that has
        ended."""
        values = (
            pid,
            int(stat_fields(pid)[19]),
            time.strftime(_CREATED, time.gmtime()),
            {kind: f"/proc/{pid}/ns/{name}" for kind, name in self.namespaces.items()},
        )
        own = json.dumps(dict(zip(_OWN_FIELDS, values, strict=True)))
        return f"{own[:-1]}, {self.record.replace(self.id, container)[1:]}"


def learn(
    container: ContainerID, settings: GroupSettings | None, state: Path, filters: list[tuple[str, int]]
) -> Pattern | None:
    """Make a pattern of a sandbox that runc has started; None if it cannot be one. `settings`: of its cgroups, None if it may
    use every device; `state`: the file with runc's record of it; `filters`: as `Pattern` has them."""
    record = json.loads(state.read_text())
    if settings is None or not record.keys() > set(_OWN_FIELDS):
        return None
    own = {name: record.pop(name) for name in _OWN_FIELDS}
    namespaces = {kind: path.rpartition("/")[2] for kind, path in own["namespace_paths"].items()}
    return Pattern(container, json.dumps(record), namespaces, filters, settings)
