"""What the proxy of a sandbox says and hears, without a sandbox."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess

import pytest

from snapshotd.egress.base import MOST_PIECES, NotAllowed
from snapshotd.egress.buffers import Buffers
from snapshotd.egress.lookup import plain
from snapshotd.egress.places import LinkedNamespace
from snapshotd.egress.proxy import ProxyProcess
from snapshotd.egress.refusals import RefusalLog
from snapshotd.egress.stream import Stream
from snapshotd.egress.web import _drop_ambiguous, may_be_http


def test_a_zone_is_part_of_no_address() -> None:
    with pytest.raises(ValueError, match="zone"):
        plain("fe80::1%\x1b[31m")


def test_sentences_are_short_and_printable() -> None:
    said: list[str] = []
    RefusalLog(lambda sentence: not said.append(sentence)).add("\x1b\n" + "x" * 1000)
    assert said[0].startswith(r"\x1b\nxxx")
    assert len(said[0]) <= 303


@pytest.mark.parametrize("message", [b"{", b"[1]", b"3", b'{"version": 1}', b'{"version": 1, "ports": 3}'])
def test_a_proxy_that_says_nonsense_is_killed(message: bytes) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    proxy = ProxyProcess(LinkedNamespace(os.open("/proc/self/ns/net", os.O_RDONLY)), ours, os.pidfd_open(child.pid))
    try:
        theirs.send(message)
        assert proxy.receive() == []
        assert proxy.has_ended
    finally:
        child.returncode = 0  # the proxy's end reaps it
        theirs.close()
        proxy.close()


def test_a_request_after_empty_lines_is_one() -> None:
    assert may_be_http(b"\r\n\nGET / HTTP/1.1\r\n") is True
    assert may_be_http(b"\r\n") is None
    assert may_be_http(b"\r\n" * 40_000) is True


def test_only_a_change_to_websocket_and_one_length_go_on() -> None:
    socket_asked = [(b"connection", b"Upgrade"), (b"upgrade", b"websocket")]
    assert _drop_ambiguous(socket_asked) == socket_asked
    h2c = [(b"connection", b"Upgrade, HTTP2-Settings"), (b"upgrade", b"h2c"), (b"http2-settings", b"x"), (b"a", b"b")]
    assert _drop_ambiguous(h2c) == [(b"a", b"b")]
    both = [(b"content-length", b"3"), (b"transfer-encoding", b"chunked")]
    assert _drop_ambiguous(both) == [(b"transfer-encoding", b"chunked")]


def test_first_words_come_in_so_many_pieces_and_cost_so_much_memory() -> None:
    async def try_it() -> None:
        buffers = Buffers(6000)
        ours, theirs = socket.socketpair()
        with theirs:
            stream = Stream(ours, buffers)
            head = stream.head()
            for _ in range(MOST_PIECES):
                theirs.send(b"x")
                assert await head.receive() == b"x"
            assert buffers.held == MOST_PIECES
            theirs.send(b"x")
            with pytest.raises(NotAllowed, match="too many pieces"):
                await head.receive()
            theirs.send(b"y" * 6000)
            head = stream.head()
            assert len(await head.receive()) == 4096, "it goes on with little at a time"
            assert len(await head.receive()) == 6001 - 4096
            with pytest.raises(NotAllowed, match="hold too much"):
                await head.receive()
            stream.close()
            assert buffers.held == 0

    asyncio.run(try_it())
