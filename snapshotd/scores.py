"""Scores as the daemon makes them and clients read them: runs of a scorer, their statistics, and experiments. Standard
library only, as in `terms.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self, TypeVar

from snapshotd.errors import UsageError
from snapshotd.junit import JUnitCounts
from snapshotd.terms import number_of

SCORER_PATH = "/tmp/score"
"""Place of the scorer's files in a fork, unless another is named."""
REPORT_PATH = "/tmp/junit.xml"
"""Place of a command's report in a throw-away fork, unless another is named."""
REPORT_VARIABLE = "SNAPSHOTD_JUNIT"
"""Name of the variable that tells the place to each command which runs in such a fork as a check: of `exec --junit`,
`tag --if`, `score`, `bisect` and an experiment. So one command line serves all of them."""
SCORE_TIMEOUT_S = 600.0
"""Time that the score of an experiment's branch may take, unless another is named."""
STOPPED = "it was stopped"
"""Why an experiment has ended that a person has stopped."""
FINAL = ("scored", "failed")
"""States of a branch that has ended for good."""


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """One run. `score` is None where there is none, and `error` says why. `seconds`: the command's own time."""

    score: float | None
    exit_code: int | None
    seconds: float
    tests: JUnitCounts | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        """The command ended well, and none of the reported tests failed."""
        failed = self.tests is not None and self.tests.failed + self.tests.errors > 0
        return self.error is None and self.exit_code == 0 and not failed

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScoredRun:
        tests = data["tests"]
        return cls(**{**data, "tests": None if tests is None else JUnitCounts(**tests)})


class Scores:
    """The statistics of some runs. A subclass is a dataclass that has them, and a rank: it begins at 1, for the highest
    mean; equal means share a rank, and one without a score has none."""

    __slots__ = ()
    runs: tuple[ScoredRun, ...]
    rank: int | None

    @property
    def error(self) -> str | None:
        """The first reason why a run has no score."""
        return next((run.error for run in self.runs if run.error is not None), None)

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(run.score for run in self.runs if run.score is not None)

    @property
    def mean(self) -> float | None:
        found = self.scores
        return math.fsum(one / len(found) for one in found) if found else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for fewer than two runs."""
        found, mean = self.scores, self.mean
        if mean is None or len(found) < 2:
            return None
        return math.sqrt(math.fsum((one - mean) * (one - mean) for one in found) / (len(found) - 1) / len(found))

    @property
    def passed(self) -> int:
        return sum(run.passed for run in self.runs)

    def pass_at(self, k: int) -> float:
        """Probability that at least one of `k` runs, drawn from these, passes (the unbiased estimate of Chen et al.,
        "Evaluating Large Language Models Trained on Code", 2021)."""
        if not 1 <= k <= len(self.runs):
            raise UsageError(f"pass@{k} needs 1 to {len(self.runs)} runs, as many as there were")
        return 1 - math.comb(len(self.runs) - self.passed, k) / math.comb(len(self.runs), k)

    def statistics(self) -> dict[str, Any]:
        """The statistics as JSON; `pass_at` for one run and for all."""
        return {
            "rank": self.rank,
            "score": self.mean,
            "standard_error": self.standard_error,
            "passes": self.passed,
            "pass_at": {str(k): self.pass_at(k) for k in sorted({1, len(self.runs)}) if self.runs},
        }


Ranked = TypeVar("Ranked", bound=Scores)


def ranked(rows: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Highest mean first; rows of the same mean stay in their order."""
    ranks: dict[float, int] = {}
    for place, mean in enumerate(sorted((row.mean for row in rows if row.mean is not None), reverse=True), 1):
        ranks.setdefault(mean, place)
    placed = [row if row.mean is None else replace(row, rank=ranks[row.mean]) for row in rows]  # type: ignore[type-var]
    return tuple(sorted(placed, key=lambda row: row.rank or len(rows) + 1))


@dataclass(frozen=True, slots=True)
class ExperimentBranch:
    """One run of a variant. `state` is waiting, running, scored, failed (`error` says why it has no score), stopped (the
    experiment ended while it ran) or skipped (it ended before). `passed`: the score's command passed, and no protected
    path changed. Files and lines are those that differ from the source in the workspace, `outside` the files elsewhere,
    `protected` the changed paths below protected ones."""

    label: str
    run: int
    state: str = "waiting"
    trajectory: str | None = None
    error: str | None = None
    score: float | None = None
    passed: bool = False
    exit_code: int | None = None
    seconds: float = 0.0
    calls: int = 0
    tokens: tuple[int, int] = (0, 0)
    cost: float = 0.0
    files: int = 0
    lines: int = 0
    outside: int = 0
    protected: tuple[str, ...] = ()

    WORDS: ClassVar = {"state": "status", "calls": "call_count", "files": "file_count", "lines": "line_count"}
    """The fields that mean something else elsewhere in our JSON."""

    @property
    def called(self) -> str:
        """Its name in the experiment."""
        return f"{self.label}.{self.run}"

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        known = {field.name: data[cls.WORDS.get(field.name, field.name)] for field in fields(cls)}
        return cls(**{**known, "tokens": tuple(known["tokens"]), "protected": tuple(known["protected"])})

    def json(self) -> dict[str, Any]:
        return {self.WORDS.get(field.name, field.name): getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class VariantScores(Scores):
    ref: str
    runs: tuple[ScoredRun, ...]
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """The runs of one variant that have ended, and their mean score. `rank` begins at 1; None without a score."""

    label: str
    branches: tuple[ExperimentBranch, ...]
    scores: VariantScores

    @property
    def rank(self) -> int | None:
        return self.scores.rank


@dataclass(frozen=True, slots=True)
class ExperimentInfo:
    """An experiment as it is now. `ended` says why no other branch begins; None while some may."""

    name: str
    snapshot: str
    began_at: str
    ended: str | None
    branches: tuple[ExperimentBranch, ...]

    @property
    def variants(self) -> tuple[VariantInfo, ...]:
        """The best mean first; among those of the same mean the one with the best branch first, as `best` says it."""
        found: dict[str, list[ExperimentBranch]] = {}
        for one in self.branches:
            found.setdefault(one.label, []).append(one)
        labels = sorted(found, key=lambda label: min(map(_merit, filter(_may_be_best, found[label])), default=_LEAST))
        rows = [
            VariantScores(label, tuple(_run(one) for one in found[label] if one.state in FINAL)) for label in labels
        ]
        return tuple(VariantInfo(row.ref, tuple(found[row.ref]), row) for row in ranked(rows))

    def of(self, label: str, states: tuple[str, ...] | None = None) -> tuple[ExperimentBranch, ...]:
        """The branches of a variant, or those of them in these states."""
        return tuple(one for one in self.branches if one.label == label and (states is None or one.state in states))

    @property
    def best(self) -> ExperimentBranch | None:
        """The branch to promote: one that passed, then the highest score, the fewest calls, the shortest time."""
        return min(filter(_may_be_best, self.branches), key=_merit, default=None)

    def best_of(self, label: str) -> ExperimentBranch | None:
        """The variant's branch to look at: the one to promote, else the first that has begun."""
        begun = [one for one in self.of(label) if one.trajectory is not None]
        return min(begun, key=_merit, default=None)

    @property
    def settled(self) -> bool:
        """True if nothing goes on in it any more."""
        return self.ended is not None and not any(one.state == "running" for one in self.branches)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        branches = tuple(map(ExperimentBranch.from_json, data["branches"]))
        return cls(data["name"], data["snapshot"], data["started_at"], data["ended_because"], branches)

    def json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "snapshot": self.snapshot,
            "started_at": self.began_at,
            "ended_because": self.ended,
            "best": None if self.best is None else self.best.called,
            "variants": [{"label": one.label, **one.scores.statistics()} for one in self.variants],
            "branches": [one.json() for one in self.branches],
        }


@dataclass(frozen=True, slots=True)
class Spending:
    """Most that may be used; None: no limit. `cost` is in the unit of the prices."""

    seconds: float | None = None
    calls: int | None = None
    tokens: float | None = None
    cost: float | None = None

    @property
    def limited(self) -> bool:
        return any(one is not None for one in (self.seconds, self.calls, self.tokens, self.cost))

    def find_exceeded(self, seconds: float, calls: int, tokens: int, cost: float) -> str | None:
        """The first limit that the use is above, in words; None: it is within all."""
        for limit, used, unit in (
            (self.seconds, seconds, "seconds"),
            (self.calls, calls, "calls"),
            (self.tokens, tokens, "tokens"),
            (self.cost, cost, "of cost"),
        ):
            if limit is not None and used > limit:
                return f"{limit:g} {unit}"
        return None


UNLIMITED = Spending()


def why_ended(
    branches: Sequence[ExperimentBranch], seconds: float, *, first_pass: bool, best_of: int | None, stop: Spending
) -> str | None:
    """The stop rule of an experiment that holds with these branches, after so many seconds; None: none does."""
    if first_pass and (passed := next((one for one in branches if one.passed), None)) is not None:
        return f"{passed.called} passed"
    if best_of is not None and sum(one.state == "scored" for one in branches) >= best_of:
        return f"{number_of(best_of, 'branch')} scored"
    calls, tokens = sum(one.calls for one in branches), sum(sum(one.tokens) for one in branches)
    limit = stop.find_exceeded(seconds, calls, tokens, sum(one.cost for one in branches))
    return None if limit is None else f"more than {limit} were used"


def _run(branch: ExperimentBranch) -> ScoredRun:
    """A branch as one run of its variant: the exit code says if it passed."""
    return ScoredRun(branch.score, int(not branch.passed), branch.seconds, error=branch.error)


def _may_be_best(branch: ExperimentBranch) -> bool:
    return branch.state == "scored" and not branch.protected


def _merit(branch: ExperimentBranch) -> tuple[bool, float, int, float]:
    """The least is the best."""
    return not branch.passed, -(branch.score or 0.0), branch.calls, branch.seconds


_LEAST = (True, math.inf, 0, 0.0)
"""Merit of a variant without a branch that has one."""
