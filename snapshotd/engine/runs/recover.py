"""Recovery: the engine opens a state directory that another daemon left, cleanly or not.

    1 find the sandboxes whose agents still run and that the engine can go on with (attach.py); destroy every other
      container of this instance: its steps were tied to the daemon that died
    2 other trajectories that were running become interrupted (an agent was at work) or stopped; their head is their
      last snapshot
    3 after a power loss, or an end after which nobody could tell that all layers were written (layers/witness.py),
      declare snapshots that were only captured lost; drop all layers: stored snapshots come back from the repository
    4 remove trajectories that the daemon had not completed (half_made.py)
    5 remove everything that no catalog row refers to: layers, outputs in the spool, sockets

Nothing here needs a clean shutdown and everything may be interrupted and run again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path

from snapshotd.engine.context import Context
from snapshotd.engine.runs import half_made
from snapshotd.engine.runs.command_records import CommandRecords
from snapshotd.engine.sandbox.attach import Survivor, drop_kept, find_survivors
from snapshotd.engine.storage.needed import forget_cached_layers, referenced_layers
from snapshotd.errors import SandboxFailed, SnapshotdError
from snapshotd.kernel import files
from snapshotd.types import SnapshotState, TrajectoryStatus

_log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BOOT, _CLEAN = "boot_id", "clean_boot_id"
"""Catalog facts: the boot in which a daemon last started here, and the boot in which one last ended cleanly."""


def recover(context: Context) -> list[Survivor]:
    """See the module's text. Returns the sandboxes to go on with."""
    found = find_survivors(context) if context.store.proof.earlier and not context.store.proof.missing else []
    alive = {survivor.container.id for survivor in found}
    drop_kept(context, lambda container: container not in alive)
    for runtime in context.runtimes.values():
        if runtime.unavailable() is None:
            for container in set(runtime.list()) - alive:
                _log.warning("destroying container %s of an earlier daemon", container)
                try:
                    runtime.destroy(container)
                except SandboxFailed as exc:
                    _log.error(
                        "it is left for the next start: %s", exc.message
                    )  # one stuck process must not keep all the rest away
    _clear_run_dir(context, alive)
    running, records = {survivor.trajectory.id for survivor in found}, CommandRecords(context)
    for trajectory in context.catalog.trajectories.list(TrajectoryStatus.RUNNING):
        if trajectory.id in running:
            continue
        records.settle(trajectory.id)
        unfinished = trajectory.agent is not None and trajectory.exit_code is None
        context.catalog.trajectories.set_status(
            trajectory.id, TrajectoryStatus.INTERRUPTED if unfinished else TrajectoryStatus.STOPPED
        )
    _after_boot(context)
    _remove_half_made(context)
    sweep_spool(context)
    context.store.sweep(lambda: referenced_layers(context))
    context.store.proof.watch()
    return found


def _remove_half_made(context: Context) -> None:
    for trajectory in half_made.find_incomplete(context.catalog):
        _log.warning("trajectory %s is removed: the daemon died before it was complete", trajectory.id)
        context.catalog.trajectories.remove(trajectory.id)
        context.events.remove(trajectory.id)
        context.secrecy.forget(trajectory.id)
    half_made.forget_list(context.catalog)


def sweep_spool(context: Context) -> None:
    """Remove outputs that no captured snapshot refers to. Only while no step is being taken."""
    keep = context.catalog.snapshots.unstored_blobs()
    for blob in list(context.spool.blobs()):
        if blob not in keep:
            context.spool.remove(blob)


def _clear_run_dir(context: Context, spared: Collection[str]) -> None:
    directory = context.run_dir / "c"
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    with files.closing_fd(os.open(directory, files.DIR_FLAGS)) as fd:
        for name in set(os.listdir(fd)).difference(spared):
            files.remove_tree(fd, name)


def _after_boot(context: Context) -> None:
    """Captured survives the daemon, not the machine, unless the daemon had closed: then it had synced the layers
    (`mark_clean`). Layers that cannot be reached keep what they have for a later start."""
    if context.store.proof.missing:
        return
    catalog = context.catalog
    boot = _BOOT_ID.read_text().strip()
    before, clean = catalog.get_meta(_BOOT), catalog.get_meta(_CLEAN)
    if not context.store.proof.earlier or (before is not None and before != boot and clean != before):
        lost = catalog.snapshots.unstored()
        if lost:
            _log.error(
                "%d snapshots were captured but not stored when the machine went down or a write to the layers failed; "
                "they are lost: %s",
                len(lost),
                " ".join(lost),
            )
            catalog.snapshots.set_state(lost, SnapshotState.LOST)
        forget_cached_layers(context)
        removed = context.store.sweep(set)
        if removed:
            _log.warning("%d layers are not trusted; snapshots come back from the repository", len(removed))
        catalog.flush()
    catalog.set_meta(_BOOT, boot)
    catalog.set_meta(_CLEAN, "")
    catalog.checkpoint()  # `was_killed` must not depend on the log that it tells about


def was_killed(fact: Callable[[str], str | None]) -> bool:
    """True if the daemon before did not come to its end. `fact`: a named fact of the catalog."""
    return fact(_BOOT) is not None and fact(_CLEAN) == ""


def mark_clean(context: Context) -> None:
    """Sync the layers at the very end of a daemon, so that they survive power loss, too. If they cannot be synced, the next
    start does not trust them, and declares snapshots that were only captured lost."""
    proof = context.store.proof
    if proof.missing:
        return
    try:
        proof.settle()
    except OSError as exc:
        _log.error("the layers cannot be synced, so the next start does not trust them: %s", exc)
        return
    try:
        context.spool.flush()
        context.secrecy.vault.flush()
        context.catalog.set_meta(_CLEAN, context.catalog.get_meta(_BOOT) or "")
        context.catalog.flush()
    except (OSError, SnapshotdError) as exc:
        _log.error("outputs and catalog cannot be synced: %s", exc)
