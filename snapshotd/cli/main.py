"""The command `snapshotd`: finds the command, reports errors as one line, sets the exit code.

Command `x` lives in `cli/commands/FOLDER/x.py` as `command` and is imported when it is used, so that `snapshotd exec`
does not pay for `tree`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError

from snapshotd.cli.command import (
    CONTEXT_SETTINGS,
    CliGroup,
    Failure,
    ReaderGone,
    drop_output,
    global_options,
    system_error,
    usage_error,
)
from snapshotd.config import passed_on
from snapshotd.errors import SnapshotdError, UsageError

SECTIONS: dict[str, str] = {
    "running": "Running",
    "inspection": "Inspection",
    "history": "History and approvals",
    "storage": "Storage",
    "service": "The daemon and this machine",
}
"""Folder of `cli/commands/` to its heading in the help."""

COMMANDS: dict[str, dict[str, str]] = {
    "running": {
        "run": "Run an agent or a command in a sandbox, with a snapshot after every tool call.",
        "create": "Start a sandbox without an agent.",
        "exec": "Run a command as a tool call in a sandbox, or in a throw-away fork.",
        "shell": "Open a shell in a sandbox.",
        "snapshot": "Take a snapshot of a running sandbox now.",
        "cp": "Copy files into a sandbox, or out of a sandbox or snapshot.",
        "port": "Reach a server inside a sandbox at an address of this machine.",
        "attach": "Follow a run, or a background command, from its beginning.",
        "logs": "Print what a run, or a background command, has printed so far.",
        "wait": "Wait until a run, or a background command, has ended.",
        "network": "Show, or change, the hosts that a trajectory's sandboxes reach.",
        "kill": "Send a signal to commands of a sandbox.",
        "stop": "End sandboxes after a last snapshot.",
        "rm": "Forget trajectories and free what only they used.",
        "ls": "List trajectories.",
        "ps": "List live sandboxes, or a trajectory's commands.",
        "fork": "Start new sandboxes from a snapshot.",
        "experiment": "Run variants from one state, score them, and keep the best.",
        "resume": "Let an agent go on where it stopped.",
    },
    "inspection": {
        "ui": "Show in a browser what agents did, and act on it.",
        "log": "List a trajectory's snapshots.",
        "tree": "Show all trajectories as a forest.",
        "find": "Find text in arguments, outputs and messages.",
        "show": "Show everything about one snapshot.",
        "inspect": "Print all about trajectories and snapshots as JSON.",
        "diff": "Show what changed between two snapshots.",
        "compare": "Compare trajectories call by call: where they part, and how each came out.",
        "score": "Run a command in a throw-away fork of each snapshot, and rank them.",
        "cat": "Print a file as it was in a snapshot.",
        "journal": "Show what a program did, call by call.",
        "state": "Show the agent's state.",
        "tasks": "List the agent's subtasks.",
        "tag": "Name a snapshot, or take a name away.",
    },
    "history": {
        "rewind": "Go back to an older snapshot, in place.",
        "undo": "Take the last rewind, promotion or merge of a trajectory back.",
        "promote": "Make a fork the head of the trajectory that it came from.",
        "edit": "Make a new trajectory from a snapshot with something changed.",
        "bisect": "Find the call that broke it: the first snapshot where a command fails.",
        "retry": "Do one task of an agent again.",
        "approvals": "List what waits for a person.",
        "approval": "Show what an approval is about.",
        "approve": "Let a call run that waits for it.",
        "deny": "Refuse a call that waits for approval.",
        "effects": "List irreversible calls that rewinds left behind.",
        "compensate": "Run the compensations of irreversible calls that were left behind.",
        "store": "Read and write the key-value store across trajectories.",
    },
    "storage": {
        "restore": "Write a snapshot's files into a folder.",
        "apply": "Bring what a snapshot changed to a folder, and keep what the folder has changed.",
        "merge": "Bring what one branch changed to another trajectory, and keep what that one has changed.",
        "export": "Write a snapshot, or a whole trajectory, as one file.",
        "import": "Take in what `snapshotd export` wrote.",
        "mount": "Show every stored snapshot as a folder.",
        "umount": "End what `snapshotd mount` began.",
        "stats": "Show what sandboxes take, and how long they stand still.",
        "df": "Show what takes space.",
        "image": "Build, import, list and remove images.",
        "policy": "Show or set which snapshots keep their files.",
        "prune": "Give up the files of snapshots that no policy keeps, and free the space.",
        "check": "Verify the repository.",
        "repair": "Rebuild damaged parts of the repository from intact ones.",
        "catalog": "Move the catalog between a file and a PostgreSQL database.",
    },
    "service": {
        "mcp": "Serve the daemon's verbs to an agent that speaks MCP.",
        "hooks": "Let an agent in your own folder take a snapshot at every call, without a sandbox.",
        "doctor": "Say what this machine lacks, and the fix for each.",
        "setup": "Install missing system packages, where that is possible.",
        "serve": "Be the daemon, for other machines too, or serve clients of E2B.",
        "token": "Make, list and revoke tokens for callers from other machines.",
        "audit": "List who did what.",
        "login": "Keep the token of a daemon on another machine.",
        "logout": "Forget the token of a daemon on another machine.",
        "dial": "Carry a connection to the daemon over standard input and output.",
        "fleet": "Look at the nodes of a fleet, drain one, and forget one.",
        "daemon": "Be the daemon, ask after it, stop it, or put another in its place.",
        "version": "Print the versions of client and daemon.",
        "completion": "Print the completion script for a shell.",
    },
}
"""Folder to names of commands to their summaries: the first lines of their docstrings (a test compares them)."""

FOLDERS: dict[str, str] = {name: folder for folder, commands in COMMANDS.items() for name in commands}


class LazyGroup(CliGroup):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(FOLDERS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in FOLDERS:
            return None
        found: click.Command = importlib.import_module(f"snapshotd.cli.commands.{FOLDERS[cmd_name]}.{cmd_name}").command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As any group does it, and for a word that is no command, what does what was probably meant."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as exc:
            import difflib

            from snapshotd.cli.habits import HABITS

            if args[0] in HABITS:
                raise UsageError(f"no such command {args[0]!r}: {HABITS[args[0]]}") from None
            near = difflib.get_close_matches(args[0], FOLDERS, 1, cutoff=0.7)
            if not near:
                raise
            raise click.UsageError(f"{exc.message.rstrip('.')}, did you mean {near[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for folder, heading in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl(list(COMMANDS[folder].items()))


def _version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        import snapshotd

        click.echo(f"snapshotd {snapshotd.__version__}")
        ctx.exit(0)


@click.group("snapshotd", cls=LazyGroup, context_settings=CONTEXT_SETTINGS, params=global_options())
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version and exit."
)
def cli() -> None:
    """Run LLM agents in containers; one atomic snapshot of files, conversation and tool call after every tool call.

    A snapshot can be looked at, diffed, restored, and forked into sandboxes that run side by side. Wherever a command
    takes an id, any unique prefix of it, a name or a tag will do. Data goes to standard output, everything else to
    standard error.
    """


def main(args: list[str] | None = None) -> int:
    """Run one command line. Returns the exit code; never raises an error that a user could cause."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _main(args)
        sys.stdout.flush()
        return code
    except (ReaderGone, BrokenPipeError):
        drop_output()
        return 141
    except KeyboardInterrupt:  # while the outcome was told
        return 130
    except OSError as exc:
        error = system_error(exc)
        return report(error, error.exit_code, as_json=False)


def _main(args: list[str] | None) -> int:
    try:
        color = False if passed_on(["NO_COLOR"]).get("NO_COLOR") else None  # https://no-color.org
        outcome: Any = cli.main(args, prog_name="snapshotd", standalone_mode=False, color=color)
    except Failure as failure:
        return report(failure.error, failure.exit_code, as_json=failure.as_json)
    except NoArgsIsHelpError as exc:  # a group alone: a person looks round
        click.echo(exc.ctx.get_help())
        return 0
    except click.UsageError as exc:
        error = usage_error(exc, None)
        return report(error, error.exit_code, as_json=False)
    except SnapshotdError as error:
        return report(error, error.exit_code, as_json=False)
    except (KeyboardInterrupt, click.Abort):
        return 130
    return outcome if isinstance(outcome, int) else 0


def report(error: SnapshotdError, exit_code: int, *, as_json: bool) -> int:
    """One line on standard error; with --json also an object on standard output. Returns the exit code."""
    from snapshotd.cli.text import printable

    if as_json:
        click.echo(json.dumps(error.as_json()))
    click.echo(f"snapshotd: {printable(error.message)}", err=True)
    return exit_code
