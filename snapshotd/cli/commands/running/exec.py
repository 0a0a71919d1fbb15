"""`snapshotd exec`."""

from __future__ import annotations

import io
import shlex
from pathlib import Path
from typing import Any

import click

from snapshotd.cli import terminal
from snapshotd.cli.background import service_of, service_options
from snapshotd.cli.command import (
    CONTEXT_SETTINGS,
    CliCommand,
    after_dashes,
    connect,
    declare,
    is_terminal,
    json_option,
    keep_apart,
    refuse,
    refuse_input,
    standard_input,
)
from snapshotd.cli.follow import INTERRUPTED, BetweenLines, note
from snapshotd.cli.github import GitHub, github_option
from snapshotd.cli.snapshots import summary_line, wait_for_counts
from snapshotd.cli.text import bytes_json, print_answer, print_json, printable
from snapshotd.cli.values import Seconds, complete_snapshot, complete_trajectory, idle_option, process_options
from snapshotd.cli.waiting import Wait, wait_option
from snapshotd.client.client import Snapshotd
from snapshotd.client.results import ExecInfo
from snapshotd.config import read_variables
from snapshotd.junit import FailedTest, count_tests, failed_tests

_EXAMPLES = [
    "snapshotd exec box -- make test",
    "snapshotd exec -u nobody box ls -la",
    "snapshotd exec box -- sh -c 'echo hello > note.txt'",
    "snapshotd exec -it box bash",
    "tar -c src | snapshotd exec -i box -- tar -x",
    "snapshotd exec --input queries.sql box -- sqlite3 shop.db",
    "snapshotd exec --snapshot a1b2c3 -- ls -la   # in a throw-away fork",
    "snapshotd exec --snapshot known-good --junit out.xml -- sh -c 'pytest --junit-xml $SNAPSHOTD_JUNIT'",
    "snapshotd exec --if-head a1b2c3 box -- make release",
    "snapshotd exec --timeout 10m --json box -- pytest -q",
    "snapshotd exec --detach box -- python3 -m http.server 8000",
    "snapshotd exec --detach --service db --ready pg_isready box -- postgres -D /data",
]


class _Exec(CliCommand):
    """Its options end where the command begins, with or without `--` between them."""

    def own_words(self, ctx: click.Context, args: list[str]) -> list[str]:
        options, rest, dashes = self._leading(ctx, args)
        place: list[str] = []
        if not dashes and not any(word.partition("=")[0] == "--snapshot" for word in options):
            place = rest[:1]
            more, rest, _ = self._leading(ctx, rest[1:])
            options += more
        if place or rest:
            keep_apart(ctx, rest)
        return options + place

    def _leading(self, ctx: click.Context, args: list[str]) -> tuple[list[str], list[str], bool]:
        """The options that `args` begins with, the rest, and whether `--` stands between them."""
        words = self.make_parser(ctx).parse_args(list(args))[0]["words"]
        rest = list(words) if isinstance(words, tuple) else []  # click has a value of its own for none
        options = args[: len(args) - len(rest)]
        dashes = options[-1:] == ["--"]
        return options[: len(options) - dashes], rest, dashes


@declare(
    "exec",
    cls=_Exec,
    examples=_EXAMPLES,
    docker_codes=True,
    options_metavar="[OPTIONS]",
    context_settings={**CONTEXT_SETTINGS, "allow_interspersed_args": False},
)
@click.option(
    "--snapshot",
    metavar="ID",
    help="Run in a throw-away fork of this snapshot; nothing of it is kept.",
    shell_complete=complete_snapshot,
)
@click.option("-i", "--interactive", is_flag=True, help="Send standard input to the command; else it has none.")
@click.option(
    "--input",
    "from_file",
    metavar="FILE",
    help="Send this file to the command as its standard input; - is ours, as with -i.",
)
@click.option(
    "-t",
    "--tty",
    is_flag=True,
    help="Give the command a terminal; with -i it is this one, and the command ends when this client does.",
)
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Run it in the background and print its id; `attach`, `logs`, `kill` take that.",
)
@service_options
@process_options
@click.option(
    "--if-head",
    metavar="ID",
    help="Only while this snapshot is the trajectory's head; else refuse and name the head.",
    shell_complete=complete_snapshot,
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Seconds(),
    help="End the command with all that it started after so long (90, 1.5, 10m): status timed-out, exit code 124.",
)
@idle_option
@click.option(
    "--junit",
    metavar="FILE",
    type=click.Path(),
    help="With --snapshot: write a JUnit report, the one that the command leaves at $SNAPSHOTD_JUNIT or one about it.",
)
@click.option("-q", "--quiet", is_flag=True, help="Only the command's output: no line about the snapshot.")
@wait_option
@github_option
@json_option
@click.argument(
    "words",
    metavar="TRAJECTORY [--] CMD [ARGS]...",
    nargs=-1,
    type=click.UNPROCESSED,
    shell_complete=complete_trajectory,
)
def command(
    ctx: click.Context,
    words: tuple[str, ...],
    snapshot: str | None,
    if_head: str | None,
    interactive: bool,
    from_file: str | None,
    tty: bool,
    detach: bool,
    idle_timeout: float | None,
    junit: str | None,
    quiet: bool,
    wait: Wait | None,
    github: GitHub | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run a command as a tool call in a sandbox, or in a throw-away fork.

    Options stand before the command; from its first word on, everything is the command's. A stopped trajectory's
    sandbox is started again. The snapshot is taken when the command ends, also when it failed, when --timeout ended it
    (status timed-out, exit code 124), when this client was interrupted, or when `stop` ended the sandbox (status
    interrupted, exit code 137); a throw-away fork ends with this client. The exit code is the command's; 125 when
    snapshotd failed, 126 and 127 when the command cannot be run or is not there (then there is no snapshot). When
    the reader of its output goes away (`| head`), the command meets a broken pipe, as it would without a sandbox.

    A sandbox that was started again is stopped after half an hour without a command (--idle-timeout, else the
    daemon's SNAPSHOTD_IDLE_TIMEOUT in seconds; 0: never).

    --timeout ends the command with all that it started. Only a process that has left the command's session and its
    parent (a daemon) is left alone while other commands, an agent or servers of earlier commands run in the sandbox: it
    could be theirs.

    With -t the command has a terminal, with -it this one: keys reach it as they are pressed, Ctrl-C too, and it learns
    of a new size. All that it prints goes to standard output. It ends, with a snapshot, when this client goes away.

    With -i the command reads this command's standard input; it may end before it has read all of it. Without -i its
    standard input is empty, and data on ours (`echo hi | snapshotd exec box -- cat`) is refused. With --input FILE it reads
    that file of this machine, of any size, as far as it wants to.

    With --junit, a JUnit report outlives the throw-away fork: the command may write one to $SNAPSHOTD_JUNIT; else the
    command itself is its one test.

    With --detach the command runs in the background, and its id is printed: other calls go on beside it, its snapshot is
    taken when it ends, and a new daemon goes on with it. `snapshotd ps TRAJECTORY` lists such commands. With -i its
    standard input stays open for `snapshotd attach -i`; otherwise it is empty. `stop`, a rewind and the end of the
    trajectory's agent end it.

    With --detach --service NAME it is a service: it is started again, and awaited, in every fork, rewind, resume and start
    from a later snapshot, in throw-away forks too. It is ready once --ready CMD succeeds, and something listens on --port;
    its id is printed then, and a snapshot declares it. `snapshotd ps`, `logs`, `port` and `kill` take its name, and
    `snapshotd kill --remove` takes it away. It is no tool call, so its end leaves no snapshot.

    With --json: {"exit_code","timed_out","stdout","stderr","snapshot"}; output that is not UTF-8 is there as stdout_b64 or
    stderr_b64 too, and error if the sandbox reached a limit. With --detach: the
    command as `snapshotd ps --json` lists it.
    """
    service = service_of(options)
    if service is not None and not detach:
        refuse("a service runs in the background; add --detach, or leave out --service")
    trajectory, argv = _split(list(words), after_dashes(ctx), snapshot is not None)
    if snapshot is not None:
        _check_throw_away(wait, if_head, idle_timeout)
    elif junit is not None:
        refuse(
            "a trajectory keeps the files of its commands: fetch the report with `snapshotd cp`, or leave out --junit"
        )
    given = {"if_head": if_head, "idle_timeout": idle_timeout, "junit": junit}
    options.update({name: value for name, value in given.items() if value is not None}, env=dict(options["env"]))
    _check_input(from_file, interactive=interactive, tty=tty, detach=detach)
    if detach:
        if snapshot is not None or if_head is not None or tty or wait is not None:
            refuse(
                "a command in the background has no throw-away fork, no --if-head, no terminal and no snapshot to wait for yet; leave out "
                "--detach, or --snapshot, --if-head, -t and --wait"
            )
        begun = connect(ctx).exec_in_background(trajectory, argv, **options, stdin=interactive, service=service)
        print_answer(begun, begun.id, as_json=as_json)
        return 0
    _give_input(ctx, options, "-" if interactive else from_file)
    if wait is not None:
        options["wait"] = wait
    if tty and junit is not None:
        refuse("a JUnit report is written of a command that has no terminal; leave out -t or --junit")
    if tty and interactive and not is_terminal():
        refuse("standard input is no terminal, so a command cannot have it as one; leave out -t")
    if tty and as_json:
        refuse("a terminal and JSON cannot both have standard output; leave out -t or --json")
    client = connect(ctx)
    try:
        if as_json:
            done = _as_json(client, trajectory, snapshot, argv, options)
        elif tty:
            done = exec_in_terminal(client, trajectory, snapshot, argv, options, quiet)
        else:
            done = exec_in_pipes(client, trajectory, snapshot, argv, options, quiet)
        if github is not None:
            _tell(github, done, argv, junit)
        return done.exit_code
    except KeyboardInterrupt:
        if snapshot is None:
            note(
                f"the command goes on in {trajectory}: `snapshotd ps {trajectory}` shows it, `snapshotd kill` ends it; its snapshot is "
                f"taken when it ends, and `snapshotd log {trajectory}` shows that"
            )
        return INTERRUPTED


def _check_input(from_file: str | None, *, interactive: bool, tty: bool, detach: bool) -> None:
    if from_file is not None and (interactive or tty or detach):
        refuse(
            "a file is the whole input of a command that is waited for and has no terminal; leave out --input, or -i, -t and -d"
        )


def _give_input(ctx: click.Context, options: dict[str, Any], path: str | None) -> None:
    """Give the command that file as its input; `-` is ours. Without a file, refuse data that no program would read."""
    if path == "-":
        options["stdin"] = standard_input() or io.BytesIO()
        return
    refuse_input("add -i to send it")
    if path is None:
        return
    try:
        options["stdin"] = ctx.with_resource(open(path, "rb", buffering=0))  # noqa: SIM115 - closed with ctx
    except OSError as exc:
        refuse(f"the input {path} cannot be read: {exc.strerror}; name a file that you may read")


def _check_throw_away(wait: Wait | None, if_head: str | None, idle_timeout: float | None) -> None:
    for given, what, option in (
        (wait, "leaves no snapshot to wait for", "--wait"),
        (if_head, "has no head to compare with", "--if-head"),
        (idle_timeout, "ends with its command", "--idle-timeout"),
    ):
        if given is not None:
            refuse(f"a throw-away fork {what}; leave out {option}, or name a trajectory instead of --snapshot")


def _split(words: list[str], after: list[str] | None, in_fork: bool) -> tuple[str, list[str]]:
    """Return the trajectory ("" for a fork) and the command line."""
    trajectory = ""
    if not in_fork:
        if not words:
            refuse(
                "no trajectory was named; `snapshotd exec TRAJECTORY -- CMD`, or --snapshot ID for a throw-away fork"
            )
        trajectory = words.pop(0)
    if words:
        refuse(f"a throw-away fork needs no trajectory, and {words[0]!r} was named; leave it out, or --snapshot")
    if not after:
        refuse("there is no command to execute; name one behind the trajectory")
    return trajectory, after


def _call(
    client: Snapshotd, trajectory: str, snapshot: str | None, argv: list[str], on_output: Any, options: dict[str, Any]
) -> ExecInfo:
    if snapshot is not None:
        report = options.pop("junit", None)
        if report is not None:
            return client.exec_junit(snapshot, argv, report, on_output=on_output, **options)
        return client.exec_snapshot(snapshot, argv, on_output=on_output, **options)
    return client.exec(trajectory, argv, on_output=on_output, **options)


def exec_in_terminal(
    client: Snapshotd, trajectory: str, snapshot: str | None, argv: list[str], options: dict[str, Any], quiet: bool
) -> ExecInfo:
    """Run the command, which has this terminal until it ends."""
    options["env"] = {**read_variables(["TERM"]), **options["env"]}
    lines = BetweenLines()
    with terminal.lend_terminal() as options["terminal"]:
        done = _call(client, trajectory, snapshot, argv, lines.output, options)
    return _report_end(client, done, options, quiet, lines)


def exec_in_pipes(
    client: Snapshotd, trajectory: str, snapshot: str | None, argv: list[str], options: dict[str, Any], quiet: bool
) -> ExecInfo:
    """Run the command; its output goes to ours."""
    lines = BetweenLines()
    return _report_end(client, _call(client, trajectory, snapshot, argv, lines.output, options), options, quiet, lines)


def _report_end(
    client: Snapshotd, done: ExecInfo, options: dict[str, Any], quiet: bool, lines: BetweenLines
) -> ExecInfo:
    if done.call.error is not None and not quiet:
        lines.line(f"snapshotd: {printable(done.call.error)}", at_once=True)
    if done.snapshot is not None and not quiet:
        lines.line(summary_line(wait_for_counts(client, done.snapshot), with_state="wait" in options), at_once=True)
    return done


def _as_json(
    client: Snapshotd, trajectory: str, snapshot: str | None, argv: list[str], options: dict[str, Any]
) -> ExecInfo:
    kept: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
    done = _call(client, trajectory, snapshot, argv, lambda stream, data: kept[stream].append(data), options)
    answer: dict[str, Any] = {"exit_code": done.exit_code, "timed_out": done.timed_out}
    for stream, pieces in kept.items():
        answer.update(bytes_json(stream, b"".join(pieces)))
    if done.call.error is not None:
        answer["error"] = done.call.error
    answer["snapshot"] = None if done.snapshot is None else done.snapshot.id
    if done.snapshot is not None and "wait" in options:
        answer["state"] = done.snapshot.state
    print_json(answer)
    return done


def _tell(github: GitHub, done: ExecInfo, argv: list[str], junit: str | None) -> None:
    line = shlex.join(argv)
    values: dict[str, object] = {"exit-code": done.exit_code}
    rows: dict[str, object] = {"Exit code": done.exit_code, "Time": f"{done.call.duration_ms / 1000:.1f} s"}
    if done.snapshot is not None:
        values["snapshot"] = rows["Snapshot"] = done.snapshot.id
    failures: tuple[FailedTest, ...] = ()
    if junit is not None:
        report = Path(junit).read_bytes()
        tests, failures = count_tests(report), failed_tests(report)
        values.update(passed=tests.passed, failed=tests.failed + tests.errors, skipped=tests.skipped)
        rows["Tests"] = f"{tests.passed} passed, {tests.failed + tests.errors} failed, {tests.skipped} skipped"
    github.outputs(values)
    github.summary(line, rows, "\n".join(f"{one.name}: {one.message}" for one in failures))
    for one in failures:
        github.annotate("error", one.message or "failed", title=one.name, file=one.file, line=one.line)
    if done.exit_code != 0 and not failures:
        github.annotate("error", done.call.error or f"exit code {done.exit_code}", title=line)
