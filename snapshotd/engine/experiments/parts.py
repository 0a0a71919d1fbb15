"""The services that comparisons, scores, bisections and experiments are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from snapshotd.at_once import fitting
from snapshotd.engine.base import Event, Variant
from snapshotd.engine.services.branching import BranchingService
from snapshotd.engine.services.journal import JournalService
from snapshotd.engine.services.runs import RunService
from snapshotd.engine.services.snapshots import SnapshotService
from snapshotd.errors import NO_ROOM, OutOfSpace
from snapshotd.kernel.memory import available_bytes
from snapshotd.types import Trajectory


@dataclass(frozen=True, slots=True)
class Services:
    """`watch`: as `Watch.follow`."""

    runs: RunService
    snapshots: SnapshotService
    branching: BranchingService
    journal: JournalService
    watch: Callable[[], Iterator[Event]]


@contextmanager
def full_disk_named() -> Iterator[None]:
    """An error of the kernel inside the block that says that the disk is full becomes OutOfSpace."""
    try:
        yield
    except OSError as exc:
        if exc.errno in NO_ROOM:
            raise OutOfSpace(f"the disk is full ({exc.strerror}); free some space and try again") from exc
        raise


def count_fitting(variants: Iterable[Variant], source: Trajectory) -> int:
    """How many forks of `source` fit into the free memory, each with the largest limit of these variants."""
    own = (dict(one.limits).get("memory_bytes") for one in variants)
    return fitting(
        max(one if isinstance(one, int) else source.spec.limits.memory_bytes for one in own), available_bytes()
    )
