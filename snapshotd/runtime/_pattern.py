"""A sandbox that runc made, as the pattern for more of its kind, which the starter makes (starting/sandbox.py).

The pattern gives what only runc knows: its own record of a container, without which `runc exec` finds none; the compiled
system call filter; and the settings of the cgroups. All else is in the OCI configuration. Only for version 1 of cgroups:
in version 2 the allowed devices are a program of the kernel's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.kernel.processes import stat_fields
from snapshotd.runtime import _cgroups
from snapshotd.types import ContainerID

_SHARED_SETTINGS = ("cpuset.cpus", "cpuset.mems")
_SETTINGS = (
    *_SHARED_SETTINGS,
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
    "pids.max",
)
"""In the order in which they can be set."""
_DEVICES = "devices.list"
_OWN_FIELDS = ("init_process_pid", "init_process_start", "created", "namespace_paths")
"""Fields of runc's record that differ from sandbox to sandbox; the rest has nothing but the id of it."""
_CREATED = "%Y-%m-%dT%H:%M:%S.000000000Z"

Levels = list[list[tuple[str, list[tuple[str, str]]]]]
"""For each hierarchy the directory that all sandboxes share and the sandbox's own, each with what is written to its
files."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """`record`: runc's, without the sandbox's own fields; `namespaces`: the names in it and in /proc; `filters`: as the
    starter tells and takes them."""

    id: ContainerID
    record: str
    namespaces: dict[str, str]
    filters: list[tuple[str, int]]
    levels: Levels

    def order(self, container: ContainerID, config: dict[str, Any], owner: int) -> dict[str, Any]:
        """The starter's order for another sandbox of the kind."""
        linux = {name: config["linux"][name] for name in ("readonlyPaths", "maskedPaths")}
        return {
            "config": {**config, "linux": linux},
            "owner": owner,
            "filters": self.filters,
            "cgroups": [
                [(directory.replace(self.id, container), settings) for directory, settings in level]
                for level in self.levels
            ],
        }

    def record_of(self, container: ContainerID, pid: int) -> str:
        """Runc's record of another sandbox, whose init is `pid`. FileNotFoundError: that has ended."""
        values = (
            pid,
            int(stat_fields(pid)[19]),
            time.strftime(_CREATED, time.gmtime()),
            {kind: f"/proc/{pid}/ns/{name}" for kind, name in self.namespaces.items()},
        )
        own = json.dumps(dict(zip(_OWN_FIELDS, values, strict=True)))
        return f"{own[:-1]}, {self.record.replace(self.id, container)[1:]}"


def learn(container: ContainerID, cgroup: str, state: Path, filters: list[tuple[str, int]]) -> Pattern | None:
    """The pattern that a sandbox makes, or None: it cannot be one. `cgroup`: the path of its cgroups; `state`: runc's
    record of it."""
    places = [point / cgroup.lstrip("/") for point in _cgroups.hierarchies()]
    entered = [place for place in places if place.is_dir()]
    record = json.loads(state.read_text())
    if not any((place / _DEVICES).exists() for place in entered) or not record.keys() > set(_OWN_FIELDS):
        return None
    own = {name: record.pop(name) for name in _OWN_FIELDS}
    namespaces = {kind: path.rpartition("/")[2] for kind, path in own["namespace_paths"].items()}
    levels = [
        [
            (str(place.parent), _settings(place.parent, _SHARED_SETTINGS)),
            (str(place), [*_settings(place, _SETTINGS), *_devices(place)]),
        ]
        for place in entered
    ]
    return Pattern(container, json.dumps(record), namespaces, filters, levels)


def _settings(directory: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, (directory / name).read_text().strip()) for name in names if (directory / name).exists()]


def _devices(directory: Path) -> list[tuple[str, str]]:
    if not (directory / _DEVICES).exists():
        return []
    allowed = (directory / _DEVICES).read_text().splitlines()
    return [("devices.deny", "a"), *(("devices.allow", line) for line in allowed)]
