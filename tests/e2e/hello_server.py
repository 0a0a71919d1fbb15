"""A server on this machine that a sandbox may reach, and a program that asks it."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

ASK = """
import socket, sys
host, port = sys.argv[1], int(sys.argv[2])
try:
    with socket.create_connection((host, port), 10) as s:
        s.sendall(b"*1"); s.shutdown(socket.SHUT_WR)
        print(s.recv(100).decode() or "nothing")
except OSError as exc:
    print(type(exc).__name__)
"""


class Server(socketserver.ThreadingTCPServer):
    """Says hello to everybody, on an address of this machine that others could reach, too."""

    allow_reuse_address, daemon_threads = True, True


class Hello(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.read()
        self.wfile.write(b"hello")


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("203.0.113.80", 9))
        address: str = probe.getsockname()[0]
        return address


@contextlib.contextmanager
def hello_server() -> Iterator[tuple[str, int]]:
    with Server((own_address(), 0), Hello) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield listening.server_address[0], listening.server_address[1]
        listening.shutdown()
