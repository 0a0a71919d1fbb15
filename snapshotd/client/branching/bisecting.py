"""Bisection: the first snapshot at which a command fails, found with runs in throw-away forks.

Exit codes mean what they mean to `git bisect run`: 0 passes, 125 says that the snapshot cannot be tested, everything
else fails. A command that is not there fails, too: its program may be what a call removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from snapshotd.client.branching.lineage import lineage
from snapshotd.client.branching.scoring import at_once
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import CommandNotFound, CommandNotRunnable, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

Outcome = Literal["good", "bad", "untestable"]
UNTESTABLE = 125
"""Exit code of a command that cannot tell."""
_NOT_THERE = 127


@dataclass(frozen=True, slots=True)
class Tried:
    """One run: where, which round (0: both ends, the last: the border again), how it ended."""

    snapshot: SnapshotInfo
    round: int
    outcome: Outcome
    exit_code: int


@dataclass(frozen=True, slots=True)
class BisectInfo:
    """`first_bad` is the snapshot whose call broke it, `last_good` the one before which passed. `unknown` lie between
    them and could not be tested: the call of each may have broken it as well. `rounds` counts those of the search.
    `flaky`: the same snapshot passed in one run and failed in another, or a later one passed again."""

    first_bad: SnapshotInfo
    last_good: SnapshotInfo
    unknown: tuple[SnapshotInfo, ...]
    tried: tuple[Tried, ...]
    rounds: int
    flaky: bool

    def counts(self, snapshot: SnapshotInfo) -> tuple[int, int]:
        """How many runs at a snapshot passed, and how many there were."""
        runs = [one for one in self.tried if one.snapshot.id == snapshot.id]
        return sum(one.outcome == "good" for one in runs), len(runs)


@dataclass(slots=True)
class _Bisection:
    """`line[low]` passes and `line[high]` fails."""

    client: Snapshotd
    argv: Sequence[str]
    options: Mapping[str, object]
    parallel: int
    on_tried: Callable[[Tried], object]
    line: list[SnapshotInfo]
    tried: list[Tried] = field(default_factory=list)
    untestable: set[int] = field(default_factory=set)
    flaky: bool = False

    def run(self, repeat: int) -> BisectInfo:
        low, high = self._ends()
        rounds = 0
        while places := self._places(low, high):
            rounds += 1
            found = self._test(places, rounds)
            self.untestable |= {place for place, outcome in found.items() if outcome == "untestable"}
            bad = [place for place, outcome in found.items() if outcome == "bad"]
            high = min(bad, default=high)
            low = max((place for place, outcome in found.items() if outcome == "good" and place < high), default=low)
            self.flaky |= any(outcome == "good" and place > high for place, outcome in found.items())
        for _ in range(repeat):
            again = self._test([low, high], rounds + 1)
            self.flaky |= again[low] != "good" or again[high] != "bad"
        unknown = tuple(self.line[low + 1 : high])
        return BisectInfo(self.line[high], self.line[low], unknown, tuple(self.tried), rounds, self.flaky)

    def _ends(self) -> tuple[int, int]:
        last = len(self.line) - 1
        first, at_end = self.line[0], self.line[last]
        if last == 0:
            raise UsageError(f"the good and the bad snapshot are the same ({first.id[:12]}); name two that differ")
        found = self._test([0, last], 0)
        for place, wanted, one in ((0, "good", first), (last, "bad", at_end)):
            if found[place] != wanted:
                does = {"good": "passes", "bad": "fails", "untestable": "cannot tell (exit code 125)"}[found[place]]
                should = {"good": "pass", "bad": "fail"}[wanted]
                raise UsageError(
                    f"the command {does} at snapshot {one.id[:12]} ({one.tool.name}), where it should {should}: "
                    "name another good or bad snapshot, or another command"
                )
        return 0, last

    def _places(self, low: int, high: int) -> list[int]:
        """Places to test next; they divide what is left into equal parts."""
        left = [place for place in range(low + 1, high) if place not in self.untestable]
        parts = min(self.parallel, len(left)) + 1
        return sorted({left[len(left) * part // parts] for part in range(1, parts)}) if left else []

    def _test(self, places: Iterable[int], number: int) -> dict[int, Outcome]:
        wanted = list(places)
        done = dict(at_once(wanted, self.parallel, lambda place: self._try(self.line[place], number)))
        self.tried += [done[place] for place in wanted]
        return {place: one.outcome for place, one in done.items()}

    def _try(self, snapshot: SnapshotInfo, number: int) -> Tried:
        if snapshot.state in ("lost", "pruned"):
            tried = Tried(snapshot, number, "untestable", UNTESTABLE)
        else:
            try:
                code = self.client.exec_snapshot(snapshot.id, self.argv, **self.options).exit_code  # type: ignore[arg-type]
            except (CommandNotFound, CommandNotRunnable):
                code = _NOT_THERE
            outcome: Outcome = "good" if code == 0 else "untestable" if code == UNTESTABLE else "bad"
            tried = Tried(snapshot, number, outcome, code)
        self.on_tried(tried)
        return tried


def bisect(
    client: Snapshotd,
    ref: str,
    argv: Sequence[str],
    *,
    good: str | None,
    bad: str | None,
    parallel: int,
    repeat: int,
    on_tried: Callable[[Tried], object],
    options: Mapping[str, object],
) -> BisectInfo:
    """See `Snapshotd.bisect`."""
    if not argv:
        raise UsageError("there is no command to try; give one that fails where it is broken")
    if parallel < 1 or repeat < 0:
        raise UsageError("at least one run at a time, and no fewer than 0 repetitions")
    line = lineage(client, ref if bad is None else bad)
    if good is not None:
        first = client.snapshot(good).id
        ids = [one.id for one in line]
        if first not in ids:
            raise UsageError(f"the good snapshot {first[:12]} is no ancestor of the bad one {line[-1].id[:12]}")
        line = line[ids.index(first) :]
    return _Bisection(client, argv, options, parallel, on_tried, line).run(repeat)
