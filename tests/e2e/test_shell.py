"""`shell --each`: one snapshot after each command line, in the shells that images have."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotd.client import Snapshotd
from snapshotd.kernel.processes import stat_fields
from tests import way
from tests.e2e.model_rig import processes
from tests.e2e.person import Person
from tests.e2e.support import Snap, wait_until

LINES = (
    "echo one > n",
    "mkdir -p 'a b/c' && cd 'a b/c'",
    'pwd; x="it\'s  5"',
    'echo "$x" > kept',
    "false",
    "(exit 7)",
    "if true; then",
    "  rm -r /workspace/'a b'; fi",
    "cat kept; umask 027",
    "cd /workspace; ls",
    "umask; echo two > n",
)
"""Ten command lines; one has two lines of text."""


def each(snap: Snap, box: str, lines: str, *options: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "snapshotd", "shell", "--each", *options, box]
    return subprocess.run(words, env=snap.env, input=lines, capture_output=True, text=True, timeout=snap.timeout_s)


@pytest.mark.parametrize("shell", ["bash", pytest.param("dash", marks=pytest.mark.long)])
def test_ten_lines_are_ten_snapshots(snap: Snap, runtime: str, shell: str) -> None:
    check_ten_lines(snap, runtime, shell)


def check_ten_lines(snap: Snap, runtime: str, shell: str, *create: str) -> None:
    box, _ = snap.create("--runtime", runtime, *create)
    done = each(snap, box, "\n".join(LINES) + "\n", "--shell", shell)
    assert done.returncode == 0, done.stderr
    log = snap.json("log", box)
    assert len(log) == 11
    lines = [one["tool"]["arguments"]["argv"][1] for one in log[1:]]
    assert lines == [*LINES[:6], "\n".join(LINES[6:8]), *LINES[8:]]
    assert [one["tool"]["exit_code"] for one in log[1:]] == [0, 0, 0, 0, 1, 7, 0, 0, 0, 0]
    assert {one.method for one in Snapshotd(snap.state_dir).log(box)[1:]} <= {way.PIVOT, "unchanged"}
    assert done.stdout.splitlines() == ["/workspace/a b/c", "n", "0027"]
    assert snap("cat", f"{log[4]['id']}:a b/c/kept").stdout == "it's  5\n"

    done = each(
        snap,
        box,
        "rm n\nback\ncat n\nsnap here\ncd /\necho three > /workspace/n\npwd; cat workspace/n\nback\nback\npwd\n",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["two", "/", "three", "/"]
    more = snap.json("log", box)[11:]
    assert [one["tool"]["name"] for one in more] == [
        "exec",
        "rewind",
        "exec",
        "exec",
        "exec",
        "exec",
        "rewind",
        "rewind",
        "exec",
    ]
    assert snap("cat", f"{box}:n").stdout == "two\n"
    assert snap.json("inspect", "here")[0]["id"] == more[2]["id"]
    assert each(snap, box, "back\n").returncode == 1
    assert each(snap, box, "true\nexit 9\necho never\n").returncode == 9
    snap("rm", "--force", box)


def test_a_person_edits_lines_and_goes_back(snap: Snap, runtime: str) -> None:
    box, _ = snap.create("--runtime", runtime, "--name", "hands")
    person = Person(snap, "shell", "--each", box)
    person.reads("hands 1$ ")
    person.types("echo wrong\x08\x08\x08\x08\x08right > f; stty size\r")
    person.reads("33 101\r\n")
    person.reads("hands 2$ ")
    person.types("echo 'two\r")
    person.reads("> ")
    person.types("lines' > g; cat g\r")
    assert "two\r\nlines\r\n" in person.reads("hands 3$ ")
    person.types("cat\r")
    wait_until(lambda: runs(box, "cat"), "cat runs")
    person.types("typed\r")
    person.reads("typed\r\ntyped\r\n")
    person.types("\x03")
    person.reads("hands 4$ ")
    person.types(
        "\x1b[A\x1b[A\x01back; # \x01\x0bback\r"
    )  # earlier lines are there to be edited; all of it is deleted again
    person.reads("hands 4$ ")
    person.types("back\r")
    person.reads("hands 4$ ")
    person.types("ls; no-such-program\r")
    assert "f\r\n" in person.reads("hands 5$ ")
    person.types("snap it\r")
    person.reads("hands 5$ ")
    person.types("back now\r")
    person.reads("`snap NAME` names its snapshot")
    person.reads("hands 5$ ")
    person.types("half a line")
    person.reads("half a line")
    # Python's readline misses a signal that comes after the echo and before it waits for a key
    wait_until(lambda: stat_fields(person.process.pid)[0] == b"S", "it waits for a key")
    person.process.send_signal(signal.SIGINT)
    person.reads("hands 5$ ")
    person.types("\x04")
    assert person.ends() == 2
    log = snap.json("log", box)
    assert [one["tool"]["name"] for one in log] == ["start", "exec", "exec", "exec", "rewind", "rewind", "exec"]
    exits = [one["tool"]["exit_code"] for one in log if one["tool"]["name"] == "exec"]
    assert exits == [0, 0, 130, 127]
    assert log[-1]["tags"] == ["it"]
    snap("rm", "--force", box)


def runs(box: str, program: str) -> bool:
    """True if a program of this name runs in a sandbox. Looks from the host: a look from inside is a call."""
    for pid in processes(box):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{pid}/comm").read_text() == f"{program}\n":
                return True
    return False


@pytest.mark.long
@pytest.mark.runc
def test_busybox_has_its_lines_taken_too(snap: Snap, hands_image: str) -> None:
    check_ten_lines(snap, "runc", "busybox sh", "--image", hands_image)


@pytest.mark.long
def test_editors_and_prompts_work_with_a_snapshot_in_the_middle(snap: Snap, runtime: str, hands_image: str) -> None:
    """vim, top and a Python prompt: drawn for the size that the terminal has, and for the next one; they go on after a
    snapshot that is taken under them."""
    box, _ = snap.create("--runtime", runtime, "--image", hands_image, "--name", "screen")
    person = Person(snap, "shell", "--each", box)
    person.reads("screen 1$ ")
    person.types("vim.tiny -u NONE -N text\r")
    person.reads('"text" [New')
    person.types("ofirst\x1b")
    wait_until(lambda: vim_has(person, 33), "it fills the terminal")
    snap.sh(box, "echo beside > beside")
    person.resize(20, 60)
    wait_until(lambda: vim_has(person, 20), "it learns of the size")
    person.types("osecond\x1b:wq\r")
    person.reads("screen 2$ ")
    person.types("top -d 0.3\r")
    person.reads("load average")
    snap.sh(box, "echo more >> beside")
    person.seen = b""
    person.reads("load average")
    person.types("q")
    person.reads("screen 3$ ")
    person.types("python3 -q\r")
    person.reads(">>> ")
    person.types("kept = 6\r")
    person.reads(">>> ")
    taken = snap.sh(box, "cat text beside")
    assert taken["stdout"] == "\nfirst\nsecond\nbeside\nmore\n"
    person.types("import os; print(kept * 7, tuple(os.get_terminal_size()))\r")
    person.reads("42 (60, 20)")
    person.types("\x04")
    person.reads("screen 4$ ")
    person.types("\x04")
    assert person.ends() == 0
    lines = [one["tool"]["arguments"]["argv"] for one in snap.json("log", box) if one["tool"]["name"] == "exec"]
    own = [argv[1] for argv in lines if argv[0] == "snapshotd-line"]
    assert own == ["vim.tiny -u NONE -N text", "top -d 0.3", "python3 -q"]
    snap("rm", "--force", box)


def vim_has(person: Person, rows: int) -> bool:
    """True if vim, in its command mode, draws on so many rows."""
    person.types(":set lines?\r")
    person.reads("  lines=")
    return person.reads("\x1b").startswith(f"{rows}")


@pytest.fixture(scope="module")
def hands_image(snap: Snap, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with an editor, top and busybox."""
    recipe = tmp_path_factory.mktemp("recipe") / "hands"
    recipe.mkdir()
    (recipe / "image.toml").write_text(
        'suite = "bookworm"\nvariant = "essential"\npackages = ["python3", "vim-tiny", "procps", "busybox"]\n'
        '[env]\nLANG = "C.UTF-8"\n'
    )
    snap("image", "build", recipe, "--name", "hands")
    return "hands"
