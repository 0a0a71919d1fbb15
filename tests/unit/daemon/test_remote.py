"""Other machines cannot hold the daemon up: slow ones, large ones, many at once, and what speaks no TLS. Its own users are
answered on the socket all the while."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from snapshotd.client import Snapshotd
from snapshotd.daemon.access.address import parse_listen
from snapshotd.daemon.access.limits import BODY_S, CONNECTIONS_MAX, HEAD_MAX_BYTES, HEAD_S, Pace, Shares, share_of
from snapshotd.errors import DaemonUnavailable, UsageError
from tests.any_request import ask_anything, operations
from tests.unit.daemon.asking import eventually
from tests.unit.daemon.process import Daemon, start

FLOOD = 10_000
ANSWER_S = 2.0
"""The socket's users wait no longer, on a machine that is busy with more than this."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = start(tmp_path / "state", tmp_path / "s.sock", SMALL_LISTEN="127.0.0.1:0")
    yield daemon
    daemon.close()


def address_of(daemon: Daemon) -> tuple[str, int]:
    parts = urlsplit(str(daemon.client.status()["listening"]))
    return str(parts.hostname), int(parts.port or 0)


def connect(daemon: Daemon) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(address_of(daemon), timeout=60))


def read_all(connection: socket.socket) -> bytes:
    """Until the daemon has closed it."""
    found = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(65536):
            found += data
    return found


@contextlib.contextmanager
def answered_meanwhile(daemon: Daemon) -> Iterator[None]:
    """Inside, the socket's users get their answers in time."""
    longest, failed, over = [0.0], list[str](), threading.Event()

    def look() -> None:
        client = daemon.client
        while not over.is_set():
            began = time.monotonic()
            try:
                client.version()
            except Exception as exc:  # noqa: BLE001 - told below
                failed.append(repr(exc))
            longest[0] = max(longest[0], time.monotonic() - began)
            over.wait(0.02)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert failed == []
    assert longest[0] < ANSWER_S


def test_a_slow_head_is_cut(daemon: Daemon) -> None:
    with answered_meanwhile(daemon), contextlib.ExitStack() as opened:
        slow = [opened.enter_context(connect(daemon)) for _ in range(20)]
        began = time.monotonic()
        for one in slow:
            one.sendall(b"GET /v1/version HTTP/1.1\r\nHost: x\r\n")
        over = threading.Event()

        def trickle() -> None:
            while not over.wait(0.5):
                for one in slow:
                    with contextlib.suppress(OSError):
                        one.sendall(b"X: y\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            assert [read_all(one) for one in slow] == [b""] * len(slow)
        finally:
            over.set()
            thread.join()
        assert HEAD_S - 2 < time.monotonic() - began < HEAD_S + 20


@pytest.mark.parametrize("head", [b"X-Long: " + b"x" * 1_000_000, b"X: y\r\n" * 200_000, b"\r\n" * 1_000_000])
def test_a_large_head_is_refused(daemon: Daemon, head: bytes) -> None:
    with answered_meanwhile(daemon), connect(daemon) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /v1/version HTTP/1.1\r\n" + head if head[:1] == b"X" else head)
        answer = read_all(connection)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
    assert len(head) > HEAD_MAX_BYTES


def test_a_large_or_slow_body_is_no_burden(daemon: Daemon) -> None:
    token = daemon.client.create_token("t", scopes=["run"]).token
    for authorization, status in (("", b"401"), (f"Authorization: Bearer {token}\r\n", b"413")):
        for length in ("Content-Length: 99999999999", "Transfer-Encoding: chunked"):
            with answered_meanwhile(daemon), connect(daemon) as connection:
                head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\n{authorization}{length}\r\n\r\n"
                connection.sendall(head.encode())
                with contextlib.suppress(OSError):
                    for _ in range(200):
                        connection.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                answer = read_all(connection)
                assert answer == b"" or answer.split()[1] == status, answer[:200]
    assert BODY_S <= 60


def test_what_speaks_no_tls_is_let_go(daemon: Daemon) -> None:
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 1000, b""):
        with answered_meanwhile(daemon), socket.create_connection(address_of(daemon), timeout=60) as connection:
            connection.sendall(said)
            if said:
                assert b"HTTP/1.1 2" not in read_all(connection)
    assert "Traceback" not in daemon.log()


@pytest.mark.timeout(240)
def test_ten_thousand_connections_leave_the_sockets_users_alone(daemon: Daemon) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < FLOOD + 500:
        pytest.skip("this machine allows too few open files for a process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FLOOD + 500), hard))
    host = address_of(daemon)
    box = daemon.client.create()[0].id
    try:
        with answered_meanwhile(daemon), contextlib.ExitStack() as opened:
            for _ in range(FLOOD):
                one = opened.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(host)
            eventually(lambda: connections(daemon) > 0)
            for _ in range(10):
                assert daemon.client.exec(box, ["true"]).exit_code == 0
                assert connections(daemon) <= CONNECTIONS_MAX
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    eventually(lambda: connections(daemon) == 0)
    token = daemon.client.create_token("after", scopes=["read"]).token
    status = daemon.client.status()

    def is_answered() -> bool:
        with contextlib.suppress(Exception):
            there = Snapshotd(host=status["listening"], token=token, pin=status["fingerprint"])
            return there.version().version != ""
        return False

    eventually(is_answered)


def connections(daemon: Daemon) -> int:
    """Number of TCP connections that the daemon has."""
    port = f":{address_of(daemon)[1]:04X}"
    inodes = {
        fields[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if (fields := line.split())[1].endswith(port) and fields[3] == "01"
    }
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    found = set()
    for name in folder.iterdir():
        with contextlib.suppress(OSError):
            found.add(str(name.readlink()).removeprefix("socket:[").rstrip("]"))
    return len(found & inodes)


def test_requests_of_one_token_have_a_share(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Shares(2, 10.0, 3.0)
    assert [share.enter("a"), share.enter("a"), share.enter("a")] == [True, True, False]
    assert share.enter("b")
    share.leave("a")
    assert share.enter("a")
    share.leave("a")
    assert not share.enter("a"), "three came at once"
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert share.enter("a")
    pace = Pace(2.0, 1.0)
    assert (pace.take(), pace.take()) == (0.0, 0.5)


def test_a_network_of_one_host_is_one_address() -> None:
    assert share_of("2001:db8::1") == share_of("2001:db8::ffff:1") != share_of("2001:db8:0:1::1")
    assert share_of("::ffff:192.0.2.1") == share_of("192.0.2.1") != share_of("192.0.2.2")
    assert share_of("fe80::1%eth0") == share_of("fe80::2%eth1")


def test_who_leaves_tls_out_is_told_to_write_https(daemon: Daemon) -> None:
    host, port = address_of(daemon)
    client = Snapshotd(host=f"http://{host}:{port}", token="sdt_any")
    with pytest.raises(DaemonUnavailable, match="listens there with TLS, write https://"):
        client.version()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0.0.0.0:7000", "https://0.0.0.0:7000"),
        ("127.0.0.1", "https://127.0.0.1:7676"),
        ("[::]:443", "https://[::]:443"),
        ("https://10.0.0.1:1", "https://10.0.0.1:1"),
        ("http://127.0.0.1:80", "http://127.0.0.1:80"),
        ("http://[::1]", "http://[::1]:7676"),
        ("localhost:1", "https://127.0.0.1:1"),
    ],
)
def test_addresses_are_read(text: str, place: str) -> None:
    assert str(parse_listen(text)) == place


@pytest.mark.parametrize(
    "text", ["http://0.0.0.0:80", "http://192.0.2.1", "example.org:80", "1.2.3.4:x", "ftp://127.0.0.1", ":80", ""]
)
def test_addresses_that_would_tell_a_token_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_listen(text)


@pytest.mark.parametrize("operation", operations({"/shutdown": "it does end the daemon"}), ids=" ".join)
def test_no_request_over_tcp_makes_the_daemon_fail(operation: tuple[str, str], refusing: tuple[Daemon, str]) -> None:
    daemon, token = refusing
    ask_anything(daemon.socket_path, operation, {}, 3, over=(address_of(daemon), token))
    assert daemon.client.version().pid == daemon.process.pid


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, str]]:
    """A daemon that touches no folder of this machine, and a token for all of it."""
    folder = tmp_path_factory.mktemp("s")
    daemon = start(folder / "state", folder / "s.sock", SMALL_LISTEN="http://127.0.0.1:0", SMALL_REFUSING="1")
    token = daemon.client.create_token("any", scopes=["admin"]).token
    yield daemon, token
    daemon.close()


def test_the_certificate_stays_and_is_private(tmp_path: Path) -> None:
    seen = []
    for _ in range(2):
        daemon = start(tmp_path / "state", tmp_path / "s.sock", SMALL_LISTEN="127.0.0.1:0")
        seen.append(daemon.client.status()["fingerprint"])
        daemon.close()
    assert seen[0] == seen[1]
    assert (tmp_path / "state" / "tls" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert json.loads((tmp_path / "state" / "daemon.log").read_text().splitlines()[0])
