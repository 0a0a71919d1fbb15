"""An Internet of two network namespaces, for the proxy of sandboxes: a machine whose resolver asks a name server of the
test, servers at public addresses, and a sandbox that has all rights over its own network namespace, more than a real one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from snapshotd.egress.way_out import WayOut
from snapshotd.kernel import syscalls as sc
from snapshotd.kernel.namespaces import in_open_network_namespace, new_network_namespace
from snapshotd.kernel.net import links
from snapshotd.network import HostRules

T = TypeVar("T")
MACHINE, NAMES, GOOD, OTHER = "52.95.0.1", "52.95.0.53", "52.95.0.10", "52.95.0.66"
NEIGHBOUR = "10.77.0.9"
"""A server of the machine's private network."""
METADATA = "169.254.169.254"


class NameServer(socketserver.ThreadingUDPServer):
    """Answers for `zone`, name to addresses, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.zone: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.silent = False
        super().__init__((NAMES, 53), _Question)


class _Question(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        data, sock = self.request
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode())
            at += 1 + data[at]
        name, kind = ".".join(labels).lower(), struct.unpack_from("!H", data, at + 1)[0]
        self.server.asked.append(name)
        if self.server.silent:
            return
        known = self.server.zone.get(name)
        addresses = [a for a in known or () if (":" in a) == (kind == 28)] if kind in (1, 28) else []
        head = data[:2] + struct.pack("!HHHHH", 0x8180 | (3 if known is None else 0), 1, len(addresses), 0, 0)
        answers = b"".join(
            struct.pack("!HHHIH", 0xC00C, kind, 1, 1, len(packed)) + packed
            for packed in (socket.inet_pton(socket.AF_INET6 if ":" in a else socket.AF_INET, a) for a in addresses)
        )
        sock.sendto(head + data[12 : at + 5] + answers, self.client_address)


class WebServer(socketserver.ThreadingTCPServer):
    """Answers every request with its own label, its `Host` and its path, and remembers them. With a context: over TLS."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 1024

    def __init__(self, address: str, port: int, context: ssl.SSLContext | None = None) -> None:
        self.served: list[tuple[str, str]] = []
        self.context = context
        self.taken = 0
        super().__init__((address, port), _Web)


class _Web(socketserver.StreamRequestHandler):
    def setup(self) -> None:
        self.server.taken += 1
        if self.server.context is not None:
            self.request = self.server.context.wrap_socket(self.request, server_side=True)
        super().setup()

    def handle(self) -> None:
        while (line := self.rfile.readline()).strip():
            headers = {}
            while (header := self.rfile.readline().strip()) != b"":
                name, _, value = header.partition(b":")
                headers[name.lower()] = value.strip()
            length = int(headers.get(b"content-length", b"0"))
            body = self.rfile.read(length)
            host, path = headers.get(b"host", b"").decode(), line.split()[1].decode()
            self.server.served.append((host, path))
            if path.startswith("/redirect/"):
                self.wfile.write(
                    b"HTTP/1.1 302 Found\r\nLocation: http://%s/\r\nContent-Length: 0\r\n\r\n" % path[10:].encode()
                )
                continue
            if path.startswith("/bytes/"):
                count = int(path[7:])
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % count)
                piece = bytes(1 << 20)
                while count > 0:
                    self.wfile.write(piece[:count])
                    count -= len(piece)
                continue
            told = f"{self.server.server_address[0]} {host} {path} {len(body)}".encode()
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(told), told))
            if headers.get(b"connection") == b"close":
                return


class Greeter(socketserver.ThreadingTCPServer):
    """A protocol in which the server speaks first."""

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 1024


class _Greeting(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.wfile.write(b"SSH-2.0-here\r\n")
        self.wfile.write(b"got " + self.rfile.readline())


class _Source(socketserver.StreamRequestHandler):
    """Bytes without end, after a line."""

    def handle(self) -> None:
        self.rfile.readline()
        piece = bytes(1 << 20)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(piece)


class Internet:
    """See the module's text. `names`, `web`, `tls`: by address."""

    def __init__(self, folder: Path) -> None:
        self._ends = contextlib.ExitStack()
        self._far = self._held(new_network_namespace())
        self._machine = ThreadPoolExecutor(1, "machine")
        self._ends.callback(self._machine.shutdown)
        self._near = self._held(self._machine.submit(_leave, folder).result())
        in_open_network_namespace(self._far, lambda: self._link())
        context = self._context(folder)
        self.names: NameServer = self._serve(NameServer)
        self.web = {a: self._serve(lambda a=a: WebServer(a, 80)) for a in (GOOD, OTHER, NEIGHBOUR, METADATA)}
        self.tls = {a: self._serve(lambda a=a: WebServer(a, 443, context)) for a in (GOOD, OTHER)}
        self.greeter = self._serve(lambda: Greeter((GOOD, 22), _Greeting))
        self._serve(lambda: Greeter((GOOD, 9000), _Source))
        other_group = self._context(folder)
        other_group.set_ecdh_curve("secp384r1")
        self.asks_again = self._serve(lambda: WebServer(GOOD, 8443, other_group))
        self.own = self._serve(lambda: WebServer("127.0.0.1", 80), self._near)
        self.names.zone = {
            "good.example": [GOOD],
            "www.good.example": [GOOD],
            "other.example": [OTHER],
            "six.example": ["2001:db8::6"],
            "loop.example": ["127.0.0.1"],
            "loop6.example": ["::1", "::ffff:127.0.0.1"],
            "metadata.example": [METADATA],
            "machine.example": [MACHINE],
            "neighbour.example": [NEIGHBOUR],
            "mixed.example": ["127.0.0.1", GOOD],
        }

    def _held(self, fd: int) -> int:
        self._ends.callback(os.close, fd)
        return fd

    def _link(self) -> None:
        links.bring_up("lo")
        links.add_pair("far", "near", self._near)
        for address in (NAMES, GOOD, OTHER, NEIGHBOUR, METADATA):
            links.add_address("far", address, 32)
        links.bring_up("far")
        self.on_machine(self._set_up_machine)
        subprocess.run(["ip", "route", "add", MACHINE, "dev", "far"], check=True)

    def _set_up_machine(self) -> None:
        links.bring_up("lo")
        links.add_address("near", MACHINE, 32)
        links.bring_up("near")
        subprocess.run(["ip", "route", "add", "default", "dev", "near", "src", MACHINE], check=True)

    def _context(self, folder: Path) -> ssl.SSLContext:
        key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "any")])
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        builder = builder.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(9))
        path = folder / "server.pem"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
            + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return context

    def _serve(self, make: Callable[[], Any], namespace: int | None = None) -> Any:
        server = in_open_network_namespace(self._far if namespace is None else namespace, make)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._ends.callback(server.server_close)
        self._ends.callback(server.shutdown)
        return server

    def on_machine(self, action: Callable[[], T]) -> T:
        """Do something where the daemon would."""
        return self._machine.submit(action).result(60)

    @contextlib.contextmanager
    def sandbox(self, *rules: str) -> Iterator[Box]:
        """A sandbox that reaches what these rules allow."""
        init = subprocess.Popen(["unshare", "--net", "sleep", "1000"])
        try:
            own = os.stat("/proc/self/ns/net").st_ino
            deadline = time.monotonic() + 30
            while os.stat(f"/proc/{init.pid}/ns/net").st_ino == own and time.monotonic() < deadline:
                time.sleep(0.005)
            way_out = self.on_machine(lambda: WayOut.make("rig", init.pid))
            try:
                box = Box(self, init.pid, way_out)
                box.allow(*rules)
                yield box
                assert way_out.control_fd is not None, "the proxy lives"
            finally:
                self.on_machine(way_out.close)
        finally:
            init.kill()
            init.wait()

    def close(self) -> None:
        self._ends.close()


def _leave(folder: Path) -> int:
    """The thread leaves for a machine of its own, whose resolver asks the test's name server. Its network namespace."""
    sc.call("unshare", sc.CLONE_FS)
    sc.call("unshare", sc.CLONE_NEWNS)
    sc.call("unshare", sc.CLONE_NEWNET)
    sc.call("mount", "none", "/", None, sc.MS_REC | sc.MS_SLAVE, None)
    resolver = folder / "resolv.conf"
    resolver.write_text(f"nameserver {NAMES}\noptions timeout:1 attempts:1\n")
    sc.call("mount", str(resolver), os.path.realpath("/etc/resolv.conf"), None, sc.MS_BIND, None)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


class Box:
    """A sandbox, as it is for whoever is in it."""

    def __init__(self, internet: Internet, pid: int, way_out: WayOut) -> None:
        self.internet, self.way_out = internet, way_out
        self.pid = pid

    def allow(self, *rules: str) -> None:
        """These rules from now on."""
        self.internet.on_machine(lambda: self.way_out.apply(HostRules(rules)))

    def inside(self, action: Callable[[], T]) -> T:
        """Do something in the sandbox's network namespace."""
        fd = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return in_open_network_namespace(fd, action)
        finally:
            os.close(fd)

    def question(self, name: bytes | str, kind: int = 1, server: str = "198.18.0.1") -> tuple[int, str | None]:
        """Code and address of a name server's answer."""
        labels = name.encode() if isinstance(name, str) else name
        raw = b"".join(bytes((len(label),)) + label for label in labels.split(b".") if label) + b"\0"
        with self.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
            sock.settimeout(20)
            sock.connect((server, 53))
            sock.send(struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + raw + struct.pack("!HH", kind, 1))
            answer = sock.recv(4096)
        code, count = answer[3] & 0xF, struct.unpack_from("!H", answer, 6)[0]
        return code, socket.inet_ntoa(answer[-4:]) if count else None

    def address(self, name: str) -> str:
        code, found = self.question(name)
        assert found is not None, (name, code)
        return found

    def connect(self, host: str, port: int) -> socket.socket:
        """To a name or an address."""
        address = host if host.replace(".", "").isdigit() else self.address(host)
        sock = self.inside(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        sock.settimeout(30)
        try:
            sock.connect((address, port))
        except BaseException:
            sock.close()
            raise
        return sock

    def said(self, host: str, port: int, data: bytes, *, more: bool = False) -> bytes:
        """Everything that is answered; nothing if the connection is cut."""
        try:
            with self.connect(host, port) as sock:
                sock.sendall(data)
                if not more:
                    sock.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: sock.recv(1 << 16), b""))
        except OSError:
            return b""

    def tls(self, host: str, name: str | None, request: bytes, port: int = 443) -> bytes:
        """Over TLS with this server name."""
        try:
            return over_tls(self.connect(host, port), name, request)
        except OSError:
            return b""

    def tunnel(self, target: str) -> socket.socket:
        """Through the proxy for those who want one. ConnectionError: it is refused."""
        sock = self.connect("198.18.0.1", 3128)
        sock.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        head = b""
        while not head.endswith(b"\r\n\r\n") and (piece := sock.recv(1)):
            head += piece
        if b" 200 " not in head.partition(b"\r\n")[0]:
            sock.close()
            raise ConnectionError(head.decode())
        return sock


def over_tls(sock: socket.socket, name: str | None, request: bytes) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with sock, context.wrap_socket(sock, server_hostname=name) as secure:
        secure.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        return b"".join(iter(lambda: secure.recv(1 << 16), b""))


def get(host: str, path: str = "/", *more: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", f"Host: {host}", *more)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
