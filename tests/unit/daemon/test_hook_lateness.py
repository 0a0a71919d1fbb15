"""A hook whose work takes long is answered in time, and only such a one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from snapshotd.daemon.hook_lateness import LateAnswers


@pytest.fixture
def late() -> Iterator[LateAnswers]:
    found = LateAnswers(0.05)
    yield found
    found.close()


def test_a_hook_that_takes_long_is_answered_and_goes_on(late: LateAnswers) -> None:
    ours, theirs = socket.socketpair()
    theirs.settimeout(60)
    with ours, theirs:
        with late.answer_late(ours, 11, "it goes on\n"):
            answer = b""
            while piece := theirs.recv(100):
                answer += piece
        assert answer == b"\x0bit goes on\n"
        with pytest.raises(BrokenPipeError):
            ours.sendall(b"\0")


def test_each_of_several_is_answered(late: LateAnswers) -> None:
    pairs = [socket.socketpair() for _ in range(3)]
    inside = [late.answer_late(ours, 11, str(number)) for number, (ours, _) in enumerate(pairs)]
    for one in inside:
        one.__enter__()
    for number, (ours, theirs) in enumerate(pairs):
        theirs.settimeout(60)
        assert theirs.recv(100) == b"\x0b" + str(number).encode()
        inside[number].__exit__(None, None, None)
        ours.close()
        theirs.close()


def test_a_hook_that_has_ended_is_not_answered_so(late: LateAnswers) -> None:
    done, slow = socket.socketpair(), socket.socketpair()
    with late.answer_late(done[0], 11, "late"):
        pass
    with late.answer_late(slow[0], 11, "late"):
        slow[1].settimeout(60)
        assert slow[1].recv(100) == b"\x0blate", "this one began later, so the other's time is over too"
    done[0].sendall(b"\0")
    assert done[1].recv(100) == b"\0"
    for one in (*done, *slow):
        one.close()
