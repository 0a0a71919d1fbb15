"""Attacks on the way out of a sandbox: nothing but what its rules allow is reached, and a hostile sandbox hurts nobody else.

Whoever is in the rig's sandbox has every right over its network namespace: raw sockets, routes, addresses.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotd.kernel.net import links
from tests.e2e.support import wait_until
from tests.egress_rig import GOOD, MACHINE, METADATA, NAMES, NEIGHBOUR, OTHER, Box, Internet, get, over_tls


@pytest.fixture(scope="module")
def internet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Internet]:
    made = Internet(tmp_path_factory.mktemp("internet"))
    yield made
    made.close()


def is_refused(box: Box, sentence: str) -> None:
    wait_until(lambda: sentence in box.way_out.refused, f"{sentence!r} in {box.way_out.refused}", 10)


def served(internet: Internet) -> int:
    """Connections that any server has taken which no rule of these tests allows."""
    return sum(one.taken for one in (internet.web[OTHER], internet.tls[OTHER], internet.web[METADATA], internet.own))


def test_an_allowed_name_is_reached_in_every_way(internet: Internet) -> None:
    with internet.sandbox("good.example", "*.good.example", "good.example:22") as box:
        assert f"{GOOD} good.example /a 0".encode() in box.said(
            "good.example", 80, get("good.example", "/a"), more=False
        )
        assert b"www.good.example" in box.said("www.good.example", 80, get("www.good.example"))
        assert b"good.example /t" in box.tls("good.example", "good.example", get("good.example", "/t"))
        assert box.said("good.example", 22, b"hello\r\n") == b"SSH-2.0-here\r\ngot hello\r\n"
        assert b"good.example /x" in over_tls(box.tunnel("good.example:443"), "good.example", get("good.example", "/x"))
        absolute = b"GET http://good.example/p HTTP/1.1\r\nHost: good.example\r\n\r\n"
        assert b"good.example /p" in box.said("198.18.0.1", 3128, absolute)
        body = b"POST /b HTTP/1.1\r\nHost: good.example\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n12345"
        assert b"/b 5" in box.said("good.example", 80, body)
        assert box.way_out.refused == ()


def test_what_is_not_allowed_is_not_reached_by_address(internet: Internet) -> None:
    before = served(internet)
    with internet.sandbox("good.example") as box:
        for address in (OTHER, METADATA, MACHINE, "127.0.0.1"):
            for port in (22, 53, 80, 443, 8080):
                assert box.said(address, port, get("good.example")) == b""
        is_refused(box, f"{OTHER}:80: no rule allows it")
        is_refused(box, f"{OTHER}:8080: no rule allows this port")
        assert box.said(GOOD, 80, get("good.example")) == b"", "its address alone is not what the rule names"
        with pytest.raises(OSError, match=r"."):
            box.connect("good.example", 22)
        is_refused(box, "good.example:22: no rule allows this port")
        with box.inside(lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM)) as sock, pytest.raises(OSError):
            sock.connect(("2001:db8::6", 443))
    assert served(internet) == before


def test_raw_packets_and_other_protocols_go_nowhere(internet: Internet) -> None:
    seen = internet.on_machine(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)))
    seen.bind(("near", 3))
    seen.setblocking(False)
    with seen, internet.sandbox("good.example") as box:

        def attack() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
                for protocol in (1, 6, 17, 41, 47):
                    inner = struct.pack("!HHHH", 1234, 80, 8, 0) + bytes(32)
                    total = 20 + len(inner)
                    head = struct.pack("!BBHHHBBH", 0x45, 0, total, 1, 0, 64, protocol, 0)
                    packet = head + socket.inet_aton("6.6.6.6") + socket.inet_aton(OTHER) + inner
                    raw.sendto(packet, (OTHER, 0))
            links.add_address("eth0", "52.95.0.77", 32)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.sendto(b"out", (OTHER, 4444))

        box.inside(attack)
        is_refused(box, f"{OTHER}:4444: only TCP goes out, and this is UDP")
        is_refused(box, f"{OTHER}: only TCP goes out, and this is IP protocol 47")
        packets = []
        with contextlib.suppress(BlockingIOError):
            while True:
                packets.append(seen.recvfrom(100)[0])
        assert not [one for one in packets if one[12:20] in (b"\x06\x06\x06\x06", socket.inet_aton(OTHER))]
        assert b"good.example" in box.said("good.example", 80, get("good.example"))


def test_names_that_are_not_allowed_never_leave_the_machine(internet: Internet) -> None:
    internet.names.asked.clear()
    with internet.sandbox("good.example", "*.good.example", "!bad.good.example") as box:
        for server in ("198.18.0.1", "8.8.8.8", NAMES):
            for name in (
                "secret.evil.example",
                "data." * 40 + "evil.example",
                "good.example.evil.example",
                "bad.good.example",
            ):
                for kind in (1, 16, 28, 255):
                    assert box.question(name, kind, server) == (3, None)
        for odd in (b"\xff\x00\n.evil.example", b"a b.good.example", b"*.good.example", b"evil\x1b[31m.example"):
            assert box.question(odd) == (3, None)
        assert box.question("good.example", 16) == box.question("good.example", 28) == (0, None)
        assert box.question("GOOD.Example")[0] == 0
        assert box.question("nothing.good.example") == (3, None)
        assert set(internet.names.asked) <= {"good.example", "nothing.good.example"}
        assert all(one.isprintable() and one.isascii() for one in box.way_out.refused)
        assert "secret.evil.example: no rule allows this name" in box.way_out.refused


@pytest.mark.parametrize("name", ["loop", "loop6", "metadata", "machine", "neighbour"])
def test_an_allowed_name_that_leads_to_the_machine_or_its_neighbours_is_refused(internet: Internet, name: str) -> None:
    before = served(internet), internet.web[NEIGHBOUR].taken
    with internet.sandbox(f"{name}.example") as box:
        assert box.question(f"{name}.example") == (3, None)
        assert any("private, or this machine's own" in one for one in box.way_out.refused)
        with box.tunnel(f"{name}.example:80") as sock:
            sock.sendall(get(f"{name}.example"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 403")
    assert (served(internet), internet.web[NEIGHBOUR].taken) == before


def test_a_name_that_changes_its_address_is_checked_at_every_connection(internet: Internet) -> None:
    internet.names.zone["rebinding.example"] = [GOOD]
    before = served(internet)
    with internet.sandbox("rebinding.example", "mixed.example") as box:
        address = box.address("rebinding.example")
        internet.names.zone["rebinding.example"] = ["127.0.0.1"]
        assert str(GOOD).encode() in box.said(address, 80, get("rebinding.example")), (
            "what was checked is what is reached"
        )
        for _ in range(5):
            assert str(GOOD).encode() in box.said("mixed.example", 80, get("mixed.example"))
    with internet.sandbox("rebinding.example") as box:
        assert box.question("rebinding.example") == (3, None)
    assert served(internet) == before


def test_a_rule_that_names_private_addresses_opens_them(internet: Internet) -> None:
    with internet.sandbox("neighbour.example", f"{NEIGHBOUR}/24", "loop.example", "0.0.0.0/0") as box:
        assert b"neighbour.example" in box.said("neighbour.example", 80, get("neighbour.example"))
        assert b"anything" in box.said(NEIGHBOUR, 80, get("anything"))
        assert box.question("loop.example") == (3, None), "everything is not the machine itself"
        assert box.said(METADATA, 80, get("x")) == b""
        assert box.said(MACHINE, 80, get("x")) == b""
        assert str(OTHER).encode() in box.said(OTHER, 80, get("x"))


def test_tls_has_to_tell_the_name_of_its_connection(internet: Internet) -> None:
    before = internet.tls[GOOD].taken
    request = get("other.example")
    with internet.sandbox("good.example", "www.good.example") as box:
        assert box.tls("good.example", "other.example", request) == b""
        assert box.tls("good.example", "www.good.example", request) == b"", "an allowed name, and another one"
        assert box.tls("good.example", None, request) == b""
        assert box.said("good.example", 443, b"SSH-2.0-tunnel\r\n" + bytes(100)) == b""
        for name in ("other.example", None):
            with pytest.raises(OSError, match=r"."):
                over_tls(box.tunnel("good.example:443"), name, request)
        is_refused(box, "good.example:443: TLS names another server: other.example")
        is_refused(box, "good.example:443: TLS cannot be checked, it tells no server name")
        is_refused(box, "good.example:443: it does not speak the protocol of this port")
        for target in (
            "other.example:443",
            f"{OTHER}:443",
            f"{GOOD}:443",
            "127.0.0.1:80",
            "good.example:25",
            "[::1]:80",
        ):
            with pytest.raises(ConnectionError, match=r"HTTP/1\.1 403"):
                box.tunnel(target)
    assert internet.tls[GOOD].taken == before
    assert served(internet) == served(internet)


def test_a_server_name_in_many_pieces_is_read_whole(internet: Internet) -> None:
    """A hello in records and packets of one byte each, and one that a second hello follows."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    before = internet.tls[GOOD].taken
    with internet.sandbox("good.example") as box, contextlib.suppress(ssl.SSLWantReadError):
        hello = context.wrap_bio(incoming, outgoing, server_hostname="evil.example")
        try:
            hello.do_handshake()
        except ssl.SSLWantReadError:
            message = outgoing.read()[5:]
        pieces = b"".join(b"\x16\x03\x01\x00\x01" + message[at : at + 1] for at in range(len(message)))
        assert box.said("good.example", 443, pieces) == b""
        is_refused(box, "good.example:443: TLS names another server: evil.example")
        with box.connect("good.example", 443) as sock:
            for at in range(200):
                sock.sendall(pieces[at : at + 1])
        assert box.said("good.example", 443, b"\x16\x03\x01\xff\xff" + bytes(70_000)) == b""
    assert internet.tls[GOOD].taken == before


def test_a_second_hello_has_to_tell_the_same_name(internet: Internet) -> None:
    """The server wants a key of another group, and asks the client for another hello."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with internet.sandbox("good.example:8443") as box:
        assert b"/x" in box.tls("good.example", "good.example", get("good.example", "/x"), 8443)
        for told, refused in (("good.example", False), ("evil.example", True)):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            client = context.wrap_bio(incoming, outgoing, server_hostname="good.example")
            with box.connect("good.example", 8443) as sock:
                for number in range(2):
                    with pytest.raises(ssl.SSLWantReadError):
                        client.do_handshake()
                    said, answer = outgoing.read(), b""
                    sock.sendall(said.replace(b"good.example", told.encode()) if number else said)
                    with contextlib.suppress(ConnectionResetError):
                        answer = sock.recv(65536)
                    incoming.write(answer)
                assert bool(answer) is not refused
        is_refused(box, "good.example:8443: TLS names another server: evil.example")


def test_a_proxy_that_cannot_be_started_again_now_is_started_later(
    internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process can be made for a while."""
    with internet.sandbox("good.example") as box:
        os.kill(proxy_of(box), signal.SIGKILL)
        wait_until(lambda: box.way_out.mend() and box.way_out.control_fd is None, "its end is noticed")
        tried: list[object] = []
        with monkeypatch.context() as patch:
            patch.setattr(
                "snapshotd.egress.proxy._spawn", lambda *_: tried.append(1) or os.open("/missing", os.O_RDONLY)
            )
            wait_until(lambda: not internet.on_machine(box.way_out.mend) or bool(tried), "it was tried")
        assert box.way_out.mend(), "it is watched on"
        wait_until(lambda: internet.on_machine(box.way_out.mend) and box.way_out.control_fd is not None, "it is mended")
        assert b"good.example" in box.said("good.example", 80, get("good.example"))


def test_what_nobody_takes_costs_bounded_memory(internet: Internet) -> None:
    with internet.sandbox("good.example:9000") as box:
        before, address = memory_of(box), box.address("good.example")
        held: list[socket.socket] = []

        def hold() -> None:
            for _ in range(300):
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                sock.settimeout(30)
                sock.connect((address, 9000))
                sock.sendall(b"x\n" + bytes(100))
                held.append(sock)

        box.inside(hold)
        for sock in held:
            assert sock.recv(1)
        sizes: list[int] = []
        wait_until(lambda: sizes.append(memory_of(box)) or sizes[-3:-1] == sizes[-2:], "nothing moves any more", 30)  # type: ignore[func-returns-value]
        assert sizes[-1] - before < 48 << 20
        for sock in held:
            sock.close()


def memory_of(box: Box) -> int:
    status = Path(f"/proc/{proxy_of(box)}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_every_request_has_to_name_the_host_of_its_connection(internet: Internet) -> None:
    internet.web[GOOD].served.clear()
    before = served(internet)
    evil = get("other.example", "/evil")
    with internet.sandbox("good.example", "www.good.example") as box:
        attacks = [
            evil,
            get("good.example", "/1") + evil,
            get("www.good.example", "/evil"),
            get("good.example:8080", "/evil"),
            b"GET /evil HTTP/1.0\r\n\r\n",
            b"GET /evil HTTP/1.1\r\nHost: good.example\r\nHost: other.example\r\n\r\n",
            b"GET http://other.example/evil HTTP/1.1\r\nHost: good.example\r\n\r\n",
            b"GET http://good.example@other.example/evil HTTP/1.1\r\nHost: good.example\r\n\r\n",
            b"CONNECT other.example:443 HTTP/1.1\r\nHost: other.example:443\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"POST /1 HTTP/1.1\r\nHost: good.example\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n" + evil,
            b"POST /1 HTTP/1.1\r\nHost: good.example\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n" + evil,
            b"POST /1 HTTP/1.1\r\nHost: good.example\r\nTransfer-Encoding : chunked\r\n\r\n" + evil,
            b"GET /1 HTTP/1.1\r\nHost: good.example\r\nX: y\n\n" + evil,
            b"\x00\x01\x02 nonsense",
        ]
        for attack in attacks:
            answer = box.said("good.example", 80, attack)
            assert b"evil" not in answer.replace(b"not for this sandbox", b""), attack or answer
        assert not [one for one in internet.web[GOOD].served if "evil" in one[1]]
        is_refused(box, "other.example:80: no rule allows it")
        answer = box.said("good.example", 80, evil)
        assert answer.startswith(b"HTTP/1.1 403")
        redirected = box.said("good.example", 80, get("good.example", f"/redirect/{OTHER}"))
        assert b"302" in redirected
        assert box.said(OTHER, 80, get(OTHER)) == b""
    assert served(internet) == before


def test_rules_that_are_changed_cut_what_they_do_not_allow(internet: Internet) -> None:
    with internet.sandbox("good.example", "good.example:22") as box:
        with box.connect("good.example", 22) as sock:
            assert sock.recv(100) == b"SSH-2.0-here\r\n"
            box.allow("good.example")
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(100) == b""
        with pytest.raises(ConnectionRefusedError):
            box.connect("good.example", 22)
        box.allow("good.example", "good.example:22")
        assert box.said("good.example", 22, b"x\n").startswith(b"SSH")
        box.allow()
        assert box.question("good.example") == (3, None)


@pytest.mark.long  # test_hostile_questions_do_no_harm counts what they hold
def test_slow_and_many_connections_cost_only_their_own_sandbox(internet: Internet) -> None:
    with internet.sandbox("good.example") as box, internet.sandbox("good.example") as other:
        address = box.address("good.example")
        held: list[socket.socket] = []

        def hold() -> None:
            for _ in range(3000):
                sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                sock.settimeout(10)
                try:
                    sock.connect((address, 80))
                    sock.send(b"GET / HTTP/1.1\r\nHost: good")
                    held.append(sock)
                except OSError:
                    sock.close()

        box.inside(hold)
        is_refused(box, "it has 1000 connections at once, and gets no more")
        began = time.monotonic()
        assert b"good.example" in other.said("good.example", 80, get("good.example"))
        assert time.monotonic() - began < 10
        for sock in held:
            sock.settimeout(60)
        wait_until(
            lambda: b"good.example" in box.said("good.example", 80, get("good.example")), "slow clients are cut", 60
        )
        for sock in held:
            sock.close()


def test_hostile_questions_do_no_harm(internet: Internet) -> None:
    with internet.sandbox("good.example", "*.slow.example") as box:

        def flood() -> None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.connect(("8.8.8.8", 53))
                for number in range(4000):
                    name = b"%04d-%s" % (number, os.urandom(20).hex().encode())
                    with contextlib.suppress(OSError):
                        sock.send(
                            struct.pack("!HHHHHH", 1, 256, 1, 0, 0, 0) + bytes((len(name),)) + name + b"\0\0\x01\0\x01"
                        )
                        sock.send(os.urandom(number % 1400))
                for packet in (
                    bytes(60_000),
                    b"",
                    struct.pack("!HHHHHH", 1, 256, 1, 0, 0, 0) + b"\xc0\x0c\0\x01\0\x01",
                ):
                    with contextlib.suppress(OSError):
                        sock.send(packet)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.connect(("8.8.8.8", 53))
                with contextlib.suppress(OSError):
                    sock.sendall(b"\xff\xff" + bytes(65_535))

        box.inside(flood)
        assert len(box.way_out.refused) <= 51
        internet.names.silent = True
        with ThreadPoolExecutor(80) as many:
            found = list(many.map(lambda n: box.question(f"{n}.slow.example"), range(80)))
        assert set(found) == {(2, None)}, "a name server that does not answer holds nothing up for ever"
        internet.names.silent = False
        wait_until(lambda: box.question("good.example")[0] == 0, "names are found again", 30)


def test_the_proxy_has_no_rights(internet: Internet) -> None:
    with internet.sandbox("good.example") as box:
        pid = proxy_of(box)
        status = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
        assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == int(status["CapInh"], 16) == 0
        assert "0" not in status["Uid"].split() + status["Gid"].split()
        assert status["NoNewPrivs"] == "1"
        assert status["Groups"].strip() == ""
        assert b"good.example" in box.said("good.example", 80, get("good.example"))


def proxy_of(box: Box) -> int:
    return next(
        int(one)
        for one in os.listdir("/proc")
        if one.isdigit() and _line(one).endswith(b"\0rig\0") and b"snapshotd.egress.main" in _line(one)
    )


def _line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_many_downloads_at_once_arrive_whole(internet: Internet) -> None:
    size = 5_000_000
    with internet.sandbox("good.example") as box:
        address = box.address("good.example")
        with ThreadPoolExecutor(8) as many:
            got = list(many.map(lambda _: box.said(address, 80, get("good.example", f"/bytes/{size}")), range(8)))
        assert [len(one.partition(b"\r\n\r\n")[2]) for one in got] == [size] * 8
        assert b"/x" in box.tls("good.example", "good.example", get("good.example", "/x"))
        assert threading.active_count() < 100
