"""The way to a daemon that listens for other machines: TCP, with TLS but on the loopback, and a token.

The daemon is known by the fingerprint of its certificate, or by who signed that; nothing is sent before. TLS is done in
memory over any connection of `links.py`, since OpenSSL lets no two threads use one connection at once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import ssl
import threading
import time
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from ipaddress import ip_address
from urllib.parse import urlsplit

from snapshotd.api.wire import LISTEN_PORT
from snapshotd.client.exchange import READ_BYTES, DaemonAway
from snapshotd.client.links import ByteLink, Links
from snapshotd.client.remote.logins import find_login
from snapshotd.errors import NotPermitted, SnapshotdError, UsageError

CONNECT_S = 20.0
_PIN = re.compile(r"sha256:[0-9a-f]{64}")
_TOKEN = re.compile(r"[!-~]{1,512}")


class TlsWay:
    """See the module's text."""

    is_here = False

    def __init__(self, host: str, token: str | None = None, pin: str | None = None, ca: str | None = None) -> None:
        """`host`: https://HOST[:PORT]. `token`, and `pin` or `ca`: else those of the login. UsageError; NotPermitted: other
        users could read the logins."""
        self._host, self._port, self._plain = _parse(host)
        name = f"[{self._host}]" if ":" in self._host else self._host
        self.place = f"{'http' if self._plain else 'https'}://{name}:{self._port}"
        login = find_login(self.place) if token is None or (pin is None and ca is None) else None
        token = login.token if token is None and login is not None else token
        if pin is None and ca is None and login is not None:
            pin, ca = login.pin, login.ca
        if pin is not None and not _PIN.fullmatch(pin):
            raise UsageError(f"{pin[:80]!r} is no fingerprint; it is `sha256:` and 64 hexadecimal characters")
        if token is not None and not _TOKEN.fullmatch(token):
            raise UsageError("the token has characters that no token has; look at SNAPSHOTD_TOKEN, or log in again")
        self._pin, self._ca = pin, ca
        self._header = b"" if token is None else b"Authorization: Bearer %b\r\n" % token.encode()

    async def connect(self, links: Links) -> ByteLink:
        link = links.adopt(await links.apart(self._dial))
        if self._plain:
            return link
        tls = TlsLink(link, self._context, self._host, links.mutex())
        try:
            link.deadline = time.monotonic() + CONNECT_S
            await tls.shake_hands()
            link.deadline = None
            if self._pin is not None:
                _check_pin(self.place, self._pin, tls.fingerprint())
        except BaseException:
            link.close()
            raise
        return tls

    def sign(self, head: bytes) -> bytes:
        first, end, rest = head.partition(b"\r\n")
        return first + end + self._header + rest

    def connect_error(self, exc: OSError) -> SnapshotdError:
        if isinstance(exc, ssl.SSLCertVerificationError):
            return NotPermitted(
                f"the certificate of {self.place} is not trusted ({exc.verify_message}); log in with its fingerprint, which the daemon "
                f"prints when it starts: `snapshotd login {self.place} --pin sha256:...`"
            )
        if isinstance(exc, ssl.SSLError):
            return DaemonAway(
                f"{self.place} speaks no TLS that this client knows ({exc.reason}); is it a daemon's address?"
            )
        return DaemonAway(
            f"no daemon answers at {self.place} ({exc.strerror or exc}); start it there with `snapshotd serve --listen`, or "
            "name another place in SNAPSHOTD_HOST"
        )

    def _dial(self) -> socket.socket:
        connected = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
        return connected

    @cached_property
    def _context(self) -> ssl.SSLContext:
        if self._pin is None:
            try:
                return ssl.create_default_context(cafile=self._ca)
            except (OSError, ssl.SSLError) as exc:
                raise UsageError(f"the certificates in {self._ca} cannot be read ({exc}); name another file") from exc
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False  # the very certificate is known, so its name says nothing more
        context.verify_mode = ssl.CERT_NONE
        return context


class TlsLink:
    """A connection with TLS over another one."""

    def __init__(
        self, link: ByteLink, context: ssl.SSLContext, host: str, sending: AbstractAsyncContextManager[object]
    ) -> None:
        """`sending`: a lock. Data is sealed and sent under it, in one order."""
        self._link, self._sending = link, sending
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=host)
        self._using = threading.Lock()
        """Held for each call of OpenSSL, and for nothing that waits."""

    @property
    def deadline(self) -> float | None:
        return self._link.deadline

    @deadline.setter
    def deadline(self, at: float | None) -> None:
        self._link.deadline = at

    async def shake_hands(self) -> None:
        """Before anything else. OSError."""
        while True:
            try:
                with self._using:
                    self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                await self._flush()  # the other side is told why
                raise
            await self._flush()
            await self._take()
        await self._flush()

    def fingerprint(self) -> str:
        """The fingerprint of the other side's certificate."""
        return f"sha256:{hashlib.sha256(self._tls.getpeercert(binary_form=True) or b'').hexdigest()}"

    async def send(self, data: bytes) -> None:
        async with self._sending:
            with self._using:
                self._tls.write(data) if data else None
                sealed = self._out.read()
            await self._link.send(sealed)

    async def receive(self) -> bytes:
        while True:
            try:
                with self._using:
                    data = self._tls.read(READ_BYTES)
                    answers = bool(self._out.pending)
            except ssl.SSLWantReadError:
                await self._take()
                continue
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as exc:  # also an end that nobody has sealed
                raise ConnectionResetError(f"the connection was cut ({exc.reason})") from exc
            if answers:
                await self._flush()
            return data

    async def _take(self) -> None:
        data = await self._link.receive()
        with self._using:
            if data:
                self._in.write(data)
            else:
                self._in.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            with self._using:
                sealed = self._out.read()
            if sealed:
                await self._link.send(sealed)

    def break_off(self) -> None:
        self._link.break_off()

    def close(self) -> None:
        self._link.close()

    async def finish(self) -> None:
        async with self._sending:
            self.close()


def fingerprint_at(host: str) -> str:
    """The fingerprint of the certificate that is shown at https://HOST[:PORT], whoever made it. OSError, UsageError."""
    name, port, _ = _parse(host)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((name, port), timeout=CONNECT_S) as plain, context.wrap_socket(plain) as shown:
        return f"sha256:{hashlib.sha256(shown.getpeercert(binary_form=True) or b'').hexdigest()}"


def _check_pin(place: str, pin: str, shown: str) -> None:
    if not hmac.compare_digest(pin, shown):
        raise NotPermitted(
            f"{place} shows another certificate ({shown}) than the one that is known ({pin}): somebody may be in between. Ask the owner "
            "of the daemon whether it has a new one, and log in again"
        )


def _parse(host: str) -> tuple[str, int, bool]:
    """Host, port, and whether it goes without TLS. UsageError."""
    try:
        parts = urlsplit(host)
        name, port, is_plain = parts.hostname or "", parts.port or LISTEN_PORT, parts.scheme == "http"
        whole = parts.scheme in ("http", "https") and name and parts.path in ("", "/")
        whole = whole and not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        whole, name, port, is_plain = False, "", 0, False
    if not whole:
        raise UsageError(f"{host[:80]!r} is no address of a daemon; write https://HOST:PORT and nothing more")
    if is_plain and not _is_loopback(name):
        raise UsageError(f"{host} would send the token in plain through the network; write https://")
    return name, port, is_plain


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
