"""Commands that have a terminal: through the command line in a real one, over both drivers."""

from __future__ import annotations

import pytest

from snapshotd.client import Snapshotd, Terminal
from tests.e2e.person import Person
from tests.e2e.support import Snap, wait_until

DEADLINE_S = 60.0
DRAW = r'$| = 1; print "\e[2J\e[5;5Hdrawn\n"; my $l = <STDIN>; print "read $l"; exit 3'


def test_a_shell_has_a_terminal(snap: Snap, box: str) -> None:
    """Echo, size, resize, job control, Ctrl-C; a snapshot in the middle; one for the whole at its end."""
    person = Person(snap, "shell", box)
    person.types("PS1='ready> '; stty size; tty\n")
    person.reads("33 101\r\n/dev/pts/")
    person.reads("ready> ")
    person.resize(50, 60)
    wait_until(lambda: _asked(person, "stty size", "50 60"), "the command learns of the size")
    person.types("sleep 1000\n")
    wait_until(lambda: "sleep" in snap.programs(box), "sleep runs")  # with a snapshot
    person.types("\x03")
    person.reads("ready> ")
    person.types("sleep 1000 & jobs; kill %1; echo left > file; echo after\n")
    person.reads("after\r\n")
    person.reads("ready> ")
    person.types("exit 7\n")
    assert person.ends() == 7
    assert b"exec" in person.seen
    head = snap.json("log", box)[-1]
    assert (head["tool"]["name"], head["tool"]["exit_code"]) == ("exec", 7)
    assert snap("cat", f"{head['id']}:file").stdout == "left\n"
    assert "stty size" in snap("show", "--output", "stdout", head["id"]).stdout


def _asked(person: Person, question: str, answer: str) -> bool:
    person.types(f"{question}\n")
    said = person.reads("ready> ")
    if question not in said:
        said += person.reads("ready> ")
    return answer in said


def test_a_program_draws_on_the_terminal(snap: Snap, box: str) -> None:
    person = Person(snap, "exec", "-it", box, "perl", "-e", DRAW)
    person.reads("\x1b[2J\x1b[5;5Hdrawn\r\n")
    person.types("words\r")
    person.reads("read words")
    assert person.ends() == 3


def test_a_client_that_goes_away_leaves_nothing_hanging(snap: Snap, box: str) -> None:
    before = len(snap.json("log", box))
    person = Person(snap, "exec", "-it", box, "sh", "-c", "echo on > file; echo ready; sleep 1000; sleep 1001")
    person.reads("ready\r\n")
    person.process.kill()
    person.ends()
    wait_until(lambda: len(snap.json("log", box)) > before, "its snapshot is taken")
    assert "sleep" not in snap.programs(box)
    assert snap.sh(box, "cat file")["stdout"] == "on\n"


def test_a_terminal_through_the_client(snap: Snap, box: str) -> None:
    client = Snapshotd(state_dir=snap.state_dir)
    said = bytearray()
    done = client.exec(
        box,
        ["sh", "-c", "stty size; echo $TERM; id -u; test -t 2"],
        terminal=Terminal(7, 9),
        user="1000",
        on_output=lambda _, data: said.extend(data),
    )
    assert (done.exit_code, bytes(said)) == (0, b"7 9\r\nxterm\r\n1000\r\n")


def test_what_a_sandbox_puts_in_the_place_of_the_multiplexer_is_not_taken(snap: Snap, box: str) -> None:
    snap.sh(box, "rm /dev/ptmx; mkfifo /dev/ptmx")
    client = Snapshotd(state_dir=snap.state_dir)
    with pytest.raises(Exception, match="its /dev/ptmx was replaced"):
        client.exec(box, ["true"], terminal=Terminal())
    assert snap.sh(box, "echo ok")["stdout"] == "ok\n"


def test_a_terminal_that_is_none_is_refused(snap: Snap, box: str) -> None:
    for words in (("exec", "-it", box, "true"), ("shell", box)):
        assert "no terminal" in snap(*words, code=None).stderr
    assert "leave out -t or --json" in snap("exec", "-t", "--json", box, "true", code=None).stderr
