"""Finds the sandboxes that a killed daemon left and whose agents still run, and makes sure that this daemon can go on
with them.

Everything is checked from outside: the container's real root, and that no pivot is half done. A sandbox that the daemon
cannot go on with is ended like any leftover container; its trajectory is interrupted, and `resume` goes on.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotd.engine.context import Context
from snapshotd.engine.sandbox import live
from snapshotd.engine.sandbox.live import LiveRecord, Root
from snapshotd.engine.sandbox.sandbox import Sandbox
from snapshotd.errors import SnapshotdError
from snapshotd.kernel.holding.members import Members
from snapshotd.layers.pivot import Target, layout_of, settle
from snapshotd.runtime.base import Container, Process, Runtime
from snapshotd.types import CallID, ContainerID, Trajectory, TrajectoryID, TrajectoryStatus

_log = logging.getLogger(__name__)
_DIRECTORY = "live"
COMMANDS = "command"
"""Stands between container and command in a key of the keeper."""


@dataclass(frozen=True, slots=True)
class Survivor:
    """A sandbox of an earlier daemon. `facts`: as they were given to `Sandbox.outlive`. `process`: its agent, which may
    have ended; None: there is none. `commands`: those in the background, likewise."""

    trajectory: Trajectory
    runtime: Runtime
    container: Container
    target: Target
    cgroup: Members
    process: Process | None
    commands: dict[CallID, Process]
    root: Root
    record: LiveRecord
    facts: dict[str, Any]

    def give_up(self, context: Context) -> None:
        """End a sandbox that no daemon can go on with. SandboxFailed."""
        _log.warning("the run of %s is interrupted: its sandbox cannot be gone on with", self.trajectory.id)
        self.record.remove()
        self.runtime.destroy(self.container.id)
        self.target.close()
        _close(self.process, self.commands)
        drop_kept(context, lambda container: container == self.container.id)
        context.store.release(self.root.stack.layers)
        context.store.remove(self.root.upper)
        agent = self.process is not None
        context.catalog.trajectories.set_status(
            self.trajectory.id, TrajectoryStatus.INTERRUPTED if agent else TrajectoryStatus.STOPPED
        )


def drop_kept(context: Context, unwanted: Callable[[str], bool]) -> None:
    """Have the keeper let go of all that it holds of `unwanted` containers. A key begins with the container's id."""
    for key in sorted(context.keeper.keys()):
        if unwanted(key.partition(".")[0]):
            context.keeper.drop(key)


def record_of(context: Context, container: ContainerID) -> LiveRecord:
    """The live record of a container. It need not exist on disk."""
    return LiveRecord(context.run_dir / _DIRECTORY / container)


def outlive(context: Context, sandbox: Sandbox) -> None:
    """Make sure that the next daemon can go on with a sandbox. A sandbox with a program sees to that by itself."""
    with sandbox.lock:
        if sandbox.use.agent_running or sandbox.survival.is_kept:
            return
        if not sandbox.survival.has_record:
            record = record_of(context, sandbox.container.id)
            record.open()
            sandbox.survival.use(record)
        sandbox.outlive(
            {
                "trajectory": sandbox.trajectory.id,
                "started_at_ns": sandbox.started_at_ns,
                "idle_timeout_s": sandbox.use.idle_timeout_s,
            }
        )


def find_survivors(context: Context) -> list[Survivor]:
    """Every sandbox that this daemon can go on with. Its layers are pinned and held from now on. The records of the
    others are removed."""
    return list(_find_survivors(context))


def _find_survivors(context: Context) -> Iterator[Survivor]:
    directory = context.run_dir / _DIRECTORY
    for name in sorted(os.listdir(directory)) if directory.is_dir() else ():
        record = record_of(context, ContainerID(name))
        try:
            survivor = _find_survivor(context, record)
        except (SnapshotdError, OSError, KeyError, TypeError, ValueError) as exc:
            _log.warning("the sandbox %s of an earlier daemon is not gone on with: %s", name, exc)
            survivor = None
        if survivor is None:
            record.remove()
        else:
            yield survivor


def _find_survivor(context: Context, record: LiveRecord) -> Survivor | None:
    found = live.read(record.directory)
    if found is None:
        return None
    facts, roots = found
    trajectory = context.catalog.trajectories.get(TrajectoryID(facts["trajectory"]))
    runtime = context.runtimes[trajectory.spec.runtime]
    container = runtime.attach(ContainerID(record.directory.name))
    if container is None or trajectory.status is not TrajectoryStatus.RUNNING:
        return None
    process, commands = context.keeper.process(container.id), _find_commands(context, container.id)
    if process is None and not commands:
        return None
    try:
        return _settle(context, trajectory, runtime, container, process, commands, record, facts, roots)
    except BaseException:
        _close(process, commands)
        raise


def _find_commands(context: Context, container: ContainerID) -> dict[CallID, Process]:
    """The commands in the background of a container that the keeper has."""
    found = {}
    for key in sorted(context.keeper.keys()):
        name, kind, command = (*key.split("."), "", "")[:3]
        process = context.keeper.process(key) if (name, kind) == (container, COMMANDS) else None
        if process is not None:  # else it is a descriptor of one
            found[CallID(command)] = process
    return found


def _settle(
    context: Context,
    trajectory: Trajectory,
    runtime: Runtime,
    container: Container,
    process: Process | None,
    commands: dict[CallID, Process],
    record: LiveRecord,
    facts: dict[str, Any],
    roots: list[Root],
) -> Survivor:
    cgroup = context.members(runtime, container)
    cgroup.thaw()  # it may have been in the middle of a copy
    target = Target.of(container.pid, container.id_map)
    try:
        settle(target)
        present = layout_of(target).root_id
        root = next((root for root in roots if root.mount_id == present), None)
        if root is None:
            raise ValueError("it has another root than was noted")
        if root.lazy:
            raise ValueError("its files were still being fetched")
        kept = [*commands.values(), *([] if process is None else [process])]
        _end_cut_off_commands(cgroup, {container.pid, *(one.pid for one in kept)})
        if not context.store.revive(root.upper, root.stack):
            raise ValueError("a layer of its root is missing")
    except BaseException:
        target.close()
        raise
    return Survivor(trajectory, runtime, container, target, cgroup, process, commands, root, record, facts)


def _end_cut_off_commands(cgroup: Members, spared: set[int]) -> None:
    """Kill clients' commands: they were cut off with the daemon that ran them. Their background children live on, as
    always."""
    inside = set(cgroup.members())
    for pid in inside - spared:
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            if parent not in inside:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue  # it has ended


def _close(process: Process | None, commands: dict[CallID, Process]) -> None:
    for one in (process, *commands.values()):
        if one is not None:
            os.close(one.stdout_fd)
            os.close(one.stderr_fd)
