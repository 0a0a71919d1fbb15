"""`snapshotd score`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from snapshotd.cli.command import after_dashes, connect, declare, json_option, refuse
from snapshotd.cli.follow import note
from snapshotd.cli.text import print_json, printable, table
from snapshotd.cli.values import Count, Seconds, complete_snapshot, process_options
from snapshotd.client.branching.results import ScoreInfo
from snapshotd.junit import JUnitCounts
from snapshotd.scores import SCORER_PATH, ScoredRun
from snapshotd.terms import short

_EXAMPLES = [
    "snapshotd score try-1 try-2 try-3 -- pytest -q",
    "snapshotd score --with hidden:/workspace/hidden --junit r.xml a1b2c3 -- pytest --junit-xml r.xml hidden",
    "snapshotd score --each --number --json agent -- ./count-todos.sh",
    "snapshotd score --repeat 5 --parallel 2 left right -- make flaky-test",
]


@declare("score", examples=_EXAMPLES, splits=True)
@click.option("--each", is_flag=True, help="Every snapshot of the named trajectories, not their heads alone.")
@click.option(
    "--with",
    "files",
    metavar="DIR[:PATH]",
    help=f"Folder that only the fork gets, at PATH, in place of anything there.  [PATH: {SCORER_PATH}]",
)
@click.option("--number", is_flag=True, help="The score is the last line of standard output that is a number.")
@click.option(
    "--junit", metavar="PATH", help="The score is the share of passed tests in the report that the run leaves."
)
@click.option("--repeat", metavar="K", type=Count(1), default=1, help="Runs of each.  [default: 1]")
@click.option("--parallel", metavar="N", type=Count(1), help="Runs at once.  [default: number of processors]")
@click.option(
    "--timeout", metavar="SECONDS", type=Seconds(), help="A run that takes longer has no score (90, 1.5, 10m)."
)
@process_options
@json_option
@click.argument("refs", metavar="ID... -- CMD [ARGS]...", nargs=-1, shell_complete=complete_snapshot)
def command(
    ctx: click.Context, /, refs: tuple[str, ...], files: str | None, as_json: bool, env: Any, **options: Any
) -> int:
    """Run a command in a throw-away fork of each snapshot, and rank them.

    A trajectory stands for its head. The score is 1 for exit code 0, else 0; or a number that the command prints; or
    the share of tests that passed. With --with the command finds files that no agent has seen (needs sh and tar in the
    image). With --repeat: mean and standard error, and the estimated probability that one of 1 or K runs passes. The
    exit code is 1 when a run has no score; the others go on.

    With --json, highest first: [{"rank","ref","snapshot","score","standard_error","passes","pass_at","error",
    "runs":[{"score","exit_code","seconds","tests","error"}]}].
    """
    argv = after_dashes(ctx)
    if not refs or not argv:
        refuse("name snapshots or trajectories, and a command: `snapshotd score ID... -- CMD`")
    folder, place = _split_place(files)
    found = connect(ctx).score(refs, argv, with_files=folder, with_path=place, env=dict(env), on_run=_say, **options)
    if as_json:
        print_json([_json(row) for row in found])
    else:
        _show(found, tests=options["junit"] is not None, repeat=options["repeat"])
    return int(any(row.error is not None for row in found))


def _split_place(files: str | None) -> tuple[str | None, str | None]:
    folder, colon, place = (files or "").rpartition(":")
    return (folder, place) if colon and folder and place.startswith("/") else (files, None)


def _say(row: ScoreInfo, run: ScoredRun) -> None:
    said = f"no score: {run.error}" if run.score is None else f"{run.score:g}"
    code = "" if run.exit_code is None else f" (exit code {run.exit_code}, {run.seconds:.1f} s)"
    note(f"{_ref(row)}: {said}{code}")


def _json(row: ScoreInfo) -> dict[str, Any]:
    return {
        "ref": row.ref,
        "snapshot": None if row.snapshot is None else row.snapshot.id,
        **row.statistics(),
        "error": row.error,
        "runs": [dataclasses.asdict(run) for run in row.runs],
    }


def _show(found: tuple[ScoreInfo, ...], *, tests: bool, repeat: int) -> None:
    more = [f"PASS@{k}" for k in (1, repeat)] if repeat > 1 else []
    header = ["RANK", "REF", "SNAPSHOT", "SCORE", *more, *(["TESTS"] if tests else []), "EXIT", "TIME"]
    table(header, [_cells(row, tests, repeat) for row in found], right=(0,))


def _cells(row: ScoreInfo, tests: bool, repeat: int) -> list[str]:
    error = row.standard_error
    score = "-" if row.mean is None else f"{row.mean:.4g}" + ("" if error is None else f" ± {error:.2g}")
    codes = sorted({run.exit_code for run in row.runs if run.exit_code is not None})
    seconds = sum(run.seconds for run in row.runs) / len(row.runs)
    return [
        "-" if row.rank is None else str(row.rank),
        _ref(row),
        "-" if row.snapshot is None else short(row.snapshot.id),
        score,
        *([f"{row.pass_at(k):.2f}" if len(row.runs) == repeat else "-" for k in (1, repeat)] if repeat > 1 else []),
        *([_tests(row)] if tests else []),
        ",".join(map(str, codes)) or "-",
        f"{seconds:.1f} s",
    ]


def _tests(row: ScoreInfo) -> str:
    counts = sum((run.tests for run in row.runs if run.tests is not None), JUnitCounts())
    named = [f"{count} {name}" for name, count in dataclasses.asdict(counts).items() if count]
    return ", ".join(named) or "-"


def _ref(row: ScoreInfo) -> str:
    whole = row.snapshot is not None and row.ref in (row.snapshot.id, row.snapshot.trajectory)
    return short(row.ref) if whole else printable(row.ref)
