"""Scores: a command run in a throw-away fork of each snapshot, with files of the scorer that only the fork has.

The command, the shell around it and `tar` are the snapshot's own, so an agent that had root there may have replaced
them. A score says what they print, and is no more trusted than that.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import posixpath
import re
import secrets
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from snapshotd.api.commands import CommandFields
from snapshotd.api.experiments import ScoreRequest
from snapshotd.at_once import at_once
from snapshotd.engine.caller import Caller, Stream
from snapshotd.engine.experiments.base import Attendance, Scorer, SnapshotScores
from snapshotd.engine.experiments.parts import Services, full_disk_named
from snapshotd.errors import Ambiguous, NotFound, SnapshotdError, UsageError
from snapshotd.junit import REPORT_MAX_BYTES, JUnitCounts, count_tests
from snapshotd.scores import REPORT_PATH, REPORT_VARIABLE, SCORER_PATH, ScoredRun, ranked
from snapshotd.types import NO_ISOLATION, CallStatus

_WINDOW_BYTES = 256 << 10
"""Bytes of the scorer's files that wait for a command to take them."""
_NUMBER = re.compile(rb"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_NUMBER_BYTES = 400
"""A longer line is no number: the expression takes the square of the length where digits end in something else."""
_TAIL_BYTES = 64 << 10
_SAID_CHARS = 300
_NOT_RUN = (126, 127)
"""Exit codes of a shell that cannot run a program, and that finds none."""
_IN_FORK = r"""
mark=$1 where=${2:+${SNAPSHOTD_ROOT-}$2} report=$3 most=$4; shift 4
case $report in /*) report=${SNAPSHOTD_ROOT-}$report ;; esac
fail() { echo "$mark $1" >&2; exit 125; }
if [ -n "$where" ]; then
  said=$( { rm -rf -- "$where" && mkdir -p -- "$where" && tar -xf - -C "$where"; } 2>&1 ) ||
    fail "the scorer's files cannot be put at $where: $said"
fi
below=${SNAPSHOTD_ROOT:+"; without isolation the paths of a sandbox begin at \$SNAPSHOTD_ROOT (sh -c '\$SNAPSHOTD_ROOT/...')"}
for word; do
  case $word in /*) [ -e "$word" ] || [ ! -e "${SNAPSHOTD_ROOT-}$word" ] || fail "there is no $word$below" ;; esac
done
command -v "$1" >/dev/null || fail "command not found: $1$below"
[ -n "$report" ] || exec "$@" </dev/null
rm -rf -- "$report"
"$@" </dev/null >&2
code=$?
[ -f "$report" ] || { echo "$mark there is no JUnit report at $report after the run (exit code $code)" >&2; exit $code; }
head -c "$most" < "$report"
exit $code
"""
"""Runs in the fork, which is below $SNAPSHOTD_ROOT if it is a plain folder; the command is told when it names a path as it is
in other sandboxes. A report that is there before the run goes,
since it tells of another one. With a report standard output is the report alone; a line that begins with the mark says
why there is no score."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Runs a scorer in throw-away forks, as long as the client that asked for it attends."""

    services: Services
    scorer: Scorer
    attendance: Attendance

    def run(self, snapshot: str) -> ScoredRun:
        """Run the scorer once. A SnapshotdError is not raised: the run carries it."""
        try:
            with full_disk_named():
                return self.attempt(snapshot)
        except SnapshotdError as exc:
            return ScoredRun(None, None, 0.0, error=exc.message)

    def attempt(self, snapshot: str) -> ScoredRun:
        """Run the scorer once. A run without a score says why; errors of the engine are raised."""
        scorer, mark = self.scorer, secrets.token_hex(16)
        where = "" if scorer.files is None else _normal(scorer.where or SCORER_PATH)
        report = scorer.report and _normal(scorer.report)
        argv = scorer.argv
        if where or report is not None or self._is_folder(snapshot):
            most = str(REPORT_MAX_BYTES + 1)
            argv = ("/bin/sh", "-c", _IN_FORK, "score", mark, where, report or "", most, *argv)
        env = {REPORT_VARIABLE: report or REPORT_PATH, **dict(scorer.env)}
        kept = {"stdout": _Tail(REPORT_MAX_BYTES + 1 if scorer.report is not None else _TAIL_BYTES), "stderr": _Tail()}

        def sink(stream: Stream, data: bytes) -> None:
            kept[stream].add(data)

        with self.attendance.caller(gives_input=scorer.files is not None) as caller:
            if scorer.files is not None:
                _feed(caller, scorer.files)
            done = self.services.runs.exec_snapshot(
                snapshot,
                CommandFields(argv, cwd=scorer.cwd, env=env, user=scorer.user, timeout_s=scorer.timeout_s),
                sink=sink,
                caller=caller,
            )
        seconds = done.call.duration_ns // 1000 / 1e6
        if done.call.status is CallStatus.TIMED_OUT:
            return ScoredRun(None, done.exit_code, seconds, error=f"the command did not end within {seconds:.0f} s")
        reason = kept["stderr"].after(mark.encode())
        if reason is not None:
            return ScoredRun(None, done.exit_code, seconds, error=reason)
        try:
            if done.exit_code in _NOT_RUN and not scorer.number and report is None:
                raise UsageError(
                    f"a program of the command {scorer.argv[0]!r} is missing or cannot be run (exit code {done.exit_code})"
                    f"{_last_of(kept['stderr'].lines)}"
                )
            score, tests = self._read(done.exit_code, kept["stdout"])
        except UsageError as exc:
            return ScoredRun(None, done.exit_code, seconds, error=exc.message)
        return ScoredRun(score, done.exit_code, seconds, tests)

    def _is_folder(self, snapshot: str) -> bool:
        """The fork has no isolation, so an absolute path is one of this machine."""
        line = self.services.snapshots.get(snapshot).trajectory
        return self.services.snapshots.trajectory(line).spec.runtime == NO_ISOLATION

    def _read(self, exit_code: int, output: _Tail) -> tuple[float, JUnitCounts | None]:
        if self.scorer.report is not None:
            tests = count_tests(output.data)
            if not tests.ran:
                raise UsageError(f"the JUnit report has no test that ran ({tests.skipped} skipped)")
            return tests.passed / tests.ran, tests
        if self.scorer.number:
            return last_number(output.lines, exit_code), None
        return float(exit_code == 0), None


def _normal(path: str) -> str:
    """A path without `..` above the root, where it is absolute: in a plain folder that would lead out of it."""
    return posixpath.normpath(path) if path.startswith("/") else path


def _feed(caller: Caller, data: bytes) -> None:
    """Send a command its input, a window at a time."""
    at = 0

    def more(count: int) -> None:
        nonlocal at
        if at < len(data):
            piece = data[at : at + count]
            at += len(piece)
            caller.send(piece)
            if at == len(data):
                caller.end_input()

    caller.on_taken(more)
    more(_WINDOW_BYTES)


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
        if len(line) <= _NUMBER_BYTES and _NUMBER.fullmatch(line) and math.isfinite(number := float(line)):
            return number
    raise UsageError(f"no line of the command's output is a number (exit code {exit_code}){_last_of(lines)}")


def _last_of(output: Sequence[bytes]) -> str:
    """The last line that says something, as the end of an error."""
    line = next((line.strip() for line in reversed(output) if line.strip()), b"")
    return f"; its last line is {line.decode(errors='replace')[:_SAID_CHARS]!r}" if line else ""


def check_scorer(scorer: Scorer) -> None:
    """Check that a scorer makes sense. UsageError."""
    if not scorer.argv:
        raise UsageError("there is no command to score with")
    if scorer.number and scorer.report is not None:
        raise UsageError("a score is a number in the output or counts of a JUnit report, not both; choose one")
    if scorer.files is None and scorer.where is not None:
        raise UsageError("the scorer's files have a place, and there are none; leave the place out, or bring files")
    if scorer.where is not None and (
        not scorer.where.startswith("/") or posixpath.normpath(scorer.where).strip("/") == ""
    ):
        raise UsageError(f"{scorer.where!r} is no place for the scorer's files; name an absolute path below /")
    digest_files(scorer.files)


def digest_files(files: bytes | None) -> bytes | None:
    """A digest of what a tar holds. UsageError: it is none."""
    if files is None:
        return None
    found = hashlib.sha256()
    try:
        with tarfile.open(fileobj=io.BytesIO(files), mode="r:") as tar:
            for item in tar:
                if item.size > len(files):  # a few bytes may stand for more than there is memory
                    raise UsageError(f"{item.name!r} in the scorer's files is sparse; make the tar of whole files")
                found.update(
                    repr((item.name, item.type, item.mode, item.linkname, item.size)).encode("utf-8", "replace")
                )
                content = tar.extractfile(item) if item.isfile() else None
                found.update(b"" if content is None else content.read())
    except (tarfile.TarError, OSError, ValueError) as exc:
        raise UsageError(f"the scorer's files are no tar: {exc}; make one with `tar -c`") from exc
    return found.digest()


def score(
    services: Services,
    request: ScoreRequest,
    scorer: Scorer,
    attendance: Attendance,
    on_run: Callable[[SnapshotScores, ScoredRun], object],
) -> tuple[SnapshotScores, ...]:
    """See `ExperimentService.score`."""
    check_scorer(scorer)
    rows = [row for ref in request.refs for row in _select_rows(services, ref, request.each)]
    runs: list[list[ScoredRun]] = [list(row.runs) for row in rows]
    for row in rows:
        for run in row.runs:
            on_run(row, run)
    scoring = Scoring(services, scorer, attendance)
    wanted = [(at, row.snapshot.id) for at, row in enumerate(rows) if row.snapshot is not None] * request.repeat
    many = request.parallel or len(os.sched_getaffinity(0))
    try:
        for (at, _), run in at_once(wanted, many, lambda one: scoring.run(one[1])):
            runs[at].append(run)
            on_run(rows[at], run)
    finally:
        attendance.leave()
    return ranked([replace(row, runs=tuple(found)) for row, found in zip(rows, runs, strict=True)])


def _select_rows(services: Services, ref: str, each: bool) -> list[SnapshotScores]:
    try:
        if each:
            return [SnapshotScores(one.id, one, ()) for one in services.snapshots.log(ref)]
        return [SnapshotScores(ref, services.snapshots.get(ref), ())]
    except (NotFound, Ambiguous, UsageError) as exc:
        return [SnapshotScores(ref, None, (ScoredRun(None, None, 0.0, error=exc.message),))]
