"""The certificate that the daemon shows to other machines: the owner's, or one made on the first start."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import socket
import ssl
from pathlib import Path

from snapshotd.errors import UsageError
from snapshotd.kernel.files import create_file

_DAYS = 3650
"""It is known by its fingerprint, not by who signed it: there is nothing that a shorter life would protect."""


def load_certificate(state_dir: Path, cert: Path | None, key: Path | None) -> tuple[ssl.SSLContext, str]:
    """The TLS settings of a listener, and the fingerprint of its certificate: `sha256:` and 64 hexadecimal characters.
    UsageError: the files cannot be used."""
    if cert is None or key is None:
        if cert is not None or key is not None:
            raise UsageError("a certificate and its key go together: name both files, or none of them")
        cert, key = _make_own(state_dir)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password="")
        text = cert.read_text()
        start = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----")
        first = ssl.PEM_cert_to_DER_cert(text[start:end])
    except (OSError, ValueError) as exc:
        reason = getattr(exc, "strerror", None) or exc
        raise UsageError(f"the certificate {cert} with the key {key} cannot be used: {reason}; name others") from exc
    return context, fingerprint_of(first)


def fingerprint_of(certificate: bytes) -> str:
    """The fingerprint of a certificate in DER."""
    return f"sha256:{hashlib.sha256(certificate).hexdigest()}"


def _make_own(state_dir: Path) -> tuple[Path, Path]:
    """Make the daemon's own certificate if it is missing. Returns its file, and that of its key."""
    folder = state_dir / "tls"
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not (cert.exists() and key.exists()):
        folder.mkdir(mode=0o700, exist_ok=True)
        certificate, secret = _make()
        create_file(key, secret)
        create_file(cert, certificate)
    return cert, key


def _make() -> tuple[bytes, bytes]:
    from cryptography import x509  # only on the first start with a listener
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "snapshotd")])
    names = {x509.DNSName(text) for text in ("localhost", socket.gethostname()) if text.isascii() and text}
    loopback = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([*names, *loopback]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(secret, hashes.SHA256())
    )
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return made.public_bytes(pem), secret.private_bytes(pem, form, serialization.NoEncryption())
