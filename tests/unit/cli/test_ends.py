"""How a command ends that is interrupted, whose reader goes away, whose question gets a no, or that meets a path that
cannot be used: never with a traceback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.cli.main import main
from tests.unit.cli.conftest import Cli
from tests.unit.cli.terminals import answered, edit_on_terminal
from tests.unit.cli.world import World
from tests.unit.daemon.process import Daemon, environment


@pytest.mark.parametrize(
    "module",
    [
        "snapshotd.cli.main",
        "click",
        "click.parser",
        "snapshotd.cli.command",
        "snapshotd.cli.commands.running.ls",
        "snapshotd.client.client",
        "snapshotd.client.transport",
    ],
)
def test_ctrl_c_while_modules_are_loaded_is_no_traceback(daemon: Daemon, module: str) -> None:
    code = (
        "import os, runpy, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['snapshotd', 'ls']\n"
        "runpy.run_module('snapshotd', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(daemon), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode in (-signal.SIGINT, 130), done
    assert done.stderr.strip() == ""


def test_an_ignored_interrupt_stays_ignored(daemon: Daemon) -> None:
    """As `nohup` and a script's background jobs have it."""
    code = (
        "import os, runpy, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "sys.argv = ['snapshotd', 'ls', '-q']\n"
        "try:\n"
        "    runpy.run_module('snapshotd', run_name='__main__', alter_sys=True)\n"
        "finally:\n"
        "    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN\n"
    )
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, env=environment(daemon), capture_output=True, check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("answer", ["n\n", "\n", "\x04"])
def test_a_no_is_the_same_at_every_question(daemon: Daemon, answer: str) -> None:
    """Exit code 1, one sentence, and nothing is changed. (`edit` asks in its own test.)"""
    line, first = daemon.client.create(name="box")
    daemon.client.exec(line.id, ["effect", "send"], wait="stored")
    before = [(one.id, one.state) for one in daemon.client.log("box")]
    for words in (["rewind", "box", first.id], ["rm", "--all"], ["prune"]):
        code, said = answered(daemon, words, answer)
        assert (code, said.splitlines()[-1].rpartition("snapshotd: ")[2]) == (
            1,
            "the answer was no, so nothing was changed",
        ), (words, said)
    assert [(one.id, one.state) for one in daemon.client.log("box")] == before


def test_a_failing_editor_is_one_sentence(edited: Daemon) -> None:
    for command in ("false", "/nowhere/editor", "editor 'unclosed"):
        code, said = edit_on_terminal(edited, command)
        assert (code, "Traceback" in said) == (2, False), said
        assert "the editor failed, so nothing was made" in said
        assert "EDITOR" in said
    assert len(edited.client.trajectories()) == 1


def test_bytes_that_are_no_text_can_be_mended_in_the_editor(edited: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "bytes"
    script.write_text("#!/bin/sh\nprintf '\\377' > \"$1\"\n")
    script.chmod(0o700)
    code, said = edit_on_terminal(edited, str(script), "n")
    assert (code, "is not JSON" in said, "Traceback" in said) == (1, True, False), said


def test_a_path_of_this_machine_that_cannot_be_used_is_one_sentence(
    cli: Cli, box: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    gone = tmp_path / "gone"
    gone.mkdir()
    cases = [
        ["compare", "--html", "/nosuch/x", box, box],
        ["compare", "--html", f"{file}/x", box, box],
        ["cp", f"{box}:new", f"{file}/x"],
        ["cp", f"{box}:new", "/nosuch/x"],
        ["export", box, "-o", "/nosuch/x"],
        ["export", box, "-o", str(tmp_path)],
        ["exec", "--snapshot", box, "--junit", "/nosuch/x", "--", "ls"],
        ["import", "/nosuch/x"],
        ["import", str(tmp_path)],
        ["fork", box, "--variants", "/nosuch/x"],
        ["fork", box, "--variants", str(tmp_path)],
        ["experiment", "run", "/nosuch/x.toml"],
        ["experiment", "run", f"{file}/x.toml"],
        ["score", "--with", "/nosuch/x", box, "--", "ls"],
        ["score", "--with", str(file), box, "--", "ls"],
        ["apply", box, "--to", "/nosuch/x"],
        ["apply", box, "--to", str(file)],
        ["hooks", "install", "claude", f"{file}/x"],
        ["hooks", "status", f"{file}/x"],
        ["edit", box, "--file", "a=/nosuch/x"],
        ["approve", "abcd", "--arguments", str(tmp_path)],
    ]
    for words in cases:
        done = cli(*words)
        assert done.code in (2, 4, 6, 125), (words, done)
        assert done.err.splitlines()[-1].startswith("snapshotd: "), (words, done.err)
    for word in ("--stop", "--restart"):
        done = cli("daemon", word, "--state-dir", str(file))
        assert (done.code, "sudo" in done.err, "name the state directory" in done.err) == (2, False, True)
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (
        ["hooks", "status"],
        ["mount", "x"],
        ["apply", box, "--to", "."],
        ["restore", box, "--to", "x"],
        ["ls"],
    ):
        done = cli(*words)
        assert "Traceback" not in done.err, words


@pytest.mark.parametrize("words", [[], ["image"], ["store"], ["hooks"], ["experiment"]])
def test_a_group_alone_shows_its_help(cli: Cli, words: list[str]) -> None:
    done = cli(*words)
    assert (done.code, done.err) == (0, "")
    assert done.out == cli(*words, "--help").out
    assert "\nCommands:\n" in done.out or "\nInspection:\n" in done.out


def test_the_reader_of_every_command_may_go_away(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that print something end as other tools do, which SIGPIPE kills."""
    for words in world.lines():
        line = words.split()
        at = line.index("--") if "--" in line else len(line)
        for option in ([], ["--json"]) if words in _REPEATABLE else ([],):
            ours, theirs = os.pipe()
            os.close(ours)
            printed = _Counted(theirs)
            with printed, monkeypatch.context() as patched:
                patched.setattr(sys, "stdout", printed)
                code = main([*line[:at], *option, *line[at:]])
            said = (line, option, code)
            assert code == 141 if printed.count and line[0] not in _OF_ANOTHER else code != 1, said


_REPEATABLE = {"tree", "log box", "ls", "journal box", "diff box", "show box"}
_OF_ANOTHER = ("run", "exec", "attach", "logs", "resume", "wait")
"""Their exit code is the program's, which goes on."""


class _Counted(io.TextIOWrapper):
    """Text output that counts the characters."""

    def __init__(self, fd: int) -> None:
        super().__init__(open(fd, "wb"), encoding="utf-8")  # noqa: SIM115 - closed with this
        self.count = 0

    def write(self, text: str) -> int:
        self.count += len(text)
        return super().write(text)


def test_a_shell_without_a_terminal_says_what_to_do_and_makes_no_sandbox(cli: Cli, box: str) -> None:
    before = cli("ls", "-q").out
    for words in (["shell", box], ["shell"], ["shell", "--snapshot", box], ["shell", "--workspace", "."]):
        done = cli(*words)
        assert (done.code, "snapshotd shell --each NAME" in done.err, "leave out" in done.err) == (125, True, False), (
            words
        )
    assert cli("ls", "-q").out == before
    assert "leave out -t" in cli("exec", "-it", box, "sh").err


def test_a_path_above_the_snapshot_is_shown_as_it_was_typed(cli: Cli, box: str, tmp_path: Path) -> None:
    for words in (["restore", box, "--path", "../x", "--to", str(tmp_path / "out")], ["cat", f"{box}:../x"]):
        done = cli(*words)
        assert (done.code, "'../x' has" in done.err, "b'" in done.err) == (2, True, False), done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("typed", ["0", "soon", "0s"])
def test_a_bad_time_is_shown_as_it_was_typed(cli: Cli, box: str, typed: str) -> None:
    said = cli("exec", "--timeout", typed, box, "ls").err
    assert f"'--timeout': '{typed}' is no time: write seconds above 0" in said
