"""What somebody types by habit works, or the answer names the command that does it."""

from __future__ import annotations

import re

import click
import pytest

from snapshotd.cli.habits import HABITS
from snapshotd.cli.main import cli as group
from snapshotd.cli.main import find_commands
from tests.unit.cli.conftest import Cli

TYPED = [
    "attach",
    "backup",
    "bash",
    "branch",
    "build",
    "cat",
    "checkout",
    "checkpoint",
    "clone",
    "commit",
    "connect",
    "cp",
    "create",
    "delete",
    "describe",
    "diff",
    "download",
    "events",
    "exec",
    "export",
    "files",
    "fork",
    "gc",
    "help",
    "history",
    "images",
    "import",
    "info",
    "init",
    "inspect",
    "kill",
    "list",
    "load",
    "log",
    "logs",
    "ls",
    "mount",
    "pause",
    "port",
    "prune",
    "ps",
    "pull",
    "push",
    "remove",
    "rename",
    "reset",
    "restart",
    "resume",
    "revert",
    "rm",
    "rmi",
    "rollback",
    "run",
    "save",
    "shell",
    "snapshot",
    "snapshots",
    "ssh",
    "start",
    "status",
    "stop",
    "switch",
    "tag",
    "top",
    "unmount",
    "unpause",
    "untag",
    "update",
    "upload",
    "version",
    "volume",
    "wait",
]
"""By people who come from docker, git or a sandbox service."""


@pytest.mark.parametrize("word", TYPED)
def test_a_word_of_habit_is_a_command_or_names_one(cli: Cli, word: str) -> None:
    assert (word in find_commands()) != (word in HABITS)
    if word in find_commands():
        assert cli(word, "--help").code == 0


@pytest.mark.parametrize("word", HABITS)
def test_a_habit_is_answered_with_what_to_type(cli: Cli, word: str) -> None:
    done = cli(word, "some", "--thing")
    assert (done.code, done.out) == (2, "")
    assert done.err == f"snapshotd: no such command {word!r}: {HABITS[word]}\n"
    lines = [line.split()[1:] for line in re.findall(r"`(?:[^`]*\| )?(snapshotd [^`]*)`", HABITS[word])]
    assert lines
    for name, *words in lines:
        command: click.Command | None = group if name == "--help" else group.get_command(click.Context(group), name)
        assert command is not None, name
        if isinstance(command, click.Group) and words:
            command, words = command.get_command(click.Context(command), words[0]), words[1:]
            assert command is not None, name
        known = {option for param in command.params for option in param.opts} | {"--help"}
        inside = words.index("NAME") + 1 if name == "exec" else len(words)
        assert {word for word in words[:inside] if word.startswith("-")} <= known, words
