"""The parts that every command has: the global options after its name, examples in its help, one-sentence errors, its
exit codes."""

from __future__ import annotations

import errno
import fcntl
import gc
import inspect
import os
import re
import stat
import sys
import termios
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn, TextIO, TypeVar

import click

from snapshotd.config import read
from snapshotd.errors import (
    NO_ROOM,
    CommandNotFound,
    CommandNotRunnable,
    NotPermitted,
    OutOfSpace,
    SandboxFailed,
    SnapshotdError,
    UsageError,
)
from snapshotd.terms import ALLOW

if TYPE_CHECKING:
    from snapshotd.cli.github import GitHub
    from snapshotd.client.aio.client import AsyncSnapshotd
    from snapshotd.client.client import Snapshotd

F = TypeVar("F", bound=Callable[..., Any])
_STATE_DIR, _SOCKET, _JSON, _AFTER = ("snapshotd.state_dir", "snapshotd.socket", "snapshotd.json", "snapshotd.after")
_FULL = (*NO_ROOM, errno.EFBIG)
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Failure(Exception):  # noqa: N818 - carries an error, is none
    """An error on its way to `main`, with the command's own way to report it."""

    def __init__(self, error: SnapshotdError, exit_code: int, as_json: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.exit_code = exit_code
        self.as_json = as_json


class Declined(SnapshotdError):  # noqa: N818 - as those of `errors`
    """A person has answered a question with no: exit code 1, in every command."""


class ReaderGone(Exception):  # noqa: N818 - what happened, and no failure of ours
    """The reader of our output has gone away."""


def drop_output(stream: TextIO | None = None) -> None:
    """Drop standard output (or `stream`) from now on: Python would fail again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def refuse_input(advice: str) -> None:
    """Refuse standard input with data that no program would read (UsageError). A terminal is fine, and so is an input that
    is empty so far: a pipe that a job of CI or a service has inherited. `advice`: how to go on."""
    source = standard_input()
    if source is not None and waiting_bytes(source.fileno()):
        raise UsageError(f"standard input has data that would not be sent: {advice}, or add `< /dev/null` to drop it")


def standard_input() -> BinaryIO | None:
    """Standard input as it comes, unbuffered; None if the parent process has closed it."""
    try:
        return open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    except (AttributeError, OSError, ValueError):
        return None


def is_terminal() -> bool:
    """True if standard input is a terminal, where a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


def waiting_bytes(fd: int) -> int:
    """Number of bytes that can be read at once and that no person typed."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return max(0, os.fstat(fd).st_size - os.lseek(fd, 0, os.SEEK_CUR))
    if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode):
        return 0
    return int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)), sys.byteorder)


def system_error(exc: OSError) -> SnapshotdError:
    """Return the error to report for one of the system. Output that finds no room is dropped from now on. An error about
    neither our output nor a path of this machine is raised again."""
    path = None if exc.filename is None else os.fsdecode(exc.filename)
    if exc.errno in _FULL:
        if path is None:
            drop_output()
        what = path or "the output"
        return OutOfSpace(f"{what} cannot be written to its end: {exc.strerror}; free some space or send it elsewhere")
    if path is None and not isinstance(exc, FileNotFoundError):
        raise exc
    path = path or "the working directory"  # `getcwd` names nothing
    kind = NotPermitted if isinstance(exc, PermissionError) else UsageError
    return kind(f"{path} cannot be used: {exc.strerror}; name another path, or change that one")


class CliFormatter(click.HelpFormatter):
    """Breaks no line at the hyphen in a word, which may be the name of an option or a command."""

    _HYPHEN = "\N{NON-BREAKING HYPHEN}"

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", self._HYPHEN))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        super().write_dl([(name, text.replace("-", self._HYPHEN)) for name, text in rows], col_max, col_spacing)

    def write(self, string: str) -> None:
        super().write(string.replace(self._HYPHEN, "-"))


class CliContext(click.Context):
    formatter_class = CliFormatter


class CliGroup(click.Group):
    """A group of commands."""

    context_class = CliContext


_OBJECT = re.compile(r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}")
"""The form of an object of `--json` in a command's help, with objects in it."""


class CliCommand(click.Command):
    """A command of ours.

    `examples`: command lines for the help. `docker_codes`: docker's exit codes, for commands that run something: 125
    for every failure of ours, 126 and 127 for programs that cannot be run. `splits`: arguments after the first `--` are
    kept apart (`after_dashes`).
    """

    context_class = CliContext

    def __init__(
        self,
        name: str | None,
        *,
        examples: Sequence[str] = (),
        docker_codes: bool = False,
        splits: bool = False,
        **attrs: Any,
    ) -> None:
        attrs.setdefault("context_settings", CONTEXT_SETTINGS)
        super().__init__(name, **attrs)
        self.examples = tuple(examples)
        self.docker_codes = docker_codes
        self.splits = splits
        self.params.extend(global_options())

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        before = args
        try:
            before = _with_bare_network(self, self.own_words(ctx, args))
            return super().parse_args(ctx, list(before))
        except click.UsageError as exc:
            raise self._failure(usage_error(exc, ctx), "--json" in before) from exc
        except SnapshotdError as exc:
            raise self._failure(exc, "--json" in before) from exc
        except OSError as exc:
            raise self._failure(system_error(exc), "--json" in before) from exc

    def own_words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The words that are options and arguments of this command; `keep_apart` gets the rest."""
        if not self.splits or "--" not in args:
            return args
        at = args.index("--")
        keep_apart(ctx, args[at + 1 :])
        return args[:at]

    def invoke(self, ctx: click.Context) -> Any:
        if not gc.isenabled():  # see snapshotd/__main__.py
            gc.freeze()  # modules stay: the first search would look at all of them, for 4 ms
            gc.enable()
        try:
            outcome = super().invoke(ctx)
            sys.stdout.flush()
            return outcome
        except BrokenPipeError as exc:
            raise ReaderGone from exc  # before click sees it, which would end with its own exit code
        except click.UsageError as exc:
            raise self._annotate_failure(ctx, usage_error(exc, ctx)) from exc
        except SnapshotdError as exc:
            raise self._annotate_failure(ctx, exc) from exc
        except OSError as exc:
            raise self._annotate_failure(ctx, system_error(exc)) from exc

    def _annotate_failure(self, ctx: click.Context, error: SnapshotdError) -> Failure:
        step: GitHub | None = ctx.params.get("github")
        if step is not None:
            step.annotate("error", error.message, title=ctx.command_path)
        return self._failure(error, wants_json(ctx))

    def _failure(self, error: SnapshotdError, as_json: bool) -> Failure:
        code = error.exit_code
        if self.docker_codes and not isinstance(error, CommandNotFound | CommandNotRunnable):
            code = SandboxFailed.exit_code
        return Failure(error, code, as_json)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # To the formatter a list of JSON's words is one word, which it would cut anywhere at the end of a line.
        text = _OBJECT.sub(lambda words: re.sub(r",(?=\S)", ", ", words[0]), inspect.cleandoc(self.help or ""))
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def declare(
    name: str, *, examples: Sequence[str], group: click.Group | None = None, **attrs: Any
) -> Callable[[Callable[..., Any]], CliCommand]:
    """Declare a command of ours. The function gets click's context first, and returns the exit code; None is 0. The first line of its
    docstring is the command's line in `snapshotd --help`."""

    make: Any = click.command(name, examples=examples, **{"cls": CliCommand, **attrs})

    def add(function: Callable[..., Any]) -> CliCommand:
        command: CliCommand = make(click.pass_context(function))
        if group is not None:
            group.add_command(command)
        return command

    return add


def declare_group(name: str) -> Callable[[Callable[..., Any]], CliGroup]:
    """Declare a command that only has commands below it; `declare` adds them."""
    return click.group(name, cls=CliGroup, context_settings=CONTEXT_SETTINGS)


def join_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Make one decorator of several, which `--help` lists in this order."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


def global_options() -> list[click.Option]:
    """--state-dir and --socket, which every command takes, before or after its name."""

    def keep(key: str) -> Callable[[click.Context, click.Parameter, Any], None]:
        def callback(ctx: click.Context, _param: click.Parameter, value: Any) -> None:
            if value is not None:
                ctx.meta[key] = value

        return callback

    return [
        click.Option(
            ["--state-dir"],
            metavar="DIR",
            expose_value=False,
            callback=keep(_STATE_DIR),
            type=click.Path(readable=False),
            help="The daemon's state directory. [$SNAPSHOTD_STATE_DIR, else /var/lib/snapshotd; without root $XDG_STATE_HOME/snapshotd]",
        ),
        click.Option(
            ["--socket"],
            metavar="PATH",
            expose_value=False,
            callback=keep(_SOCKET),
            type=click.Path(readable=False),
            help="The daemon's socket. [$SNAPSHOTD_SOCKET, else snapshotd.sock in the state directory]",
        ),
    ]


def _remember_json(ctx: click.Context, _param: click.Parameter, value: bool) -> bool:
    if value:
        ctx.meta[_JSON] = True
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, is_eager=True, callback=_remember_json, help="Print JSON on standard output."
)
"""--json, as the parameter `as_json`."""


def wants_json(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(_JSON))


def keep_apart(ctx: click.Context, words: list[str]) -> None:
    """Keep the words of another program, which `after_dashes` returns."""
    ctx.meta[_AFTER] = words


def after_dashes(ctx: click.Context) -> list[str] | None:
    """The arguments after `--`, or those that were kept apart without it; None if there are none."""
    after: list[str] | None = ctx.meta.get(_AFTER)
    return after


def connect(ctx: click.Context, *, autostart: bool = True) -> Snapshotd:
    """Make a client of the daemon that the options and the environment name."""
    from snapshotd.client.client import Snapshotd  # 40 ms that `--help` does not need

    isolation = ctx.params.get("isolation")
    return Snapshotd(ctx.meta.get(_STATE_DIR), ctx.meta.get(_SOCKET), autostart=autostart, isolation=isolation)


def connect_async(ctx: click.Context) -> AsyncSnapshotd:
    """Make the asynchronous client of that daemon."""
    from snapshotd.client.aio.client import AsyncSnapshotd

    return AsyncSnapshotd(ctx.meta.get(_STATE_DIR), ctx.meta.get(_SOCKET), isolation=ctx.params.get("isolation"))


def is_local(ctx: click.Context) -> bool:
    """True if paths mean the same to the daemon: the user named no socket, which could belong to a daemon in a
    container."""
    return _SOCKET not in ctx.meta and not read(only=("socket",)).socket


def usage_error(exc: click.UsageError, ctx: click.Context | None) -> UsageError:
    """click's complaint as one sentence of ours."""
    text = exc.format_message().strip().rstrip(".")
    text = " ".join(text.split())
    path = (exc.ctx or ctx).command_path if (exc.ctx or ctx) else "snapshotd"  # type: ignore[union-attr]
    return UsageError(f"{text[:1].lower()}{text[1:]}; `{path} --help` shows how it is used")


def refuse(message: str) -> NoReturn:
    raise UsageError(message)


def ask(question: str, *, default: bool = False) -> None:
    """Ask the person at the terminal, on standard error: click's own question writes a blank to standard output, where
    only data belongs. Declined: the answer is no, or none that can be understood."""
    click.echo(f"{question} [{'Y/n' if default else 'y/N'}] ", nl=False, err=True)
    line = sys.stdin.readline()
    answer = line.strip().lower()
    if not (answer in ("y", "yes") or (default and line.endswith("\n") and not answer)):
        raise Declined("the answer was no, so nothing was changed")


def _with_bare_network(cmd: click.Command, args: list[str]) -> list[str]:
    """`--network` alone means `--network bridge`. Only our own options are looked at, never an agent's."""
    valued = {
        name for param in cmd.params if isinstance(param, click.Option) and not param.is_flag for name in param.opts
    }
    if "--network" not in valued:
        return args
    at = 0
    while at < len(args) and args[at].startswith("-"):
        if args[at] == "--network":
            following = args[at + 1] if at + 1 < len(args) else "-"
            if following.startswith("-") or (
                ("." in following or "/" in following) and not following.startswith(ALLOW)
            ):
                return [*args[: at + 1], "bridge", *args[at + 1 :]]
        at += 2 if args[at] in valued else 1
    return args
