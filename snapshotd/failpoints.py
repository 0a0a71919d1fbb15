"""Named places where a test can make the process die, to prove that any crash there loses nothing.

`hit("engine.step.sealed")` is free unless armed. Arm with the environment variable `SNAPSHOTD_FAILPOINT=name` (die at
the first hit) or `name:3` (die at the third). Dying is `os._exit(99)`: no handler, no flush, like SIGKILL; one line on
standard error (the daemon's log, for its child processes too) says that it was reached.
Every name is listed in `NAMES`, so that the crash tests can walk all of them and a new one cannot be forgotten.
"""

from __future__ import annotations

import os

EXIT_CODE = 99

NAMES: tuple[str, ...] = (
    "engine.step.begin",
    "engine.step.sealed",
    "engine.step.outputs_saved",
    "engine.step.committed",
    "engine.output.moved",
    "engine.output.shown",
    "engine.request.done",
    "engine.command.begun",
    "engine.command.started",
    "engine.command.committed",
    "engine.service.ready",
    "engine.service.declared",
    "engine.journal.sent",
    "engine.journal.begun",
    "engine.journal.ended",
    "engine.resume.settled",
    "engine.reuse.moved",
    "engine.values.changed",
    "engine.start.container_created",
    "engine.start.pivoted",
    "engine.find.read",
    "engine.find.added",
    "engine.fork.recorded",
    "engine.fork.changed",
    "engine.edit.forked",
    "engine.experiment.forked",
    "engine.experiment.scored",
    "engine.remove.recorded",
    "engine.remove.published",
    "engine.prune.told",
    "engine.archive.tree",
    "engine.archive.record",
    "engine.archive.flushed",
    "engine.archive.stored",
    "engine.publish.segment",
    "engine.publish.written",
    "engine.publish.committed",
    "engine.takeover.merged",
    "engine.takeover.added",
    "engine.prune.recorded",
    "engine.rebuild.filled",
    "engine.rebuild.aside",
    "engine.cold.built",
    "layers.merge.built",
    "layers.evict.renamed",
    "layers.capture.copied",
    "catalog.postgres.commit",
    "catalog.migrate.filled",
    "repo.pack.written",
    "repo.pack.stored",
    "repo.index.committed",
    "repo.gc.relisted",
    "repo.gc.forgotten",
    "repo.gc.copied",
    "repo.gc.indexed",
    "repo.gc.deleted",
    "repo.fleet.segment_made",
    "repo.fleet.segment_put",
    "repo.fleet.segment_noted",
    "repo.fleet.merged",
    "repo.fleet.taken_back",
    "repo.fleet.tombstone_put",
    "repo.fleet.objects_forgotten",
    "repo.fleet.pack_deleted",
    "repo.fleet.pack_forgotten",
    "repo.repair.saved",
    "repo.repair.kept",
    "repo.repair.indexed",
    "repo.repair.aside",
    "repo.repair.moved",
    "engine.folders.begun",
    "engine.folders.captured",
    "engine.folders.put",
    "engine.folders.exchanged",
    "engine.folders.put_back",
    "engine.import.ingested",
    "engine.import.committed",
    "engine.approval.recorded",
    "engine.approval.decided",
    "engine.compensate.begun",
    "engine.compensate.ran",
    "client.apply.staged",
    "client.apply.step",
    "client.apply.placed",
    "client.apply.counts",
    "client.apply.undo",
    "client.apply.done",
    "langgraph.call.begun",
    "langgraph.call.made",
    "langgraph.put.bound",
    "langgraph.put.stored",
    "langgraph.writes.stored",
)

_armed, _, _count = os.environ.get("SNAPSHOTD_FAILPOINT", "").partition(":")
_left = int(_count or 1)


def hit(name: str) -> None:
    """Die here if a test armed `name`. AssertionError for a name that is not in `NAMES`."""
    global _left
    if not _armed:
        return
    assert name in NAMES, f"failpoint {name} is not registered in failpoints.NAMES"
    if name == _armed:
        _left -= 1
        if _left == 0:
            os.write(2, f"failpoint {name} reached by process {os.getpid()}\n".encode())
            os._exit(EXIT_CODE)
