"""`snapshotd experiment run|ls|status|compare|promote|stop|rm`."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapshotd.cli.command import connect, declare, declare_group, json_option
from snapshotd.cli.commands.inspection.compare import show_comparison
from snapshotd.cli.follow import note
from snapshotd.cli.snapshots import report_snapshot
from snapshotd.cli.text import ago, print_answer, print_json, printable, table
from snapshotd.cli.values import complete_experiment
from snapshotd.cli.waiting import Wait, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.errors import UsageError
from snapshotd.scores import FINAL, ExperimentBranch, ExperimentInfo, VariantInfo
from snapshotd.terms import short

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_MEANS = ("TIME", "CALLS", "TOKENS", "COST", "FILES", "LINES", "OUTSIDE")
"""Columns of `_mean_cells`, before the last."""


@declare_group("experiment")
def command() -> None:
    """Run variants from one state, score them, and keep the best.

    A TOML file describes the experiment: where its branches begin, their variants, the command that scores them, budgets
    and stop rules. Branches are trajectories called EXPERIMENT.VARIANT.RUN. docs/branching.md has all keys.
    """


@declare(
    "run",
    group=command,
    examples=[
        "snapshotd experiment run parser.toml",
        "snapshotd experiment run --detach parser.toml",
        "snapshotd experiment run --fleet https://one:7676 --fleet https://two:7676 parser.toml",
    ],
)
@click.option(
    "--fleet",
    metavar="URL",
    multiple=True,
    help="Share the branches among nodes: a node's https:// address, once for each; or the fleet's postgresql:// address; or ray.",
)
@click.option(
    "-d", "--detach", is_flag=True, help="Print its name and leave; `snapshotd experiment status --follow` follows it."
)
@json_option
@click.argument("file", metavar="FILE.toml", type=click.Path(dir_okay=False, path_type=Path))
def run(ctx: click.Context, file: Path, fleet: tuple[str, ...], detach: bool, as_json: bool) -> int:
    """Run an experiment until it ends.

    The daemon drives it; this command shows a table that moves, on standard error. Ctrl-C stops the experiment, as it
    stops a run. When this command goes away in another way, or with --detach, it runs on, also after a restart of the
    daemon. The same command follows it again, and goes on with one that was stopped. The exit code is 1 if no branch
    passed. With --json: as `status --json`; with --detach as well, as it has begun.

    With --fleet several daemons drive it (docs/fleet.md), and it is stopped when this command goes away. Run 2 of the
    variant `cold` is then the trajectory EXPERIMENT.cold.2.0 on its node.
    """
    if fleet:
        if detach:
            raise UsageError("an experiment of a fleet needs this command for its stop rules: leave out --detach")
        return _run_shared(fleet, file, as_json)
    client = connect(ctx)
    info = client.create_experiment(file)
    if detach:
        print_answer(info.json(), info.name, as_json=as_json)
        return 0
    try:
        with _Progress(quiet=as_json) as progress:
            info = client.follow_experiment(info.name, on_change=progress.show)
    except KeyboardInterrupt:
        note(f"stopping it; `snapshotd experiment run {file}` goes on with it")
        client.stop_experiment(info.name)
        raise
    _report(client, info, as_json, branches=False)
    return int(not any(one.passed for one in info.branches))


def _run_shared(fleet: tuple[str, ...], file: Path, as_json: bool) -> int:
    from snapshotd.client.fleet.fleet import Fleet

    with Fleet.open(fleet[0] if len(fleet) == 1 else fleet) as nodes, _Progress(quiet=as_json) as progress:
        info = nodes.run_experiment(file, on_change=progress.show)
    if as_json:
        print_json(info.json())
    else:
        _report_rows(info, branches=False)
        if info.best is not None:
            click.echo(f"best: {_branch_name(info.best)}, trajectory {short(info.best.trajectory or '')} on its node")
    return int(not any(one.passed for one in info.branches))


@declare("ls", group=command, examples=["snapshotd experiment ls"])
@json_option
def ls(ctx: click.Context, as_json: bool) -> None:
    """List experiments.

    With --json: an array, each as `status --json`.
    """
    found = connect(ctx).experiments()
    if as_json:
        print_json([info.json() for info in found])
        return
    rows = [
        (
            printable(info.name),
            f"{sum(one.state in FINAL for one in info.branches)}/{len(info.branches)}",
            str(sum(one.passed for one in info.branches)),
            "-" if info.best is None else _branch_name(info.best),
            ago(info.began_at),
            printable(info.ended or "-"),
        )
        for info in found
    ]
    table(("NAME", "BRANCHES", "PASSED", "BEST", "BEGAN", "ENDED"), rows)


@declare(
    "status",
    group=command,
    examples=["snapshotd experiment status parser", "snapshotd experiment status --follow parser"],
)
@click.option("--branches", is_flag=True, help="A line for each branch in place of each variant.")
@click.option("-f", "--follow", is_flag=True, help="Show it until it has ended. Ctrl-C leaves; it runs on.")
@json_option
@click.argument("name", shell_complete=complete_experiment)
def status(ctx: click.Context, name: str, branches: bool, follow: bool, as_json: bool) -> None:
    """Show how an experiment stands.

    Time, calls and the numbers behind them are means of the runs that have ended; with --branches they are those of each
    run, and `experiment compare` shows the best run of each variant. With --json: {"name","snapshot","started_at",
    "ended_because","best","variants":[...],"branches":[...]}.
    """
    client = connect(ctx)
    if not follow:
        info = client.experiment(name)
    else:
        with _Progress(quiet=as_json) as progress:
            info = client.follow_experiment(name, on_change=progress.show)
    _report(client, info, as_json, branches=branches)


@declare("compare", group=command, examples=["snapshotd experiment compare parser"])
@json_option
@click.argument("name", shell_complete=complete_experiment)
def compare(ctx: click.Context, name: str, as_json: bool) -> None:
    """Compare the best branch of each variant, call by call.

    As `snapshotd compare`, with the best of all first. With --json: as `compare --json`.
    """
    show_comparison(connect(ctx).compare_experiment(name), as_json=as_json)


@declare(
    "promote",
    group=command,
    examples=["snapshotd experiment promote parser", "snapshotd experiment promote parser cold.2"],
)
@click.option("-y", "--yes", is_flag=True, help="Leave behind what the trajectory did since the experiment began.")
@wait_option
@json_option
@click.argument("name", shell_complete=complete_experiment)
@click.argument("branch", required=False, metavar="[VARIANT.RUN]")
def promote(ctx: click.Context, name: str, branch: str | None, yes: bool, wait: Wait | None, as_json: bool) -> None:
    """Promote the best branch to the trajectory that all began from.

    As `snapshotd promote`. The best branch has passed, and among those has the highest score, then the fewest calls. With
    --json: the new snapshot as `log --json` has it.
    """
    client = connect(ctx)
    taken = client.promote_experiment(name, branch, leave_behind=yes, wait=wait or "captured")
    report_snapshot(client, taken, wait, as_json=as_json)


@declare("stop", group=command, examples=["snapshotd experiment stop parser"])
@json_option
@click.argument("name", shell_complete=complete_experiment)
def stop(ctx: click.Context, name: str, as_json: bool) -> None:
    """Stop the branches that run, and begin no other.

    `snapshotd experiment run` goes on with it. With --json: as `status --json`.
    """
    client = connect(ctx)
    _report(client, client.stop_experiment(name), as_json, branches=False)


@declare("rm", group=command, examples=["snapshotd experiment rm parser", "snapshotd experiment rm --force parser"])
@click.option("-f", "--force", is_flag=True, help="Stop branches that run first.")
@json_option
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_experiment)
def rm(ctx: click.Context, names: tuple[str, ...], force: bool, as_json: bool) -> None:
    """Forget experiments with their branches.

    With --json: {"removed":[...]}.
    """
    client = connect(ctx)
    for name in names:
        client.remove_experiment(name, force=force)
        if not as_json:
            click.echo(name)
    if as_json:
        print_json({"removed": list(names)})


class _Progress:
    """The table of variants on a terminal, one line for each branch that has ended elsewhere."""

    def __init__(self, *, quiet: bool) -> None:
        self._live: Live | None = None
        self._said: set[str] = set()
        if not quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True, highlight=False), transient=True, refresh_per_second=4)

    def __enter__(self) -> _Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, info: ExperimentInfo) -> None:
        if self._live is not None:
            self._live.update(_draw(info))
            return
        for one in info.branches:
            if one.state in (*FINAL, "stopped") and one.called not in self._said:
                self._said.add(one.called)
                note(f"{_branch_name(one)}: {one.error or one.state}{'' if one.score is None else f' {one.score:g}'}")


def _draw(info: ExperimentInfo) -> Table:
    from rich.table import Table
    from rich.text import Text

    header, rows = _variant_rows(info)
    drawn = Table(*header, box=None, pad_edge=False)
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def _report(client: Snapshotd, info: ExperimentInfo, as_json: bool, *, branches: bool) -> None:
    if as_json:
        print_json(info.json())
        return
    _report_rows(info, branches=branches)
    if info.best is not None:
        click.echo(f"best: {_branch_name(info.best)}{_promotion(client, info, info.best)}")


def _report_rows(info: ExperimentInfo, *, branches: bool) -> None:
    header, rows = _branch_rows(info) if branches else _variant_rows(info)
    table(header, rows)
    if info.ended is not None:
        click.echo(f"ended: {printable(info.ended)}")
    for one in info.branches:
        if one.error is not None and not branches:
            click.echo(f"{_branch_name(one)}: {printable(one.error)}")


def _promotion(client: Snapshotd, info: ExperimentInfo, best: ExperimentBranch) -> str:
    """Return the command that keeps the best branch. It names a branch that did not pass, and has --yes where the trajectory
    would leave something behind."""
    words, said = info.name, ""
    if not best.passed:
        words, said = f"{words} {_branch_name(best)}", ", which did not pass"
    source = client.trajectory(client.snapshot(info.snapshot).trajectory)
    if source.head != info.snapshot:
        words = f"--yes {words}"
        said += f", and {printable(source.name or short(source.id))} went on since the experiment began"
    return f"{said}; `snapshotd experiment promote {words}` keeps it"


def _variant_rows(info: ExperimentInfo) -> tuple[Sequence[str], list[Sequence[str]]]:
    most = max((len(info.of(one.label)) for one in info.variants), default=1)
    more = [f"PASS@{k}" for k in ((1, most) if most > 1 else (1,))]
    header = ["RANK", "VARIANT", "DONE", "SCORE", *more, *_MEANS, "PROTECTED"]
    return header, [_variant_cells(variant, most) for variant in info.variants]


def _variant_cells(variant: VariantInfo, most: int) -> list[str]:
    done = [one for one in variant.branches if one.state in FINAL]
    scores = variant.scores
    error = scores.standard_error
    score = "-" if scores.mean is None else f"{scores.mean:.4g}" + ("" if error is None else f" ± {error:.2g}")
    passes = [f"{scores.pass_at(k):.2f}" if len(done) >= k else "-" for k in ((1, most) if most > 1 else (1,))]
    return [
        "-" if variant.rank is None else str(variant.rank),
        printable(variant.label),
        f"{len(done)}/{len(variant.branches)}",
        score,
        *passes,
        *_mean_cells(done),
    ]


def _mean_cells(done: Sequence[ExperimentBranch]) -> list[str]:
    if not done:
        return ["-"] * 8

    def mean(name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in done)

    return [
        f"{mean('seconds'):.1f} s",
        f"{mean('calls'):.4g}",
        f"{statistics.fmean(sum(one.tokens) for one in done):.6g}",
        *(f"{mean(name):.4g}" for name in ("cost", "files", "lines", "outside")),
        str(sum(bool(one.protected) for one in done)),
    ]


def _branch_rows(info: ExperimentInfo) -> tuple[Sequence[str], list[Sequence[str]]]:
    rows: list[Sequence[str]] = []
    for one in info.branches:
        done = one.state in (*FINAL, "stopped")
        cells = _mean_cells([one] if done else [])
        reason = one.error or ", ".join(one.protected)
        rows.append(
            [
                _branch_name(one),
                one.state,
                "-" if one.score is None else f"{one.score:.4g}",
                "yes" if one.passed else "no" if done else "-",
                "-" if one.exit_code is None else str(one.exit_code),
                *cells[:-1],
                printable(reason) or "-",
            ]
        )
    return ["BRANCH", "STATE", "SCORE", "PASSED", "EXIT", *_MEANS, "ERROR OR PROTECTED"], rows


def _branch_name(one: ExperimentBranch) -> str:
    return printable(one.called)
