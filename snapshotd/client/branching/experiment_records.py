"""Experiments as the daemon keeps them: one value for each experiment, and one for each branch that has begun.

They lie in the key-value store under a tenant of their own, which no sandbox gets unless a person names it. A branch is a
trajectory called EXPERIMENT.VARIANT.RUN, so that one which was forked before its record was written is found again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from snapshotd.api.record import ApiRecord
from snapshotd.client.branching.experiment_file import Experiment, parse_experiment
from snapshotd.client.branching.scoring import ScoredRun, ScoreInfo, ranked
from snapshotd.errors import Conflict, NotFound
from snapshotd.terms import BRANCHES
from snapshotd.terms import EXPERIMENTS_TENANT as TENANT

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

_LIST = "list"
_PAGE = 500
BranchState = Literal["waiting", "running", "scored", "failed", "stopped", "skipped"]
FINAL = ("scored", "failed")


@dataclass(frozen=True, slots=True)
class ExperimentBranch(ApiRecord):
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


@dataclass(frozen=True, slots=True)
class VariantInfo:
    """The runs of one variant that have ended, and their mean score. `rank` begins at 1; None without a score."""

    label: str
    branches: tuple[ExperimentBranch, ...]
    scores: ScoreInfo
    rank: int | None


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
        """The best mean first; those of the same mean stay in their order."""
        labels = list(dict.fromkeys(one.label for one in self.branches))
        rows = [ScoreInfo(label, None, tuple(map(_run, self.of(label, FINAL)))) for label in labels]
        return tuple(VariantInfo(row.ref, self.of(row.ref), row, row.rank) for row in ranked(rows))

    def of(self, label: str, states: tuple[str, ...] | None = None) -> tuple[ExperimentBranch, ...]:
        """The branches of a variant, or those of them in these states."""
        return tuple(one for one in self.branches if one.label == label and (states is None or one.state in states))

    @property
    def best(self) -> ExperimentBranch | None:
        """The branch to promote: a passed one before others, then the highest score, the fewest calls, the shortest."""
        scored = [one for one in self.branches if one.state == "scored" and not one.protected]
        return min(scored, key=lambda one: (not one.passed, -(one.score or 0.0), one.calls, one.seconds), default=None)


def _run(branch: ExperimentBranch) -> ScoredRun:
    """A branch as one run of its variant: the exit code says if it passed."""
    return ScoredRun(branch.score, int(not branch.passed), branch.seconds, error=branch.error)


class Records:
    """The records of one experiment. NotFound: there is none of this name."""

    def __init__(self, client: Snapshotd, name: str) -> None:
        self._client, self.name, self._branches = client, name, f"{BRANCHES}/{name}"

    def begin(self, experiment: Experiment, snapshot: str, began_at: str) -> None:
        """Record a new one. Conflict: there is one of this name."""
        value = {
            "text": experiment.text,
            "digest": experiment.digest,
            "folder": experiment.folder,
            "snapshot": snapshot,
            "began_at": began_at,
            "ended": None,
        }
        try:
            self._client.put_value(_LIST, self.name, value, tenant=TENANT, expected_version=0)
        except Conflict as exc:
            raise Conflict(f"another command has just begun the experiment {self.name}: repeat this one") from exc

    def head(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._client.get_value(_LIST, self.name, tenant=TENANT).value
        except NotFound as exc:
            raise NotFound(
                f"there is no experiment {self.name[:100]!r}; `snapshotd experiment ls` lists those there are"
            ) from exc
        return found

    def experiment(self) -> Experiment:
        head = self.head()
        return parse_experiment(head["text"], self.name, head["folder"], self.name)

    def set_ended(self, why: str | None) -> None:
        self._client.put_value(_LIST, self.name, {**self.head(), "ended": why}, tenant=TENANT)

    def save(self, branch: ExperimentBranch) -> None:
        self._client.put_value(self._branches, _key(branch), dataclasses.asdict(branch), tenant=TENANT)

    def info(self) -> ExperimentInfo:
        head = self.head()
        experiment = parse_experiment(head["text"], self.name, head["folder"], self.name)
        known = {(one.label, one.run): one for one in self._saved()}
        rest = "waiting" if head["ended"] is None else "skipped"
        branches = (known.get(at) or ExperimentBranch(*at, state=rest) for at in experiment.branches())
        return ExperimentInfo(self.name, head["snapshot"], head["began_at"], head["ended"], tuple(branches))

    def _saved(self) -> Iterator[ExperimentBranch]:
        after = ""
        while page := self._client.search_values(self._branches, tenant=TENANT, limit=_PAGE, after=after):
            yield from (ExperimentBranch.of(item.value) for item in page)
            after = page[-1].key

    def forget(self) -> None:
        """Branches first, so that one that is cut off can be repeated."""
        for branch in list(self._saved()):
            self._client.delete_value(self._branches, _key(branch), tenant=TENANT)
        self._client.delete_value(_LIST, self.name, tenant=TENANT)


def names(client: Snapshotd) -> list[str]:
    """All experiments, in the order of their names."""
    found: list[str] = []
    while page := client.search_values(_LIST, tenant=TENANT, limit=_PAGE, after=found[-1] if found else ""):
        found += [item.key for item in page]
        if len(page) < _PAGE:
            break
    return found


def _key(branch: ExperimentBranch) -> str:
    return f"{branch.label}.{branch.run}"
