"""What comes over the hooks' socket: read once it is whole, within one deadline, and in a time that has a bound."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from snapshotd.daemon import hooks
from snapshotd.errors import LimitExceeded, UsageError
from snapshotd.formats import foreign_json
from snapshotd.formats.foreign_json import parse


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The daemon's end and the peer's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_a_peer_that_sends_byte_by_byte_has_one_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    over = threading.Event()

    def trickle() -> None:
        while not over.wait(0.005):
            theirs.send(b" ")

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        with pytest.raises(TimeoutError):
            hooks._payload(ours, b"{", time.monotonic() + 0.2)
    finally:
        over.set()
        thread.join()


def test_a_payload_that_is_never_whole_is_not_read_again_and_again(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    tries: list[bytes] = []

    def counted(data: bytes) -> object:
        tries.append(data)
        raise ValueError

    monkeypatch.setattr(hooks, "parse", counted)
    done = threading.Event()

    def send() -> None:
        while not done.wait(0.001):
            theirs.send(b"}")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        with pytest.raises(UsageError):
            hooks._payload(ours, b"{", time.monotonic() + 60)
    finally:
        done.set()
        thread.join()
    assert len(tries) == hooks._MOST_TRIES


def test_a_payload_is_whole_without_an_end(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    event = {"text": '"}{\\' * 1000, "more": [{"a": "}"}] * 100}
    data = json.dumps(event).encode() + b"\n"
    theirs.sendall(data[10:])
    assert hooks._payload(ours, data[:10], time.monotonic() + 60) == event


def test_a_text_with_too_many_parts_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_json, "MOST_PARTS", 100)
    long_text = json.dumps({"text": '[,{"\\' * 10_000})
    assert parse(long_text.encode()) == json.loads(long_text)
    for text in (
        "[" + "[]," * 100 + "1]",
        "[" * 200,
        '["",' + '"a",' * 100 + "1]",
        "9" * 2000,
        '"' * 2000,
        "{" + '"k":1,' * 100,
    ):
        with pytest.raises(LimitExceeded):
            parse(text.encode())
    for text in ('{"a', "", "nul", '"\\"', "[" * 90, "9" * 999 + "e"):
        with pytest.raises(ValueError, match=r"."):
            parse(text.encode())
