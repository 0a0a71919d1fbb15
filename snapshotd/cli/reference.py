"""`python -m snapshotd.cli.reference` prints docs/cli.md: every command with its options and examples, from the
commands themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import click

from snapshotd import errors
from snapshotd.cli.command import CliCommand
from snapshotd.cli.main import cli
from snapshotd.daemon.http.words import WORDS

_INTRODUCTION = """\
# Commands

Generated from the commands by `python -m snapshotd.cli.reference`; do not edit.

- Wherever a command takes an id, any unique prefix of it (four characters or more), a name or a tag will do.
- Data goes to standard output; progress and one line per snapshot go to standard error. `--json` prints JSON instead of text, and an
  error as `{"error":{"code","message"}}`. [The words of --json](#the-words-of---json) says what each word means.
- `--state-dir` (`SNAPSHOTD_STATE_DIR`) and `--socket` (`SNAPSHOTD_SOCKET`) may stand before or after the command's name.
- The first command that needs the daemon starts it, when run as root.
"""


def reference() -> str:
    """The whole page as Markdown."""
    lines = [_INTRODUCTION, *_exit_codes(), *_contents()]
    for name, command in _walk():
        lines += _section(name, command)
    lines += _words()
    return "\n".join(lines).rstrip() + "\n"


def _walk() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {child}", each) for child, each in command.commands.items())


def _exit_codes() -> list[str]:
    lines = [
        "## Exit codes",
        "",
        "| code | meaning |",
        "|---|---|",
        "| 0 | it worked |",
        "| 1 | the answer to a question was no; or what the command itself says of 1 |",
    ]
    lines += [
        f"| {kind.exit_code} | {code} |"
        for code, kind in sorted(errors.BY_CODE.items(), key=lambda item: item[1].exit_code)
    ]
    lines += [
        "| 130 | interrupted by Ctrl-C |",
        "| 141 | the reader of standard output went away |",
        "",
        "`run`, `create`, `exec` and `attach` follow docker: 125 for every failure of snapshotd, 126 when the command was found but cannot "
        "be run, 127 when it was not found; otherwise the code of the command or agent itself. `resume` ends with the agent's code too, "
        "but with those of the table where snapshotd failed or has a question.",
        "",
    ]
    return lines


def _words() -> list[str]:
    lines = [
        "## The words of --json",
        "",
        "One word has one type and one meaning in every command, and in the API and the client where they say the same. ",
    ]
    lines[-1] += (
        "An `id` is 32 or 64 hexadecimal digits, never a prefix or a name; a `time` is ISO 8601 in UTC; the keys of a `map` are data; "
        "`any` is as it was recorded. Any may be null: there is none, or it is not known yet."
    )
    rows = (f"| `{word}` | {kind} | {meaning} |" for word, (kind, meaning) in sorted(WORDS.items()))
    return [*lines, "", "| word | type | |", "|---|---|---|", *rows, ""]


def _contents() -> list[str]:
    lines = ["## Overview", "", "| command | |", "|---|---|"]
    for name, command in _walk():
        if " " not in name:
            lines.append(f"| [`{name}`](#snapshotd-{name}) | {command.get_short_help_str(200)} |")
    return [*lines, ""]


def _section(name: str, command: click.Command) -> list[str]:
    context = click.Context(command, info_name=f"snapshotd {name}")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f"## snapshotd {name}",
        "",
        "```",
        f"snapshotd {name} {usage}",
        "```",
        "",
        *_paragraphs(command.help or ""),
        "",
    ]
    rows = [_row(param) for param in command.params if isinstance(param, click.Option) and _is_listed(param)]
    if rows:
        lines += ["| option | |", "|---|---|", *rows, ""]
    if isinstance(command, CliCommand) and command.examples:
        lines += ["```sh", *command.examples, "```", ""]
    return lines


def _is_listed(option: click.Option) -> bool:
    return not option.hidden and option.name not in ("state_dir", "socket")


def _row(option: click.Option) -> str:
    """Not click's own rendering of an option, which differs between its versions."""
    value = ""
    if isinstance(option.type, click.Choice):
        value = " " + "\\|".join(str(choice) for choice in option.type.choices)
    elif not option.is_flag:
        value = " " + (option.metavar or option.type.name.upper())
    text = " ".join((option.help or "").split())
    if option.show_default and not option.is_flag:
        text += f" [default: {option.default}]"
    return f"| `{', '.join(option.opts)}{value}` | {text} |"


def _paragraphs(text: str) -> list[str]:
    """The help's paragraphs, each on one line."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n")).splitlines()


def main() -> int:
    os.environ.pop("COLUMNS", None)
    sys.stdout.write(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
