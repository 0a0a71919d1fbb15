"""Lines for people: what a call did, cut to the terminal, and never in the middle of a program's line."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import sys
import termios
from collections.abc import Iterator
from typing import Any, TextIO

import pytest

from snapshotd.cli.changes import ShownPatch
from snapshotd.cli.follow import BetweenLines
from snapshotd.cli.main import main
from snapshotd.cli.text import fit_text
from snapshotd.terms import ARGUMENT_CHARS, main_argument
from tests.unit.cli.conftest import Cli


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"path": "sqlparse/engine/x.py", "old": "a", "new": "b"}, "sqlparse/engine/x.py"),
        ({"argv": ["sed", "-i", "s/a b/c/", "x"], "cwd": "/workspace"}, "sed -i 's/a b/c/' x"),
        ({"argv": ["/bin/sh", "-c", "make  test\n# twice\nmake test"]}, "make test # twice make test"),
        ({"argv": ["snapshotd-line", "ls"]}, "ls"),
        ({"argv": ["sh", "-c", "echo $0", "x"]}, "sh -c 'echo $0' x"),
        ({"replace_all": False, "n": 3, "file": "x"}, "x"),
        ({"n": 3}, '{"n": 3}'),
        ({"during": ["build", "test"]}, "build test"),
        ({"to": "0123456789ab" + "c" * 20, "mode": "both"}, "0123456789ab"),
        ({"digest": "d" * 64}, "d" * 64),
        ("text", "text"),
        ([1, 2], "[1, 2]"),
        ({"a": "", "b": "x" * 10**6}, "x" * (ARGUMENT_CHARS - 1) + "…"),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_main_argument_is_the_first_text(arguments: Any, shown: str) -> None:
    assert main_argument(arguments) == shown


@contextlib.contextmanager
def terminal(columns: int, shown: list[bytes] | None = None) -> Iterator[TextIO]:
    """A terminal to write to; `shown` gets what a person sees there at the end."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    try:
        with os.fdopen(theirs, "w") as stream:
            yield stream
        with contextlib.suppress(OSError):  # the end of a terminal
            while shown is not None:
                shown.append(os.read(ours, 4096))
    finally:
        os.close(ours)


PATCH = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-old\n+\ta\x1b[2Jb\xff\n same"


def test_a_patch_on_a_terminal_is_in_colour_and_has_no_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bytes] = []
    with terminal(80, shown) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        patch = ShownPatch()
        for at in range(0, len(PATCH), 7):
            patch.write(PATCH[at : at + 7])
        patch.end()
    lines = b"".join(shown).decode().splitlines()
    assert lines[0] == "\x1b[1mdiff --git a/x b/x\x1b[0m"
    assert lines[3:] == [
        "\x1b[36m@@ -1 +1 @@\x1b[0m",
        "\x1b[31m-old\x1b[0m",
        "\x1b[32m+\ta\\x1b[2Jb\\xff\x1b[0m",
        " same\x1b[0m",
    ]


def test_a_patch_has_no_colour_where_none_is_wanted_and_is_as_it_is_in_a_pipe(
    cli: Cli, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("exec", box, "--", "sh", "-c", "printf '\\377\\n' > a.txt")
    patch = cli("diff", "--patch", box).out.encode(errors="surrogateescape")
    assert patch.startswith(b"diff --git a/a.txt b/a.txt\n")
    assert patch.endswith(b"+\xff\n")
    for no_color, there in (("1", False), ("", True)):
        shown: list[bytes] = []
        monkeypatch.setenv("NO_COLOR", no_color)
        with terminal(80, shown) as stream, monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", stream)
            assert main(["diff", "--patch", box]) == 0
        assert (b"\x1b[" in b"".join(shown), b"\\xff" in b"".join(shown)) == (there, True)


def test_a_text_is_cut_to_the_terminals_width_and_has_no_controls() -> None:
    with terminal(40) as wide, terminal(20) as narrow:
        assert fit_text("x" * 100, 10, wide) == "x" * 29 + "…"
        assert fit_text("\x1b[2Jx", 30, wide) == "\\x1b[2Jx"
        assert fit_text("x" * 100, 30, narrow) == "x" * 9 + "…", "some of it is shown on any terminal"


def test_tree_has_columns_and_what_each_call_did(cli: Cli, box: str) -> None:
    cli("exec", "--wait", "stored", box, "--", "fail", "2", "x")
    cli("exec", "--wait", "stored", box, "--", "echo", "a\x1b[2J b")
    lines = [line for line in cli("log", "--graph", box).out.splitlines() if "──" in line]
    assert [line.split("  ")[-1] for line in lines[1:]] == ["fail 2 x", "echo 'a\\x1b[2J b'"]
    assert len({line.index("+0 ~0 -0") for line in lines[1:]}) == 1, lines


@contextlib.contextmanager
def one_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Standard output and error are the same, as on a terminal; yields where to read it."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out, os.fdopen(os.dup(writer), "w") as err, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        yield reader
    os.close(reader)


def test_no_line_of_ours_comes_in_the_middle_of_one_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_pipe(monkeypatch) as shown:
        lines = BetweenLines()
        lines.output("stdout", b"edit x.py")
        lines.line("one")
        lines.output("stderr", b" more")
        lines.line("two")
        lines.output("stdout", b"\nnext")
        lines.line("three")
        lines.line("asked", at_once=True)
        lines.output("stdout", b"last\n")
        lines.line("four")
        lines.output("stdout", b"rest")
        lines.line("five")
        lines.end()
        sys.stderr.flush()
        assert os.read(shown, 4096) == b"edit x.py more\none\ntwo\nnext\nthree\nasked\nlast\nfour\nrest\nfive\n"


def test_the_line_of_a_snapshot_is_below_the_output_of_its_command(
    cli: Cli, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_pipe(monkeypatch) as shown:
        assert main(["exec", box, "--", "raw", b"no newline".hex()]) == 0
        assert os.read(shown, 4096).startswith(b"no newline\n\xe2\x97\x8f 1 ")
        assert main(["exec", "-q", box, "--", "raw", b"no newline".hex()]) == 0
        assert os.read(shown, 4096) == b"no newline", "nothing is added without a line of ours"


def test_a_program_whose_output_goes_elsewhere_holds_no_line_up(capfd: pytest.CaptureFixture[str]) -> None:
    lines = BetweenLines()
    lines.output("stdout", b"half a line")
    lines.line("ours")
    assert capfd.readouterr() == ("half a line", "ours\n")
