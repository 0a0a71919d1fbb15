"""Scores: a command run in a throw-away fork of each snapshot, with files of the scorer that only the fork has.

The command, the shell around it and `tar` are the snapshot's own, so an agent that had root there may have replaced
them. A score says what they print, and is no more trusted than that.
"""

from __future__ import annotations

import math
import os
import posixpath
import queue
import re
import secrets
import statistics
import tarfile
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from snapshotd.client.branching.junit import REPORT_MAX_BYTES, JUnitCounts, count_tests
from snapshotd.client.results import SnapshotInfo
from snapshotd.errors import Ambiguous, NotFound, SnapshotdError, UsageError

if TYPE_CHECKING:
    from snapshotd.client.client import Snapshotd

T = TypeVar("T")
R = TypeVar("R")
SCORER_PATH = "/tmp/score"
"""Place of the scorer's folder in a fork, unless another is named."""
REPEAT_MAX = 10_000

_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_TAIL_BYTES = 64 << 10
_SAID_CHARS = 300
_IN_FORK = """
mark=$1 where=$2 report=$3 most=$4; shift 4
fail() { echo "$mark $1" >&2; exit 125; }
if [ -n "$where" ]; then
  said=$( { rm -rf -- "$where" && mkdir -p -- "$where" && tar -xf - -C "$where"; } 2>&1 ) ||
    fail "the scorer's files cannot be put at $where: $said"
fi
command -v "$1" >/dev/null || fail "command not found: $1"
[ -n "$report" ] || exec "$@" </dev/null
rm -rf -- "$report"
"$@" </dev/null >&2
code=$?
[ -f "$report" ] || { echo "$mark there is no JUnit report at $report after the run (exit code $code)" >&2; exit $code; }
head -c "$most" < "$report"
exit $code
"""
"""Runs in the fork. A report that is there before the run goes, since it tells of another one. With a report standard
output is the report alone; a line that begins with the mark says why there is no score."""


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


@dataclass(frozen=True, slots=True)
class ScoreInfo:
    """One selected snapshot. `rank` begins at 1, for the highest mean; equal means share a rank, and one without a
    score has none. `snapshot` is None where the ref names none."""

    ref: str
    snapshot: SnapshotInfo | None
    runs: tuple[ScoredRun, ...]
    rank: int | None = None

    @property
    def error(self) -> str | None:
        """The first reason why a run has no score."""
        return next((run.error for run in self.runs if run.error is not None), None)

    @property
    def scores(self) -> tuple[float, ...]:
        return tuple(run.score for run in self.runs if run.score is not None)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.scores) if self.scores else None

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; None for fewer than two runs."""
        count = len(self.scores)
        return statistics.stdev(self.scores) / math.sqrt(count) if count > 1 else None

    @property
    def passed(self) -> int:
        return sum(run.passed for run in self.runs)

    def pass_at(self, k: int) -> float:
        """Probability that at least one of `k` runs, drawn from these, passes (the unbiased estimate of Chen et al.,
        "Evaluating Large Language Models Trained on Code", 2021)."""
        if not 1 <= k <= len(self.runs):
            raise UsageError(f"pass@{k} needs 1 to {len(self.runs)} runs, as many as there were")
        return 1 - math.comb(len(self.runs) - self.passed, k) / math.comb(len(self.runs), k)


@dataclass(frozen=True, slots=True)
class Scorer:
    """A command, and how its score is read: as a number in its output, from a JUnit report, else from the exit code (1
    for 0, else 0)."""

    argv: Sequence[str]
    number: bool
    report: str | None
    where: str | None
    options: Mapping[str, object]

    def run(self, client: Snapshotd, snapshot: str, archive: Path | None) -> ScoredRun:
        """Never raises an error of ours; the run carries it."""
        try:
            return self.attempt(client, snapshot, archive)
        except SnapshotdError as exc:
            return ScoredRun(None, None, 0.0, error=exc.message)

    def attempt(self, client: Snapshotd, snapshot: str, archive: Path | None) -> ScoredRun:
        """The run carries that there is no score; errors of the daemon are raised."""
        mark = secrets.token_hex(16)
        argv = list(self.argv)
        if self.where is not None or self.report is not None:
            most = str(REPORT_MAX_BYTES + 1)
            argv = ["/bin/sh", "-c", _IN_FORK, "score", mark, self.where or "", self.report or "", most, *argv]
        kept = {"stdout": _Tail(REPORT_MAX_BYTES + 1 if self.report is not None else _TAIL_BYTES), "stderr": _Tail()}
        with open(archive or os.devnull, "rb", buffering=0) as stdin:
            done = client.exec_snapshot(
                snapshot,
                argv,
                on_output=lambda stream, data: kept[stream].add(data),
                stdin=None if archive is None else stdin,
                **self.options,  # type: ignore[arg-type]
            )
        seconds = done.call.duration_ms / 1000
        if done.call.status == "timed-out":
            return ScoredRun(None, done.exit_code, seconds, error=f"the command did not end within {seconds:.0f} s")
        reason = kept["stderr"].after(mark.encode())
        if reason is not None:
            return ScoredRun(None, done.exit_code, seconds, error=reason)
        try:
            score, tests = self._read(done.exit_code, kept["stdout"])
        except UsageError as exc:
            return ScoredRun(None, done.exit_code, seconds, error=exc.message)
        return ScoredRun(score, done.exit_code, seconds, tests)

    def _read(self, exit_code: int, output: _Tail) -> tuple[float, JUnitCounts | None]:
        if self.report is not None:
            tests = count_tests(output.data)
            if not tests.ran:
                raise UsageError(f"the JUnit report has no test that ran ({tests.skipped} skipped)")
            return tests.passed / tests.ran, tests
        if self.number:
            return last_number(output.lines, exit_code), None
        return float(exit_code == 0), None


class _Tail:
    """The last bytes of a stream, at least `most` of them where there are as many."""

    def __init__(self, most: int = _TAIL_BYTES) -> None:
        self._data, self._most, self._cut = bytearray(), most, False

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._most:
            del self._data[: -self._most]
            self._cut = True

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    @property
    def lines(self) -> list[bytes]:
        """Whole lines only."""
        return self.data.splitlines()[1 if self._cut else 0 :]

    def after(self, mark: bytes) -> str | None:
        """The rest of the output behind the mark, on one line."""
        _, found, rest = self.data.rpartition(mark)
        return " ".join(rest.decode(errors="replace").split()) if found else None


def last_number(output: Sequence[bytes], exit_code: int) -> float:
    """The last line that is a finite number and nothing else. UsageError."""
    lines = [line.strip() for line in output if line.strip()]
    for line in reversed(lines):
        if _NUMBER.fullmatch(line) and math.isfinite(number := float(line)):
            return number
    last = f"; its last line is {lines[-1].decode(errors='replace')[:_SAID_CHARS]!r}" if lines else ""
    raise UsageError(f"no line of the command's output is a number (exit code {exit_code}){last}")


@contextmanager
def archived(folder: str | Path | None) -> Iterator[Path | None]:
    """The folder's content as a temporary tar, owned by root in it. UsageError: it cannot be read."""
    if folder is None:
        yield None
        return
    if not Path(folder).is_dir():
        raise UsageError(f"the scorer's folder {folder} is no folder; name one that holds its files")
    with tempfile.NamedTemporaryFile(prefix="snapshotd-score-", suffix=".tar") as file:
        try:
            with tarfile.open(fileobj=file, mode="w") as tar:
                tar.add(folder, arcname=".", filter=_owned_by_root)
        except OSError as exc:
            raise UsageError(f"the scorer's folder {folder} cannot be read: {exc.strerror}: {exc.filename}") from exc
        file.flush()
        yield Path(file.name)


def _owned_by_root(item: tarfile.TarInfo) -> tarfile.TarInfo:
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    return item


def at_once(items: Sequence[T], most: int, work: Callable[[T], R]) -> Iterator[tuple[T, R]]:
    """Results as they come, `most` at once. The threads are daemons: when the caller is interrupted and ends, so does
    their work, which a pool of threads would wait for."""
    left, done = deque(items), queue.SimpleQueue[tuple[T, R | BaseException]]()

    def take() -> None:
        while True:
            try:
                item = left.popleft()
            except IndexError:
                return
            try:
                done.put((item, work(item)))
            except BaseException as exc:  # noqa: BLE001 - raised again by whoever takes the results
                left.clear()
                done.put((item, exc))

    for _ in range(min(most, len(items))):
        threading.Thread(target=take, name="fork", daemon=True).start()
    try:
        for _ in items:
            item, result = done.get()
            if isinstance(result, BaseException):
                raise result
            yield item, result
    finally:
        left.clear()


def score(
    client: Snapshotd,
    refs: Sequence[str],
    scorer: Scorer,
    *,
    each: bool,
    folder: str | Path | None,
    repeat: int,
    parallel: int | None,
    on_run: Callable[[ScoreInfo, ScoredRun], object],
) -> tuple[ScoreInfo, ...]:
    """See `Snapshotd.score`."""
    if not refs:
        raise UsageError("there is nothing to score; name a snapshot or a trajectory")
    if not scorer.argv:
        raise UsageError("there is no command to score with")
    if scorer.number and scorer.report is not None:
        raise UsageError("a score is a number in the output or counts of a JUnit report, not both; choose one")
    if not 1 <= repeat <= REPEAT_MAX or (parallel is not None and parallel < 1):
        raise UsageError(f"1 to {REPEAT_MAX} runs of each, and at least one at a time")
    if scorer.where is not None and (
        not scorer.where.startswith("/") or posixpath.normpath(scorer.where).strip("/") == ""
    ):
        raise UsageError(f"{scorer.where!r} is no place for the scorer's folder; name an absolute path below /")
    rows = [row for ref in refs for row in _selected(client, ref, each)]
    runs: list[list[ScoredRun]] = [list(row.runs) for row in rows]
    for row in rows:
        for run in row.runs:
            on_run(row, run)
    with archived(folder) as archive:
        wanted = [(at, row.snapshot.id) for at, row in enumerate(rows) if row.snapshot is not None] * repeat
        many = parallel or len(os.sched_getaffinity(0))
        for (at, _), run in at_once(wanted, many, lambda one: scorer.run(client, one[1], archive)):
            runs[at].append(run)
            on_run(rows[at], run)
    return ranked([replace(row, runs=tuple(found)) for row, found in zip(rows, runs, strict=True)])


def _selected(client: Snapshotd, ref: str, each: bool) -> list[ScoreInfo]:
    try:
        if each:
            return [ScoreInfo(one.id, one, ()) for one in client.log(ref)]
        return [ScoreInfo(ref, client.snapshot(ref), ())]
    except (NotFound, Ambiguous, UsageError) as exc:
        return [ScoreInfo(ref, None, (ScoredRun(None, None, 0.0, error=exc.message),))]


def ranked(rows: Sequence[ScoreInfo]) -> tuple[ScoreInfo, ...]:
    """Highest mean first; rows of the same mean stay in their order."""
    means = sorted((row.mean for row in rows if row.mean is not None), reverse=True)
    placed = [row if row.mean is None else replace(row, rank=1 + means.index(row.mean)) for row in rows]
    return tuple(sorted(placed, key=lambda row: row.rank or len(rows) + 1))
