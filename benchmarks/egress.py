"""Throughput of a sandbox's way out: the same download directly and through the proxy, in one network of the test.

    sudo .venv/bin/python -m benchmarks.egress

Prints, for plain HTTP and for another protocol (which the proxy copies without parsing), MB/s of both ways, and the time
of a short request. Servers, machine and sandbox are network namespaces of this machine (`tests/egress_rig.py`).
"""

from __future__ import annotations

import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.egress_rig import GOOD, Box, Internet, get

SIZE = 500_000_000
ROUNDS = 5
SHORT = 200


def download(connect: Callable[[], socket.socket], request: bytes) -> float:
    """Bytes a second."""
    buffer = memoryview(bytearray(1 << 20))
    with connect() as sock:
        began, left = time.perf_counter(), SIZE
        sock.sendall(request)
        while left > 0:
            count = sock.recv_into(buffer)
            if not count:
                raise ConnectionResetError
            left -= count
        return SIZE / (time.perf_counter() - began)


def short(connect: Callable[[], socket.socket]) -> float:
    """Seconds of one connection with one request."""
    began = time.perf_counter()
    with connect() as sock:
        sock.sendall(get("good.example", "/x"))
        sock.recv(1000)
    return time.perf_counter() - began


def direct(internet: Internet, port: int) -> socket.socket:
    sock = internet.on_machine(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    sock.connect((GOOD, port))
    return sock


def through(box: Box, address: str, port: int) -> socket.socket:
    return box.connect(address, port)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        internet = Internet(Path(folder))
        try:
            with internet.sandbox("good.example", "good.example:9000") as box:
                address = box.address("good.example")
                for what, port, request in (
                    ("plain HTTP, parsed", 80, get("good.example", f"/bytes/{SIZE}")),
                    ("another protocol, copied", 9000, b"\0go\n"),
                ):
                    ways = (lambda: direct(internet, port)), (lambda: through(box, address, port))  # noqa: B023
                    rates = [[download(way, request) / 1e6 for way in ways] for _ in range(ROUNDS)]
                    one, other = (statistics.median(rate) for rate in zip(*rates, strict=True))
                    print(f"{what:26} direct {one:6.0f} MB/s   through the proxy {other:6.0f} MB/s")
                ways = (lambda: direct(internet, 80)), (lambda: through(box, address, 80))
                one, other = (statistics.median(short(way) for _ in range(SHORT)) * 1000 for way in ways)
                print(f"{'a short request':26} direct {one:6.2f} ms     through the proxy {other:6.2f} ms")
        finally:
            internet.close()


if __name__ == "__main__":
    main()
