"""Bisection: the first snapshot at which a command fails, found with runs in throw-away forks.

Exit codes mean what they mean to `git bisect run`: 0 passes, 125 says that the snapshot cannot be tested, everything
else fails. A command that is not there fails, too: its program may be what a call removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from snapshotd.api.commands import CommandFields
from snapshotd.api.experiments import Bisection, BisectRequest, Outcome, Tried
from snapshotd.at_once import at_once
from snapshotd.engine import records
from snapshotd.engine.experiments.base import Attendance
from snapshotd.engine.experiments.parts import Services
from snapshotd.engine.history.lineage import lineage
from snapshotd.errors import CommandNotFound, CommandNotRunnable, UsageError
from snapshotd.scores import REPORT_PATH, REPORT_VARIABLE
from snapshotd.types import Snapshot, SnapshotID, SnapshotState

UNTESTABLE = 125
"""Exit code of a command that cannot tell."""
_NOT_THERE = 127


@dataclass(slots=True)
class _Search:
    """`line[low]` passes and `line[high]` fails."""

    services: Services
    request: BisectRequest
    attendance: Attendance
    on_tried: Callable[[Tried], object]
    line: list[Snapshot]
    untestable: set[int] = field(default_factory=set)
    missing: set[SnapshotID] = field(default_factory=set)
    """Snapshots that do not have the command's program."""
    flaky: bool = False

    def run(self) -> Bisection:
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
        for _ in range(self.request.repeat):
            again = self._test([low, high], rounds + 1)
            self.flaky |= again[low] != "good" or again[high] != "bad"
        last_good, *unknown, first_bad = map(records.snapshot, self.line[low : high + 1])
        return Bisection(first_bad, last_good, tuple(unknown), rounds, self.flaky)

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
                program = f", since its program {self.request.argv[0]!r} is not there" if one.id in self.missing else ""
                raise UsageError(
                    f"the command {does} at snapshot {one.id[:12]} ({one.call.name}){program}, where it should {should}: "
                    "name another good or bad snapshot, or another command"
                )
        return 0, last

    def _places(self, low: int, high: int) -> list[int]:
        """The places to test next. They divide the untested rest into equal parts."""
        left = [place for place in range(low + 1, high) if place not in self.untestable]
        parts = min(self.request.parallel, len(left)) + 1
        return sorted({left[len(left) * part // parts] for part in range(1, parts)}) if left else []

    def _test(self, places: Iterable[int], number: int) -> dict[int, Outcome]:
        wanted = list(places)
        done = dict(at_once(wanted, self.request.parallel, lambda place: self._try(self.line[place], number)))
        return {place: one.outcome for place, one in done.items()}

    def _try(self, snapshot: Snapshot, number: int) -> Tried:
        if snapshot.state in (SnapshotState.LOST, SnapshotState.PRUNED):
            tried = Tried(records.snapshot(snapshot), number, "untestable", UNTESTABLE)
        else:
            code = self._exit_code(snapshot)
            outcome: Outcome = "good" if code == 0 else "untestable" if code == UNTESTABLE else "bad"
            tried = Tried(records.snapshot(snapshot), number, outcome, code)
        self.on_tried(tried)
        return tried

    def _exit_code(self, snapshot: Snapshot) -> int:
        asked = self.request
        try:
            with self.attendance.caller() as caller:
                return self.services.runs.exec_snapshot(
                    snapshot.id,
                    CommandFields(
                        asked.argv, cwd=asked.cwd, env={REPORT_VARIABLE: REPORT_PATH, **asked.env}, user=asked.user
                    ),
                    sink=lambda _stream, _data: None,
                    caller=caller,
                ).exit_code
        except (CommandNotFound, CommandNotRunnable):
            self.missing.add(snapshot.id)
            return _NOT_THERE


def bisect(
    services: Services, request: BisectRequest, attendance: Attendance, on_tried: Callable[[Tried], object]
) -> Bisection:
    """See `ExperimentService.bisect`."""
    line = lineage(services.snapshots.get, request.ref if request.bad is None else request.bad)
    if request.good is not None:
        first = services.snapshots.get(request.good).id
        ids = [one.id for one in line]
        if first not in ids:
            raise UsageError(
                f"the good snapshot {first[:12]} is no ancestor of the bad one {line[-1].id[:12]}, so no call between them broke "
                f"anything: name a good one that `snapshotd log {line[-1].id[:12]}` lists, or one that it was forked from"
            )
        line = line[ids.index(first) :]
    try:
        return _Search(services, request, attendance, on_tried, line).run()
    finally:
        attendance.leave()
