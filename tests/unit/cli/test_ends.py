"""How a command ends that is interrupted, whose reader goes away, whose question gets a no, or that meets a path that
cannot be used: never with a traceback."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Cli
from tests.unit.cli.test_mind import edit_on_terminal, edited
from tests.unit.daemon.process import Daemon, environment

__all__ = ["edited"]


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


def answered(daemon: Daemon, words: list[str], answer: str) -> tuple[int, str]:
    """Run a command line on a terminal of its own, and answer its question. Exit code, and all that it shows."""
    ours, theirs = pty.openpty()
    with open(ours, "r+b", buffering=0) as terminal:
        with open(theirs, "r+b", buffering=0) as tty:
            argv = [sys.executable, "-m", "snapshotd", *words]
            running = subprocess.Popen(
                argv, env=environment(daemon), stdin=tty, stdout=tty, stderr=tty, start_new_session=True
            )
        said = b""
        try:
            while select.select([terminal], [], [], 60)[0]:
                try:
                    said += terminal.read(4096)
                except OSError:
                    break  # EIO: nobody has the other side open any more
                if said.endswith(b"[y/N] "):
                    terminal.write(answer.encode())
            return running.wait(60), said.decode()
        finally:
            running.kill()
            running.wait(20)


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
    assert "\nCommands:\n" in done.out or "\nLooking:\n" in done.out


def test_the_reader_of_a_tree_may_go_away(daemon: Daemon) -> None:
    daemon.client.create(name="box")
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "wb") as gone:
        argv = [sys.executable, "-m", "snapshotd", "tree"]
        done = subprocess.run(
            argv, env=environment(daemon), stdout=gone, stderr=subprocess.PIPE, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (141, b"")
