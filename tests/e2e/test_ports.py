"""A server in a sandbox without network is reached from the host, whatever happens to the sandbox around it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import signal
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from tests.e2e.support import Snap, wait_until

BIG = 24 << 20
ECHO = r"""
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self): self.wfile.write(self.rfile.read())  # all of it, once its end has come
class Server(socketserver.ThreadingTCPServer): allow_reuse_address = True
Server(("127.0.0.1", 8001), Echo).serve_forever()
"""
SERVE = (
    "python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 & echo $! > /tmp/pid; python3 /tmp/echo.py 2>/dev/null & "
    "echo $! >> /tmp/pid"
)
HELD = 'awk \'$2 ~ /:1F41$/ && $4 != "0A" && $4 != "06"\' /proc/net/tcp'
"""Connections to the echo server inside that have not ended."""


@contextlib.contextmanager
def port(snap: Snap, *words: str) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """`snapshotd port` while it runs: the process and its address."""
    process = snap.follow("port", *words)
    try:
        assert process.stdout is not None
        host, _, number = process.stdout.readline().strip().partition(":")
        yield process, host, int(number)
    finally:
        process.kill()
        process.communicate(timeout=60)


def get(host: str, number: int, path: str) -> str | None:
    """What the server answers; None as long as there is none."""
    try:
        with urllib.request.urlopen(f"http://{host}:{number}/{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return None


def echoed(host: str, number: int, data: bytes) -> bytes:
    with socket.create_connection((host, number), 60) as client:

        def send() -> None:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        found = b"".join(iter(lambda: client.recv(1 << 16), b""))
        sender.join()
        return found


@pytest.mark.each_runtime
def test_a_server_inside_is_reached_across_snapshots_a_rewind_and_a_stop(snap: Snap, runtime: str) -> None:
    box, _ = snap.create("--runtime", runtime)
    first = snap.sh(box, f"echo 0 > step; cat > /tmp/echo.py <<'EOF'\n{ECHO}\nEOF")["snapshot"]
    snap.sh(box, SERVE)
    with port(snap, box, "8000") as (process, *http), port(snap, box, "8001") as (echo_process, *echo):
        wait_until(lambda: get(*http, "step") == "0\n", "it serves")
        for number in range(1, 6):
            snap.sh(box, f"echo {number} > step")
            assert get(*http, "step") == f"{number}\n"

        data = os.urandom(BIG)
        wait_until(lambda: _echoes(*echo), "the other one serves")
        assert hashlib.sha256(echoed(*echo, data)).digest() == hashlib.sha256(data).digest()

        with socket.create_connection((echo[0], echo[1]), 60) as client:
            client.sendall(b"x")
            wait_until(lambda: snap.sh(box, HELD)["stdout"] != "", "it is connected")
            echo_process.kill()
            wait_until(lambda: snap.sh(box, HELD)["stdout"] == "", "the connection has ended inside, too")

        snap.sh(box, "kill $(cat /tmp/pid)")
        wait_until(lambda: snap("rewind", "--files", box, first, code=None).returncode == 0, "the servers have ended")
        snap.sh(box, SERVE)
        wait_until(lambda: get(*http, "step") == "0\n", "it serves the files of then")

        with socket.create_connection((http[0], http[1]), 60) as idle:
            idle.sendall(b"GET /step HTTP/1.0\r\n\r\n")
            assert b"".join(iter(lambda: idle.recv(1 << 16), b"")).endswith(b"0\n")  # the server has closed its end
            snap("stop", box)
            hang_up = select.poll()
            hang_up.register(idle, 0)
            assert hang_up.poll(60_000), "nothing more would come of it, and it is still open"
        assert get(*http, "step") is None
        snap.sh(box, SERVE)
        wait_until(lambda: get(*http, "step") == "0\n", "it serves in another container")

        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM
        assert f"{box[:12]} is not running" in errors
    snap("rm", "--force", box)


def _echoes(host: str, number: int) -> bool:
    try:
        return echoed(host, number, b"x") == b"x"
    except OSError:
        return False


def test_a_port_on_which_nothing_listens_is_a_closed_connection_and_a_line(snap: Snap, runtime: str) -> None:
    """The server of the host on that port is not the sandbox's."""
    box, _ = snap.create("--runtime", runtime)
    with socket.create_server(("127.0.0.1", 0)) as outside:
        number = outside.getsockname()[1]
        with port(snap, box, str(number)) as (process, *local):
            for _ in range(3):
                with socket.create_connection((local[0], local[1]), 60) as client:
                    assert client.recv(1) == b""
            assert process.stderr is not None
            said = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert process.returncode == 128 + signal.SIGINT
            assert said.startswith(f"snapshotd: nothing listens on port {number} in {box[:12]}: ")
    snap("rm", "--force", box)


def test_a_server_on_the_other_loopback_address_is_reached(snap: Snap, runtime: str) -> None:
    box, _ = snap.create("--runtime", runtime)
    if snap.sh(box, "test -e /proc/net/if_inet6 && grep -q ' lo$' /proc/net/if_inet6", code=None)["exit_code"] != 0:
        pytest.skip("the sandbox's loopback has no IPv6")
    snap.sh(box, "echo yes > it; python3 -m http.server 8000 --bind ::1 >/dev/null 2>&1 &")
    with port(snap, box, "8000") as (_, *local):
        wait_until(lambda: get(*local, "it") == "yes\n", "it serves")
    snap("rm", "--force", box)
