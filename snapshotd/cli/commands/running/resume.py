"""`snapshotd resume`."""

from __future__ import annotations

from typing import Any

import click

from snapshotd.cli.command import connect, declare, json_option, refuse
from snapshotd.cli.documents import json_file
from snapshotd.cli.follow import follow, patience
from snapshotd.cli.text import print_answer
from snapshotd.cli.values import Pair, complete_trajectory
from snapshotd.cli.waiting import Wait, wait_for_head, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import TrajectoryInfo
from snapshotd.errors import Undecided

_EXAMPLES = [
    "snapshotd resume nightly",
    "snapshotd resume nightly --skip a1b2c3d4",
    "snapshotd resume nightly --retry a1b2c3d4 --result d4e5f6a7=receipt.json",
    "snapshotd resume -d nightly && snapshotd attach nightly",
]


@declare("resume", examples=_EXAMPLES)
@click.option("--retry", "retries", metavar="CALL", multiple=True, help="Run this call again; its outcome is unknown.")
@click.option("--skip", "skips", metavar="CALL", multiple=True, help="Pass over it, as if it had returned null.")
@click.option(
    "--result",
    "results",
    metavar="CALL=FILE",
    type=Pair("CALL=FILE"),
    multiple=True,
    help="It happened, and its result is the JSON in FILE (- for standard input).",
)
@click.option("-d", "--detach", is_flag=True, help="Leave when it is started; `snapshotd attach` follows it.")
@click.option("-q", "--quiet", is_flag=True, help="Only the agent's output: no line per snapshot.")
@wait_option
@json_option
@click.argument("trajectory", shell_complete=complete_trajectory)
def command(
    ctx: click.Context,
    trajectory: str,
    retries: tuple[str, ...],
    skips: tuple[str, ...],
    results: tuple[tuple[str, str], ...],
    detach: bool,
    quiet: bool,
    wait: Wait | None,
    as_json: bool,
) -> int:
    """Let an agent go on where it stopped.

    After a crash of agent, sandbox, daemon or machine, and after a rewind. Its program is started again from the top;
    every call that is recorded is answered at once from the journal, without running again and with the files as they
    were; behind the last one it goes on. An irreversible call that was cut off stops the resume with a question (exit
    code 14): --retry, --skip or --result answers it. Else follows the agent and ends with its exit code, as `snapshotd
    run` does. With --json: one event per line; with --detach, {"trajectory"}.
    """
    answers = _results(results)
    twice = next((call for call in answers if call in retries or call in skips), None) or next(
        (c for c in retries if c in skips), None
    )
    if twice is not None:
        refuse(f"call {twice} is decided twice; choose one of --retry, --skip and --result")
    client = connect(ctx)
    with patience():
        started = _resume(client, trajectory, retries, skips, answers)
    if not detach:
        return follow(client, started.id, as_json=as_json, quiet=quiet, stop_on_interrupt=True, wait=wait)
    state = {} if wait is None else {"state": wait_for_head(client, started.id, wait)}
    print_answer({"trajectory": started.id, **state}, started.id, as_json=as_json)
    return 0


def _resume(
    client: Snapshotd, trajectory: str, retries: tuple[str, ...], skips: tuple[str, ...], answers: dict[str, Any]
) -> TrajectoryInfo:
    try:
        return client.resume(trajectory, retry=retries, skip=skips, results=answers)
    except Undecided as exc:
        raise Undecided(
            f"{exc.message}: `--result CALL=FILE` (it happened, and this is its result), `--skip CALL` (go on without it) or "
            "`--retry CALL` (it did not: run it)"
        ) from exc


def _results(pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for call, path in pairs:
        if call in answers:
            refuse(f"call {call} has two results; give one")
        answers[call] = json_file(path, f"the result of call {call}")
    return answers
