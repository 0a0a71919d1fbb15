"""A provider behind TLS: its certificate is checked, its replies can be cut."""

from __future__ import annotations

import datetime
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from snapshotd.gateway import forward
from tests.unit.gateway.rig import BODIES, CHAT, DEADLINE_S, Memory, ask, gateway


def make_certificate(folder: Path) -> Path:
    """A key and a certificate for 127.0.0.1 in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "provider")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "provider.pem"
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(secret + certificate.public_bytes(serialization.Encoding.PEM))
    return path


@contextmanager
def provider(certificate: Path, asked: threading.Event, answer: bytes) -> Iterator[str]:
    """Answers each connection with these bytes, and waits for its end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(plain, server_side=True) as connected:
                    connected.settimeout(DEADLINE_S)
                    if connected.recv(65536):
                        asked.set()
                        connected.sendall(answer)
                    while connected.recv(65536):
                        pass
            except OSError:  # the handshake failed, or the connection was cut: ssl.SSLError is one
                plain.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


@pytest.fixture
def certificate(tmp_path: Path) -> Iterator[Path]:
    forward._tls.cache_clear()
    yield make_certificate(tmp_path)
    forward._tls.cache_clear()


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


def test_a_certificate_is_checked(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()
    with provider(certificate, asked, ANSWER) as url:
        with gateway(url, memory := Memory()) as server:
            refused = ask(server.port, CHAT, BODIES[CHAT])
            assert refused.status == 502
            assert "CERTIFICATE_VERIFY_FAILED" in (memory.reply.error or "")
        assert not asked.is_set()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        forward._tls.cache_clear()
        with gateway(url, Memory()) as server:
            assert ask(server.port, CHAT, BODIES[CHAT]).body == b"{}"


def test_a_wait_for_a_reply_can_be_cut(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    asked = threading.Event()
    with provider(certificate, asked, b"") as url, gateway(url, memory := Memory()) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_S) as connection:
            body = json.dumps(BODIES[CHAT]).encode()
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            assert asked.wait(DEADLINE_S)
        assert "hung up" in (memory.reply.error or "")
