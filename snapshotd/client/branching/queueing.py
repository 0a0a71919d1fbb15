"""A fork of more children than fit at once: each runs its program to the end before the next takes its place."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from snapshotd.api.wire import QUEUE_MAX
from snapshotd.at_once import at_once, fitting
from snapshotd.client.branching.variants import Variants, check_variants
from snapshotd.client.local.sizes import size_given
from snapshotd.client.results import TrajectoryInfo
from snapshotd.client.verbs.base import ForkPlace
from snapshotd.errors import SnapshotdError, UsageError
from snapshotd.terms import number_of

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd


@dataclass(frozen=True, slots=True)
class QueuedFork:
    """One child after its program has ended. `trajectory` is None where it did not start, and `error` says why."""

    index: int
    label: str
    trajectory: TrajectoryInfo | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """A fork that was made piece by piece. `children` in the order of their numbers."""

    experiment: str
    children: tuple[QueuedFork, ...]

    @property
    def failed(self) -> tuple[QueuedFork, ...]:
        """The children that did not start, or whose program did not run to its end."""
        return tuple(child for child in self.children if child.error is not None)


def memory_needed(source: TrajectoryInfo, variants: Variants | None) -> int:
    """The most memory, in bytes, that one of the children may take."""
    own = [size_given("memory", given.get("memory")) for given in (variants or {"": {}}).values()]
    return max(source.limits.memory_bytes if one is None else one for one in own)


@dataclass(slots=True)
class _Queue:
    client: Snapshotd
    snapshot: str
    experiment: str
    labels: list[str]
    options: Mapping[str, Any]
    variants: Variants | None
    keep_going: bool
    made: list[str] = field(default_factory=list)
    taken_back: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, index: int) -> QueuedFork:
        label = self.labels[index]
        made: TrajectoryInfo | None = None
        try:
            made = self._started(index, label)
            for _ in self.client.events(made.id):
                pass
            ended = self.client.trajectory(made.id)
        except SnapshotdError as exc:
            if not self.keep_going:
                raise
            return QueuedFork(index, label, made, exc.message)
        whole = ended.status in ("finished", "failed")
        return QueuedFork(index, label, ended, None if whole else f"its program did not end by itself: {ended.status}")

    def _started(self, index: int, label: str) -> TrajectoryInfo:
        one = None if self.variants is None else {label: self.variants[label]}
        part = ForkPlace(self.experiment, index, len(self.labels))
        (made,) = self.client.fork(self.snapshot, variants=one, part=part, **self.options).trajectories
        with self.lock:
            self.made.append(made.id)
            late = self.taken_back
        if late:
            self._remove(made.id)
        return made

    def take_back(self) -> None:
        """Remove what was started, newest first, and what another thread starts meanwhile."""
        with self.lock:
            self.taken_back, made = True, self.made[::-1]
        for identity in made:
            self._remove(identity)

    def _remove(self, identity: str) -> None:
        """One that cannot be removed stays in the list of trajectories."""
        with contextlib.suppress(SnapshotdError):
            self.client.remove(identity, force=True)


def fork_queue(
    client: Snapshotd,
    ref: str,
    n: int,
    *,
    parallel: int | None,
    keep_going: bool,
    variants: Variants | None,
    on_child: Callable[[QueuedFork], object],
    options: Mapping[str, Any],
) -> QueueInfo:
    """See `Snapshotd.fork_queue`."""
    if variants is not None:
        check_variants(variants, QUEUE_MAX)
        n = len(variants)
    if not 1 <= n <= QUEUE_MAX:
        raise UsageError(f"{number_of(n, 'fork')} cannot be made: a queue takes 1 to {QUEUE_MAX}; nothing was started")
    if parallel is not None and parallel < 1:
        raise UsageError("at least one fork runs at a time")
    has_args = options.get("args") is not None or all("args" in keys for keys in (variants or {"": {}}).values())
    if not (has_args or options.get("resume")):
        raise UsageError(
            "a queue needs programs that end, so that others can begin: give the forks a command, or let the program resume"
        )
    snapshot = client.snapshot(ref)
    source = client.trajectory(snapshot.trajectory)
    many = parallel or fitting(memory_needed(source, variants), client.status().get("free_memory_bytes") or 0)
    labels = list(variants) if variants is not None else [str(index) for index in range(n)]
    queue = _Queue(client, snapshot.id, uuid.uuid4().hex, labels, options, variants, keep_going)
    found: dict[int, QueuedFork] = {}
    try:
        for index, child in at_once(range(n), many, queue.run, thread="fork"):
            found[index] = child
            on_child(child)
    except SnapshotdError:
        if not keep_going:
            queue.take_back()
        raise
    return QueueInfo(queue.experiment, tuple(found[index] for index in range(n)))
