"""A local address that reaches a server: data and ends both ways, and what is left when one of the parties goes away."""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from snapshotd.client import Port, Sandbox
from snapshotd.client.verbs import ports as client_ports
from snapshotd.daemon.http.carrying import ConnectionLimit
from snapshotd.errors import Conflict, LimitExceeded, NotFound, SnapshotdError, UsageError
from snapshotd.types import new_id
from tests.unit.daemon.asking import Connection, eventually
from tests.unit.daemon.process import Daemon
from tests.unit.daemon.process import start_with_ports as start_daemon  # noqa: F401 - see conftest.py

TIMEOUT_S = 60.0
BIG = 24 << 20

pytestmark = pytest.mark.usefixtures("both_clients")


@pytest.fixture
def box(shared_daemon: Daemon) -> Sandbox:
    return Sandbox.create(name=f"box-{new_id()[:8]}", client=shared_daemon.client)


@pytest.fixture(autouse=True)
def ports_of_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandboxes of this daemon are plain folders whose ports are the machine's; the client knows none of those."""
    monkeypatch.setattr(client_ports, "NO_ISOLATION", "isolated")


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A listening socket of the machine, which stands for one in a sandbox."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        yield listener


def number_of(listener: socket.socket) -> int:
    number: int = listener.getsockname()[1]
    return number


@contextlib.contextmanager
def connected(port: Port, server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through the port: the client's and the server's."""
    assert port.number is not None
    with socket.create_connection(("127.0.0.1", port.number), TIMEOUT_S) as client:
        end, _ = server.accept()
        end.settimeout(TIMEOUT_S)
        with end:
            yield client, end


def rest(end: socket.socket) -> bytes:
    """Everything until the other side ends."""
    return b"".join(iter(lambda: end.recv(1 << 16), b""))


def send_on(end: socket.socket, data: bytes) -> NoReturn:
    """Send it again and again, until that fails."""
    while True:
        end.sendall(data)


def carried(daemon: Daemon) -> int:
    """Number of connections that the daemon carries: it watches the client of each."""
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    kinds = []
    for entry in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):
            kinds.append(os.readlink(folder / entry))
    return kinds.count("anon_inode:[eventpoll]") - 1  # less the event loop's own


def reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def test_much_data_goes_both_ways_at_once(box: Sandbox, server: socket.socket) -> None:
    up, down = os.urandom(BIG), os.urandom(BIG)
    with box.port(number_of(server)) as port, connected(port, server) as (client, end):

        def send(to: socket.socket, data: bytes) -> None:
            to.sendall(data)
            to.shutdown(socket.SHUT_WR)

        senders = [threading.Thread(target=send, args=args, daemon=True) for args in ((client, up), (end, down))]
        for sender in senders:
            sender.start()
        for receiver, sent in ((end, up), (client, down)):
            assert hashlib.sha256(rest(receiver)).digest() == hashlib.sha256(sent).digest()
        for sender in senders:
            sender.join()


def test_one_way_goes_on_while_nobody_takes_the_other(box: Sandbox, server: socket.socket) -> None:
    with box.port(number_of(server)) as port, connected(port, server) as (client, end):
        end.settimeout(0.2)
        with pytest.raises(TimeoutError):
            end.sendall(bytes(BIG))
        end.settimeout(TIMEOUT_S)
        for number in range(100):
            client.sendall(b"%3d" % number)
            assert end.recv(3, socket.MSG_WAITALL) == b"%3d" % number


@pytest.mark.parametrize("first", ["client", "server"])
def test_an_end_of_one_side_leaves_the_other_way_open(box: Sandbox, server: socket.socket, first: str) -> None:
    with box.port(number_of(server)) as port, connected(port, server) as pair:
        one, other = pair if first == "client" else pair[::-1]
        one.sendall(b"all that there is")
        one.shutdown(socket.SHUT_WR)
        assert rest(other) == b"all that there is"
        for piece in (b"a", b"b"):
            other.sendall(piece)
            assert one.recv(1) == piece
        other.shutdown(socket.SHUT_WR)
        assert rest(one) == b""


@pytest.mark.parametrize("first", ["client", "server"])
def test_a_reset_does_not_look_like_an_end(box: Sandbox, server: socket.socket, first: str) -> None:
    with box.port(number_of(server)) as port, connected(port, server) as pair:
        one, other = pair if first == "client" else pair[::-1]
        one.sendall(b"half of")
        assert other.recv(7, socket.MSG_WAITALL) == b"half of"
        reset(one)
        with pytest.raises(ConnectionResetError):
            rest(other)


def test_a_connection_that_cannot_be_made_is_closed_and_says_why(box: Sandbox, server: socket.socket) -> None:
    number = number_of(server)
    server.close()
    failures = queue.SimpleQueue[SnapshotdError]()
    with box.port(number, on_failure=failures.put) as port:

        def said() -> SnapshotdError:
            with socket.create_connection(("127.0.0.1", port.number), TIMEOUT_S) as client:
                assert rest(client) == b""
            return failures.get(timeout=TIMEOUT_S)

        assert f"nothing listens on port {number}" in str(said())
        box.stop()
        assert "is not running" in str(said())


def test_connections_end_with_the_sandbox(box: Sandbox, server: socket.socket) -> None:
    with box.port(number_of(server)) as port, connected(port, server) as (client, end):
        end.sendall(b"x")
        end.shutdown(socket.SHUT_WR)
        assert rest(client) == b"x"  # the server has ended its way: nothing but the sandbox's end can be heard now
        box.stop()
        for side in (client, end):
            with pytest.raises(ConnectionError):
                send_on(side, b"y")


@pytest.mark.parametrize("reads", [False, True])
def test_a_client_that_goes_away_leaves_nothing(
    shared_daemon: Daemon, box: Sandbox, server: socket.socket, reads: bool
) -> None:
    """Without `reads` the daemon does not read from its client either, because nobody takes the data."""
    request = Connection(shared_daemon)
    request.putrequest("POST", f"/v1/trajectories/{box.id}/ports/{number_of(server)}")
    request.putheader("Transfer-Encoding", "chunked")
    request.endheaders()
    end, _ = server.accept()
    with end:
        end.settimeout(TIMEOUT_S)
        if not reads:
            request.sock.settimeout(0.2)
            with pytest.raises(TimeoutError):
                send_on(request.sock, b"100000\r\n" + bytes(1 << 20) + b"\r\n")
        eventually(lambda: carried(shared_daemon) == 1)
        request.sock.close()
        eventually(lambda: carried(shared_daemon) == 0)
        with pytest.raises(ConnectionResetError):
            rest(end)


@pytest.mark.parametrize("kind", ["killed", "stopped"])
def test_connections_end_with_the_daemon(daemon: Daemon, server: socket.socket, kind: str) -> None:
    box = Sandbox.create(client=daemon.client)
    with box.port(number_of(server)) as port, connected(port, server) as (client, end):
        end.sendall(b"x")
        assert client.recv(1) == b"x"
        if kind == "killed":
            daemon.kill()
        else:
            daemon.process.terminate()
        with pytest.raises(ConnectionResetError):
            rest(client)
        daemon.process.wait(60)


def test_closing_a_port_cuts_its_connections(box: Sandbox, server: socket.socket) -> None:
    before = threading.active_count()
    port = box.port(number_of(server))
    with connected(port, server) as (client, end):
        client.sendall(b"x")
        assert end.recv(1) == b"x"
        port.close()
        assert threading.active_count() == before
        with pytest.raises(ConnectionResetError):
            rest(end)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number), TIMEOUT_S)
    port.close()


def test_there_is_a_limit(box: Sandbox, server: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_ports, "PORT_CONNECTIONS_MAX", 1)
    failures = queue.SimpleQueue[SnapshotdError]()
    with box.port(number_of(server), on_failure=failures.put) as port, connected(port, server) as (first, _):
        with socket.create_connection(("127.0.0.1", port.number), TIMEOUT_S) as second:
            assert rest(second) == b""
        assert isinstance(failures.get(timeout=TIMEOUT_S), LimitExceeded)
        first.sendall(b"it goes on")
    limit = ConnectionLimit(1)
    give_back = limit.take()
    with pytest.raises(LimitExceeded):
        limit.take()
    give_back()
    limit.take()


def test_one_tenant_leaves_places_to_the_others() -> None:
    limit = ConnectionLimit(3, 1)
    give_back = limit.take("acme")
    with pytest.raises(LimitExceeded, match="1 connections"):
        limit.take("acme")
    limit.take("other")
    limit.take()
    with pytest.raises(LimitExceeded, match="3 connections"):
        limit.take()
    give_back()
    limit.take("acme")


def test_a_unix_socket_is_for_this_user_alone_and_goes_with_the_port(
    box: Sandbox, server: socket.socket, short_dir: Path
) -> None:
    path = short_dir / "p.sock"
    with box.port(number_of(server), unix=path) as port:
        assert (port.address, port.number) == (str(path), None)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(Conflict):
            box.port(number_of(server), unix=path)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(port.address)
            end, _ = server.accept()
            with end:
                end.sendall(b"hello")
            client.shutdown(socket.SHUT_WR)
            assert rest(client) == b"hello"
    assert not path.exists()


def _unknown(box: Sandbox, _: int) -> None:
    box._client.port("no-such", 8000)


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (UsageError, lambda box, _: box.port(0)),
        (UsageError, lambda box, _: box.port(65536)),
        (UsageError, lambda box, _: box.port(8000, -1)),
        (UsageError, lambda box, _: box.port(8000, 1, unix="x")),
        (Conflict, lambda box, taken: box.port(8000, taken)),
        (NotFound, _unknown),
    ],
)
def test_bad_requests_open_nothing(
    box: Sandbox, server: socket.socket, kind: type[SnapshotdError], call: Callable[[Sandbox, int], object]
) -> None:
    before = threading.active_count()
    with pytest.raises(kind):
        call(box, number_of(server))
    assert threading.active_count() == before
