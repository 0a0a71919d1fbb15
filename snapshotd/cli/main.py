"""The command `snapshotd`: finds the command, reports errors as one line, sets the exit code.

Command `x` lives in `cli/commands/FOLDER/x.py` as `command` and is imported when it is used, so that `snapshotd exec`
does not pay for `tree`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from pathlib import Path
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
from snapshotd.config import read_variables
from snapshotd.errors import SnapshotdError, UsageError

SECTIONS: dict[str, str] = {
    "running": "Running",
    "inspection": "Inspection",
    "history": "History and approvals",
    "storage": "Storage",
    "service": "The daemon and this machine",
}
"""Folder of `cli/commands/` to its heading in the help."""
_COMMANDS = Path(__file__).with_name("commands")


@cache
def find_commands() -> dict[str, str]:
    """The name of each command to the folder that its module is in: in the order of the help, without importing them."""
    return {
        name.removesuffix(".py"): folder
        for folder in SECTIONS
        for name in sorted(os.listdir(_COMMANDS / folder))
        if name.endswith(".py") and name != "__init__.py"
    }


def summary_of(name: str) -> str:
    """The first line of the help of a command, which is the docstring of its function `command`."""
    source = (_COMMANDS / find_commands()[name] / f"{name}.py").read_text(encoding="utf-8")
    return source.partition("\ndef command(")[2].partition('"""')[2].partition("\n")[0].removesuffix('"""')


class LazyGroup(CliGroup):
    """Lists commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(find_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        folder = find_commands().get(cmd_name)
        if folder is None:
            return None
        found: click.Command = importlib.import_module(f"snapshotd.cli.commands.{folder}.{cmd_name}").command
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
            # Swapped letters first: to difflib `lgo` is as near to `logout` as to `log`.
            swapped = [name for name in find_commands() if sorted(name) == sorted(args[0])]
            near = swapped or difflib.get_close_matches(args[0], find_commands(), 1)
            if not near:
                raise
            raise click.UsageError(f"{exc.message.rstrip('.')}, did you mean {near[0]!r}?", ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for folder, heading in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, summary_of(name)) for name, its in find_commands().items() if its == folder])


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
        color = False if read_variables(["NO_COLOR"]).get("NO_COLOR") else None  # https://no-color.org
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
    """Print an error as one line on standard error, with --json also as an object on standard output. Returns the exit code."""
    from snapshotd.cli.text import printable

    if as_json:
        click.echo(json.dumps(error.as_json()))
    click.echo(f"snapshotd: {printable(error.message)}", err=True)
    return exit_code
