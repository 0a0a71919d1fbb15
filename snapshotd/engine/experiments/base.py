"""The words of comparisons, scores, bisections and experiments, and the services that they are made of.

A command in a throw-away fork changes nothing. It is no more trusted than the files of that fork: an agent that had root
there may have replaced any program.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from snapshotd.api.trajectories import SandboxFields
from snapshotd.engine.base import Variant
from snapshotd.engine.caller import Caller
from snapshotd.scores import UNLIMITED, ExperimentBranch, ScoredRun, Scores, Spending, why_ended
from snapshotd.types import Snapshot

Env = tuple[tuple[str, str], ...]

# -- commands in throw-away forks --------------------------------------------------------------------------------------


class Attendance:
    """The presence of the client for which commands run in throw-away forks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: set[Caller] = set()
        self._gone = False

    def leave(self) -> None:
        """The client is gone: commands that run for it end, and so does each that begins."""
        with self._lock:
            self._gone, callers = True, set(self._callers)
        for caller in callers:
            caller.leave()

    @property
    def gone(self) -> bool:
        return self._gone

    @contextmanager
    def caller(self, *, gives_input: bool = False) -> Iterator[Caller]:
        """The caller of one command."""
        caller = Caller(gives_input=gives_input)
        with self._lock:
            self._callers.add(caller)
            gone = self._gone
        if gone:
            caller.leave()
        try:
            yield caller
        finally:
            with self._lock:
                self._callers.discard(caller)


@dataclass(frozen=True, slots=True)
class Scorer:
    """A command, and how its score is read: as a number in its output, from the JUnit report that it leaves at `report`,
    else from the exit code (1 for 0, else 0). `files` is a tar that only the fork has, at `where`, in place of anything
    there; it needs `sh` and `tar` in the image."""

    argv: tuple[str, ...]
    number: bool = False
    report: str | None = None
    files: bytes | None = field(default=None, repr=False)
    where: str | None = None
    cwd: str | None = None
    env: Env = ()
    user: str | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class SnapshotScores(Scores):
    """The runs of one selected snapshot. `snapshot` is None where the ref names none."""

    ref: str
    snapshot: Snapshot | None
    runs: tuple[ScoredRun, ...]
    rank: int | None = None


# -- experiments -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExperimentRequest:
    """The description of an experiment: `variants` run from `source` (a snapshot, or a new sandbox), `repeat` times each, and are
    scored. `prices` are of a million tokens, in and out. `budget` is of each branch, `stop` of all together; `first_pass`,
    `best_of`: it ends when one branch passed, or so many are scored. Paths below one of `protected` may not change in a
    branch that passes. With `resume` the program goes on from the source, with `args` or the variants' own if given; else
    `args` start one, as in `BranchingService.fork`."""

    __pydantic_config__: ClassVar = {"ser_json_bytes": "base64", "val_json_bytes": "base64"}
    """pydantic reads this: bytes are base64 where a description is recorded."""
    name: str
    source: str | SandboxFields
    variants: tuple[Variant, ...]
    scorer: Scorer
    args: tuple[str, ...] | None = None
    resume: bool = False
    repeat: int = 1
    parallel: int | None = None
    protected: tuple[str, ...] = ()
    first_pass: bool = False
    best_of: int | None = None
    stop: Spending = UNLIMITED
    budget: Spending = UNLIMITED
    prices: tuple[float, float] = (0.0, 0.0)

    def branches(self) -> list[tuple[str, int]]:
        """Label and run of each branch, in the order in which they begin: each variant once, then each again."""
        return [(one.label, run) for run in range(self.repeat) for one in self.variants]

    def why_ended(self, branches: Sequence[ExperimentBranch], seconds: float) -> str | None:
        """The stop rule that holds with these branches, after so many seconds."""
        return why_ended(branches, seconds, first_pass=self.first_pass, best_of=self.best_of, stop=self.stop)
